"""Rows with images as token ids: their texts, their tokens, and truncation."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from nemo_like.config.errors import ConfigError
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.encoded_rows import EncodedRows
from nemo_like.data.formats import SFT_ROWS
from nemo_like.data.image_encoding import ImageEncoder
from nemo_like.data.jagged import EncodedRow, collate
from nemo_like.data.planning.plan import BatchPlan, PlanSpec, plan_batch
from nemo_like.data.planning.token_counts import TokenCounts, count_tokens
from nemo_like.data.rows import Rows, load_rows
from nemo_like.models.vision import ImageSettings, VisionSpec
from nemo_like.training.encoding import encode_sft_row
from tests.vision import IMAGE_TOKEN, tiny_vision_model, tiny_vision_tokenizer

SPEC = VisionSpec.from_config(tiny_vision_model("qwen3_vl").config)
SETTINGS = ImageSettings(min_pixels=64, max_pixels=4096, factor=8)


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def encoder() -> ChatEncoder:
    chat = ChatEncoder(tiny_vision_tokenizer())
    images = ImageEncoder(SPEC, SETTINGS, None)
    images.check_template(chat.template)
    chat.images = images
    return chat


def encode(chat: ChatEncoder, rows: Rows) -> list[EncodedRow]:
    found = EncodedRows(rows, lambda row: encode_sft_row(chat, "assistant", row))
    # Twice: from the file the second time.
    found.fetch(range(len(rows)))
    return [row for row in found.fetch(range(len(rows))) if row is not None]


def question(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


ANSWER = {"role": "assistant", "content": "yes"}


def test_bytes_in_parquet_and_paths_in_json_are_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(16, 24))
    data = {"messages": [{"role": "user", "content": "see <image>"}, ANSWER]}
    parquet = tmp_path / "rows.parquet"
    row = {**data, "images": [{"bytes": png(16, 24), "path": "other.png"}]}
    pq.write_table(pa.Table.from_pylist([row]), parquet)
    jsonl = tmp_path / "rows.jsonl"
    jsonl.write_text(json.dumps({**data, "image": "a.png"}) + "\n")
    chat = encoder()
    encoded = []
    for path in (parquet, jsonl):
        rows = load_rows(path, SFT_ROWS, images=chat.images)
        encoded += encode(chat, rows)
    left, right = encoded
    assert left.input_ids.tolist() == right.input_ids.tolist()
    assert left.token_mask.tolist() == right.token_mask.tolist()
    assert np.count_nonzero(left.input_ids == IMAGE_TOKEN) == 6
    assert [image.image.read() for image in left.images] == [png(16, 24)]
    assert [image.image.path for image in right.images] == [str(tmp_path / "a.png")]
    assert [image[1:] for image in left.images] == [image[1:] for image in right.images]
    assert "[image 16x24 = 6 tokens]" in "".join(text for text, _ in chat.segments(left))


def three_images(tmp_path: Path) -> EncodedRow:
    for name, size in {"a": (16, 24), "b": (8, 8), "c": (32, 16)}.items():
        (tmp_path / f"{name}.png").write_bytes(png(*size))
    parts = [{"type": "image", "image": f"{name}.png"} for name in "abc"]
    row = {"messages": [question(parts[0], parts[1], "and"), ANSWER, question(parts[2]), ANSWER]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    chat = encoder()
    (encoded,) = encode(chat, load_rows(path, SFT_ROWS, images=chat.images))
    return encoded


def test_a_row_is_never_cut_inside_of_an_image(tmp_path: Path) -> None:
    row = three_images(tmp_path)
    assert [image.num_tokens for image in row.images] == [6, 1, 8]
    for length in range(1, len(row.input_ids) + 1):
        cut = row.beginning(length)
        num_tokens = np.count_nonzero(cut.input_ids == IMAGE_TOKEN)
        assert num_tokens == sum(image.num_tokens for image in cut.images)
        assert len(cut.input_ids) == len(cut.token_mask) <= length
        next_image = [image for image in row.images if image.start < length < image.end]
        assert len(cut.input_ids) == (next_image[0].start if next_image else length)


def test_turns_behind_the_last_answer_and_their_images_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(16, 24))
    image = {"type": "image", "image": "a.png"}
    path = tmp_path / "rows.jsonl"
    row = {"messages": [question(image, "?"), ANSWER, question(image, "again?")]}
    path.write_text(json.dumps(row) + "\n")
    chat = encoder()
    (encoded,) = encode(chat, load_rows(path, SFT_ROWS, images=chat.images))
    assert [each.num_tokens for each in encoded.images] == [6]


def test_image_tokens_in_a_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(16, 24))
    path = tmp_path / "rows.jsonl"
    image = {"type": "image", "image": "a.png"}
    row = {"messages": [question(image, "a <|image_pad|>?"), ANSWER]}
    path.write_text(json.dumps(row) + "\n")
    chat = encoder()
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: the row has 1 image, .* 2 image tokens"):
        encode(chat, load_rows(path, SFT_ROWS, images=chat.images))


def test_a_chat_template_without_images_is_refused() -> None:
    tokenizer = tiny_vision_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {% if message.content is string %}"
        "{{ message.content }}{% else %}{% for part in message.content %}{{ part.text }}"
        "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    )
    with pytest.raises(ConfigError, match="does not write"):
        ImageEncoder(SPEC, SETTINGS, None).check_template(ChatEncoder(tokenizer).template)


def test_a_plan_knows_which_microbatches_have_images_on_any_rank(tmp_path: Path) -> None:
    with_images = three_images(tmp_path)
    text = EncodedRow(with_images.input_ids, with_images.token_mask)
    length = len(text.input_ids)
    spec = PlanSpec(max_tokens=length, num_ranks=2)
    rows = [text, with_images, text, text, text]
    counts = TokenCounts.of_batch(collate(rows))
    assert counts.to_dict() == count_tokens(rows).to_dict()
    plan = plan_batch(counts, spec)
    assert BatchPlan.from_json(plan.to_json()) == plan
    for each in (plan, plan.with_budget(2 * length)):
        microbatches = list(zip(*each.ranks, strict=True))
        has_image = [any(1 in mb.rows for mb in ranks) for ranks in microbatches]
        assert [[mb.has_images for mb in ranks] for ranks in microbatches] == [
            [flag, flag] for flag in has_image
        ]
        assert sum(has_image) == 1
    plain = plan_batch(TokenCounts.of_batch(collate([text] * 5)), spec)
    assert "image" not in plain.to_json()
    assert "images" not in collate([text])
