"""The plan of all steps of a stream whose lengths are known, for predictions and comparisons."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nemo_like.data.packing.packers import Packing
from nemo_like.data.planning.oversize import FittedRows
from nemo_like.data.planning.plan import BatchPlan, join_steps
from nemo_like.data.planning.plan_step import StepPlan
from nemo_like.data.streaming.planner import PlannedStep, StreamingPlanner
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.integer_math import round_up


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
        steps.append(StepPlan(Packing(rows, plan.offsets), plan.num_microbatches))
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
