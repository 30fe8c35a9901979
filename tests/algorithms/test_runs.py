"""Complete runs with the real policy, sampler and rewards, in this process: resume, planners,
exports.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.config.errors import ConfigError
from nemo_like.data.packing.algorithms import PackingAlgorithm
from nemo_like.training.run import RunResult
from tests.recipe import Recipe

_CLOCKS = ("timing/", "performance/", "weight_sync/", "policy/rank_time", "unix_time_s")


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Every logged step without the measures of time, which no two runs share."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith(_CLOCKS)}
        for line in lines
    ]


def read_rollout(run: Path, step: int) -> list[dict[str, Any]]:
    """Every record of the rollout that `step` trained."""
    path = run / "rollouts" / f"step_{step}.jsonl"
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def interrupt_at(run: Path, step: int) -> None:
    """Leave the run as a kill between `step` and the next checkpoint would have: later checkpoints
    are not there.
    """
    for folder in (run / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)
    (run / "latest").unlink()
    # A run without an export has none.
    shutil.rmtree(run / "hf", ignore_errors=True)


@pytest.mark.parametrize("job", ["sft", "grpo"])
def test_an_interrupted_and_resumed_run_equals_a_straight_one_bit_for_bit(recipe: Recipe, job: str):
    run, config = (run_sft, recipe.sft) if job == "sft" else (run_grpo, recipe.grpo)
    straight = run(config("checkpointing.keep_latest=5"))  # type: ignore[arg-type]
    expected = read_metrics(straight.directory.path)
    weights = (straight.directory.hf / "model.safetensors").read_bytes()
    assert [line["step"] for line in expected] == [0, 1, 2, 3, 4]
    assert all(line["policy/grad_norm"] > 0 for line in expected[1:]), (
        "a run without gradients would prove nothing"
    )
    interrupt_at(straight.directory.path, 2)
    resumed = run(config("checkpointing.keep_latest=5", "resume=true"))  # type: ignore[arg-type]
    assert read_metrics(resumed.directory.path) == expected
    assert (resumed.directory.hf / "model.safetensors").read_bytes() == weights


ONE_STEP = (
    "sft.max_num_steps=1",
    "sft.val_at_start=false",
    "checkpointing.enabled=false",
    "data.max_train_rows=200",
)
ONE_STEP_OF_GRPO = (
    "grpo.max_num_steps=1",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "checkpointing.enabled=false",
    "data.max_train_rows=64",
    "data.validation_path=null",
)


def test_swapping_the_packer_changes_the_plan_and_nothing_else(recipe: Recipe):
    losses, plans = {}, set()
    for algorithm in PackingAlgorithm:
        result = run_sft(
            recipe.sft(
                f"policy.sequence_packing.algorithm={algorithm}",
                f"run_name=sft_{algorithm}",
                *ONE_STEP,
            )
        )
        losses[str(algorithm)] = read_metrics(result.directory.path)[0]["policy/loss"]
        plans.add(result.directory.plan(0).read_text())
    assert np.ptp(list(losses.values())) <= 1e-5 * abs(np.mean(list(losses.values()))), losses
    assert len(plans) > 1, "the packers should not all agree on these rows"


def test_layouts_agree_on_the_loss(recipe: Recipe):
    packed = run_sft(recipe.sft("run_name=packed", *ONE_STEP))
    modes = {
        "dynamic": "policy.dynamic_batching.enabled=true",
        "fixed": "policy.train_micro_batch_size=4",
    }
    for name, mode in modes.items():
        options = (f"run_name={name}", mode, *ONE_STEP)
        padded = run_sft(recipe.sft("policy.sequence_packing.enabled=false", *options))
        for metric in ("policy/loss", "policy/grad_norm", "policy/num_tokens"):
            expected = packed.last[metric]
            assert padded.last[metric] == pytest.approx(expected, rel=1e-5), (name, metric)


def check_export(result: RunResult, recipe: Recipe) -> None:
    """The exported model is the trained one, and generates."""
    assert result.export is not None
    model = AutoModelForCausalLM.from_pretrained(result.export)
    tokenizer = AutoTokenizer.from_pretrained(result.export)
    start = AutoModelForCausalLM.from_pretrained(recipe.demo / "model")
    moved = [
        not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True)
    ]
    assert all(moved)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    generated = model.generate(**ids, max_new_tokens=4, do_sample=False)  # pyright: ignore[reportAttributeAccessIssue]
    assert generated.shape[1] > ids["input_ids"].shape[1]


def test_a_grpo_run_leaves_the_promised_directory_and_a_model_that_generates(recipe: Recipe):
    result = run_grpo(recipe.grpo("grpo.max_num_steps=1"))
    run = result.directory
    for path in (
        run.config,
        run.metrics,
        run.plan(0),
        run.rollouts(1),
        run.path / "latest",
        run.hf / "config.json",
    ):
        assert path.is_file(), path
    assert list(run.tensorboard.glob("events.*"))
    records = [json.loads(line) for line in run.rollouts(1).read_bytes().splitlines()]
    assert len(records) == 32 and {
        "prompt",
        "completion",
        "reward",
        "advantage",
        "finish_reason",
    } <= set(records[0])
    promised = (
        "utilization",
        "waste_ratio",
        "bin_balance",
        "efficiency",
        "padding_share",
        "rank_imbalance_tokens",
        "rank_imbalance_flops",
        "num_microbatches",
    )
    assert {f"packing/{name}" for name in promised} <= set(result.last)
    assert {
        "performance/tokens_per_s",
        "performance/train_mfu",
        "mismatch/gen_kl_k3",
        "reward/mean",
    } <= set(result.last)
    assert result.last["mismatch/gen_kl_k3"] < 1e-6, "sampler and policy are the same fp32 model"
    check_export(result, recipe)


def test_the_sampler_uses_the_new_weights_of_every_step(recipe: Recipe):
    result = run_grpo(recipe.grpo("policy.optimizer.lr=1e-2", "policy.scheduler.kind=constant"))
    metrics = read_metrics(result.directory.path)
    assert all(line["mismatch/gen_kl_k3"] < 1e-6 for line in metrics[1:]), (
        "stale weights would show here"
    )
    versions = [
        json.loads(result.directory.rollouts(step).read_bytes().splitlines()[0])["weight_versions"]
        for step in (1, 2, 3, 4)
    ]
    assert versions == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("token_filter", "reference_kl"),
    [("{top_p: 0.8}", 0.01), ("{top_k: 50}", 0.0), ("{min_p: 0.05}", 0.0)],
)
def test_filtered_sampling_and_the_policy_have_one_distribution(
    recipe: Recipe, token_filter: str, reference_kl: float
) -> None:
    """Equal weights, so sampler and policy may differ by rounding only; the KL to equal weights is
    0.
    """
    options = [
        f"policy.generation.{item.strip()}".replace(": ", "=")
        for item in token_filter[1:-1].split(",")
    ]
    result = run_grpo(
        recipe.grpo(
            *options,
            f"loss_fn.reference_policy_kl_penalty={reference_kl}",
            "policy.train_global_batch_size=32",
            *ONE_STEP_OF_GRPO,
        )
    )
    assert result.last["mismatch/token_mult_prob_error"] <= 1.001
    assert result.last["mismatch/importance_ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert result.last["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    if reference_kl > 0:
        assert abs(result.last["policy/reference_kl_k3"]) < 1e-6
    assert result.last["policy/grad_norm"] > 0


@pytest.mark.parametrize(
    ("options", "num_passes"),
    [
        (("policy.train_global_batch_size=16",), 2),
        (("policy.train_global_batch_size=32",), 1),
        (("policy.train_global_batch_size=32", "loss_fn.reference_policy_kl_penalty=0"), 0),
        (
            (
                "policy.train_global_batch_size=16",
                "loss_fn.reference_policy_kl_penalty=0",
                "loss_fn.importance_correction.kind=bypass",
            ),
            0,
        ),
    ],
)
def test_a_log_prob_pass_runs_only_where_its_result_is_used(
    recipe: Recipe, options: tuple[str, ...], num_passes: int
) -> None:
    config = recipe.grpo(*options, *ONE_STEP_OF_GRPO)
    assert config.needs.logprob_pass == (num_passes > 0)
    last = run_grpo(config).last
    assert ("timing/logprobs_s" in last) == (num_passes > 0)
    assert last["policy/grad_norm"] > 0
    assert last["mismatch/num_nonfinite"] == 0.0


def test_a_run_name_is_reused_only_with_resume(recipe: Recipe):
    run_sft(recipe.sft(*ONE_STEP))
    with pytest.raises(ConfigError, match="resume=true"):
        run_sft(recipe.sft(*ONE_STEP))


@pytest.mark.parametrize(
    ("policy", "outcome"),
    [("error", "max_total_sequence_length"), ("truncate", None), ("singleton", None)],
)
def test_a_row_longer_than_the_cap(
    recipe: Recipe, policy: str, outcome: str | None, caplog: pytest.LogCaptureFixture
):
    long_rows = recipe.folder / "long.jsonl"
    turns = [("1+1", "#### 2"), ("12+1", "#### " + "1" * 120)] * 8
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in turns
    ]
    long_rows.write_text("\n".join(map(json.dumps, rows)))
    config = recipe.sft(
        f"policy.oversize_rows={policy}",
        f"data.train_path={long_rows}",
        "policy.sequence_packing.train_mb_tokens=100",
        "policy.sequence_packing.logprob_mb_tokens=100",
        "sft.max_num_steps=1",
        "data.validation_path=null",
        "sft.val_period=0",
        "sft.val_at_start=false",
    )
    if outcome is not None:
        with pytest.raises(ConfigError, match=outcome) as error:
            run_sft(config)
        places = re.findall(r"long\.jsonl:(\d+)", str(error.value))
        assert [int(place) % 2 for place in places] == [0] * len(places), "of the long rows"
        assert places
        return
    if policy == "singleton":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = run_sft(config)
        # The first run of a process makes log records of warnings.
        texts = [*caplog.messages, *(str(warning.message) for warning in caught)]
        assert sum("row 1 has 133 tokens" in text for text in texts) == 1
        assert result.last["packing/num_oversize"] == 8
    else:
        result = run_sft(config)
    assert result.last["policy/grad_norm"] > 0
