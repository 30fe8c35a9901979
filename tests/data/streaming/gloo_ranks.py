"""Runs aligned planners in the processes of a gloo group. Imported by the started processes."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.streaming.alignment import (
    AlignedPlanner,
    AlignmentError,
    ProcessGroupCoordinator,
)
from nemo_like.data.streaming.spec import StreamSpec


class Outcome(NamedTuple):
    """What one rank had in one case."""

    rows: list[tuple[int, ...]]
    """Rows of each step."""
    num_microbatches: list[int]
    num_trained: list[int]
    num_dummies: list[int]
    num_dropped: int


GlooCase = tuple[StreamSpec, bool, list[list[int]]]
"""Settings, `join` and the lengths of the rows of every rank."""


def run_rank(
    rank: int, num_ranks: int, meeting: Path, cases: list[GlooCase]
) -> tuple[list[Outcome], list[str]]:
    """Run every case; return the outcomes of this rank, and messages of expected errors."""
    warnings.simplefilter("ignore")
    messages = [message_of_coordinator(None)]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    try:
        outcomes = []
        for spec, join, shards in cases:
            planner = AlignedPlanner(spec, ProcessGroupCoordinator(), join=join)
            outcomes.append(run_shard(planner, shards[rank]))
        messages.append(message_of_failure(rank))
        # A group without rank 0, which every process creates.
        others: Any = dist.new_group(list(range(1, num_ranks)))
        if rank == 0:
            messages.append(message_of_coordinator(others))
        else:
            coordinator = ProcessGroupCoordinator(others)
            messages.append(str(coordinator.all_gather([rank, 7]).tolist()))
        return outcomes, messages
    finally:
        dist.destroy_process_group()


def run_shard(planner: AlignedPlanner, lengths: list[int]) -> Outcome:
    outcome = Outcome([], [], [], [], 0)
    read = 0
    while True:
        while planner.needs_rows:
            if read == len(lengths):
                planner.close()
                continue
            planner.push(read, lengths[read], lengths[read] // 2)
            read += 1
        step = planner.next_step()
        if step is None:
            return outcome._replace(num_dropped=planner.counts.num_dropped)
        outcome.rows.append(step.own.rows)
        outcome.num_microbatches.append(step.own.plan.num_microbatches)
        outcome.num_trained.append(step.own.num_trained)
        outcome.num_dummies.append(step.num_dummies)


def message_of_coordinator(group: dist.ProcessGroup | None) -> str:
    try:
        ProcessGroupCoordinator(group)
    except ValueError as error:
        return str(error)
    return "no error"


def message_of_failure(rank: int) -> str:
    """Rank 1 fails in place of its first step."""
    planner = AlignedPlanner(StreamSpec(plan=PlanSpec(max_tokens=8)), ProcessGroupCoordinator())
    planner.push(0, 3)
    planner.close()
    if rank == 1:
        planner.fail()
    try:
        planner.next_step()
    except AlignmentError as error:
        # After the error no rank waits for this one.
        planner.fail()
        return str(error)
    return "no error"
