"""The short last batch of an epoch: the same step whatever forms the microbatches, also with fewer
rows than replicas.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.config.schema import (
    DynamicBatchingConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from nemo_like.data.planning.plan import plan_batch
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import NllLoss
from nemo_like.metrics import metric_values
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.dtensor.engine import DTensorEngine
from nemo_like.policy.dtensor.parallel import Groups
from nemo_like.policy.worker import PolicyWorker
from tests.policy.tiny import compute_and_fetch, context, random_batch, run_ranks

PLAIN = PolicyConfig(
    model_name="",
    train_global_batch_size=8,
    logprob_chunk_size=16,
    optimizer=OptimizerConfig(lr=1e-3),
)
MODES = {
    "plain": PLAIN,
    "packed": dataclasses.replace(
        PLAIN, sequence_packing=SequencePackingConfig(enabled=True, train_mb_tokens=48)
    ),
    "dynamic": dataclasses.replace(
        PLAIN, dynamic_batching=DynamicBatchingConfig(enabled=True, train_mb_tokens=48)
    ),
}
BATCHES = ([7], [9, 14, 6, 23, 3, 17, 5, 12, 11])
"""Rows of each batch: fewer than the ranks, and an optimizer step of 8 rows and one of a single
row.
"""


def program(worker_context: WorkerContext, model: str) -> dict[str, Any]:
    """Metrics of every optimizer step, and the outputs this rank has, in each mode."""
    parallel_layout = ParallelLayout.from_world_size(worker_context.world_size)
    if worker_context.world_size > 1:
        process_groups.init_process_group(worker_context)
    found: dict[str, Any] = {}
    try:
        for name, mode in MODES.items():
            config = dataclasses.replace(mode, model_name=model)
            groups = Groups.join(
                parallel_layout, worker_context.rank, torch.device("cpu"), mixed_precision=False
            )
            engine = DTensorEngine(config, groups, trainable=True)
            worker = PolicyWorker(config, engine, None)
            spec = plan_spec(config, purpose="train", parallel_layout=parallel_layout, model=None)
            steps, outputs = [], []
            for seed, lengths in enumerate(BATCHES):
                batch = random_batch(lengths, seed=seed)
                shard = batch.shard(plan_batch(batch["length"], spec))[
                    parallel_layout.dp_rank(worker_context.rank)
                ]
                logprobs = compute_and_fetch(worker, shard)["prev_logprobs"]
                outputs += [
                    (ids.tobytes(), np.asarray(row))
                    for ids, row in zip(shard["input_ids"], logprobs, strict=True)
                ]
                steps += [
                    metric_values(metrics) for metrics in worker.train(shard, None, NllLoss())
                ]
            found[name] = (steps, outputs)
        return found
    finally:
        if worker_context.world_size > 1:
            process_groups.destroy()


def test_a_short_batch_is_the_same_step_on_two_ranks_as_on_one(model_dir, rank_pool, meeting):
    model = model_dir("qwen3_tied")
    expected_steps, expected_scores = program(context(), model)["plain"]
    assert len(expected_steps) == 3, "the second batch is two optimizer steps"
    ranks = run_ranks(rank_pool, program, 2, meeting, model)
    for name in MODES:
        outputs = dict(score for rank in ranks for score in rank[name][1])
        assert outputs.keys() == dict(expected_scores).keys()
        for ids, row in expected_scores:
            np.testing.assert_allclose(outputs[ids], row, rtol=1e-5, atol=1e-5)
        for rank in ranks:
            assert len(rank[name][0]) == len(expected_steps)
            for step, expected in zip(rank[name][0], expected_steps, strict=True):
                for metric in (
                    "policy/loss",
                    "policy/grad_norm",
                    "policy/num_rows",
                    "policy/num_tokens",
                ):
                    assert step[metric] == pytest.approx(expected[metric], rel=1e-5), (name, metric)
