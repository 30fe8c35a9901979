"""Every process group of both engines has the configured collective timeout, and ranks that could
not connect try again.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from nemo_like.config.parallel import build_layout
from nemo_like.config.schema import ParallelConfig
from nemo_like.distributed import process_groups
from nemo_like.distributed.local_group import local_context
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


def sum_after_failures(context: WorkerContext, rank: int, num_failures: int) -> tuple[float, int]:
    """The sum of the ranks plus 1, and the attempts; the first ones of `rank` fail at their end."""
    create = dist.init_process_group
    attempts = []

    def create_or_fail(*args: Any, **kwargs: Any) -> None:
        attempts.append(1)
        create(*args, **kwargs)
        if context.rank == rank and len(attempts) <= num_failures:
            dist.destroy_process_group()
            # As a group that was not created.
            c10d._world.group_count = 1
            raise RuntimeError("gloo connectFullMesh failed with Connection closed by peer")

    dist.init_process_group = create_or_fail
    try:
        process_groups.init_process_group(context)
        total = torch.tensor(context.rank + 1.0)
        dist.all_reduce(total)
        return total.item(), len(attempts)
    finally:
        dist.init_process_group = create
        process_groups.destroy()


@pytest.mark.parametrize(("rank", "num_failures"), [(1, 1), (0, 2)])
def test_all_ranks_try_again_if_one_could_not_connect(
    rank_pool: ProcessPoolExecutor, meeting: Path, rank: int, num_failures: int
) -> None:
    found = run_ranks(rank_pool, sum_after_failures, 2, meeting, rank, num_failures)
    assert found == [(3.0, num_failures + 1)] * 2


def test_another_error_of_the_group_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def fail(*args: Any, **kwargs: Any) -> None:
        attempts.append(1)
        raise RuntimeError("another error")

    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(RuntimeError, match="another error"):
        process_groups.init_process_group(local_context(num_threads=1))
    assert len(attempts) == 1
