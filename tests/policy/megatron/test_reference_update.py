"""A reference that is updated from the policy, in both engines: its log-probs, and checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.config.parallel import build_layout
from nemo_like.config.schema import (
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from nemo_like.data.planning.plan import plan_batch
from nemo_like.distributed import process_groups
from nemo_like.distributed.batched_data_dict import SlicedDataDict
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import NllLoss
from nemo_like.models.spec import load_spec
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.device import HostMemory
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.megatron.worker import MegatronPolicyWorker
from nemo_like.policy.worker import PolicyWorker
from tests.policy.megatron.ranks import OnRanks
from tests.policy.tiny import compute_and_fetch, context, random_batch, saved_tensors

CONFIG = PolicyConfig(
    model_name="",
    train_global_batch_size=4,
    sequence_packing=SequencePackingConfig(
        enabled=True,
        train_mb_tokens=48,
        logprob_mb_tokens=48,
        sequence_length_round=4,
        # All microbatches have one length here; the other engine test has different ones.
        microbatch_length_round=48,
    ),
    optimizer=OptimizerConfig(lr=1e-2),
)


def start(
    worker_context: WorkerContext, parallel: ParallelConfig, engine: str, config: PolicyConfig
) -> tuple[PolicyWorker, SlicedDataDict]:
    """A worker with a reference, and its rows."""
    worker_class: Any = MegatronPolicyWorker if engine == "megatron" else DTensorPolicyWorker
    worker = worker_class(
        worker_context, config=config, start=PolicyStart(parallel=parallel, needs_reference=True)
    )
    layout = build_layout(parallel, worker_context.world_size)
    spec = plan_spec(
        config, purpose="train", parallel_layout=layout, model=load_spec(config.model_name)
    )
    batch = random_batch([7, 12, 3, 9])
    plan = plan_batch(batch["length"], spec)
    return worker, batch.shard(plan)[layout.dp_rank(worker_context.rank)]


def values_of(worker: PolicyWorker, shard: SlicedDataDict) -> dict[str, np.ndarray]:
    """Log-probs [T] by name of this rank's rows; none on pipeline stages but the last."""
    return {name: column.values for name, column in compute_and_fetch(worker, shard).items()}


def train_update_and_save(
    worker_context: WorkerContext,
    parallel: ParallelConfig,
    engine: str,
    config: PolicyConfig,
    folder: Path,
) -> list[dict[str, np.ndarray]]:
    """Log-probs before, after one step with an update, and after a second one without."""
    try:
        worker, shard = start(worker_context, parallel, engine, config)
        seen = [values_of(worker, shard)]
        worker.save(folder / "initial")
        worker.train(shard, None, NllLoss())
        worker.update_reference()
        seen.append(values_of(worker, shard))
        worker.train(shard, None, NllLoss())
        worker.start_save(folder / "updated")
        files = worker.finish_save()
        assert any(name.startswith("reference/rank_") for name in files)
        seen.append(values_of(worker, shard))
        return seen
    finally:
        process_groups.destroy()


def load(
    worker_context: WorkerContext,
    parallel: ParallelConfig,
    engine: str,
    config: PolicyConfig,
    folder: Path,
) -> dict[str, np.ndarray]:
    """Log-probs of a fresh worker that has loaded a checkpoint."""
    try:
        worker, shard = start(worker_context, parallel, engine, config)
        worker.load(folder)
        return values_of(worker, shard)
    finally:
        process_groups.destroy()


@pytest.mark.parametrize(
    ("engine", "layout", "architecture", "precision"),
    [
        ("dtensor", "tp2", "qwen3", "float32"),
        ("dtensor", "dp2", "llama_tied", "bfloat16"),
        ("megatron", "dp2", "llama_tied", "bfloat16"),
        ("megatron", "tp2 x ep2 + sp", "qwen3_moe", "float32"),
    ],
)
def test_an_updated_reference_is_the_policy_and_survives_a_checkpoint(
    engine, layout, architecture, precision, model_dir, on_ranks: OnRanks, tmp_path
) -> None:
    config = dataclasses.replace(CONFIG, model_name=model_dir(architecture), precision=precision)
    ranks = on_ranks(train_update_and_save, layout, engine, config, tmp_path)
    for before, updated, later in ranks:
        assert np.array_equal(before["reference_logprobs"], before["prev_logprobs"])
        assert np.array_equal(updated["reference_logprobs"], updated["prev_logprobs"])
        assert not np.array_equal(updated["reference_logprobs"], before["reference_logprobs"])
        assert np.array_equal(later["reference_logprobs"], updated["reference_logprobs"])
        assert not np.array_equal(later["prev_logprobs"], updated["prev_logprobs"])
    assert not (tmp_path / "initial" / "reference").exists(), "the initial weights are not saved"
    again = on_ranks(load, layout, engine, config, tmp_path / "updated")
    for (_, _, later), loaded in zip(ranks, again, strict=True):
        assert np.array_equal(loaded["reference_logprobs"], later["reference_logprobs"])
        assert np.array_equal(loaded["prev_logprobs"], later["prev_logprobs"])
    if engine == "dtensor" and precision == "float32":
        # One process reads the same weights.
        saved = saved_tensors(tmp_path / "updated" / "reference", "weight")
        one = load(context(), ParallelConfig(), "dtensor", config, tmp_path / "updated")
        assert len(saved) > 0 and len(one["reference_logprobs"]) == 31


def test_a_worker_without_reference_cannot_update_one(model_dir) -> None:
    config = dataclasses.replace(CONFIG, model_name=model_dir("llama"))
    worker = DTensorPolicyWorker(context(), config=config)
    with pytest.raises(ValueError, match="needs_reference=True"):
        worker.update_reference()


def test_discarded_copies_are_made_again() -> None:
    memory = HostMemory(pinned=False, constant=True)
    weight = torch.randn(8)
    memory.offload([weight])
    with pytest.raises(RuntimeError, match="call onload first"):
        memory.discard_copies()
    memory.onload()
    weight.fill_(3.0)
    memory.discard_copies()
    memory.offload([weight])
    weight.untyped_storage().resize_(0)
    memory.onload()
    assert (weight == 3.0).all()
    assert memory.num_bytes == 32, "the buffer is used again"
