"""DPO of vision-language models with images in the prompt: complete runs in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from nemo_like.algorithms.preferences.config import DpoRunConfig
from nemo_like.algorithms.preferences.loop import run_dpo
from nemo_like.algorithms.registry import load_config
from nemo_like.commands.validate import validate
from tests.algorithms.test_runs import read_metrics
from tests.algorithms.test_vision_runs import answer, image_part, text_part, write_data
from tests.vision import (
    expanded_ids,
    logits_of,
    picture_inputs,
    save_tiny_vision_model,
    trained_patches,
)

BETA = 0.5
WHAT = [image_part("a.png"), text_part("what?")]
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": WHAT}], "chosen": "a", "rejected": "no"},
    # The same ids as above, and another image of the same size.
    {"prompt": "<image>what?", "images": ["e.png"], "chosen": "a", "rejected": "no"},
    {
        "chosen": [{"role": "user", "content": "<image>and<image>"}, answer("two")],
        "rejected": [{"role": "user", "content": "<image>and<image>"}, answer("one")],
        "images": ["b.png", "a.png"],
    },
    {"prompt": "none", "chosen": "no", "rejected": "yes"},
]
IMAGE_TOKENS = {"a.png": 6, "b.png": 4, "e.png": 6}
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
PAIRS = [
    (["a.png"], f"{IMAGE}what?", ("a", "no")),
    (["e.png"], f"{IMAGE}what?", ("a", "no")),
    (["b.png", "a.png"], f"{IMAGE}and{IMAGE}", ("two", "one")),
    ([], "none", ("no", "yes")),
]


def config(folder: Path, index: int, *overrides: str) -> DpoRunConfig:
    """The files of each format are apart."""
    paths = [folder / f"{number}.jsonl" for number in (0, 1)]
    for path, rows in zip(paths, ([ROWS[0], ROWS[1], ROWS[3]], [ROWS[2]]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f"""
output_dir: {folder}/runs
run_name: dpo
policy:
  model_name: {folder}/model
  train_global_batch_size: {(3, 1)[index]}
  max_total_sequence_length: 256
  sequence_packing: {{enabled: true, train_mb_tokens: 512, logprob_mb_tokens: 512}}
  optimizer: {{lr: 1.0e-2}}
  vision: {{train: all}}
  parity_check: false
loss_fn: {{beta: {BETA}}}
cluster: {{backend: local}}
dpo: {{max_num_steps: 2, max_num_epochs: 2}}
data: {{train_path: {paths[index]}, shuffle: false}}
"""
    (folder / "dpo.yaml").write_text(text)
    return load_config(DpoRunConfig, folder / "dpo.yaml", list(overrides))


def completion_logprob(folder: Path, model: Any, pair: Any, completion: str) -> torch.Tensor:
    names, prompt, _ = pair
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    options, counts = picture_inputs(folder / "model", [folder / name for name in names])
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    own = tokenizer(f"{completion}<|im_end|>").input_ids
    ids = [*expanded_ids(tokenizer, text, counts), *own]
    logits = logits_of(model, ids, options)
    losses = F.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    return -losses[-len(own) :].sum()


def plain_step(folder: Path, pairs: list[Any]) -> tuple[float, float]:
    """Loss and gradient norm of the first step, with nothing but transformers, row by row."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    losses = []
    for pair in pairs:
        chosen, rejected = (completion_logprob(folder, model, pair, text) for text in pair[2])
        margin = (chosen - chosen.detach()) - (rejected - rejected.detach())
        losses.append(-F.logsigmoid(BETA * margin))
    loss = torch.stack(losses).mean()
    loss.backward()
    grads = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return float(loss), float(torch.stack(grads).norm())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("dpo")
    save_tiny_vision_model("qwen3_vl", made / "model")
    write_data(made)
    pixels = np.random.default_rng(1).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(made / "e.png")
    return made


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_step_equals_single_rows_in_transformers(folder: Path, index: int) -> None:
    pairs = [[PAIRS[0], PAIRS[1], PAIRS[3]], [PAIRS[2]]][index]
    loss, norm = plain_step(folder, pairs)
    steps = {}
    images = {name: 4 * size for name, size in IMAGE_TOKENS.items()}
    unique = sum(images[name] for name in {name for pair in pairs for name in pair[0]})
    for shared in ("true", "false"):
        options = (f"policy.shared_prefix={shared}", f"run_name=run-{index}-{shared}")
        with trained_patches() as patches:
            result = run_dpo(config(folder, index, *options))
        # Both rows of a pair have the images of one.
        assert patches == [unique] * 2
        steps[shared] = read_metrics(result.directory.path)
        assert steps[shared][0]["policy/loss"] == pytest.approx(loss, rel=1e-5)
        assert steps[shared][0]["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)
    second = [each[1]["policy/loss"] for each in steps.values()]
    assert second[0] == pytest.approx(second[1], rel=1e-4)
    assert second[0] < loss - 0.01


def test_validate_shows_the_images_of_both_rows(folder: Path) -> None:
    found = validate(config(folder, 1))
    assert not found.problems
    texts = ["".join(text for text, _ in sample.segments) for sample in found.samples]
    assert [text.count("[image 24x16 = 6 tokens]") for text in texts] == [1, 1]
    path = folder / "other.jsonl"
    rows = json.loads(json.dumps(ROWS[2]))
    del rows["images"]
    for name, file in (("chosen", "a.png"), ("rejected", "b.png")):
        rows[name][0]["content"] = [image_part(file), text_part("x")]
    path.write_text(json.dumps(rows) + "\n")
    problems = validate(config(folder, 1, f"data.train_path={path}")).problems
    assert any("other.jsonl:1" in each and "different images" in each for each in problems)
