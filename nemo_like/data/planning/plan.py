"""The batch plan: which rows form which microbatch on which data-parallel rank.

A plan is computed from the lengths of rows and, if they are known, their numbers of tokens with
loss, on one machine or identically on every rank. It has no row data, only numbers. Packed tensors,
padded tensors, shards and metrics are derived from it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from nemo_like.data.packing.metrics import bin_stats
from nemo_like.data.packing.packers import Packing, checked_lengths
from nemo_like.data.planning.context_step import (
    ContextStep,
    form_context_step,
    join_context_ranks,
    join_context_steps,
    place_groups,
    sums_of_ranks,
    tokens_of_groups,
)
from nemo_like.data.planning.oversize import (
    FittedRows,
    OversizeWarning,
    checked_groups,
    fit_rows,
    step_of_rows,
)
from nemo_like.data.planning.plan_step import (
    form_rank,
    form_step,
    join_ranks,
    longest_of,
    rank_major_bins,
)
from nemo_like.data.planning.plan_text import describe
from nemo_like.data.planning.prefixes import MIN_SHARED_WORK, SharedPrefixes, SharedPrefixMode
from nemo_like.data.planning.shared_step import form_shared_rank, form_shared_step
from nemo_like.data.planning.spec import Microbatch, PlanSpec, RankPlan
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.integer_math import ceil_div, round_up
from nemo_like.models.vision import unshared_images

_ARRAYS = ("rows", "lengths", "padded_lengths", "offsets")
_OPTIONAL_ARRAYS = ("num_trained", "shared", "image_tokens", "context_first", "context_size")

__all__ = ["BatchPlan", "Microbatch", "PlanSpec", "RankPlan", "plan_batch"]


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """Assignment of `num_rows` rows to microbatches and ranks. A value: equal by content.

    Invariants:

    1. Every row is exactly once in the microbatches, in `deferred` or in `dropped`; dropped only by
       `oversize="drop"`, and counted.
    2. No microbatch has more than `spec.max_tokens` positions (or `spec.max_rows` rows), except a
       single row, or a group that must stay together, that exceeds it: an error, a truncation, a
       singleton with a warning or a drop, as `spec.oversize` selects.
    3. Every rank runs the same number of microbatches in a step, a multiple of
       `spec.microbatch_multiple`; dummies without rows where rows run out.
    4. The same lengths, groups, counts and spec (which has the seed) give the same plan.
    5. No row crosses a global batch: step s has rows s * global_batch_size up to the next, or the
       rows of so many episodes; rows of a group share a microbatch.
    6. Padded lengths are multiples of `spec.row_multiple` (2 * cp and the configured rounding),
       positions of a microbatch of `spec.total_multiple` (2 * cp, cp * tp with sequence
       parallelism, the configured rounding).

    Example: lengths [5, 3, 4, 4] packed under 8 tokens on 2 ranks: each rank runs one microbatch of
    8 tokens, one of rows 0 and 1, the other of rows 2 and 3, and `step_offsets` is (0, 1).
    """

    spec: PlanSpec
    num_rows: int
    step_offsets: tuple[int, ...]
    """Bounds of each optimizer step in a rank's microbatches, equal on all ranks."""
    rows: np.ndarray
    """int64 [n]: row ids in execution order, rank after rank."""
    lengths: np.ndarray
    """int64 [n]: real tokens of each of `rows`, after truncation."""
    padded_lengths: np.ndarray
    """int64 [n]: positions of each of `rows`, without its `shared` tokens."""
    offsets: np.ndarray
    """int64 [R*M+1]: microbatch m of rank r is `rows[offsets[r*M + m] : offsets[r*M + m + 1]]`."""
    deferred: tuple[int, ...] = ()
    """Rows left for a later plan."""
    dropped: tuple[int, ...] = ()
    """Rows above the token limit that were dropped."""
    num_truncated: int = 0
    num_oversize: int = 0
    num_trained: np.ndarray | None = None
    """int64 [n]: tokens with loss of each of `rows`; None: unknown, all positions count as such."""
    shared: np.ndarray | None = None
    """int64 [n]: leading tokens of each of `rows` that the row before it in its microbatch has in
    common with it, so that an earlier row computes them; None: every row is complete.
    """
    prefixes: SharedPrefixes | None = None
    """The common leading tokens of all rows, after truncation."""
    image_tokens: np.ndarray | None = None
    """int64 [n]: image tokens of each of `rows`; None: no row has an image."""
    image_work: np.ndarray | None = None
    """float64 [n]: work of the vision tower of each of `rows`; None: it is not known."""
    context_first: np.ndarray | None = None
    """int64 [n]: first context-parallel rank of the group that computes each of `rows`; None: all
    ranks compute all rows.
    """
    context_size: np.ndarray | None = None
    """int64 [n]: the ranks of the group of each of `rows`."""
    oversize_warning: str = field(default="", compare=False)
    """Which rows were above the token limit and what happened to them; empty if none were, and for
    plans that `from_json`, `with_budget` or a stream made.
    """

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps."""
        return len(self.step_offsets) - 1

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each rank over all steps, dummies included."""
        return self.step_offsets[-1]

    @cached_property
    def ranks(self) -> tuple[tuple[Microbatch, ...], ...]:
        """Microbatches of each rank, with row ids of the batch."""
        ranks = range(self.spec.num_ranks)
        return tuple(self._microbatches(rank, self.rows_of_rank(rank)) for rank in ranks)

    @cached_property
    def computed_lengths(self) -> np.ndarray:
        """Real tokens that are computed for each of `rows`, int64 [n]: those not shared."""
        return self.lengths if self.shared is None else self.lengths - self.shared

    @cached_property
    def work(self) -> np.ndarray:
        """Forward work of each of `rows` by `spec.cost`, float64 [n], without its shared tokens."""
        shared = self.shared
        lengths = self.padded_lengths if shared is None else self.padded_lengths + shared
        return self.spec.cost.of(lengths, self.num_trained, shared) + self.computed_image_work

    @cached_property
    def computed_image_work(self) -> np.ndarray:
        """Work of the tower for each of `rows`, float64 [n], without images of shared tokens."""
        if self.image_work is None or self.image_tokens is None:
            return np.zeros(len(self.rows))
        if self.shared is None:
            return self.image_work
        images = unshared_images(self.image_tokens, self.lengths, self.shared)
        return self.image_work * (images / np.maximum(self.image_tokens, 1))

    @property
    def shared_work_share(self) -> float:
        """Share of the work of complete rows that shared prefixes save; 0 without them."""
        complete = round_up(self.lengths, self.spec.row_multiple)
        separate_work = self.spec.cost.of(complete, self.num_trained).sum()
        separate_work += 0.0 if self.image_work is None else self.image_work.sum()
        return float(1 - self.work.sum() / (separate_work or 1.0))

    @cached_property
    def num_tokens(self) -> np.ndarray:
        """Positions of each microbatch, int64 [R, M]; a dummy has the smallest legal number."""
        if self.context_first is not None and self.context_size is not None:
            groups = (self.offsets, self.context_first, self.context_size)
            return tokens_of_groups(self.padded_lengths, *groups, self.spec)
        padded_tokens = self.bins.loads(self.by_row(self.padded_lengths))
        tokens = round_up(padded_tokens, self.spec.total_multiple)
        tokens[np.diff(self.offsets) == 0] = self.spec.dummy_tokens
        return tokens.reshape(self.spec.num_ranks, -1)

    def of_context_ranks(self, values: np.ndarray) -> np.ndarray:
        """Sum `values` [n] of `rows` for each rank, float64 [R * cp, M]; a row is shared equally.

        Without `context_size` the context-parallel ranks of a data-parallel rank are one, [R, M].
        """
        if self.context_first is None or self.context_size is None:
            return self.bins.loads(self.by_row(values)).reshape(self.spec.num_ranks, -1)
        groups = (self.offsets, self.context_first, self.context_size)
        return sums_of_ranks(values, *groups, self.spec)

    def rows_of_rank(self, dp_rank: int) -> np.ndarray:
        """Return the row ids of a rank in execution order, int64 [n_r]: the order of its shard."""
        start, stop = self._rank_bounds(dp_rank)
        return self.rows[start:stop]

    def rank_plan(self, dp_rank: int, shard_rows: np.ndarray | None = None) -> RankPlan:
        """Return the microbatches of a rank with indices into its shard.

        `shard_rows` int64 [n_r] are the row ids of the shard in its order. The default is
        `rows_of_rank`, for which the indices of a microbatch are a range. Pass `rows_of_rank` of
        another plan if both plans use one shard.
        """
        rows = self.rows_of_rank(dp_rank)
        indices = np.arange(len(rows))
        if shard_rows is not None:
            # Nothing here may depend on the size of the batch: there is one call for each rank.
            order = np.argsort(shard_rows)
            indices = order[np.searchsorted(shard_rows, rows, sorter=order)]
        return RankPlan(self._microbatches(dp_rank, indices), self.step_offsets, self.spec)

    def with_budget(
        self, max_tokens: int | None = None, *, max_rows: int | None = None
    ) -> BatchPlan:
        """Return a plan with the same rows on the same ranks and steps under other limits.

        The log-prob pass uses it. Each rank packs its own rows into as few microbatches as
        possible, largest first, with dummies up to the maximum over ranks; groups need not stay
        together. Rows above the new limit run alone. Pass `max_rows` (and no `max_tokens`) if
        microbatches are limited by rows. Raises ValueError for a limit below the longest row under
        `oversize="error"`.
        """
        spec = self.spec.with_budget(max_tokens, max_rows)
        if spec == self.spec:
            return self
        num_trained = None if self.num_trained is None else self.by_row(self.num_trained)
        image_tokens = None if self.image_tokens is None else self.by_row(self.image_tokens)
        image_work = None if self.image_work is None else self.by_row(self.image_work)
        counts = TokenCounts(
            self.by_row(self.lengths), num_trained, self.prefixes, image_tokens, image_work
        )
        lengths = counts.lengths
        is_dropped = np.zeros(self.num_rows, dtype=bool)
        is_dropped[list(self.dropped)] = True
        fitted = replace(
            FittedRows.of(counts, spec),
            is_dropped=is_dropped,
            num_truncated=self.num_truncated,
            num_oversize=self.num_oversize,
        )
        padded = fitted.padded_lengths
        # Under the other policies rows above the new limit run alone; the training limit was
        # already applied to them.
        is_limited = spec.has_token_limit and spec.oversize == "error"
        if is_limited and padded.max(initial=0) > spec.capacity:
            row = int(padded.argmax())
            raise ValueError(
                f"row {row} has {lengths[row]} tokens ({padded[row]} padded), above"
                f" {spec.logprob_budget_key} = {max_tokens}; raise it"
            )
        # Row offsets of each step on each rank, int64 [R, num_steps + 1].
        first_microbatch = np.arange(spec.num_ranks) * self.num_microbatches
        bounds = self.offsets[np.add.outer(first_microbatch, self.step_offsets)]
        form = form_rank if self.prefixes is None else form_shared_rank
        of_one = replace(spec, num_ranks=1)
        steps = []
        context_steps = []
        for step in range(self.num_steps):
            rank_bins = []
            for rank in range(spec.num_ranks):
                start, stop = bounds[rank, step : step + 2]
                rank_bins.append(form(self.rows[start:stop], fitted, spec))
            if spec.dynamic_context:
                ranks = [form_context_step(bins, fitted, None, of_one) for bins in rank_bins]
                context_steps.append(join_context_ranks(ranks, spec.microbatch_multiple))
            else:
                steps.append(join_ranks(rank_bins, spec.microbatch_multiple))
        if spec.dynamic_context:
            return _join_context(spec, fitted, context_steps)
        return join_steps(spec, fitted, steps)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the plan by the names they are logged under.

        Bin loads are computed real tokens, so alignment padding counts as waste; dummies are not
        bins. The shares of what common leading tokens save exist only for plans with `prefixes`,
        and the idle share of a stage's time, for microbatches of equal time, only for pipelines.
        Without `max_tokens` the largest microbatch is the capacity. An imbalance is the max-loaded
        rank over the mean rank, weighted over steps by work.
        """
        num_rows = np.diff(self.offsets)
        tokens = self.num_tokens
        is_filled = num_rows > 0
        largest = int(tokens.ravel()[is_filled].max(initial=1))
        capacity = self.spec.max_tokens or largest
        loads = self.bins.loads(self.by_row(self.computed_lengths))
        # Rows of different steps cannot share a bin, so the minimum is per step.
        step_tokens = loads[:0]
        if self.num_steps:
            microbatch_tokens = loads.reshape(tokens.shape).sum(0)
            step_tokens = np.add.reduceat(microbatch_tokens, self.step_offsets[:-1])
        min_bins_of_step = ceil_div(step_tokens, capacity)
        stats = bin_stats(loads[is_filled], capacity, int(min_bins_of_step.sum()))
        num_positions = float(tokens.sum())
        num_computed = self.computed_lengths.sum()
        num_padding = float(tokens.sum() - num_computed)
        positions = self.padded_lengths.astype(np.float64)
        optional = {}
        if self.context_size is not None:
            num_shares = float((self.context_size * self.computed_lengths).sum())
            optional["packing/mean_context_size"] = num_shares / max(num_computed, 1)
        if self.spec.pp_size > 1:
            bubble = self.num_steps * self.spec.bubble_microbatches
            # An empty plan has neither.
            num_slots = max(self.num_microbatches + bubble, 1)
            optional["packing/pipeline_bubble_share"] = bubble / num_slots
        if self.image_work is not None:
            optional["packing/rank_imbalance_vision"] = self._imbalance(self.computed_image_work)
        if self.shared is not None:
            num_row_tokens = max(self.lengths.sum(), 1)
            optional["packing/shared_token_share"] = float(1 - num_computed / num_row_tokens)
            optional["packing/shared_work_share"] = self.shared_work_share
        return {
            "packing/utilization": stats["average_utilization"],
            "packing/waste_ratio": stats["waste_ratio"],
            "packing/bin_balance": stats["bin_balance"],
            "packing/efficiency": stats["bin_efficiency"],
            "packing/padding_share": num_padding / max(num_positions, 1.0),
            "packing/rank_imbalance_tokens": self._imbalance(positions),
            "packing/rank_imbalance_flops": self._imbalance(self.work),
            "packing/num_microbatches": self.num_microbatches / max(self.num_steps, 1),
            "packing/num_dummies": float(np.count_nonzero(num_rows == 0)),
            "packing/num_truncated": float(self.num_truncated),
            "packing/num_dropped": float(len(self.dropped)),
            "packing/num_oversize": float(self.num_oversize),
            **optional,
        }

    def to_json(self) -> str:
        """Return one JSON object of plain numbers; `from_json` restores an equal plan."""
        values = {}
        for name, value in self._values():
            if value is None:
                continue
            # JSON has no arrays of NumPy.
            values[name] = value.tolist() if isinstance(value, np.ndarray) else value
        values["spec"] = self.spec.to_dict()
        if self.prefixes is not None:
            values["prefixes"] = self.prefixes.to_dict()
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> BatchPlan:
        """Return the plan that `to_json` wrote."""
        values = json.loads(text)
        for name in (*_ARRAYS, *_OPTIONAL_ARRAYS):
            if name in values:
                values[name] = np.asarray(values[name], dtype=np.int64)
        if "image_work" in values:
            values["image_work"] = np.asarray(values["image_work"], dtype=np.float64)
        for name in ("step_offsets", "deferred", "dropped"):
            values[name] = tuple(values[name])
        values["spec"] = PlanSpec.from_dict(values["spec"])
        if "prefixes" in values:
            values["prefixes"] = SharedPrefixes.from_dict(values["prefixes"])
        return cls(**values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchPlan):
            return NotImplemented
        # The generated comparison of a dataclass does not handle arrays.
        pairs = zip(self._values(), other._values(), strict=True)
        return all(np.array_equal(own, others) for (_, own), (_, others) in pairs)

    def __hash__(self) -> int:
        arrays = (self.rows.tobytes(), self.offsets.tobytes())
        return hash((self.spec, self.num_rows, self.step_offsets, *arrays))

    def __str__(self) -> str:
        """Describe the size, the limits and the balance in one line; see `describe`."""
        size = (self.num_rows, self.num_steps, self.num_microbatches, len(self.dropped))
        return describe(self.spec, *size, self.metrics())

    def _imbalance(self, work: np.ndarray) -> float:
        """Sum over steps of the max-loaded rank's work over the mean rank's work.

        `work` float64 [n] is the work of each of `rows`.
        """
        # Without rows there is no mean to divide by.
        if not len(work):
            return 1.0
        by_rank = self.of_context_ranks(work)
        # [number of ranks, number of steps]
        by_step = np.add.reduceat(by_rank, self.step_offsets[:-1], axis=1)
        max_loaded = by_step.max(0).sum()
        mean = by_step.sum() / len(by_rank)
        return float(max_loaded / mean)

    @cached_property
    def bins(self) -> Packing:
        """All microbatches as bins, rank-major."""
        return Packing(self.rows, self.offsets)

    @cached_property
    def _has_images(self) -> np.ndarray:
        """True for each microbatch in which a row of any rank has an image, bool [M]."""
        if self.image_tokens is None:
            return np.zeros(self.num_microbatches, dtype=bool)
        by_rank = self.bins.loads(self.by_row(self.image_tokens))
        return by_rank.reshape(self.spec.num_ranks, -1).max(axis=0, initial=0) > 0

    def by_row(self, values: np.ndarray) -> np.ndarray:
        """Reorder values [n] of `rows` into an array over row ids [num_rows]."""
        by_row = np.zeros(self.num_rows, dtype=values.dtype)
        by_row[self.rows] = values
        return by_row

    def _rank_bounds(self, dp_rank: int) -> tuple[int, int]:
        """Bounds of a rank in `rows`; raises IndexError out of range."""
        if not 0 <= dp_rank < self.spec.num_ranks:
            raise IndexError(f"dp_rank {dp_rank} of {self.spec.num_ranks}")
        # An empty batch has no steps, and `offsets` has one entry.
        if self.num_microbatches == 0:
            return 0, 0
        first = dp_rank * self.num_microbatches
        return int(self.offsets[first]), int(self.offsets[first + self.num_microbatches])

    def _microbatches(self, dp_rank: int, row_ids: np.ndarray) -> tuple[Microbatch, ...]:
        """Build the microbatches of a rank; `row_ids` int64 [n_r] are the indices to write for each
        of `rows_of_rank`.
        """
        start, stop = self._rank_bounds(dp_rank)
        first = dp_rank * self.num_microbatches
        rank_offsets = self.offsets[first : first + self.num_microbatches + 1]
        offsets = (rank_offsets - start).tolist()
        # Slices of tuples of plain integers are much faster than slices of arrays.
        rows = tuple(row_ids.tolist())
        columns = (self.lengths, self.padded_lengths, self.shared)
        lengths, padded, shared, first_ranks, sizes = (
            () if column is None else tuple(column[start:stop].tolist())
            for column in (*columns, self.context_first, self.context_size)
        )
        tokens = self.num_tokens[dp_rank].tolist()
        has_images = self._has_images.tolist()
        microbatches = []
        for m, (a, b) in enumerate(pairwise(offsets)):
            shared_of = shared[a:b] if any(shared[a:b]) else ()
            own = (rows[a:b], lengths[a:b], padded[a:b], tokens[m], shared_of, has_images[m])
            microbatches.append(Microbatch(*own, first_ranks[a:b], sizes[a:b]))
        return tuple(microbatches)

    def _values(self) -> list[tuple[str, Any]]:
        """Return (name, value) of every field that is compared and written."""
        return [(each.name, getattr(self, each.name)) for each in fields(self) if each.compare]


def plan_batch(
    counts: TokenCounts | Sequence[int] | np.ndarray,
    spec: PlanSpec,
    groups: Sequence[int] | np.ndarray | None = None,
    *,
    episodes: Sequence[int] | np.ndarray | None = None,
    shared_prefix: SharedPrefixMode = True,
    warn: bool = True,
) -> BatchPlan:
    """Plan a batch of B rows, given by their token counts or by their lengths int [B] alone.

    Rows with equal id in `groups` int [B] stay in one microbatch. Rows with equal id in `episodes`
    int [B] stay in one optimizer step, and `spec.global_batch_size` counts episodes. If `counts`
    has prefixes, a microbatch computes common leading tokens of its rows once, and its limit and
    its work count them once; packed layout only. `shared_prefix="auto"` ignores prefixes in the
    padded layout and where they save less than `MIN_SHARED_WORK`, `False` always. Rows above the
    token limit are an OversizeWarning, unless `warn=False` leaves `BatchPlan.oversize_warning` to
    the caller. Raises ValueError for such a row under `oversize="error"`, for a group that cannot
    stay together, for prefixes in the padded layout, and for wrong counts.
    """
    counts = counts if isinstance(counts, TokenCounts) else TokenCounts(checked_lengths(counts))
    counts = counts.checked()
    if shared_prefix is False or (shared_prefix == "auto" and spec.layout == "padded"):
        counts = replace(counts, prefixes=None)
    step_of = step_of_rows(len(counts.lengths), spec.global_batch_size, episodes)
    plan = _plan_counts(counts, spec, groups, step_of)
    is_optional = counts.prefixes is not None and shared_prefix is not True
    if is_optional and plan.shared_work_share < MIN_SHARED_WORK:
        plan = _plan_counts(replace(counts, prefixes=None), spec, groups, step_of)
    if warn and plan.oversize_warning:
        warnings.warn(plan.oversize_warning, OversizeWarning, stacklevel=2)
    return plan


def _plan_counts(
    counts: TokenCounts,
    spec: PlanSpec,
    groups: Sequence[int] | np.ndarray | None,
    step_of: np.ndarray,
) -> BatchPlan:
    """Plan checked counts of rows in the optimizer steps `step_of` int64 [B]; see `plan_batch`."""
    row_groups = checked_groups(groups, step_of, spec)
    if counts.prefixes is not None and spec.layout == "padded":
        raise ValueError(
            "common leading tokens are computed once in the packed layout only; plan without"
            " prefixes, or set policy.sequence_packing.enabled=true"
        )
    fitted = fit_rows(counts, row_groups, spec)
    form = form_step if counts.prefixes is None else form_shared_step
    by_step = np.argsort(step_of, kind="stable")
    bounds = np.append(0, np.cumsum(np.bincount(step_of)))
    rows_of_step = []
    for start, stop in pairwise(bounds.tolist()):
        rows = by_step[start:stop]
        rows_of_step.append(rows[~fitted.is_dropped[rows]])
    if spec.dynamic_context:
        return _plan_context(spec, fitted, row_groups, rows_of_step)
    steps = [form(rows, fitted, row_groups, spec) for rows in rows_of_step]
    return join_steps(spec, fitted, steps)


def _plan_context(
    spec: PlanSpec,
    fitted: FittedRows,
    row_groups: np.ndarray | None,
    rows_of_step: Iterable[np.ndarray],
) -> BatchPlan:
    """Plan with `spec.dynamic_context`; `rows_of_step` has the row ids int64 [n] of each step."""
    steps = []
    for rows in rows_of_step:
        bins = Packing(rows, np.array([0, len(rows)]))
        if fitted.prefixes is not None:
            # It cuts trees that are too large for one group, and rows stay together where it does.
            bins = form_shared_step(rows, fitted, row_groups, spec)
        steps.append(form_context_step(bins, fitted, row_groups, spec))
    return _join_context(spec, fitted, steps)


def _join_context(spec: PlanSpec, fitted: FittedRows, steps: list[ContextStep]) -> BatchPlan:
    num_microbatches = [(len(step.offsets) - 1) // spec.num_ranks for step in steps]
    joined = join_context_steps(steps, spec.num_ranks)
    return _batch_plan(spec, fitted, num_microbatches, *place_groups(joined, fitted, spec))


def join_steps(spec: PlanSpec, fitted: FittedRows, steps: list[Packing]) -> BatchPlan:
    """Join the steps of a batch, bins of row ids each, into one plan, rank after rank."""
    num_microbatches = [step.num_bins // spec.num_ranks for step in steps]
    bins = rank_major_bins(steps, spec.num_ranks)
    bins, padded, shared = fitted.place(bins, spec)
    # Padded rows occupy the length of the longest row of their microbatch.
    if spec.layout == "padded":
        longest = longest_of(bins, fitted.padded_lengths)
        padded = np.repeat(longest, np.diff(bins.offsets))
    return _batch_plan(spec, fitted, num_microbatches, bins, padded, shared)


def _batch_plan(
    spec: PlanSpec,
    fitted: FittedRows,
    num_microbatches: Sequence[int],
    bins: Packing,
    padded: np.ndarray,
    shared: np.ndarray | None,
    context: tuple[np.ndarray, np.ndarray] | tuple[None, None] = (None, None),
) -> BatchPlan:
    """Return the plan of `bins`, row ids by microbatch, rank after rank.

    `num_microbatches` are those of each step, `padded`, `shared` and `context` as in `BatchPlan`.
    """
    return BatchPlan(
        spec=spec,
        num_rows=len(fitted.lengths),
        step_offsets=tuple(accumulate(num_microbatches, initial=0)),
        rows=bins.perm,
        lengths=fitted.lengths[bins.perm],
        padded_lengths=padded,
        offsets=bins.offsets,
        dropped=tuple(np.flatnonzero(fitted.is_dropped).tolist()),
        num_truncated=fitted.num_truncated,
        num_oversize=fitted.num_oversize,
        num_trained=None if fitted.num_trained is None else fitted.num_trained[bins.perm],
        shared=shared,
        prefixes=fitted.prefixes,
        image_tokens=None if fitted.image_tokens is None else fitted.image_tokens[bins.perm],
        image_work=None if fitted.image_work is None else fitted.image_work[bins.perm],
        context_first=context[0],
        context_size=context[1],
        oversize_warning=fitted.warning,
    )
