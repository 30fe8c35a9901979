"""The same rows under every way to form batches: padding, microbatches, balance, and what each is
worth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.packing.algorithms import PackingAlgorithm
from nemo_like.data.planning.oversize import round_up_all
from nemo_like.data.planning.plan import BatchPlan, PlanSpec, plan_batch
from nemo_like.data.planning.spec import round_up
from nemo_like.prediction.step_time import (
    by_microbatch,
    ideal_times,
    least_microbatches,
    least_times,
    microbatch_work,
    rank_work,
    step_times,
)

COMPARED_PACKERS = (
    PackingAlgorithm.CONCATENATIVE,
    PackingAlgorithm.FIRST_FIT_SHUFFLE,
    PackingAlgorithm.FIRST_FIT_DECREASING,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING,
    PackingAlgorithm.BEST_FIT_DECREASING,
)


@dataclass(frozen=True)
class Strategy:
    """One way to form batches."""

    key: str
    """Example: `packed/first_fit_shuffle/none`: layout, packer, what ranks are balanced by."""
    title: str
    spec: PlanSpec
    is_padded_to_batch: bool = False
    """Every row is padded to the longest of its global batch, not only of its microbatch."""

    def plan(self, lengths: np.ndarray) -> BatchPlan:
        plan = plan_batch(lengths, self.spec)
        if not self.is_padded_to_batch:
            return plan
        per_step = plan.spec.global_batch_size or len(lengths)
        longest = round_up_all(
            np.maximum.reduceat(lengths, np.arange(0, len(lengths), per_step)),
            plan.spec.row_multiple,
        )
        return replace(plan, padded_lengths=longest[plan.rows // per_step])


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a strategy makes of the rows. A step is one optimizer step; ratios are over all steps,
    weighted by work.
    """

    strategy: Strategy
    plan: BatchPlan
    max_tokens: int
    """The token budget of a microbatch."""
    pp_size: int = 1
    least_work: float = 0.0
    """What the shortest microbatch takes."""

    @cached_property
    def work(self) -> np.ndarray:
        """float64 [R, M]"""
        return microbatch_work(self.plan, self.plan.spec.cost)

    @cached_property
    def real_tokens(self) -> np.ndarray:
        """int64 [R, M]"""
        return by_microbatch(self.plan, self.plan.lengths)

    @cached_property
    def real_work(self) -> np.ndarray:
        """Work of the rows as they are, without padding, float64 [R, M]."""
        return by_microbatch(self.plan, self.plan.spec.cost.of(self.plan.lengths))

    @cached_property
    def metrics(self) -> dict[str, float]:
        """What a run with this plan would log."""
        return self.plan.metrics()

    @property
    def padding_share(self) -> float:
        return self.metrics["packing/padding_share"]

    @property
    def num_microbatches(self) -> float:
        """Of each rank in a step, on average."""
        return self.metrics["packing/num_microbatches"]

    @cached_property
    def utilization(self) -> float:
        """Real tokens over what the microbatches that hold rows could take."""
        num_filled = int(np.count_nonzero(np.diff(self.plan.offsets)))
        return float(self.plan.lengths.sum()) / max(num_filled * self.max_tokens, 1)

    @cached_property
    def rank_tokens(self) -> float:
        """The rank with the most positions over the mean rank."""
        return _worst_over_mean(self.plan.num_tokens.astype(np.float64), self.plan)

    @cached_property
    def rank_flops(self) -> float:
        """The rank with the most work over the mean rank."""
        return _worst_over_mean(self.work, self.plan)

    @cached_property
    def step_time(self) -> float:
        """Time of the mean step over that of the same real tokens without padding and waiting."""
        times = step_times(self.work, self.plan, pp_size=self.pp_size, least_work=self.least_work)
        return float(times.sum() / ideal_times(self.plan, self.plan.spec.cost).sum())

    @cached_property
    def over_bound(self) -> float | None:
        """The time ranks take, waiting included, over the least that is proven possible in as many
        microbatches; None where rows are padded, which no bound is known for."""
        if self.plan.spec.layout == "padded":
            return None
        least = least_times(self.plan, self.plan.spec.cost)
        return float(step_times(self.work, self.plan).sum() / least.sum())

    @property
    def largest_microbatch(self) -> int:
        """Positions of the largest microbatch: what memory must hold."""
        return int(self.plan.num_tokens.max())


@dataclass(frozen=True, eq=False)
class Comparison:
    """All outcomes for the same rows."""

    lengths: np.ndarray
    """int64 [B], in the order of planning: every `batch_size` are one optimizer step."""
    batch_size: int
    outcomes: tuple[Outcome, ...]
    chosen_key: str
    """The strategy that memory and pictures are about."""
    least_microbatches: float
    """The fewest microbatches of each rank in a step that packing can do, on average: proven by the
    L2 bound.
    """

    def __getitem__(self, key: str) -> Outcome:
        return next(outcome for outcome in self.outcomes if outcome.strategy.key == key)

    @property
    def chosen(self) -> Outcome:
        return self[self.chosen_key]

    @property
    def baseline(self) -> Outcome:
        """What speed-ups are told against: microbatches padded to their longest row."""
        return self["padded/microbatch"]

    @property
    def num_steps(self) -> int:
        return self.chosen.plan.num_steps

    def speedup(self, outcome: Outcome) -> float:
        return self.baseline.step_time / outcome.step_time


def strategies(
    spec: PlanSpec,
    longest: int,
    *,
    chosen: PlanSpec | None = None,
    micro_batch_size: int | None = None,
) -> Iterator[Strategy]:
    """Every way to form batches under the budget of the packed `spec`, whose algorithm and balance
    are replaced.

    Plain padding takes `micro_batch_size` rows at a time, or as many as the budget holds of the
    longest row. `chosen`, where it is none of them, comes last.
    """
    assert spec.max_tokens is not None
    plain = replace(
        spec, layout="padded", max_tokens=None, max_rows=1, balance="flops", oversize="error"
    )
    most = -(-(spec.global_batch_size or 1) // spec.num_ranks)
    at_once = micro_batch_size or max(
        min(spec.max_tokens // round_up(longest, plain.row_multiple), most), 1
    )
    plain = replace(plain, max_rows=at_once)
    rows = "1 row" if at_once == 1 else f"{at_once} rows"
    yield Strategy("padded/batch", f"padded to the batch, {rows}", plain, is_padded_to_batch=True)
    yield Strategy("padded/microbatch", f"padded, {rows} at a time", plain)
    dynamic = replace(spec, layout="padded", algorithm=PackingAlgorithm.BALANCED, balance="flops")
    yield Strategy("dynamic", "dynamic, padded by length", dynamic)
    named = [("none", algorithm) for algorithm in COMPARED_PACKERS]
    named += [(balance, PackingAlgorithm.BALANCED) for balance in ("tokens", "flops")]
    specs = [replace(spec, algorithm=algorithm, balance=balance) for balance, algorithm in named]
    yield from (Strategy(_key(each), _title(each), each) for each in specs)
    if chosen is not None and chosen not in (*specs, plain, dynamic):
        yield Strategy("configured", "as configured", chosen)


def compare(
    lengths: np.ndarray,
    spec: PlanSpec,
    *,
    chosen: PlanSpec | None = None,
    balance: str = "flops",
    micro_batch_size: int | None = None,
    pp_size: int = 1,
    least_work: float = 0.0,
) -> Comparison:
    """Plan `lengths` int64 [B] in batches of `spec.global_batch_size` under every strategy.

    The chosen one is `chosen` where it is given, else `balanced` by `balance`. Raises ConfigError
    for rows that cannot be planned.
    """
    assert spec.max_tokens is not None
    batch_size = spec.global_batch_size or len(lengths)
    outcomes = []
    for strategy in strategies(
        spec, int(lengths.max()), chosen=chosen, micro_batch_size=micro_batch_size
    ):
        try:
            plan = strategy.plan(lengths)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        outcomes.append(Outcome(strategy, plan, spec.max_tokens, pp_size, least_work))
    by_key = {outcome.strategy.key: outcome for outcome in outcomes}
    balanced = f"packed/balanced/{balance}"
    found = [key for key, outcome in by_key.items() if outcome.strategy.spec == chosen]
    batches = [lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
    least = least_microbatches(by_key[balanced].plan, batches)
    return Comparison(
        lengths, batch_size, tuple(outcomes), (found or [balanced])[0], float(least.mean())
    )


def _worst_over_mean(values: np.ndarray, plan: BatchPlan) -> float:
    """Sum over steps of the busiest rank over that of the mean rank, for `values` [R, M]."""
    by_rank = rank_work(values, plan)
    return float(by_rank.max(axis=0).sum() / by_rank.mean(axis=0).sum())


def _key(spec: PlanSpec) -> str:
    return f"packed/{spec.algorithm}/{spec.balance}"


def _title(spec: PlanSpec) -> str:
    return f"{spec.algorithm}" if spec.balance == "none" else f"{spec.algorithm} by {spec.balance}"
