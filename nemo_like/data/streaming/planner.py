"""The streaming planner: lengths of rows in, one `BatchPlan` per optimizer step out.

It needs the lengths of a bounded window of rows only, so it works where lengths are known only
after preprocessing. Every row is in exactly one step, or counted by the policy that left it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from nemo_like.data.packing.packers import Packing, prefix_sums
from nemo_like.data.planning.oversize import FittedRows
from nemo_like.data.planning.plan import BatchPlan, join_steps, plan_bins
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.streaming.former import Bin, MicrobatchFormer, split_bins
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.integer_math import round_up


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


class StreamingPlanner(MicrobatchFormer):
    """Plans the steps of all ranks from one stream of rows.

    Example: packed microbatches of 8 tokens, one per step, from a window of 2 rows. After
    `push(0, 5)`, `next_step()` is None because the window is not full; after `push(1, 3)` it is a
    step with the rows 0 and 1.

    A state can also be continued with another number of ranks; the ids of rows must mean the same
    rows.
    """

    def __init__(self, spec: StreamSpec) -> None:
        super().__init__(spec, spec.num_bins)

    def next_step(self) -> PlannedStep | None:
        """Return the next step; None if more rows are needed or the stream ended."""
        if self.form():
            bins = self.take_step()
        elif not self.is_closed or not self.bins:
            return None
        elif self.spec.tail == "drop":
            self.drop_rest()
            return None
        else:
            # Split microbatches are better than dummies: every rank then has rows.
            bins = self.take_step()
            num_bins = round_up(len(bins), self.spec.plan.bins_multiple)
            bins = split_bins(bins, num_bins, self.spec.plan.layout)
        return planned_step(bins, self.spec.step_spec, self)


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
    ranks; None if `bins` has the rows of all ranks.
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


def stream_steps(
    lengths: np.ndarray, planner: StreamingPlanner, num_trained: np.ndarray | None = None
) -> Iterator[PlannedStep]:
    """Push rows with ids 0 to B - 1, then close; yield every step.

    `lengths` and `num_trained`, their tokens with loss, are int64 [B].
    """
    for row, length in enumerate(lengths.tolist()):
        planner.push(row, length, None if num_trained is None else int(num_trained[row]))
        while (step := planner.next_step()) is not None:
            yield step
    planner.close()
    while (step := planner.next_step()) is not None:
        yield step


def plan_stream(
    lengths: np.ndarray, spec: StreamSpec, num_trained: np.ndarray | None = None
) -> BatchPlan:
    """Plan rows of `lengths` int64 [B] in this order as one epoch of a stream.

    `num_trained` int64 [B] are their tokens with loss; None: all but the first of a row.
    The plan has one optimizer step for each step of the stream. Rows that the oversize policy or
    `tail="drop"` leaves out are `dropped`. Raises ValueError for a row above the token limit under
    `oversize="error"`, and if no step can be formed.
    """
    planner = StreamingPlanner(spec)
    is_dropped = np.ones(len(lengths), dtype=bool)
    kept_lengths = lengths.copy()
    kept_trained = lengths.copy()
    steps = []
    for step in stream_steps(lengths, planner, num_trained):
        plan = step.plan
        rows = np.asarray(step.rows, dtype=np.int64)[plan.rows]
        is_dropped[rows] = False
        kept_lengths[rows] = plan.lengths
        kept_trained[rows] = plan.num_trained
        steps.append(Packing(rows, plan.offsets))
    if not steps:
        raise ValueError(
            f"the {len(lengths)} rows do not fill one step of {spec.num_bins} microbatches, and"
            f" tail is {spec.tail}; give more rows, or set tail to emit"
        )
    counts = planner.counts
    fitted = FittedRows(
        lengths=kept_lengths,
        padded_lengths=round_up(kept_lengths, spec.plan.row_multiple),
        is_dropped=is_dropped,
        num_truncated=counts.num_truncated,
        num_oversize=counts.num_oversize,
        num_trained=kept_trained,
    )
    dropped = tuple(np.flatnonzero(is_dropped).tolist())
    return join_steps(spec.step_spec, fitted, steps, dropped)
