"""The plan of one step whose microbatches are formed already, for example from a stream of rows."""

from __future__ import annotations

import numpy as np

from nemo_like.data.packing.packers import Packing
from nemo_like.data.planning.oversize import FittedRows
from nemo_like.data.planning.plan import BatchPlan, join_steps
from nemo_like.data.planning.plan_step import (
    StepPlan,
    assign_to_ranks,
    largest_first,
    longest_of,
    padded_work,
    row_work,
)
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.integer_math import round_up


def plan_bins(
    bins: Packing,
    lengths: np.ndarray,
    spec: PlanSpec,
    *,
    num_microbatches: int = 0,
    num_truncated: int = 0,
    num_oversize: int = 0,
    num_trained: np.ndarray | None = None,
) -> BatchPlan:
    """Assign given microbatches to the ranks of `spec`, which balances their work.

    `bins` has the rows of each microbatch as indices into `lengths` int64 [B] and `num_trained`
    int64 [B], their tokens with loss; none is empty. Each rank runs at least `num_microbatches`,
    with dummies where there are fewer.
    """
    padded = round_up(lengths, spec.row_multiple)
    if bins.num_bins == 1 and spec.bins_multiple == 1:
        # The most frequent step of an aligned rank, without the time of an assignment.
        step = StepPlan(bins, 1)
    else:
        step = assign_to_ranks(bins, _bin_work(bins, padded, num_trained, spec), spec)
    assigned = step.bins
    if spec.microbatch_order == "largest_first":
        assigned = largest_first(
            assigned, padded, spec.num_ranks, is_padded=spec.layout == "padded"
        )
    step = StepPlan(assigned, step.num_microbatches)
    if step.num_microbatches < num_microbatches:
        step = _with_dummies(step, num_microbatches, spec.num_ranks)
    fitted = FittedRows(
        lengths=lengths,
        padded_lengths=padded,
        is_dropped=np.zeros(len(lengths), dtype=bool),
        num_truncated=num_truncated,
        num_oversize=num_oversize,
        num_trained=num_trained,
    )
    return join_steps(spec, fitted, [step], ())


def _bin_work(
    bins: Packing, padded: np.ndarray, num_trained: np.ndarray | None, spec: PlanSpec
) -> np.ndarray | None:
    """Return the work of each microbatch, float64 [K]; None for `balance="none"`.

    `padded` int64 [B] are the padded row lengths, `num_trained` int64 [B] the tokens with loss.
    """
    if spec.layout == "packed":
        work = row_work(padded, spec, num_trained)
        return None if work is None else bins.loads(work)
    bin_trained = None if num_trained is None else bins.loads(num_trained)
    work, loss_work = padded_work(longest_of(bins, padded), bin_trained, spec)
    return None if work is None else work * np.diff(bins.offsets) + loss_work


def _with_dummies(step: StepPlan, num_microbatches: int, num_ranks: int) -> StepPlan:
    """Add empty microbatches to every rank, up to `num_microbatches`."""
    ids = np.full((num_ranks, num_microbatches), -1)
    given = np.arange(step.bins.num_bins)
    ids[:, : step.num_microbatches] = given.reshape(num_ranks, -1)
    return StepPlan(step.bins.take(ids.ravel()), num_microbatches)
