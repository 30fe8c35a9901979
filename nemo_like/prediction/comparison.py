"""Comparison of batching strategies on the same rows: padding, microbatches, balance, step time.

Among them are the layouts of transformers, NeMo RL and verl. Times refer to this system's
engine with such a layout, not measurements of those tools.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.packing.algorithms import PackingAlgorithm
from nemo_like.data.packing.packers import Packing, prefix_sums
from nemo_like.data.planning.bounds import l2_bound, lockstep_bound, rank_bound
from nemo_like.data.planning.oversize import FittedRows, fit_rows
from nemo_like.data.planning.plan import BatchPlan, PlanSpec, join_steps, plan_batch
from nemo_like.data.planning.plan_step import join_ranks
from nemo_like.data.planning.spec import Balance, CostModel
from nemo_like.data.streaming.planner import plan_stream
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.data.token_counts import MIN_SHARED_WORK, SharedPrefixMode, TokenCounts
from nemo_like.integer_math import ceil_div, round_up
from nemo_like.prediction.placement import Placement
from nemo_like.training_engines import ENGINES

_NEMO_RL = (
    PackingAlgorithm.CONCATENATIVE,
    PackingAlgorithm.FIRST_FIT_SHUFFLE,
    PackingAlgorithm.FIRST_FIT_DECREASING,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING,
)
"""Packers of NeMo RL, which assigns bins to ranks round-robin."""
_OWN: tuple[tuple[PackingAlgorithm, Balance], ...] = (
    (PackingAlgorithm.BEST_FIT_DECREASING, "flops"),
    (PackingAlgorithm.BALANCED, "tokens"),
    (PackingAlgorithm.BALANCED, "flops"),
)
"""Packers of this system, and the measure of work by which their bins are assigned to ranks."""


@dataclass(frozen=True)
class Strategy:
    """One way to form batches."""

    key: str
    """Layout, packer, balance. Example: `packed/first_fit_shuffle/none`."""
    title: str
    spec: PlanSpec
    tool: Literal["", "transformers", "NeMo RL", "verl"] = ""
    """The tool that forms batches in this way; empty for this system alone."""
    stream: StreamSpec | None = None
    """Settings of a streaming planner, which forms the steps; its `plan` is replaced by `spec`."""
    shares_prefixes: bool = False
    """Common leading tokens of rows are computed once per microbatch."""

    def plans_as(self, spec: PlanSpec, stream: StreamSpec | None) -> bool:
        """Return True if a run with `spec` and `stream` has these plans."""
        # Only verl assigns rows in a way that no spec selects.
        return self.tool != "verl" and (self.spec, self.stream) == (spec, stream)

    def plan(self, counts: TokenCounts) -> BatchPlan:
        """Plan rows. Raises ValueError for rows that cannot be planned."""
        lengths, num_trained = counts.lengths, counts.num_trained
        if self.stream is not None:
            step_spec = replace(self.spec, global_batch_size=None)
            return plan_stream(lengths, replace(self.stream, plan=step_spec), num_trained)
        if self.tool == "verl":
            return plan_verl(lengths, self.spec, num_trained)
        prefixes = counts.prefixes if self.shares_prefixes else None
        return plan_batch(lengths, self.spec, None, num_trained, prefixes)


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

    @cached_property
    def work(self) -> np.ndarray:
        """Work of each microbatch, padding included, float64 [R, M]."""
        # A cached property, because six of the reported numbers are derived from it.
        return microbatch_work(self.plan, self.plan.spec.cost)

    @cached_property
    def real_work(self) -> np.ndarray:
        """Work of each microbatch without padding, float64 [R, M]."""
        plan = self.plan
        cost = plan.spec.cost
        return by_microbatch(plan, cost.of(plan.lengths, plan.num_trained, plan.shared))

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
        times = step_times(self.work, self.plan, bubble=self.bubble, min_work=self.min_work)
        ideal = ideal_times(self.plan, self.plan.spec.cost)
        # A quotient of sums: a mean of ratios would weight short steps too much.
        return float(times.sum() / ideal.sum())

    @property
    def above_ideal(self) -> float:
        """Share of the step time that its computed real tokens, spread evenly, do not need."""
        all_tokens = ideal_times(self.plan, self.plan.spec.cost).sum()
        computed = self.real_work.sum() / self.plan.spec.num_ranks
        return float(self.step_time * all_tokens / computed - 1.0)

    @cached_property
    def over_bound(self) -> float | None:
        """Step time, idle time included, over its lower bound for as many microbatches.

        None for padded rows, for verl, which exceeds the budget, and for shared prefixes: there is
        no bound.
        """
        has_shared = self.strategy.shares_prefixes
        if self.plan.spec.layout == "padded" or self.strategy.tool == "verl" or has_shared:
            return None
        bounds = time_bounds(self.plan, self.plan.spec.cost)
        # Neither pipeline bubble nor communication, which the bounds do not model either.
        times = step_times(self.work, self.plan)
        return float(times.sum() / bounds.sum())

    @property
    def largest_microbatch(self) -> int:
        """Tokens, padding included, of the largest microbatch, which determines peak memory."""
        return int(self.plan.num_tokens.max())

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
        """The reference of speedups: the fastest layout of another tool."""
        return min(self.others.values(), key=lambda outcome: outcome.step_time)

    @property
    def others(self) -> dict[str, Outcome]:
        """The fastest layout of each other tool, by the name of the tool."""
        fastest: dict[str, Outcome] = {}
        for outcome in self.outcomes:
            tool = outcome.strategy.tool
            if tool and (tool not in fastest or outcome.step_time < fastest[tool].step_time):
                fastest[tool] = outcome
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
    found = [
        Strategy("padded/microbatch", f"transformers: {rows}, padded", plain, tool="transformers")
    ]
    for algorithm in _NEMO_RL:
        bins = replace(packed, algorithm=algorithm, balance="none")
        # The table has to fit into 100 columns.
        short = str(algorithm).replace("first_fit_decreasing", "FFD")
        found.append(Strategy(_key(bins), f"NeMo RL: {short}", bins, tool="NeMo RL"))
    found.append(Strategy("verl", "verl: use_dynamic_bsz", packed, tool="verl"))
    dynamic = replace(packed, layout="padded")
    found.append(Strategy("dynamic", "dynamic, padded by length", dynamic))
    for algorithm, balance in _OWN:
        bins = replace(packed, algorithm=algorithm, balance=balance)
        found.append(Strategy(_key(bins), f"{algorithm} by {balance}", bins))
    if not any(each.plans_as(spec, stream) for each in found):
        found.append(Strategy("configured", "as configured", spec, stream=stream))
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
        outcomes.append(Outcome(strategy, plan, max_tokens, bubble, min_work))
        if not chosen_key and strategy.plans_as(spec, stream):
            chosen_key = strategy.key
        if strategy.shares_prefixes:
            saved = plan.metrics()["packing/shared_work_share"]
            if shared_prefix is True or saved >= MIN_SHARED_WORK:
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


_LINEAR_WORK = 24576
"""Work of a token over the work of a token squared: a 7B model, whatever the trained model is."""


def plan_verl(
    lengths: np.ndarray, spec: PlanSpec, num_trained: np.ndarray | None = None
) -> BatchPlan:
    """Plan rows of `lengths` int64 [B] as verl does with `use_dynamic_bsz`, packed as in `spec`.

    Rows of an optimizer step are divided over the ranks, equally many each, and then over the
    microbatches of a rank by the Karmarkar-Karp differencing method with an estimate of work. The
    number of microbatches is the tokens of the rank over the budget, rounded up, so that a
    microbatch may exceed the budget (`verl/utils/seqlen_balancing.py`, revision b178a3cd5).

    `num_trained` int64 [B] are the tokens with loss of each row; verl does not use them.
    """
    fitted = fit_rows(lengths, None, spec, num_trained)
    rows_per_step = spec.global_batch_size or max(len(lengths), 1)
    steps = []
    for start in range(0, len(lengths), rows_per_step):
        rows = np.arange(start, min(start + rows_per_step, len(lengths)))
        steps.append(_plan_verl_step(rows, fitted, spec))
    return join_steps(spec, fitted, steps, ())


def _plan_verl_step(rows: np.ndarray, fitted: FittedRows, spec: PlanSpec) -> Packing:
    """Plan the rows of one step, int64 [n]."""
    lengths = fitted.lengths[rows]
    work = (_LINEAR_WORK * lengths + lengths * lengths).tolist()
    # verl refuses a batch that the ranks do not divide.
    equal_size = len(rows) % spec.num_ranks == 0
    ranks = karmarkar_karp(work, spec.num_ranks, equal_size=equal_size)
    num_microbatches = 1
    for rank in ranks:
        num_tokens = int(fitted.padded_lengths[rows[rank]].sum())
        num_microbatches = max(num_microbatches, ceil_div(num_tokens, spec.capacity or 1))
    num_microbatches = round_up(num_microbatches, spec.microbatch_multiple)
    rank_bins = []
    for rank in ranks:
        # A rank with fewer rows than microbatches has dummies.
        num_bins = min(num_microbatches, max(len(rank), 1))
        parts = karmarkar_karp([work[row] for row in rank], num_bins, equal_size=False)
        parts.sort(key=lambda part: sum(work[rank[row]] for row in part), reverse=True)
        # The smallest ones are at both ends, where a pipeline fills and empties.
        parts = parts[::2][::-1] + parts[1::2]
        own = rows[[rank[row] for part in parts for row in part]]
        sizes = np.array([len(part) for part in parts], dtype=np.int64)
        rank_bins.append(Packing(own, prefix_sums(sizes)))
    return join_ranks(rank_bins, spec.microbatch_multiple)


@dataclass
class _Partition:
    """Items divided into parts, the one with the most work first."""

    parts: list[tuple[int, int, tuple[int, ...]]]
    """Work, number of items and items of each part."""

    def __lt__(self, other: _Partition) -> bool:
        # A heap returns the smallest first: the largest difference between two parts.
        return self._order > other._order

    @property
    def _order(self) -> tuple[object, ...]:
        return self.parts[0][0] - self.parts[-1][0], self.parts[0]


def karmarkar_karp(work: Sequence[int], num_parts: int, *, equal_size: bool) -> list[list[int]]:
    """Divide items into `num_parts` lists of indices with similar sums of `work`.

    With `equal_size` all have equally many items, which `num_parts` must divide. Some are empty if
    there are fewer items.

    Example: `karmarkar_karp([8, 7, 6, 5, 4], 2, equal_size=False)` is `[[1, 3, 4], [0, 2]]`.
    """
    items = [(value, 1, (index,)) for index, value in enumerate(work)]
    items.sort()
    size = num_parts if equal_size else 1
    heap = [_Partition([(0, 0, ())] * num_parts)]
    for start in range(0, len(items), size):
        empty = [(0, 0, ())] * (num_parts - size)
        heap.append(_Partition(items[start : start + size][::-1] + empty))
    heapq.heapify(heap)
    while len(heap) > 1:
        # The largest part of one joins the smallest part of the other.
        largest = heapq.heappop(heap)
        pairs = zip(largest.parts, reversed(heap[0].parts), strict=True)
        joined = [(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs]
        heapq.heapreplace(heap, _Partition(sorted(joined, reverse=True)))
    return [sorted(part) for _, _, part in heap[0].parts]


ACHIEVED_FLOPS = 400e12
ACHIEVED_BYTES_PER_S = 300e9
"""Achieved rates of one GPU of an H100 node: dense bf16 FLOP/s, and bytes/s of collectives within
the node. Only their ratio matters.
"""


def train_passes(placement: Placement) -> int:
    """Return the FLOPs of forward and backward pass in units of one forward pass.

    The backward pass computes the gradients of inputs and of weights. With adapters the weights
    are frozen, and the adapters are small beside them. Full recomputation is one more forward pass.
    """
    num_passes = 2 if placement.has_adapters else 3
    return num_passes + (placement.activation_checkpointing == "full")


def comm_bound_tokens(placement: Placement) -> float:
    """Return the tokens of a microbatch whose compute takes as long as its FSDP communication.

    Weights are all-gathered for forward and backward, float32 gradients are reduce-scattered:
    2 c + 4 bytes per parameter with c bytes per value, with adapters 2 c, against 2 FLOPs per
    parameter, token and pass. The number of parameters cancels.
    """
    flops = 2 * train_passes(placement)
    num_bytes = 2 * placement.compute_bytes + (0 if placement.has_adapters else 4)
    flops_per_byte = ACHIEVED_FLOPS / ACHIEVED_BYTES_PER_S
    return num_bytes / flops * flops_per_byte


def min_microbatch_tokens(placement: Placement, num_params: int) -> float:
    """Return the microbatch size below which FSDP communication takes longer than compute.

    It is 0 if weights are not communicated in every microbatch. Weights in 4 bits never are, and
    what remains, adapters and embeddings, is neglected.
    """
    if placement.has_quantized_weights:
        return 0.0
    layout = placement.parallel_layout
    is_unsharded = layout.keeps_unsharded(placement.engine, num_params)
    shards_weights = ENGINES[placement.engine].shards_weights
    if not shards_weights or is_unsharded or placement.num_shards == 1:
        return 0.0
    return comm_bound_tokens(placement) * layout.cp


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
    return work + np.where(work > 0, tail_work, dummy_work)


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
    work = by_microbatch(plan, cost.of(plan.lengths, plan.num_trained)).sum(axis=0)
    step_work = np.add.reduceat(work, plan.step_offsets[:-1])
    return step_work / plan.spec.num_ranks


def rank_work(work: np.ndarray, plan: BatchPlan) -> np.ndarray:
    """Return the work of each rank in each step, float64 [R, S], from `work` [R, M]."""
    return np.add.reduceat(work, plan.step_offsets[:-1], axis=1)


def min_microbatches(spec: PlanSpec, batches: list[np.ndarray]) -> np.ndarray:
    """Return a lower bound (L2) of the microbatches of each rank in each step, int64 [S].

    `batches` are the row lengths of each step, int [B]. The bound holds for packed rows.
    """
    capacity = spec.capacity or 1
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
    capacity = spec.capacity or 1
    is_dummy = (np.diff(plan.offsets) == 0).reshape(plan.num_tokens.shape)
    bounds = []
    for step, (start, stop) in enumerate(pairwise(plan.step_offsets)):
        rows = rows_of_step(plan, step)
        padded = plan.padded_lengths[rows]
        # A row above the capacity runs alone; the bounds need it to fit.
        lengths = np.minimum(padded, capacity)
        work = cost.of(padded, None if plan.num_trained is None else plan.num_trained[rows])
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
