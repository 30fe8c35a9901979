"""The gradient of distillation is the same in every layout of rows and ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nemo_like.config.schema import ParallelConfig
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses.likelihood import DistillationLoss
from nemo_like.policy.dtensor.engine import DTensorEngine
from nemo_like.policy.worker import PolicyWorker
from tests.exhaustive import usually
from tests.policy.distillation import (
    SETTINGS,
    SFT_WEIGHT,
    gradients_by_definition,
    save_teachers,
    taught_batch,
)
from tests.policy.dtensor.test_layouts import DYNAMIC, PACKED, SHARED, Rank, gradients
from tests.policy.layout_losses import (
    Expected,
    Found,
    assert_losses,
    batching_of_losses,
    found_on_ranks,
)
from tests.policy.tiny import context

BATCHING = {"packed": PACKED, "dynamic": DYNAMIC, "shared": SHARED}
LAYOUTS = {
    "one rank": (1, ParallelConfig()),
    "dp 2": (2, ParallelConfig()),
    "tp 2": (2, ParallelConfig(tensor=2)),
    "cp 2": (2, ParallelConfig(context=2)),
    "cp 2, dynamic": (2, ParallelConfig(context=2, dynamic_context=True)),
    "tp 2 x cp 2, sequence": (4, ParallelConfig(tensor=2, context=2, sequence=True)),
}
LOSS = DistillationLoss(sft_weight=SFT_WEIGHT)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return save_teachers(tmp_path_factory.mktemp("teachers"))


def program(
    worker_context: WorkerContext,
    parallel: ParallelConfig,
    model: str,
    teachers: list[str],
    losses: dict[str, list[str]],
) -> Found:
    """Gradient and metrics of the divergences of each way of batching."""
    process_groups.init_process_group(worker_context)
    torch.set_num_threads(1)
    rank = Rank(worker_context, parallel)
    config = dataclasses.replace(PACKED, model_name=model)
    groups = rank.groups(config)
    engines = []
    for name in (None, *teachers):
        engines.append(
            DTensorEngine(
                config if name is None else config.frozen(name), groups, trainable=name is None
            )
        )
    worker = PolicyWorker(config, engines[0], None, engines[1:])
    found: Found = {}
    for batching, names in losses.items():
        shard = rank.shard(BATCHING[batching], taught_batch())
        for name in names:
            handle = worker.compute_targets(shard, SETTINGS[name])
            found[batching, name] = gradients(worker, shard, LOSS, handle)
    process_groups.destroy()
    return found


@pytest.fixture(scope="module")
def expected(model_dir: Callable[[str], str], teachers: list[str]) -> Expected:
    """Gradient and loss of each divergence by definition."""
    return {
        name: gradients_by_definition(model_dir("qwen3"), teachers, taught_batch(), settings)
        for name, settings in SETTINGS.items()
    }


@pytest.mark.parametrize("layout", usually(LAYOUTS, "tp 2", "cp 2"))
def test_a_layout_does_not_change_the_gradient(
    layout: str, expected, model_dir, teachers: list[str], rank_pool, meeting: Path
):
    world_size, parallel = LAYOUTS[layout]
    losses = batching_of_losses(BATCHING, SETTINGS, list(LAYOUTS).index(layout))
    arguments = (parallel, model_dir("qwen3"), teachers, losses)
    results = found_on_ranks(rank_pool, program, world_size, meeting, *arguments)
    assert_losses(results, expected, layout, equal_metric="policy/divergence", rel=1e-6)


def test_targets_of_another_batch_are_refused(model_dir, teachers: list[str], meeting: Path):
    rank = Rank(context(), ParallelConfig())
    config = dataclasses.replace(PACKED, model_name=model_dir("qwen3"))
    student = rank.engine(config)
    teacher = rank.engine(config.frozen(teachers[0]), trainable=False)
    worker = PolicyWorker(config, student, None, [teacher])
    shard = rank.shard(PACKED, taught_batch())
    with pytest.raises(ValueError, match="no targets of a teacher"):
        worker.train(shard, None, LOSS)
    handle = worker.compute_targets(shard, SETTINGS["top-k"])
    other = rank.shard(DYNAMIC, taught_batch())
    with pytest.raises(ValueError, match="call compute_targets for this batch"):
        worker.train(other, None, LOSS, handle)
    worker.offload()
    with pytest.raises(ValueError, match="released when the model was offloaded"):
        worker.train(shard, None, LOSS, handle)
    with pytest.raises(ValueError, match="no teacher"):
        PolicyWorker(config, student, None).compute_targets(shard, SETTINGS["top-k"])
