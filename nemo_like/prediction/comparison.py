"""Comparison of batching strategies on the same rows: padding, microbatches, balance, step time.

The planner of this system is compared with simple methods. All times are predicted for the same
engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.packing.algorithms import PackingAlgorithm
from nemo_like.data.packing.balance import assign_bins
from nemo_like.data.packing.bounds import l2_bound, lockstep_bound, rank_bound
from nemo_like.data.planning.oversize import fit_rows
from nemo_like.data.planning.plan import BatchPlan, PlanSpec, join_steps, plan_batch
from nemo_like.data.planning.plan_step import form_rank, join_ranks
from nemo_like.data.planning.prefixes import MIN_SHARED_WORK, SharedPrefixMode
from nemo_like.data.planning.spec import Balance, CostModel
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.data.streaming.planner import plan_stream
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.integer_math import ceil_div, round_up

Method = Literal["padded batches", "ranks in turn", "ranks before microbatches"]
"""Simple ways to form batches, with which those of this system are compared: rows in the given
order, padded; packed bins of which bin b is on rank b mod R; and rows divided over the ranks before
each rank packs its own.
"""
_IN_TURN = (
    PackingAlgorithm.CONCATENATIVE,
    PackingAlgorithm.FIRST_FIT_SHUFFLE,
    PackingAlgorithm.FIRST_FIT_DECREASING,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING,
)
"""Packers that are compared with ranks in turn."""
_BY_WORK: tuple[tuple[PackingAlgorithm, Balance], ...] = (
    (PackingAlgorithm.BEST_FIT_DECREASING, "flops"),
    (PackingAlgorithm.BALANCED, "tokens"),
    (PackingAlgorithm.BALANCED, "flops"),
)
"""Packers whose bins are assigned to ranks by work, and the measure of work."""


@dataclass(frozen=True)
class Strategy:
    """One way to form batches."""

    key: str
    """Layout, packer, balance. Example: `packed/first_fit_shuffle/none`."""
    title: str
    spec: PlanSpec
    method: Method | None = None
    """The simple method; None for the planner of this system."""
    stream: StreamSpec | None = None
    """Settings of a streaming planner, which forms the steps; its `plan` is replaced by `spec`."""
    shares_prefixes: bool = False
    """Common leading tokens of rows are computed once per microbatch."""

    def plans_as(self, spec: PlanSpec, stream: StreamSpec | None) -> bool:
        """Return True if a run with `spec` and `stream` has these plans."""
        # No spec selects ranks before microbatches.
        is_planned = self.method != "ranks before microbatches"
        return is_planned and (self.spec, self.stream) == (spec, stream)

    def plan(self, counts: TokenCounts) -> BatchPlan:
        """Plan rows. Raises ValueError for rows that cannot be planned."""
        if self.stream is not None:
            step_spec = replace(self.spec, global_batch_size=None)
            images = None
            if counts.image_tokens is not None and counts.image_work is not None:
                images = np.stack([counts.image_tokens, counts.image_work.astype(np.int64)], axis=1)
            stream = replace(self.stream, plan=step_spec)
            return plan_stream(counts.lengths, stream, counts.num_trained, images)
        if self.method == "ranks before microbatches":
            return plan_ranks_first(counts, self.spec)
        return plan_batch(counts, self.spec, shared_prefix=self.shares_prefixes, warn=False)


@dataclass(frozen=True, eq=False)
class Outcome:
    """The plan of one strategy and what is predicted from it.

    A step is one optimizer step. Ratios are quotients of sums over all steps. R is the number of
    data-parallel ranks, M the number of microbatches of a rank over all steps.
    """

    strategy: Strategy
    plan: BatchPlan
    max_tokens: int
    """The token budget of a microbatch."""
    bubble: float = 0.0
    """Idle time of a stage in each step, see `PlanSpec.bubble_microbatches`."""
    min_work: float = 0.0
    """Lower limit of the work of a microbatch, because of FSDP communication."""
    token_work: float = 0.0
    """Work that takes as long as the collectives of a token within a data-parallel rank."""
    exchange_share: float = 0.0
    """Share of `token_work` for keys and values of other context-parallel ranks."""

    @cached_property
    def work(self) -> np.ndarray:
        """Work of each microbatch, padding included, float64 [R, M].

        With context-parallel groups of different sizes that is the work of the max-loaded rank
        times the ranks.
        """
        # A cached property, because six of the reported numbers are derived from it.
        if self.plan.context_size is None:
            return microbatch_work(self.plan, self.plan.spec.cost)
        spec = self.plan.spec
        by_rank = self.plan.of_context_ranks(self.plan.work)
        return by_rank.reshape(spec.num_ranks, spec.cp_size, -1).max(axis=1) * spec.cp_size

    @cached_property
    def real_work(self) -> np.ndarray:
        """Work of each microbatch without padding, float64 [R, M]."""
        plan = self.plan
        language = plan.spec.cost.of(plan.lengths, plan.num_trained, plan.shared)
        return by_microbatch(plan, language + plan.computed_image_work)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The metrics `packing/*` that a run with this plan logs."""
        return self.plan.metrics()

    @property
    def padding_share(self) -> float:
        return self.metrics["packing/padding_share"]

    @property
    def num_microbatches(self) -> float:
        """Microbatches of a rank in a step, on average."""
        return self.metrics["packing/num_microbatches"]

    @cached_property
    def utilization(self) -> float:
        """Computed real tokens over the token budgets of the microbatches that are not empty."""
        # Dummies have no rows; no packing could fill them.
        num_filled = int(np.count_nonzero(np.diff(self.plan.offsets)))
        num_tokens = float(self.plan.computed_lengths.sum())
        return num_tokens / max(num_filled * self.max_tokens, 1)

    @cached_property
    def rank_tokens(self) -> float:
        """Tokens, padding included, of the max-loaded rank over the tokens of the mean rank."""
        return _max_over_mean(self.plan.num_tokens.astype(np.float64), self.plan)

    @cached_property
    def rank_flops(self) -> float:
        """Work of the max-loaded rank over the work of the mean rank."""
        return _max_over_mean(self.work, self.plan)

    @cached_property
    def step_time(self) -> float:
        """Step time over the time of the complete rows without padding and idle time."""
        ideal = ideal_times(self.plan, self.plan.spec.cost)
        # A quotient of sums: a mean of ratios would weight short steps too much.
        return float(self.total_work / ideal.sum())

    @cached_property
    def total_work(self) -> float:
        """Time of all steps in units of work, communication and idle time included."""
        token_work = self.token_work
        if self.plan.context_size is not None:
            # A rank receives the keys and values of the other ranks of its group only.
            others = self.metrics["packing/mean_context_size"] - 1.0
            exchanged = others / (self.plan.spec.cp_size - 1)
            token_work *= 1.0 - self.exchange_share * (1.0 - exchanged)
        work = self.work + token_work * self.plan.num_tokens
        times = step_times(work, self.plan, bubble=self.bubble, min_work=self.min_work)
        return float(times.sum())

    @property
    def above_ideal(self) -> float:
        """Share of the step time that its computed real tokens, spread evenly, do not need."""
        all_tokens = ideal_times(self.plan, self.plan.spec.cost).sum()
        computed = self.real_work.sum() / self.plan.spec.num_ranks
        return float(self.step_time * all_tokens / computed - 1.0)

    @cached_property
    def over_bound(self) -> float | None:
        """Step time, idle time included, over its lower bound for as many microbatches.

        None for padded rows and for shared prefixes, for which there is no bound.
        """
        if self.plan.spec.layout == "padded" or self.strategy.shares_prefixes:
            return None
        bounds = time_bounds(self.plan, self.plan.spec.cost)
        # Neither pipeline bubble nor communication, which the bounds do not model either.
        times = step_times(self.work, self.plan)
        return float(times.sum() / bounds.sum())

    @property
    def largest_microbatch(self) -> int:
        """Tokens, padding included, of the largest microbatch, which determines peak memory."""
        return int(self.plan.num_tokens.ravel()[self._largest])

    @property
    def image_share(self) -> float:
        """Share of the tokens of the largest microbatch that are of images."""
        return float(self._image_tokens.ravel()[self._largest] / self.largest_microbatch)

    @property
    def _largest(self) -> int:
        """Index of the microbatch with the most tokens and activations of images."""
        sizes = self.plan.num_tokens + self.plan.spec.image_weight * self._image_tokens
        return int(sizes.argmax())

    @property
    def _image_tokens(self) -> np.ndarray:
        """Tokens of images in each microbatch, int64 [R, M], without those of shared tokens."""
        plan = self.plan
        if plan.image_tokens is None:
            return np.zeros_like(plan.num_tokens)
        return by_microbatch(plan, np.minimum(plan.image_tokens, plan.computed_lengths))

    @property
    def keys_per_token(self) -> float:
        """Keys that attention reads, over the tokens of the largest microbatch; at least 1.

        Rows with a shared prefix read copies of its keys; see `MemoryModel`.
        """
        if self.plan.shared is None:
            return 1.0
        copies = by_microbatch(self.plan, self.plan.shared)
        return float((copies + self.plan.num_tokens).max()) / self.largest_microbatch


@dataclass(frozen=True, eq=False)
class Comparison:
    """All outcomes for the same rows."""

    batch_size: int
    """Rows of an optimizer step."""
    outcomes: tuple[Outcome, ...]
    chosen_key: str
    """The strategy whose memory and charts are shown."""
    min_microbatches: float
    """Lower bound (L2) of the microbatches of a rank in a step with packing, on average."""

    def __getitem__(self, key: str) -> Outcome:
        """Return the outcome of the strategy with this key."""
        return next(outcome for outcome in self.outcomes if outcome.strategy.key == key)

    @property
    def chosen(self) -> Outcome:
        """The outcome that the report describes."""
        return self[self.chosen_key]

    @property
    def baseline(self) -> Outcome:
        """The reference of speedups: the fastest outcome of a simple method."""
        return min(self.by_method.values(), key=lambda outcome: outcome.step_time)

    @property
    def by_method(self) -> dict[Method, Outcome]:
        """The fastest outcome of each simple method."""
        fastest: dict[Method, Outcome] = {}
        for outcome in self.outcomes:
            method = outcome.strategy.method
            if method and outcome.step_time < fastest.setdefault(method, outcome).step_time:
                fastest[method] = outcome
        return fastest

    @property
    def shared(self) -> Outcome | None:
        """The outcome with shared prefixes; None if the rows have none."""
        last = self.outcomes[-1]
        return last if last.strategy.shares_prefixes else None

    @property
    def separate(self) -> Outcome:
        """The outcome of the same settings without shared prefixes."""
        spec = self.chosen.strategy.spec
        return next(each for each in self.outcomes if each.strategy.plans_as(spec, None))

    @property
    def num_steps(self) -> int:
        return self.chosen.plan.num_steps

    def speedup(self, outcome: Outcome) -> float:
        return self.baseline.step_time / outcome.step_time


def packed_spec(spec: PlanSpec, max_tokens: int) -> PlanSpec:
    """Return the joint schedule of packed rows with the other settings of `spec`."""
    return replace(
        spec,
        layout="packed",
        max_tokens=max_tokens,
        max_rows=None,
        algorithm=PackingAlgorithm.BALANCED,
        balance="flops",
        microbatch_order="packer",
        dynamic_context=False,
    )


def strategies(
    spec: PlanSpec, max_tokens: int, longest: int, stream: StreamSpec | None = None
) -> list[Strategy]:
    """Return every strategy with a token budget.

    `spec` comes last, if it differs from the others; with `stream` it is planned as a stream.
    Padding without dynamic batching takes `spec.max_rows` rows at a time, or as many as fit into
    the budget at the length `longest`.
    """
    packed = packed_spec(spec, max_tokens)
    plain = replace(packed, layout="padded", max_tokens=None, max_rows=1, oversize="error")
    num_rows = spec.max_rows
    if not num_rows:
        # As many as fit if all are as long as the longest: nothing else is safe without a plan.
        rows_per_rank = ceil_div(spec.global_batch_size or 1, spec.num_ranks)
        num_fitting = max_tokens // round_up(longest, plain.row_multiple)
        num_rows = max(min(num_fitting, rows_per_rank), 1)
    plain = replace(plain, max_rows=num_rows)
    rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
    found = [Strategy("padded/microbatch", f"{rows} at a time, padded", plain, "padded batches")]
    for algorithm in _IN_TURN:
        bins = replace(packed, algorithm=algorithm, balance="none")
        # The table has to fit into 100 columns.
        short = str(algorithm).replace("first_fit_decreasing", "FFD")
        short = short.replace("first_fit_shuffle", "shuffled FF")
        found.append(Strategy(_key(bins), f"{short}, ranks in turn", bins, "ranks in turn"))
    method: Method = "ranks before microbatches"
    found.append(Strategy("ranks_first", method, packed, method))
    dynamic = replace(packed, layout="padded")
    found.append(Strategy("dynamic", "dynamic, padded by length", dynamic))
    for algorithm, balance in _BY_WORK:
        bins = replace(packed, algorithm=algorithm, balance=balance)
        found.append(Strategy(_key(bins), f"{algorithm} by {balance}", bins))
    if not any(each.plans_as(spec, stream) for each in found):
        title = "context groups" if spec.dynamic_context else "as configured"
        found.append(Strategy("configured", title, spec, stream=stream))
    return found


def compare(
    counts: TokenCounts,
    spec: PlanSpec,
    max_tokens: int,
    *,
    shared_prefix: SharedPrefixMode = "auto",
    stream: StreamSpec | None = None,
    bubble: float = 0.0,
    min_work: float = 0.0,
    token_work: float = 0.0,
    exchange_share: float = 0.0,
) -> Comparison:
    """Plan rows in batches of `spec.global_batch_size` with every strategy.

    The strategy that the report describes is `spec`, whose steps `stream` forms if it is given. If
    the rows have prefixes, it is planned without and with them, and `policy.shared_prefix` selects
    one of both. Raises ConfigError for rows that cannot be planned.
    """
    lengths = counts.lengths
    batch_size = spec.global_batch_size or len(lengths)
    chosen_key = ""
    outcomes = []
    found = strategies(spec, max_tokens, int(lengths.max()), stream)
    may_share = counts.prefixes is not None and shared_prefix is not False
    if may_share and spec.layout == "packed" and stream is None:
        found.append(Strategy("shared", "shared prefixes", spec, shares_prefixes=True))
    for strategy in found:
        try:
            plan = strategy.plan(counts)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        overheads = (bubble, min_work, token_work, exchange_share)
        outcomes.append(Outcome(strategy, plan, max_tokens, *overheads))
        if not chosen_key and strategy.plans_as(spec, stream):
            chosen_key = strategy.key
        is_enough = shared_prefix is True or plan.shared_work_share >= MIN_SHARED_WORK
        if strategy.shares_prefixes and is_enough:
            chosen_key = strategy.key
    batches = [lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
    bounds = min_microbatches(packed_spec(spec, max_tokens), batches)
    return Comparison(batch_size, tuple(outcomes), chosen_key, float(bounds.mean()))


def _max_over_mean(values: np.ndarray, plan: BatchPlan) -> float:
    """Return the sum of the max rank over the sum of the mean rank; `values` is [R, M]."""
    by_rank = rank_work(values, plan)
    max_loaded = by_rank.max(axis=0).sum()
    mean = by_rank.mean(axis=0).sum()
    return float(max_loaded / mean)


def _key(spec: PlanSpec) -> str:
    return f"packed/{spec.algorithm}/{spec.balance}"


def plan_ranks_first(counts: TokenCounts, spec: PlanSpec) -> BatchPlan:
    """Plan packed rows in two separate decisions: first the ranks of rows, then the microbatches.

    Each rank gets equally many rows of an optimizer step, with similar work, and packs them into as
    few microbatches as possible; ranks with fewer microbatches than others run dummies. Raises
    ValueError for a row above the token limit under `oversize="error"`.
    """
    fitted = fit_rows(counts.checked(), None, spec)
    work = spec.cost.of(fitted.padded_lengths, fitted.num_trained)
    rows_per_step = spec.global_batch_size or max(len(work), 1)
    steps = []
    for start in range(0, len(work), rows_per_step):
        step_work = work[start : start + rows_per_step]
        # Positions in the step of the rows of each rank, -1 for none.
        by_rank = assign_bins(step_work, spec.num_ranks)
        rank_bins = [form_rank(start + own[own >= 0], fitted, spec) for own in by_rank]
        steps.append(join_ranks(rank_bins, spec.microbatch_multiple))
    return join_steps(spec, fitted, steps)


def microbatch_work(plan: BatchPlan, cost: CostModel) -> np.ndarray:
    """Return the forward work of each microbatch, padding included, float64 [R, M]."""
    path_lengths = plan.padded_lengths if plan.shared is None else plan.padded_lengths + plan.shared
    work = by_microbatch(plan, cost.of(path_lengths, plan.num_trained, plan.shared))
    num_tail_tokens = plan.num_tokens - by_microbatch(plan, plan.padded_lengths)
    # The alignment tokens at the end of a microbatch are processed, but no row attends to them. A
    # microbatch without rows is one dummy row. Neither has a loss.
    without_loss = np.zeros_like(num_tail_tokens)
    tail_work = cost.products(num_tail_tokens, without_loss)
    dummy_work = cost.of(plan.num_tokens, without_loss)
    images = by_microbatch(plan, plan.computed_image_work)
    return work + np.where(work > 0, tail_work, dummy_work) + images


def step_times(
    work: np.ndarray, plan: BatchPlan, *, bubble: float = 0.0, min_work: float = 0.0
) -> np.ndarray:
    """Return the time of each optimizer step in units of work, float64 [S].

    `work` is float64 [R, M]; a microbatch takes at least `min_work`. `bubble` is the idle time of
    each step, in times of a microbatch.
    """
    work = np.maximum(work, min_work)
    starts = plan.step_offsets[:-1]
    if plan.spec.sync == "microbatch":
        # Every microbatch takes as long as its slowest rank.
        slowest = work.max(axis=0)
        times = np.add.reduceat(slowest, starts)
    else:
        # Ranks only wait at the end, so differences between microbatches cancel.
        by_rank = np.add.reduceat(work, starts, axis=1)
        times = by_rank.max(axis=0)
    counts = np.diff(plan.step_offsets)
    return times * (counts + bubble) / counts


def ideal_times(plan: BatchPlan, cost: CostModel) -> np.ndarray:
    """Return the work of the real tokens spread evenly over the ranks, float64 [S].

    It is a lower bound of the step time of every plan that computes all rows completely.
    """
    complete = cost.of(plan.lengths, plan.num_trained)
    if plan.image_work is not None:
        complete = complete + plan.image_work
    work = by_microbatch(plan, complete).sum(axis=0)
    step_work = np.add.reduceat(work, plan.step_offsets[:-1])
    return step_work / plan.spec.num_ranks


def rank_work(work: np.ndarray, plan: BatchPlan) -> np.ndarray:
    """Return the work of each rank in each step, float64 [R, S], from `work` [R, M]."""
    return np.add.reduceat(work, plan.step_offsets[:-1], axis=1)


def min_microbatches(spec: PlanSpec, batches: list[np.ndarray]) -> np.ndarray:
    """Return a lower bound (L2) of the microbatches of each rank in each step, int64 [S].

    `batches` are the row lengths of each step, int [B]. The bound holds for packed rows.
    """
    capacity = spec.capacity
    bins = []
    for lengths in batches:
        padded = round_up(lengths, spec.row_multiple)
        # Rows above the capacity are microbatches of their own; the bound needs them to fit.
        bins.append(l2_bound(np.minimum(padded, capacity), capacity))
    per_rank = ceil_div(np.array(bins, dtype=np.int64), spec.num_ranks)
    return round_up(per_rank, spec.microbatch_multiple)


def time_bounds(plan: BatchPlan, cost: CostModel) -> np.ndarray:
    """Return a lower bound of the time of each step with as many microbatches, float64 [S].

    The token budget comes from the plan. The bound is proven and may be unreachable.
    """
    spec = plan.spec
    capacity = spec.capacity
    is_dummy = (np.diff(plan.offsets) == 0).reshape(plan.num_tokens.shape)
    bounds = []
    for step, (start, stop) in enumerate(pairwise(plan.step_offsets)):
        rows = rows_of_step(plan, step)
        padded = plan.padded_lengths[rows]
        # A row above the capacity runs alone; the bounds need it to fit.
        lengths = np.minimum(padded, capacity)
        work = cost.of(padded, None if plan.num_trained is None else plan.num_trained[rows])
        work = work + plan.computed_image_work[rows]
        num_microbatches = stop - start
        if spec.sync == "microbatch":
            bound = lockstep_bound(lengths, work, capacity, spec.num_ranks, num_microbatches)
        else:
            bound = rank_bound(
                lengths,
                work,
                capacity,
                spec.num_ranks,
                num_microbatches,
                may_be_empty=bool(is_dummy[:, start:stop].any()),
            )
        mean_work = float(work.sum()) / spec.num_ranks
        bounds.append(max(bound, mean_work))
    return np.asarray(bounds)


def rows_of_step(plan: BatchPlan, step: int) -> np.ndarray:
    """Return the indices into `plan.rows` of the rows of one optimizer step, int64 [n]."""
    first_of_rank = np.arange(plan.spec.num_ranks) * plan.num_microbatches
    step_range = plan.step_offsets[step : step + 2]
    # [R, 2]: a step's microbatches are consecutive within a rank.
    ranges = plan.offsets[np.add.outer(first_of_rank, step_range)]
    return np.concatenate([np.arange(start, stop) for start, stop in ranges])


def by_microbatch(plan: BatchPlan, values: np.ndarray) -> np.ndarray:
    """Sum `values` [n], given in the order of `plan.rows`, over each microbatch; [R, M]."""
    # Differences of cumulative sums, since `np.add.reduceat` does not handle dummies.
    sums = np.concatenate([np.zeros(1, dtype=values.dtype), np.cumsum(values)])
    by_bin = np.diff(sums[plan.offsets])
    return by_bin.reshape(plan.num_tokens.shape)
