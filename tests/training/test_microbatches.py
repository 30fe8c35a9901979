"""Runs that run out of memory and continue with smaller microbatches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemo_like.algorithms.restart import run_with_restarts
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.config.errors import ConfigError
from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import PolicyConfig, RunConfig
from nemo_like.distributed.errors import WorkerDied, WorkerError
from nemo_like.policy.worker import PolicyWorker
from nemo_like.training.microbatches import MAX_REDUCTIONS, MemoryPolicy, smaller_microbatches
from nemo_like.training.run import RunResult
from nemo_like.training.stopping import StopRequests
from tests.recipe import Recipe

STEPS = (
    "sft.val_period=0",
    "sft.val_at_start=false",
    "checkpointing.export_hf=false",
    "policy.oom=shrink",
)


def out_of_memory(group: str = "policy", text: str = "CUDA out of memory") -> WorkerError:
    cause = torch.OutOfMemoryError(text)
    return WorkerError(group=group, rank=0, method="train", cause=cause, traceback_text="")


def next_policy(memory: MemoryPolicy, config: RunConfig, error: Exception) -> PolicyConfig | None:
    layout = policy_layout(config.parallel, config.cluster)
    return memory.next_policy(config.policy, layout, config.needs.batch, error)


def smaller(config: RunConfig) -> PolicyConfig:
    layout = policy_layout(config.parallel, config.cluster)
    return smaller_microbatches(config.policy, layout, config.needs.batch)


def run_job(config: RunConfig) -> RunResult:
    assert isinstance(config, SftRunConfig)
    return run_sft(config)


def limit_tokens(monkeypatch: pytest.MonkeyPatch, max_tokens: int, after_calls: int) -> None:
    """Let a training step fail in an allocation if a microbatch has more tokens."""
    unlimited = PolicyWorker.train
    num_calls = 0

    def train(self, shard, *arguments, **keywords):
        nonlocal num_calls
        num_calls += 1
        tokens = [each.num_tokens for each in shard.plan.microbatches]
        if num_calls > after_calls and max(tokens) > max_tokens:
            torch.empty(2**60)
        return unlimited(self, shard, *arguments, **keywords)

    monkeypatch.setattr(PolicyWorker, "train", train)


def records(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_out_of_memory_continues_with_smaller_microbatches(
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    straight = run_sft(recipe.sft(*STEPS, "run_name=straight"))
    limit_tokens(monkeypatch, 170, after_calls=3)
    result = run_with_restarts(run_job, recipe.sft(*STEPS), StopRequests(None))
    found = records(result.directory.path)
    limits = [record["policy/microbatch_limit"] for record in found]
    # 0.8 x 256 = 204.8 and 0.8 x 204 = 163.2; step 3 is repeated from the checkpoint of step 2.
    assert limits == [256, 256, 163, 163]
    expected = records(straight.directory.path)
    assert [record["policy/loss"] for record in found] == pytest.approx(
        [record["policy/loss"] for record in expected], rel=1e-6
    )
    errors = capfd.readouterr().err
    assert "out of memory after step 3" in errors
    assert "continues from step_2 and repeats 1 step" in errors
    key = "policy.sequence_packing.train_mb_tokens"
    assert f"{key}=163" in errors and "reduction 2 of at most 5; policy.oom" in errors
    assert f"changed since this run was started: {key}: 204 -> 163" in caplog.text


def test_rows_that_do_not_fit_are_one_error(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_tokens(monkeypatch, 10, after_calls=0)
    with pytest.raises(WorkerError, match="can't allocate memory") as raised:
        run_with_restarts(run_job, recipe.sft(*STEPS), StopRequests(None))
    (note,) = raised.value.cause.__notes__
    # 256 -> 204 -> 163 -> 130 -> 104 -> 96, which is `policy.max_total_sequence_length`.
    assert f"has had {MAX_REDUCTIONS} reductions" in note
    memory = MemoryPolicy()
    config = recipe.sft(*STEPS, "policy.sequence_packing.train_mb_tokens=110")
    steps = []
    error = out_of_memory()
    while (smaller := next_policy(memory, config, error)) is not None:
        config = replace(config, policy=smaller)
        packing = config.policy.sequence_packing
        steps.append((packing.train_mb_tokens, packing.logprob_mb_tokens))
    assert steps == [(96, 409), (96, 327), (96, 261), (96, 208), (96, 166)]
    config = recipe.sft(
        *STEPS,
        "policy.sequence_packing.train_mb_tokens=96",
        "policy.sequence_packing.logprob_mb_tokens=96",
    )
    error = out_of_memory()
    assert next_policy(MemoryPolicy(), config, error) is None
    assert "a row of policy.max_total_sequence_length=96 has to fit" in error.cause.__notes__[0]


def test_only_memory_of_the_policy_is_saved(recipe: Recipe) -> None:
    config = recipe.sft(*STEPS)
    for error in (
        out_of_memory("generation"),
        WorkerDied("killed", group="policy", rank=0, method="train"),
        ValueError("wrong"),
    ):
        assert next_policy(MemoryPolicy(), config, error) is None
    stops = recipe.sft("policy.oom=stop")
    assert next_policy(MemoryPolicy(), stops, out_of_memory()) is None


def test_pairs_and_rows_without_a_budget(recipe: Recipe) -> None:
    pairs = recipe.dpo(
        "policy.oom=shrink",
        "policy.sequence_packing.train_mb_tokens=200",
        "policy.sequence_packing.logprob_mb_tokens=192",
    )
    packing = smaller(pairs).sequence_packing
    # Both rows of a pair have up to 96 tokens.
    assert (packing.train_mb_tokens, packing.logprob_mb_tokens) == (192, 192)
    rows = recipe.sft(
        *STEPS, "policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=6"
    )
    fewer = smaller(rows)
    assert (fewer.train_micro_batch_size, fewer.logprob_batch_size) == (4, 3)
    assert PolicyConfig(model_name="m").oom == "stop"


def test_batches_of_a_budget_are_refused(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"policy\.oom is shrink, .* data\.batching\.kind=fixed"):
        recipe.sft("policy.oom=shrink", "data.batching.kind=token_budget")
