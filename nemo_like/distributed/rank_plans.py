"""Views of a data-parallel rank's plan: single global batches, and lists in NeMo RL's format.

`unshard` gathers the results of the ranks in the row order of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from nemo_like.data.columns import Column, concat_rows, take_rows
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import BatchPlan, Microbatch, PlanSpec, RankPlan


def microbatch_bounds(plan: RankPlan) -> list[list[list[int]]]:
    """Return the rows [start, end) of each microbatch, per global batch.

    Rows are counted within the global batch.
    """
    bounds = []
    for step in range(plan.num_steps):
        counts = [len(microbatch.rows) for microbatch in plan.step(step)]
        bounds.append(_bounds(counts))
    return bounds


def microbatch_lengths(plan: RankPlan) -> list[list[int]]:
    """Return the length of each microbatch, per global batch: its tokens, or its padded length."""
    lengths = []
    for step in range(plan.num_steps):
        lengths.append([_length(microbatch, plan.spec) for microbatch in plan.step(step)])
    return lengths


def num_rows_per_step(plan: RankPlan) -> list[int]:
    """Return the number of this rank's rows of each global batch."""
    counts = []
    for step in range(plan.num_steps):
        num_rows = sum(len(microbatch.rows) for microbatch in plan.step(step))
        counts.append(num_rows)
    return counts


def rows_of_step(plan: RankPlan, step: int) -> tuple[int, int]:
    """Return the rows [start, end) of the global batch `step`. Raises IndexError."""
    if not 0 <= step < plan.num_steps:
        raise IndexError(f"global batch {step} of {plan.num_steps}")
    # A shard has its rows in the order of the plan, so they are consecutive per step.
    counts = [len(microbatch.rows) for microbatch in plan.microbatches]
    offsets = [0, *np.cumsum(counts).tolist()]
    first_microbatch = plan.step_offsets[step]
    end_microbatch = plan.step_offsets[step + 1]
    return offsets[first_microbatch], offsets[end_microbatch]


def plan_of_step(plan: RankPlan, step: int, first_row: int) -> RankPlan:
    """Return the plan of one global batch for rows that start at `first_row`."""
    microbatches = []
    for microbatch in plan.step(step):
        rows = tuple(row - first_row for row in microbatch.rows)
        microbatches.append(replace(microbatch, rows=rows))
    return replace(plan, microbatches=tuple(microbatches), step_offsets=(0, len(microbatches)))


def localize_plan(logprob_plan: BatchPlan, plan: BatchPlan, dp_rank: int) -> RankPlan:
    """Return `logprob_plan` of one rank, with row indices into the shard of `plan`.

    Raises ValueError if the two plans have different rows on that rank.
    """
    # The order within a rank may differ, as the microbatches do.
    logprob_rows = logprob_plan.rows_of_rank(dp_rank)
    shard_rows = plan.rows_of_rank(dp_rank)
    if not np.array_equal(np.sort(logprob_rows), np.sort(shard_rows)):
        raise ValueError(
            f"the log-prob plan has other rows on dp rank {dp_rank} than the plan; make it with"
            " plan.with_budget"
        )
    return logprob_plan.rank_plan(dp_rank, shard_rows)


def _bounds(counts: Sequence[int]) -> list[list[int]]:
    """Return [start, end) of consecutive ranges: [2, 0, 1] gives [[0, 2], [2, 2], [2, 3]]."""
    bounds = []
    start = 0
    for count in counts:
        bounds.append([start, start + count])
        start += count
    return bounds


def _length(microbatch: Microbatch, spec: PlanSpec) -> int:
    """Return the tokens of a packed microbatch, or the padded row length of a padded one."""
    if spec.layout == "packed":
        return microbatch.num_tokens
    # A dummy microbatch has no rows.
    return max(microbatch.padded_lengths, default=microbatch.num_tokens)


def unshard(parts: Sequence[Column], plan: BatchPlan) -> Column:
    """Concatenate one column of every rank and restore the row order of the batch.

    `parts[dp_rank]` has the rows in the order of `plan.rows_of_rank(dp_rank)`. A row that the plan
    assigns to no rank (deferred or dropped) is empty in a Jagged, 0 in an array or a tensor, None
    in a list. Raises ValueError if the ranks returned another number of rows than they got.
    """
    # A wrong number of rows would silently assign values to other rows.
    rows_of_rank = [plan.rows_of_rank(dp_rank) for dp_rank in range(plan.spec.num_ranks)]
    expected = [len(rows) for rows in rows_of_rank]
    returned = [len(part) for part in parts]
    if returned != expected:
        raise ValueError(f"the ranks returned {returned} rows, the plan gave them {expected}")
    rows = np.concatenate(rows_of_rank)
    column = concat_rows("of the ranks", parts)
    num_missing = plan.num_rows - len(rows)
    if num_missing:
        blank_rows = _blank_rows(column, num_missing)
        column = concat_rows("of the ranks", [column, blank_rows])
        missing_rows = np.setdiff1d(np.arange(plan.num_rows), rows)
        rows = np.concatenate([rows, missing_rows])
    # `rows` is a permutation now, and argsort gives its inverse.
    return take_rows(column, np.argsort(rows))


def _blank_rows(column: Column, count: int) -> Column:
    """Return `count` rows without values, of the type and the dims of `column`."""
    if isinstance(column, list):
        return [None] * count
    if isinstance(column, Jagged):
        offsets = np.zeros(count + 1, dtype=np.int64)
        return Jagged(column.values[:0], offsets)
    if isinstance(column, Tensor):
        return column.new_zeros((count, *column.shape[1:]))
    return np.zeros((count, *column.shape[1:]), dtype=column.dtype)
