"""Every process group of both engines has the configured collective timeout."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d as c10d

from nemo_like.config.parallel import build_layout
from nemo_like.config.schema import ParallelConfig
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.policy.dtensor.parallel import Groups
from tests.policy.megatron.ranks import joined
from tests.policy.tiny import run_ranks

TIMEOUT_S = 47.5


def timeouts() -> list[timedelta]:
    """Of all groups that this process belongs to."""
    found = []
    for group in c10d._world.pg_map:
        backend: Any = group._get_backend(torch.device("cpu"))
        found.append(backend.options._timeout)
    return found


def timeouts_of_engine(context: WorkerContext, engine: str) -> list[timedelta]:
    context = dataclasses.replace(context, collective_timeout_s=TIMEOUT_S)
    parallel = ParallelConfig(tensor=2, context=2)
    if engine == "megatron":
        with joined(context, parallel):
            return timeouts()
    device = process_groups.init_process_group(context)
    try:
        layout = build_layout(parallel, context.world_size)
        Groups.join(layout, context.rank, device, mixed_precision=False)
        return timeouts()
    finally:
        process_groups.destroy()


@pytest.mark.parametrize("engine", ["dtensor", "megatron"])
def test_all_groups_have_the_setting(
    rank_pool: ProcessPoolExecutor, meeting: Path, engine: str
) -> None:
    for found in run_ranks(rank_pool, timeouts_of_engine, 4, meeting, engine):
        assert len(found) > 2, "the default group, and those of tp and cp"
        assert set(found) == {timedelta(seconds=TIMEOUT_S)}
