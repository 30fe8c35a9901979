"""The gradient of every policy-gradient loss is the same in every layout of rows and ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nemo_like.config.schema import ParallelConfig
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from tests.exhaustive import usually
from tests.policy.dtensor.test_layouts import BASE, DYNAMIC, PACKED, SHARED, Rank, gradients
from tests.policy.layout_losses import (
    Expected,
    Found,
    assert_losses,
    batching_of_losses,
    found_on_ranks,
)
from tests.policy.members import LOSSES, MEMBERS, gradients_by_definition
from tests.policy.tiny import grouped_batch

BATCHING = {
    "packed": PACKED,
    "dynamic": DYNAMIC,
    "one row at a time": dataclasses.replace(BASE, train_micro_batch_size=1),
    "shared prefixes": SHARED,
}
LAYOUTS = {
    "one rank": (1, ParallelConfig()),
    "dp 2": (2, ParallelConfig()),
    "tp 2": (2, ParallelConfig(tensor=2)),
    "cp 2": (2, ParallelConfig(context=2)),
    "cp 2, dynamic": (2, ParallelConfig(context=2, dynamic_context=True)),
    "tp 2 x cp 2": (4, ParallelConfig(tensor=2, context=2)),
}


def program(
    worker_context: WorkerContext,
    parallel: ParallelConfig,
    model: str,
    losses: dict[str, list[str]],
) -> Found:
    """Gradient and metrics of the losses of each way of batching; gradients are on rank 0."""
    process_groups.init_process_group(worker_context)
    torch.set_num_threads(1)
    rank = Rank(worker_context, parallel)
    found: Found = {}
    for batching, names in losses.items():
        config = dataclasses.replace(BATCHING[batching], model_name=model)
        worker = rank.worker(config)
        shard = rank.shard(config, grouped_batch())
        for name in names:
            found[batching, name] = gradients(worker, shard, LOSSES[name])
    process_groups.destroy()
    return found


@pytest.fixture(scope="module")
def expected(model_dir) -> Expected:
    """Gradient and loss of each member by definition."""
    batch = grouped_batch()
    return {
        name: gradients_by_definition(model_dir("qwen3"), batch, config)
        for name, config in MEMBERS.items()
    }


@pytest.mark.parametrize("layout", usually(LAYOUTS, "tp 2", "cp 2"))
def test_a_layout_does_not_change_the_gradient_of_a_member(
    layout, expected, model_dir, rank_pool, meeting
):
    world_size, parallel = LAYOUTS[layout]
    losses = batching_of_losses(BATCHING, LOSSES, list(LAYOUTS).index(layout))
    arguments = (parallel, model_dir("qwen3"), losses)
    results = found_on_ranks(rank_pool, program, world_size, meeting, *arguments)
    assert_losses(results, expected, layout, equal_metric="policy/loss", loss_abs=1e-6)
