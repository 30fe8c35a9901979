"""Save and load are exact to the bit, also onto another number of ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nemo_like.config.schema import (
    OptimizerConfig,
    PolicyConfig,
    SchedulerConfig,
    SequencePackingConfig,
)
from nemo_like.data.planning.plan import plan_batch
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import NllLoss
from nemo_like.metrics import metric_values
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.dtensor.parameters import row_range
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.run.checkpoint import CheckpointError
from tests.policy.tiny import context, random_batch, run_ranks, saved_tensors

KINDS = ("weight", "exp_avg", "exp_avg_sq")
CONFIG = PolicyConfig(
    model_name="",
    train_global_batch_size=4,
    sequence_packing=SequencePackingConfig(enabled=True, train_mb_tokens=32),
    optimizer=OptimizerConfig(lr=1e-2),
    scheduler=SchedulerConfig(kind="cosine", warmup_steps=2, decay_steps=6),
)


def train_steps(
    worker: DTensorPolicyWorker, worker_context: WorkerContext, config: PolicyConfig, steps: range
) -> list[dict[str, float]]:
    """One optimizer step per seed in `steps`, on four rows of its own."""
    lines = []
    for step in steps:
        batch = random_batch([7, 12, 3, 9], seed=step)
        spec = plan_spec(
            config,
            purpose="train",
            parallel_layout=ParallelLayout(dp=worker_context.world_size),
            model=load_spec(config.model_name),
        )
        shard = batch.shard(plan_batch(batch["length"], spec))[worker_context.rank]
        (metrics,) = worker.train(shard, None, NllLoss())
        values = metric_values(metrics)
        lines.append({k: v for k, v in values.items() if not k.startswith("policy/rank_time")})
    return lines


def train_and_save(
    worker_context: WorkerContext, config: PolicyConfig, steps: range, load: Path | None, save: Path
) -> list[dict[str, float]]:
    worker = DTensorPolicyWorker(worker_context, config=config)
    if load is not None:
        worker.load(load)
    lines = train_steps(worker, worker_context, config, steps)
    worker.save(save)
    process_groups.destroy()
    return lines


def assert_same_checkpoint(found: Path, expected: Path) -> None:
    for kind in KINDS:
        tensors, wanted = saved_tensors(found, kind), saved_tensors(expected, kind)
        assert tensors.keys() == wanted.keys() and len(wanted) > 0
        assert all(torch.equal(tensors[name], wanted[name]) for name in wanted), kind


@pytest.fixture
def config(model_dir) -> PolicyConfig:
    return dataclasses.replace(CONFIG, model_name=model_dir("qwen2"))


def test_a_resumed_run_equals_a_straight_one_bit_for_bit(config, tmp_path):
    straight = train_and_save(context(), config, range(4), None, tmp_path / "straight")
    train_and_save(context(), config, range(2), None, tmp_path / "half")
    resumed = train_and_save(
        context(), config, range(2, 4), tmp_path / "half", tmp_path / "resumed"
    )
    assert resumed == straight[2:]
    assert_same_checkpoint(tmp_path / "resumed", tmp_path / "straight")


def test_two_ranks_resume_bit_for_bit_and_one_rank_takes_their_checkpoint_over(
    config, rank_pool, tmp_path
):
    def run(steps: range, load: Path | None, name: str) -> list[dict[str, float]]:
        paths = (load, tmp_path / name)
        return run_ranks(
            rank_pool, train_and_save, 2, tmp_path / f"meeting {name}", config, steps, *paths
        )[0]

    straight = run(range(4), None, "straight")
    run(range(2), None, "half")
    assert run(range(2, 4), tmp_path / "half", "resumed") == straight[2:]
    assert_same_checkpoint(tmp_path / "resumed", tmp_path / "straight")
    # Loading and saving again without a step between: only the cut changes.
    train_and_save(context(), config, range(0), tmp_path / "half", tmp_path / "one rank")
    assert_same_checkpoint(tmp_path / "one rank", tmp_path / "half")
    run(range(0), tmp_path / "one rank", "two again")
    assert_same_checkpoint(tmp_path / "two again", tmp_path / "half")
    taken_over = train_and_save(
        context(), config, range(2, 4), tmp_path / "half", tmp_path / "over"
    )
    assert [line["policy/loss"] for line in taken_over] == pytest.approx(
        [line["policy/loss"] for line in straight[2:]], rel=1e-5
    )
    assert [line["policy/lr"] for line in taken_over] == [
        line["policy/lr"] for line in straight[2:]
    ]


def test_a_checkpoint_from_before_the_first_step_has_no_moments(config, tmp_path):
    train_and_save(context(), config, range(0), None, tmp_path / "start")
    assert (
        json.loads((tmp_path / "start" / "manifest.json").read_text())["num_optimizer_steps"] == 0
    )
    first = train_and_save(context(), config, range(2), None, tmp_path / "a")
    assert train_and_save(context(), config, range(2), tmp_path / "start", tmp_path / "b") == first


def test_a_folder_without_manifest_or_of_another_model_is_refused(config, model_dir, tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest\.json does not exist"):
        DTensorPolicyWorker(context(), config=config).load(tmp_path)
    train_and_save(context(), config, range(1), None, tmp_path / "qwen2")
    other = dataclasses.replace(config, model_name=model_dir("qwen3"))
    with pytest.raises(ValueError, match=r"another model.*check policy\.model_name"):
        DTensorPolicyWorker(context(), config=other).load(tmp_path / "qwen2")


@given(num_rows=st.integers(0, 50), world_size=st.integers(1, 9))
def test_row_ranges_are_those_of_torch_chunk(num_rows, world_size):
    chunks: list[Tensor] = list(torch.arange(num_rows).chunk(world_size)) if num_rows else []
    for rank in range(world_size):
        start, stop = row_range(num_rows, world_size, rank)
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(start, stop)) == expected
