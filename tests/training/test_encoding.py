"""SFT rows of every format against tokens and masks from an independent rendering."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from nemo_like.config.errors import ConfigError
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.formats import SFT_ROWS
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.messages import TrainOn
from nemo_like.data.preferences import PREFERENCE_ROWS, encode_preference
from nemo_like.data.rows import load_rows
from nemo_like.training.encoding import encode_sft_row
from tests.data.tiny_tokenizer import CHATML, tiny_tokenizer

TOKENIZER = tiny_tokenizer(CHATML)
ENCODER = ChatEncoder(TOKENIZER)
DATA_PAGE = Path(__file__).parents[2] / "docs" / "data.md"
WORDS = st.text(alphabet="ab four 12?\n", min_size=1, max_size=12)


def message(role: str, content: str, **flags: object) -> dict:
    return {"role": role, "content": content, **flags}


QUESTION = message("user", "What is 1 + 2?")
ANSWER = message("assistant", "3")


def expected(messages: Sequence[dict], trained: Sequence[bool]) -> EncodedRow:
    """ChatML as its definition has it; `trained` has one entry per assistant turn.

    What the model generates is tokenized by itself, as it is when it is sampled.
    """
    parts = [("", False)]
    flags = iter(trained)
    for turn in messages:
        text, has_loss = parts.pop()
        parts.append((f"{text}<|im_start|>{turn['role']}\n", has_loss))
        if turn["role"] == "assistant":
            parts.append((f"{turn['content']}<|im_end|>", next(flags)))
            parts.append(("\n", False))
        else:
            text, has_loss = parts.pop()
            parts.append((f"{text}{turn['content']}<|im_end|>\n", has_loss))
    while not parts[-1][1]:
        parts.pop()
    ids: list[int] = []
    mask: list[int] = []
    for text, has_loss in parts:
        tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        ids += tokens
        mask += [int(has_loss)] * len(tokens)
    return EncodedRow(np.array(ids), np.array(mask, dtype=np.uint8))


def assert_equal(encoded: EncodedRow, other: EncodedRow) -> None:
    assert encoded.input_ids.tolist() == other.input_ids.tolist()
    assert encoded.token_mask.tolist() == other.token_mask.tolist()


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.tuples(WORDS, WORDS, st.sampled_from([None, True, False])), min_size=1),
    train_on=st.sampled_from(["assistant", "last"]),
    name=st.sampled_from(["train", "weight"]),
)
def test_loss_is_on_the_selected_turns_only(texts: list, train_on: TrainOn, name: str) -> None:
    messages = [message("system", "think")]
    for prompt, answer, flag in texts[:4]:
        flags = {} if flag is None else {name: flag if name == "train" else int(flag)}
        messages += [message("user", prompt), message("assistant", answer, **flags)]
    trained = [flag is not False for *_, flag in texts[:4]]
    if train_on == "last":
        trained[:-1] = [False] * len(trained[:-1])
    row = {"messages": messages}
    if not any(trained):
        with pytest.raises(ConfigError, match="no assistant turn is left to learn from"):
            encode_sft_row(ENCODER, train_on, row)
        return
    assert_equal(encode_sft_row(ENCODER, train_on, row), expected(messages, trained))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [QUESTION, ANSWER]},
        {"prompt": QUESTION["content"], "completion": "3"},
        {"prompt": [QUESTION], "completion": [ANSWER]},
        {"prompt": QUESTION["content"], "answer": 3},
        {"instruction": QUESTION["content"], "input": "", "output": "3", "text": "unused"},
        {
            "conversations": [
                {"from": "human", "value": QUESTION["content"]},
                {"from": "gpt", "value": "3"},
            ]
        },
    ],
)
def test_equal_conversations_of_all_formats_have_equal_tokens(tmp_path: Path, row: dict) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    [loaded] = load_rows(path, SFT_ROWS)
    reference = expected([QUESTION, ANSWER], [True])
    assert_equal(encode_sft_row(ENCODER, "assistant", loaded), reference)
    # The same from a table, where every value is a text.
    table = tmp_path / "rows.csv"
    with table.open("w", newline="") as file:
        cells = [value if isinstance(value, str) else json.dumps(value) for value in row.values()]
        csv.writer(file).writerows([list(row), cells])
    if not isinstance(row.get("prompt"), list):
        [loaded] = load_rows(table, SFT_ROWS)
        assert_equal(encode_sft_row(ENCODER, "assistant", loaded), reference)


def test_raw_text_ends_with_the_end_token() -> None:
    encoded = encode_sft_row(ENCODER, "assistant", {"text": "four and two"})
    ids = TOKENIZER("four and two")["input_ids"]
    assert encoded.input_ids.tolist() == [*ids, TOKENIZER.eos_token_id]
    assert encoded.token_mask.all()
    ended = encode_sft_row(ENCODER, "last", {"text": "four<|eos|>"})
    assert ended.input_ids.tolist().count(TOKENIZER.eos_token_id) == 1


def test_raw_text_begins_with_one_beginning_of_sequence() -> None:
    tokenizer = tiny_tokenizer(CHATML)
    # As Llama 3: the tokenizer puts the token in front of every text.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
    )
    encoder = ChatEncoder(tokenizer)
    for text in ("four and two", "<|bos|>four and two"):
        ids = encode_sft_row(encoder, "assistant", {"text": text}).input_ids.tolist()
        words = tokenizer("four and two", add_special_tokens=False)["input_ids"]
        assert ids == [tokenizer.bos_token_id, *words, tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("columns", "mask"),
    [
        ({}, [1, 1, 1]),
        ({"labels": [-100, 9, 7]}, [0, 1, 1]),
        ({"token_mask": [0, 0, 1]}, [0, 0, 1]),
    ],
)
def test_token_rows_are_used_as_they_are(columns: dict, mask: list[int]) -> None:
    encoded = encode_sft_row(ENCODER, "assistant", {"input_ids": [5, 9, 7], **columns})
    assert_equal(encoded, EncodedRow(np.array([5, 9, 7]), np.array(mask, np.uint8)))


def test_a_token_of_another_tokenizer_is_named() -> None:
    row = {"input_ids": [5, len(TOKENIZER)]}
    with pytest.raises(ConfigError, match=rf"token id {len(TOKENIZER)}, but the tokenizer"):
        encode_sft_row(ENCODER, "assistant", row)


def test_preferences_of_sharegpt_have_the_tokens_of_both_conversations(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {
        "conversations": [{"from": "human", "value": QUESTION["content"]}],
        "chosen": {"from": "gpt", "value": "3"},
        "rejected": {"from": "gpt", "value": "four"},
    }
    path.write_text(json.dumps(row) + "\n")
    pair = encode_preference(ENCODER, load_rows(path, PREFERENCE_ROWS)[0])
    assert_equal(pair.chosen, expected([QUESTION, ANSWER], [True]))
    rejected = [QUESTION, message("assistant", "four")]
    assert_equal(pair.rejected, expected(rejected, [True]))


def test_every_example_of_the_documentation_is_a_row(tmp_path: Path) -> None:
    page = DATA_PAGE.read_text().split("## Several training sets")[0]
    examples = [part.split("```")[0] for part in page.split("```json\n")[1:]]
    assert len(examples) >= 11
    table = tmp_path / "table.csv"
    table.write_text(page.split("```csv\n")[1].split("```")[0])
    rows = load_rows(table, SFT_ROWS)
    assert rows[1]["completion"] == '6\nbecause 3+3 is "two times three"'
    for number, example in enumerate(examples):
        row = json.loads(example)
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        if "chosen" in row:
            assert encode_preference(ENCODER, load_rows(path, PREFERENCE_ROWS)[0])
        else:
            assert encode_sft_row(ENCODER, "assistant", load_rows(path, SFT_ROWS)[0])
