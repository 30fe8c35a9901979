"""SFT of vision-language models on rows with images: complete runs in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from nemo_like.algorithms.registry import load_config
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.cli import main
from nemo_like.commands.validate import validate
from nemo_like.config.errors import ConfigError
from nemo_like.models.vision import PROCESSOR_FILE
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.exhaustive import usually
from tests.vision import FAMILIES, expanded_ids, logits_of, picture_inputs, save_tiny_vision_model

SIZES = {"a.png": (24, 16), "b.png": (16, 16), "c.png": (40, 24), "d.png": (9, 21)}


def image_part(name: str) -> dict[str, Any]:
    return {"type": "image", "image": name}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "no image"}, answer("none")]},
    {
        "messages": [
            {"role": "user", "content": [image_part("a.png"), text_part("what?")]},
            answer("an a"),
        ]
    },
    {
        "messages": [
            {"role": "user", "content": [image_part("b.png"), text_part("b"), image_part("c.png")]},
            answer("b c"),
            {"role": "user", "content": [text_part("and "), image_part("d.png")]},
            answer("d"),
        ]
    },
    {
        "conversations": [
            {"from": "human", "value": "see <image> now"},
            {"from": "gpt", "value": "the <image> a"},
        ],
        "image": "a.png",
    },
]


def write_data(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for name, (width, height) in SIZES.items():
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def config(folder: Path, *overrides: str) -> SftRunConfig:
    text = f"""
output_dir: {folder}/runs
run_name: vision
policy:
  model_name: {folder}/model
  train_global_batch_size: {len(ROWS)}
  max_total_sequence_length: 256
  sequence_packing: {{enabled: true, train_mb_tokens: 512, logprob_mb_tokens: 512}}
  optimizer: {{lr: 1.0e-2}}
  parity_check: false
cluster: {{backend: local}}
checkpointing: {{save_period: 2}}
sft: {{max_num_steps: 4, max_num_epochs: 4}}
data:
  train_path: {folder}/train.jsonl
  shuffle: false
"""
    path = folder / "sft.yaml"
    path.write_text(text)
    return load_config(SftRunConfig, path, list(overrides))


def plain_loss(folder: Path) -> tuple[float, float]:
    """Loss and gradient norm of the first step, with nothing but transformers, row by row."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    places = {0: [], 1: ["a.png"], 2: ["b.png", "c.png", "d.png"], 3: ["a.png"]}
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    turns = {
        0: [("no image", "none")],
        1: [(f"{image}what?", "an a")],
        2: [(f"{image}b{image}", "b c"), (f"and {image}", "d")],
        3: [(f"see {image} now", "the <image> a")],
    }
    losses, num_trained = [], 0
    for row, names in places.items():
        options, counts = picture_inputs(folder / "model", [folder / name for name in names])
        ids: list[int] = []
        labels: list[int] = []
        for question, reply in turns[row]:
            prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            ids += expanded_ids(tokenizer, prompt, counts)
            labels += [-100] * (len(ids) - len(labels))
            own = tokenizer(f"{reply}<|im_end|>")["input_ids"]
            ids += [*own, *tokenizer("\n")["input_ids"]]
            labels += [*own, -100]
        targets = torch.tensor(labels)
        logits = logits_of(model, ids, options)
        losses.append(F.cross_entropy(logits[:-1], targets[1:], reduction="sum"))
        num_trained += int((targets[1:] >= 0).sum())
    loss = torch.stack(losses).sum() / num_trained
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return float(loss), float(norm)


@pytest.mark.parametrize("model_type", usually(FAMILIES, "qwen2_5_vl"))
def test_a_run_with_images_equals_single_rows_in_transformers(
    tmp_path: Path, model_type: str
) -> None:
    save_tiny_vision_model(model_type, tmp_path / "model")
    write_data(tmp_path)
    result = run_sft(config(tmp_path, "policy.vision.train=all"))
    steps = read_metrics(result.directory.path)
    loss, norm = plain_loss(tmp_path)
    assert steps[0]["policy/loss"] == pytest.approx(loss, rel=1e-5)
    assert steps[0]["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert steps[3]["policy/loss"] < steps[0]["policy/loss"] - 0.1
    # The recorded rows have the work of their images.
    out = tmp_path / "plan.json"
    directory = str(result.directory.path)
    assert main(["plan", directory, "--json", str(out), "--memory-gb", "8"]) == 0
    record = json.loads(out.read_text())
    assert record["memory"]["bytes"]["images"] > 0
    compared = record["logged"]["packing/utilization"]
    assert compared["planned"] == pytest.approx(compared["logged"])


@pytest.mark.parametrize("kind", usually(("online", "pool", "token_budget", "dyn_bsz"), "online"))
def test_streamed_rows_with_images_equal_single_rows_in_transformers(
    tmp_path: Path, kind: str
) -> None:
    save_tiny_vision_model("qwen3_vl", tmp_path / "model")
    write_data(tmp_path)
    options = (f"data.batching.kind={kind}", "policy.vision.train=all", "sft.max_num_epochs=1")
    result = run_sft(config(tmp_path, *options, "policy.sequence_packing.train_mb_tokens=1024"))
    (step,) = read_metrics(result.directory.path)
    loss, norm = plain_loss(tmp_path)
    assert step["policy/loss"] == pytest.approx(loss, rel=1e-5)
    assert step["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)
    # 6, 4, 15, 3 and again 6 image tokens of 4 patches; the first and the last are one image.
    assert step["data/num_images"] == 5
    assert step["data/num_patches"] == 4 * step["data/num_image_tokens"] == 4 * 34
    assert step["data/num_unique_patches"] == step["data/num_patches"] - 4 * 6


@pytest.mark.parametrize(
    ("model_type", "train"),
    [pytest.param("qwen2_5_vl", "frozen", marks=pytest.mark.exhaustive), ("qwen3_vl", "projector")],
)
def test_a_resumed_run_equals_a_straight_one_and_exports_every_tensor(
    tmp_path: Path, model_type: str, train: str
) -> None:
    start = save_tiny_vision_model(model_type, tmp_path / "model").state_dict()
    write_data(tmp_path)
    options = (f"policy.vision.train={train}", "checkpointing.keep_latest=5")
    straight = run_sft(config(tmp_path, *options))
    expected = read_metrics(straight.directory.path)
    files = [straight.directory.hf / name for name in ("model.safetensors", PROCESSOR_FILE)]
    contents = [file.read_bytes() for file in files]
    interrupt_at(straight.directory.path, 2)
    run_sft(config(tmp_path, *options, "resume=true"))
    assert read_metrics(straight.directory.path) == expected
    assert [file.read_bytes() for file in files] == contents
    assert contents[1] == (tmp_path / "model" / PROCESSOR_FILE).read_bytes()
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        straight.directory.hf, output_loading_info=True
    )
    exported, info = loaded
    assert not any(info.values())
    moved = {
        name for name, value in exported.state_dict().items() if not torch.equal(value, start[name])
    }
    tower = {name for name in start if "visual." in name}
    # The features of rows with images are added to a text.
    assert moved - tower == start.keys() - tower
    assert moved & tower == {name for name in tower if "merger" in name and train == "projector"}


def test_an_adapter_leaves_the_tower_and_loads_in_peft(tmp_path: Path) -> None:
    start = save_tiny_vision_model("qwen2_5_vl", tmp_path / "model").state_dict()
    write_data(tmp_path)
    # Layers of the tower have these names as well.
    lora = "policy.lora={enabled: true, rank: 4, target_modules: [gate_proj, o_proj]}"
    result = run_sft(config(tmp_path, lora, "sft.max_num_steps=2"))
    adapter = result.directory.hf / "adapter"
    exported: Any = AutoModelForImageTextToText.from_pretrained(result.directory.hf)
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    merged: Any = PeftModel.from_pretrained(base, adapter)
    merged = merged.merge_and_unload()
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(exported.state_dict()[name], value, msg=name)
        has_adapter = name.endswith(("gate_proj.weight", "o_proj.weight"))
        is_moved = has_adapter and "visual." not in name
        assert torch.equal(value, start[name]) != is_moved, name
    again = run_sft(config(tmp_path, lora, f"policy.lora.adapter_path={adapter}", "run_name=two"))
    first = read_metrics(again.directory.path)[0]["policy/loss"]
    assert first < read_metrics(result.directory.path)[0]["policy/loss"] - 0.01


def test_rows_without_images_keep_the_tower(tmp_path: Path) -> None:
    start = save_tiny_vision_model("qwen3_vl", tmp_path / "model").state_dict()
    (tmp_path / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    options = ("policy.train_global_batch_size=1", "policy.optimizer.weight_decay=0")
    result = run_sft(config(tmp_path, *options, "policy.vision.train=all"))
    exported = AutoModelForImageTextToText.from_pretrained(result.directory.hf)
    for name, value in exported.state_dict().items():
        assert torch.equal(value, start[name]) == ("visual." in name), name


def test_a_row_that_is_too_long_has_its_image_tokens_in_the_error(tmp_path: Path) -> None:
    save_tiny_vision_model("qwen3_vl", tmp_path / "model")
    write_data(tmp_path)
    text = r"train.jsonl:3: the row has \d+ tokens, .* is 60 \(22 of the tokens are of 3 images"
    with pytest.raises(ConfigError, match=text):
        run_sft(config(tmp_path, "policy.max_total_sequence_length=60"))


def test_validate_lists_bad_images_with_row_and_file(tmp_path: Path) -> None:
    save_tiny_vision_model("qwen3_vl", tmp_path / "model")
    write_data(tmp_path)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG broken")
    Image.new("RGB", (500, 2)).save(tmp_path / "wide.png")

    def row(name: str) -> dict[str, Any]:
        question = {"role": "user", "content": [image_part(name), text_part("what?")]}
        return {"messages": [question, answer("a")]}

    rows = [row(name) for name in ("a.png", "missing.png", "broken.png", "wide.png")]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    (problem,) = validate(config(tmp_path, "policy.train_global_batch_size=1")).problems
    for number, name, text in (
        (2, "missing.png", "does not exist"),
        (3, "broken.png", "cannot be read"),
        (4, "wide.png", "500x2"),
    ):
        assert f"train.jsonl:{number}" in problem
        assert name in problem
        assert text in problem
    rows = [{"messages": ROWS[0]["messages"], "images": ["a.png", "b.png"]}]
    rows[0]["messages"] = [{"role": "user", "content": "<image>"}, answer("a")]
    path.write_text(json.dumps(rows[0]) + "\n")
    problems = "\n".join(validate(config(tmp_path, "policy.train_global_batch_size=1")).problems)
    assert "train.jsonl:1: the row has 2 images in its column and 1 place" in problems


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("policy.sequence_packing.enabled=false",), "policy.sequence_packing.enabled=true"),
        (("policy.lora.enabled=true", "policy.vision.train=all"), "policy.vision.train=frozen"),
        (("policy.engine=megatron",), "megatron"),
        (
            ("policy.oversize_rows=truncate", "policy.sequence_packing.train_mb_tokens=200"),
            "train_mb_tokens=200: set it to 256 or more",
        ),
    ],
)
def test_runs_that_cannot_train_with_images_are_refused(
    tmp_path: Path, overrides: tuple[str, ...], text: str
) -> None:
    save_tiny_vision_model("qwen3_vl", tmp_path / "model")
    write_data(tmp_path)
    with pytest.raises(ConfigError, match=text):
        run_sft(config(tmp_path, *overrides))
