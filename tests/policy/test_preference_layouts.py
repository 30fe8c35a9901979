"""The gradient of a preference loss is the same in every layout of rows and ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nemo_like.algorithms.preferences.loss import PreferenceLoss
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
from tests.policy.preferences import LOSSES, PAIR_LENGTHS, gradients_by_definition, pair_batch
from tests.policy.tiny import context

PADDED = dataclasses.replace(BASE, train_micro_batch_size=2)
BATCHING = {
    "packed": PACKED,
    "dynamic": DYNAMIC,
    "one pair at a time": PADDED,
    "shared prefixes": SHARED,
}
LAYOUTS = {
    "one rank": (1, ParallelConfig()),
    "dp 2": (2, ParallelConfig()),
    "tp 2": (2, ParallelConfig(tensor=2)),
    "cp 2": (2, ParallelConfig(context=2)),
    "cp 2, dynamic": (2, ParallelConfig(context=2, dynamic_context=True)),
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
        config = dataclasses.replace(
            BATCHING[batching], model_name=model, train_global_batch_size=len(PAIR_LENGTHS)
        )
        worker = rank.worker(config)
        shard = rank.shard(config, pair_batch())
        for name in names:
            loss = PreferenceLoss(config=LOSSES[name])
            found[batching, name] = gradients(worker, shard, loss)
    process_groups.destroy()
    return found


@pytest.fixture(scope="module")
def expected(model_dir) -> Expected:
    """Gradient and value of each loss by definition."""
    return {
        name: gradients_by_definition(model_dir("qwen3"), pair_batch(), config)
        for name, config in LOSSES.items()
    }


@pytest.mark.parametrize("layout", usually(LAYOUTS, "one rank", "dp 2", "tp 2", "cp 2"))
def test_a_layout_does_not_change_the_gradient_of_a_preference(
    layout, expected, model_dir, rank_pool, meeting
):
    world_size, parallel = LAYOUTS[layout]
    losses = batching_of_losses(BATCHING, LOSSES, list(LAYOUTS).index(layout))
    arguments = (parallel, model_dir("qwen3"), losses)
    results = found_on_ranks(rank_pool, program, world_size, meeting, *arguments)
    assert_losses(results, expected, layout, equal_metric="rewards/margins")


def test_a_pair_in_two_microbatches_is_an_error(model_dir, meeting):
    """A plan without groups may separate the rows of a pair."""
    process_groups.init_process_group(context(0, 1, meeting))
    rank = Rank(context(0, 1, meeting), ParallelConfig())
    config = dataclasses.replace(PADDED, model_name=model_dir("qwen3"), train_micro_batch_size=1)
    batch = pair_batch()
    pair = batch.pop("pair")
    shard = rank.shard(config, batch)
    shard["pair"] = pair
    with pytest.raises(ValueError, match="without the other"):
        rank.worker(config).train(shard, None, PreferenceLoss(config=LOSSES["dpo"]))
    process_groups.destroy()
