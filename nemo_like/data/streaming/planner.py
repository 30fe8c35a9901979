"""The streaming planner: lengths of rows in, one `BatchPlan` per optimizer step out.

It needs the lengths of a bounded window of rows only, so it works where lengths are known only
after preprocessing. Every row is in exactly one step, or counted by the policy that left it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from nemo_like.data.packing.packers import Packing, prefix_sums
from nemo_like.data.planning.given_bins import plan_bins
from nemo_like.data.planning.plan import BatchPlan
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.streaming.former import Bin, MicrobatchFormer, StreamCounts, split_bins
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.integer_math import ceil_div


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """One optimizer step of a stream."""

    step: int
    """Number of steps before it."""
    rows: tuple[int, ...]
    """Ids of its rows. Row i of `plan` is `rows[i]`."""
    plan: BatchPlan
    num_trained: int
    """Tokens with loss over all ranks: the denominator of a token-mean loss."""
    num_deferred: int
    """Rows that wait for a later step."""
    max_wait: int
    """Maximum number of steps that a row of this step waited."""
    num_dropped: int
    """Rows dropped since the previous step."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the plan and of the window."""
        return self.plan.metrics() | self.window_metrics()

    def window_metrics(self) -> dict[str, float]:
        """Return the metrics of the window from which the rows were chosen."""
        return {
            "packing/num_rows": float(len(self.rows)),
            "packing/num_deferred": float(self.num_deferred),
            "packing/num_dropped": float(self.num_dropped),
            "packing/max_wait_steps": float(self.max_wait),
        }


class StreamingPlanner:
    """Plans the steps of all ranks from one stream of rows.

    Example: packed microbatches of 8 tokens, one per step, from a window of 2 rows. After
    `push(0, 5)`, `next_step()` is None because the window is not full; after `push(1, 3)` it is a
    step with the rows 0 and 1.
    """

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self._former = MicrobatchFormer(spec, spec.num_bins)

    def copy(self) -> StreamingPlanner:
        """Return a planner in the same state, which changes independently."""
        planner = StreamingPlanner(self.spec)
        planner._former = self._former.copy()
        return planner

    @property
    def num_steps(self) -> int:
        """Number of steps returned so far."""
        return self._former.num_steps

    @property
    def counts(self) -> StreamCounts:
        """Rows since the start of the stream."""
        return self._former.counts

    @property
    def num_waiting(self) -> int:
        """Rows in the window and in the incomplete step."""
        return len(self._former.window) + sum(map(len, self._former.bins))

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ids of the rows in the incomplete step and in the window."""
        return self._former.waiting

    @property
    def in_window(self) -> tuple[int, ...]:
        """Ids of the rows in the window, the oldest first."""
        return self._former.in_window

    def push(self, row: int, length: int, num_trained: int | None = None, extra: int = 0) -> bool:
        """Add a row; see `MicrobatchFormer.push`."""
        return self._former.push(row, length, num_trained, extra)

    def form_now(self) -> None:
        """Form one microbatch of the rows in the window without waiting for more.

        For a source whose next row may not join the window yet.
        """
        self._former.form_one()

    def close(self) -> None:
        """Mark the end of the stream; `next_step` then returns the remaining rows."""
        self._former.close()

    def reopen(self) -> None:
        """Continue after the end, for example with the next epoch."""
        self._former.reopen()

    def next_step(self) -> PlannedStep | None:
        """Return the next step; None if more rows are needed or the stream ended."""
        former = self._former
        if former.form():
            return self._planned(former.take_step())
        if not former.is_closed or not former.bins:
            return None
        if self.spec.tail == "drop":
            former.drop_rest()
            return None
        bins = former.take_step()
        # Split microbatches are better than dummies: every rank then has rows.
        multiple = self.spec.plan.bins_multiple
        bins = split_bins(bins, ceil_div(len(bins), multiple) * multiple, self.spec.plan.layout)
        return self._planned(bins)

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values with which another planner continues, without replaying rows."""
        return self._former.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, also with another number of ranks.

        The ids of rows must mean the same rows. Raises ValueError for a state of another version.
        """
        self._former.load_state_dict(state)

    def _planned(self, bins: list[Bin]) -> PlannedStep:
        return planned_step(bins, self.spec.step_spec, self._former)


def planned_step(
    bins: list[Bin],
    spec: PlanSpec,
    former: MicrobatchFormer,
    *,
    num_microbatches: int = 0,
    num_trained: int | None = None,
) -> PlannedStep:
    """Return the step of `bins`, which `former` has just emitted.

    Each rank runs at least `num_microbatches`. `num_trained` are the tokens with loss over all
    ranks; None if `bins` are those of all ranks.
    """
    rows = list(chain.from_iterable(bins))
    sizes = np.array([len(members) for members in bins], dtype=np.int64)
    lengths = np.array([row.length for row in rows], dtype=np.int64)
    trained = np.array([row.num_trained for row in rows], dtype=np.int64)
    plan = plan_bins(
        Packing(np.arange(len(rows)), prefix_sums(sizes)),
        lengths,
        spec,
        num_microbatches=num_microbatches,
        num_truncated=former.step_counts.num_truncated,
        num_oversize=former.step_counts.num_oversize,
        num_trained=trained,
    )
    if num_trained is None:
        num_trained = int(trained.sum())
    step = former.num_steps - 1
    return PlannedStep(
        step=step,
        rows=tuple(row.row for row in rows),
        plan=plan,
        num_trained=num_trained,
        num_deferred=len(former.window),
        max_wait=step - min((row.step for row in rows), default=step),
        num_dropped=former.step_counts.num_dropped,
    )
