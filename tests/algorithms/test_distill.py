"""Distillation runs: the student approaches the teacher, exact resume, errors about teachers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nemo_like.algorithms.distillation.data import TaughtRow, open_source
from nemo_like.algorithms.distillation.loop import is_on_policy, run_distill
from nemo_like.commands.validate import validate
from nemo_like.config.errors import ConfigError
from nemo_like.data.planning.spec import CostModel
from nemo_like.models.spec import load_spec
from nemo_like.rollout.conversations import Prompt
from nemo_like.training.run import RunResult
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.recipe import Recipe

ON_POLICY = (
    "distill.on_policy_fraction=0.5",
    "policy.generation.max_new_tokens=12",
    "distill.top_k=6",
    "policy.lora.enabled=true",
    "policy.lora.rank=4",
)


@pytest.fixture
def teachers(recipe: Recipe, tmp_path: Path) -> list[str]:
    """Two random models of another size with the student's tokenizer; the first is confident."""
    directories = []
    for index, spread in enumerate((0.25, 0.05)):
        directory = tmp_path / f"teacher_{index}"
        torch.manual_seed(index)
        config = LlamaConfig.from_pretrained(recipe.demo / "model")
        config.hidden_size = 64
        config.head_dim = 32
        config.initializer_range = spread
        LlamaForCausalLM(config).save_pretrained(directory)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(recipe.demo / "model" / name, directory / name)
        directories.append(str(directory))
    return directories


@pytest.mark.parametrize("is_sampled", [False, True], ids=["off-policy", "half on-policy"])
def test_a_resumed_run_equals_a_straight_one_and_approaches_the_teacher(
    recipe: Recipe, teachers: list[str], is_sampled: bool
):
    keys = [f"distill.teacher={teachers[0]}", "checkpointing.keep_latest=5", ONE_MICROBATCH]
    keys += [*ON_POLICY, "policy.optimizer.lr=1e-2"] if is_sampled else ["distill.sft_weight=0.1"]
    straight = run_distill(recipe.distill(*keys))
    expected = read_metrics(straight.directory.path)
    weights = (straight.directory.hf / "model.safetensors").read_bytes()
    assert [line["step"] for line in expected] == [0, 1, 2, 3, 4]
    check_model_flops(straight, recipe.demo / "model", teachers[0], has_lora=is_sampled)
    first, last = expected[0], expected[-1]
    divergences = [line.get("validation/divergence", 9.0) for line in expected]
    # Completions of so early a student say little about the validation rows of the last steps.
    assert min(divergences) < 0.95 * first["validation/divergence"]
    assert is_sampled or last["validation/divergence"] == min(divergences)
    assert last["validation/teacher_loss"] == first["validation/teacher_loss"]
    kinds = ["generation/num_tokens" in line for line in expected[1:]]
    config = recipe.distill(*keys)
    assert kinds == [is_on_policy(config, step) for step in range(4)]
    assert set(kinds) == ({True, False} if is_sampled else {False})
    interrupt_at(straight.directory.path, 2)
    if not is_sampled:
        check_changed_teacher(recipe, keys, teachers[0])
    resumed = run_distill(recipe.distill(*keys, "resume=true"))
    assert read_metrics(resumed.directory.path) == expected
    assert (resumed.directory.hf / "model.safetensors").read_bytes() == weights


def check_changed_teacher(recipe: Recipe, keys: list[str], teacher: str) -> None:
    """A run does not resume with other weights in the directory of its teacher."""
    weights = Path(teacher) / "model.safetensors"
    content = weights.read_bytes()
    values = load_file(weights)
    save_file({name: each * 1.01 for name, each in values.items()}, weights)
    with pytest.raises(
        ConfigError, match=r"distill\.teacher is .*teacher_0', whose weights differ"
    ):
        run_distill(recipe.distill(*keys, "resume=true"))
    weights.write_bytes(content)


ONE_MICROBATCH = "policy.sequence_packing.train_mb_tokens=4096"
"""A step of one microbatch: its rows share all that they have in common."""


def check_model_flops(run: RunResult, student: Path, teacher: str, *, has_lora: bool) -> None:
    """Compare the logged FLOP/s of the last step with the work of both models on its rows."""
    last_line = run.directory.lengths.read_text().splitlines()[-1]
    record = json.loads(last_line)
    rows = (np.array(record["lengths"]), np.array(record["num_trained"]))
    assert 0 < rows[1].sum() < rows[0].sum()
    forward = CostModel.from_spec(load_spec(str(student)))
    shared = np.zeros_like(rows[0])
    if "prefixes" in record:
        # The rows of a step are one microbatch.
        order, in_common = (np.array(record["prefixes"][name]) for name in ("order", "shared"))
        shared[order] = in_common
    products = forward.products(rows[0] - shared, rows[1]).sum()
    flops = 3 * forward.of(*rows, shared).sum() - has_lora * products
    flops += CostModel.from_spec(load_spec(teacher)).of(*rows, shared).sum()
    seconds = run.last["timing/train_s"] + run.last["timing/teacher_s"]
    logged = run.last["performance/train_tflops_per_s_per_worker"]
    assert logged * 1e12 * seconds == pytest.approx(flops)


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_find_the_teacher_of_their_set(recipe: Recipe, teachers: list[str], tmp_path: Path):
    rows = [{"prompt": f"{index}+1", "completion": "2"} for index in range(4)]
    other = write_rows(tmp_path / "other.jsonl", rows)
    sets = (
        f"data.train_sets={{other: {other}}}",
        "data.max_train_rows=6",
        "data.validation_path=null",
        "distill.val_period=0",
        "policy.train_global_batch_size=10",
    )
    named = f"distill.teachers={{train: {teachers[0]}, other: {teachers[1]}}}"
    loader = open_source(recipe.distill(*sets, named)).loader()
    assert sorted(row.teacher for row in next(loader)) == [0] * 6 + [1] * 4


def test_problems_of_teachers_are_reported(recipe: Recipe, teachers: list[str], tmp_path: Path):
    report = validate(recipe.distill(f"distill.teacher={teachers[0]}"))
    assert report.problems == ()
    assert any("teacher" in line for line in report.sections["model"])
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "1+1"}] * 20)
    for key, sampled in (("train_path", "0"), ("train_path", "0.5"), ("validation_path", "1")):
        config = recipe.distill(
            f"distill.teacher={teachers[0]}",
            f"data.{key}={prompts}",
            f"distill.on_policy_fraction={sampled}",
        )
        assert any("no assistant turn" in problem for problem in validate(config).problems), key
    missing = validate(recipe.distill("distill.teacher=/nowhere"))
    assert any(problem.startswith("distill.teacher is '/nowhere'") for problem in missing.problems)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(teachers[1])
    tokenizer.add_tokens(["%"])
    tokenizer.save_pretrained(teachers[1])
    with pytest.raises(ConfigError, match="it has 1 further tokens"):
        run_distill(recipe.distill(f"distill.teacher={teachers[1]}"))
    for keys, message in (
        ((), r"distill\.teacher is not set"),
        (("distill.teachers={code: x}",), "the training sets are train"),
        (
            ("distill.teacher=x", "distill.on_policy_fraction=1", "distill.sft_weight=1"),
            "no step trains on the rows",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            recipe.distill(*keys)


def test_a_teacher_needs_neither_the_frozen_weights_nor_the_padding_of_the_student(
    recipe: Recipe, teachers: list[str], tmp_path: Path
):
    config = LlamaConfig.from_pretrained(teachers[0])
    config.num_hidden_layers = 1
    config.vocab_size += 11
    LlamaForCausalLM(config).save_pretrained(teachers[0])
    key = f"distill.teacher={teachers[0]}"
    report = validate(recipe.distill(key, "policy.freeze=[model.layers.1.*]"))
    assert report.problems == ()
    # The policy has 21 tokens, fewer than the teacher.
    message = r"distill\.top_k is 21, .* the policy one of 21"
    with pytest.raises(ConfigError, match=message):
        run_distill(recipe.distill(key, "distill.top_k=21"))


def test_rows_too_long_as_conversations_are_dropped_from_all_steps_of_a_mixed_run(
    recipe: Recipe, teachers: list[str], tmp_path: Path
):
    rows = [{"prompt": "1+2", "completion": "3"}, {"prompt": "1+3", "completion": "4" * 90}]
    path = write_rows(tmp_path / "lengths.jsonl", rows * 4)
    keys = [
        f"distill.teacher={teachers[0]}",
        f"data.train_path={path}",
        "distill.on_policy_fraction=0.5",
        "policy.generation.max_new_tokens=4",
        "policy.max_total_sequence_length=64",
        "policy.train_global_batch_size=1",
    ]
    loader = open_source(recipe.distill(*keys, "policy.oversize_rows=drop")).loader()
    assert [loader_rows(next(loader)) for _ in range(4)] == [["1+2"]] * 4
    with pytest.raises(ConfigError, match=r"policy\.max_total_sequence_length is 64"):
        loader = open_source(recipe.distill(*keys, "policy.oversize_rows=error")).loader()
        for _ in range(4):
            next(loader)


def loader_rows(rows: list[TaughtRow]) -> list[str]:
    """The prompts of the rows of a step."""
    prompts = []
    for row in rows:
        assert isinstance(row.example, Prompt)
        prompts.append(row.example.row["prompt"])
    return prompts
