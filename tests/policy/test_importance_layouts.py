"""Importance correction, and steps without a log-prob pass, in every layout of rows and ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch

from nemo_like.config.loss import (
    CorrectionKind,
    ImportanceCorrectionConfig,
    PolicyGradientLossConfig,
)
from nemo_like.config.schema import ParallelConfig
from nemo_like.data.jagged import Jagged
from nemo_like.distributed import process_groups
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import ClippedPolicyGradientLoss
from nemo_like.policy.worker import PolicyWorker
from tests.policy.dtensor.test_layouts import BASE, DYNAMIC, PACKED, Rank, gradients
from tests.policy.test_gradient_equality import LENGTHS, assert_same_metrics
from tests.policy.tiny import context, random_batch, relative_error, run_ranks

KINDS: tuple[CorrectionKind, ...] = get_args(CorrectionKind)
BATCHING = {
    "packed": PACKED,
    "dynamic": DYNAMIC,
    "padded": dataclasses.replace(BASE, train_micro_batch_size=1, logprob_batch_size=2),
}
LAYOUTS = {
    "dp 2": (2, ParallelConfig()),
    "tp 2": (2, ParallelConfig(tensor=2)),
    "cp 2": (2, ParallelConfig(context=2)),
    "cp 2, dynamic": (2, ParallelConfig(context=2, dynamic_context=True)),
}
TOLERANCE = 1e-5
Found = dict[tuple[str, str, str], tuple[dict[str, np.ndarray], dict[str, float]]]


def make_loss(kind: CorrectionKind) -> ClippedPolicyGradientLoss:
    config = PolicyGradientLossConfig(
        normalization="sequence", importance_correction=ImportanceCorrectionConfig(kind=kind)
    )
    return ClippedPolicyGradientLoss(config=config)


def rollout(worker: PolicyWorker, shard: Any) -> Any:
    """Replace the log-probs of the rows by those of a sampler that agrees on every other row.

    They are derived from the row, so every layout gets the same.
    """
    handle = worker.compute_logprobs(shard, ["prev_logprobs"])
    # Pipeline stages but the last have no log-probs, and compute no loss.
    prev = worker.fetch_logprobs(shard, handle).get("prev_logprobs") or shard["generation_logprobs"]
    rows = []
    for ids, logprobs in zip(shard["input_ids"], prev, strict=True):
        noise = 0.4 * np.sin(ids) * (len(ids) % 2)
        rows.append((np.asarray(logprobs) + noise).astype(np.float32))
    shard["generation_logprobs"] = Jagged.from_rows(rows, np.float32)
    return shard


def without_logprobs() -> BatchedDataDict:
    batch = random_batch(LENGTHS)
    del batch["prev_logprobs"], batch["reference_logprobs"]
    return batch


def program(
    worker_context: WorkerContext,
    parallel: ParallelConfig,
    model: str,
    names: Sequence[tuple[str, CorrectionKind]],
) -> Found:
    """Gradient and metrics with and without a log-prob pass; gradients are on rank 0."""
    process_groups.init_process_group(worker_context)
    torch.set_num_threads(1)
    rank = Rank(worker_context, parallel)
    found: Found = {}
    for batching in dict(names):
        config = dataclasses.replace(BATCHING[batching], model_name=model)
        worker = rank.worker(config)
        shard = rollout(worker, rank.shard(config, without_logprobs()))
        kinds: list[CorrectionKind] = [kind for each, kind in names if each == batching]
        for kind in kinds:
            loss = make_loss(kind).for_num_steps(1)
            found[batching, kind, "no pass"] = gradients(worker, shard, loss)
        shard.update(worker.fetch_logprobs(shard, worker.compute_logprobs(shard)))
        for kind in kinds:
            found[batching, kind, "pass"] = gradients(worker, shard, make_loss(kind))
    process_groups.destroy()
    return found


@pytest.fixture(scope="module")
def alone(model_dir, tmp_path_factory) -> Found:
    meeting = tmp_path_factory.mktemp("alone") / "meeting"
    names = list(itertools.product(BATCHING, KINDS))
    return program(context(0, 1, meeting), ParallelConfig(), model_dir("qwen3"), names)


def assert_equal(found: Any, expected: Any, tolerance: float, name: Any) -> None:
    as_tensors = [
        {key: torch.from_numpy(value) for key, value in gradients.items()}
        for gradients in (found[0], expected[0])
    ]
    assert relative_error(as_tensors[0], as_tensors[1]) < tolerance, name
    assert_same_metrics(found[1], expected[1])


def test_one_optimizer_step_needs_no_log_prob_pass(alone):
    for batching in BATCHING:
        for kind in KINDS:
            name = (batching, kind)
            assert_equal(alone[*name, "no pass"], alone[*name, "pass"], 1e-6, name)


def test_every_kind_has_an_effect(alone):
    def gradient(kind: str) -> np.ndarray:
        return np.concatenate([g.ravel() for g in alone["packed", kind, "no pass"][0].values()])

    for kind in KINDS[1:]:
        assert not np.allclose(gradient(kind), gradient("none"), rtol=1e-3), kind
    share = alone["packed", "sequence_mask", "no pass"][1]["importance/out_of_bounds_share"]
    assert 0 < share < 1, "some rows are inside of the bounds and some outside"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_nothing(layout, alone, model_dir, rank_pool, meeting):
    world_size, parallel = LAYOUTS[layout]
    # Row sums are what a layout can change; the other kinds are elementwise.
    names: list[tuple[str, CorrectionKind]] = [
        ("packed", "sequence_mask"),
        ("packed", "bypass"),
        ("dynamic", "sequence_truncate"),
    ]
    model = model_dir("qwen3")
    ranks = run_ranks(rank_pool, program, world_size, meeting, parallel, model, names)
    for name, (gradient, metrics) in ranks[0].items():
        # Every way of batching has the gradient of the first.
        expected = alone["packed", *name[1:]]
        assert_equal((gradient, metrics), expected, TOLERANCE, (layout, name))
        for other in ranks[1:]:
            assert_same_metrics(other[name][1], expected[1])
