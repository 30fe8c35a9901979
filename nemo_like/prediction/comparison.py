"""Comparison of batching strategies on the same rows: padding, microbatches, balance, step time.

Among them are the layouts of transformers, NeMo RL and verl. Times are those of this system's
engine with such a layout, not measurements of those tools.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.packing.algorithms import PackingAlgorithm
from nemo_like.data.planning.plan import BatchPlan, PlanSpec, plan_batch
from nemo_like.data.planning.spec import Balance
from nemo_like.data.streaming.planner import plan_stream
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.integer_math import ceil_div, round_up
from nemo_like.prediction.step_time import (
    by_microbatch,
    ideal_times,
    microbatch_work,
    min_microbatches,
    rank_work,
    step_times,
    time_bounds,
)
from nemo_like.prediction.verl_layout import plan_verl

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

    def plans_as(self, spec: PlanSpec, stream: StreamSpec | None) -> bool:
        """Return True if a run with `spec` and `stream` has these plans."""
        # Only verl assigns rows in a way that no spec selects.
        return self.tool != "verl" and (self.spec, self.stream) == (spec, stream)

    def plan(self, lengths: np.ndarray, num_trained: np.ndarray | None = None) -> BatchPlan:
        """Plan rows of `lengths`, with their tokens with loss if they are known; int64 [B] each.

        Raises ValueError for rows that cannot be planned.
        """
        if self.stream is not None:
            step_spec = replace(self.spec, global_batch_size=None)
            return plan_stream(lengths, replace(self.stream, plan=step_spec), num_trained)
        if self.tool == "verl":
            return plan_verl(lengths, self.spec, num_trained)
        return plan_batch(lengths, self.spec, num_trained=num_trained)


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
    pp_size: int = 1
    min_work: float = 0.0
    """Lower limit of the work of a microbatch, because of FSDP communication."""

    @cached_property
    def work(self) -> np.ndarray:
        """Work of each microbatch, padding included, float64 [R, M]."""
        # A cached property, because six of the reported numbers are derived from it.
        return microbatch_work(self.plan, self.plan.spec.cost)

    @cached_property
    def real_tokens(self) -> np.ndarray:
        """Tokens of each microbatch without padding, int64 [R, M]."""
        return by_microbatch(self.plan, self.plan.lengths)

    @cached_property
    def real_work(self) -> np.ndarray:
        """Work of each microbatch without padding, float64 [R, M]."""
        plan = self.plan
        return by_microbatch(plan, plan.spec.cost.of(plan.lengths, plan.num_trained))

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
        """Real tokens over the token budgets of the microbatches that are not empty."""
        # Dummies have no rows; no packing could fill them.
        num_filled = int(np.count_nonzero(np.diff(self.plan.offsets)))
        num_tokens = float(self.plan.lengths.sum())
        return num_tokens / max(num_filled * self.max_tokens, 1)

    @cached_property
    def rank_tokens(self) -> float:
        """Tokens, padding included, of the max-loaded rank over those of the mean rank."""
        return _max_over_mean(self.plan.num_tokens.astype(np.float64), self.plan)

    @cached_property
    def rank_flops(self) -> float:
        """Work of the max-loaded rank over that of the mean rank."""
        return _max_over_mean(self.work, self.plan)

    @cached_property
    def step_time(self) -> float:
        """Step time over that of the same real tokens without padding and idle time."""
        times = step_times(self.work, self.plan, pp_size=self.pp_size, min_work=self.min_work)
        ideal = ideal_times(self.plan, self.plan.spec.cost)
        # A quotient of sums: a mean of ratios would weight short steps too much.
        return float(times.sum() / ideal.sum())

    @cached_property
    def over_bound(self) -> float | None:
        """Step time, idle time included, over its lower bound for as many microbatches.

        None for padded rows and for verl, which exceeds the budget: there is no bound.
        """
        if self.plan.spec.layout == "padded" or self.strategy.tool == "verl":
            return None
        bounds = time_bounds(self.plan, self.plan.spec.cost)
        # Neither pipeline bubble nor communication, which the bounds do not model either.
        times = step_times(self.work, self.plan)
        return float(times.sum() / bounds.sum())

    @property
    def largest_microbatch(self) -> int:
        """Tokens, padding included, of the largest microbatch, which determines peak memory."""
        return int(self.plan.num_tokens.max())


@dataclass(frozen=True, eq=False)
class Comparison:
    """All outcomes for the same rows."""

    lengths: np.ndarray
    """int64 [B] in the order of planning: `batch_size` consecutive rows are one optimizer step."""
    batch_size: int
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
    def num_steps(self) -> int:
        return self.chosen.plan.num_steps

    def speedup(self, outcome: Outcome) -> float:
        return self.baseline.step_time / outcome.step_time


def strategies(
    spec: PlanSpec,
    longest: int,
    *,
    chosen: PlanSpec | None = None,
    stream: StreamSpec | None = None,
    micro_batch_size: int | None = None,
) -> list[Strategy]:
    """Return every strategy with the token budget of the packed `spec`.

    Algorithm and balance of `spec` are replaced. Padding without dynamic batching takes
    `micro_batch_size` rows at a time, or as many as fit into the budget at the length `longest`.
    `chosen` comes last, if it is none of the others; with `stream` it is planned as a stream.
    """
    assert spec.max_tokens is not None
    plain = replace(
        spec, layout="padded", max_tokens=None, max_rows=1, balance="flops", oversize="error"
    )
    num_rows = micro_batch_size
    if not num_rows:
        # As many as fit if all are as long as the longest: nothing else is safe without a plan.
        rows_per_rank = ceil_div(spec.global_batch_size or 1, spec.num_ranks)
        num_fitting = spec.max_tokens // round_up(longest, plain.row_multiple)
        num_rows = max(min(num_fitting, rows_per_rank), 1)
    plain = replace(plain, max_rows=num_rows)
    rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
    found = [
        Strategy("padded/microbatch", f"transformers: {rows}, padded", plain, tool="transformers")
    ]
    for algorithm in _NEMO_RL:
        packed = replace(spec, algorithm=algorithm, balance="none")
        # The table has to fit into 100 columns.
        short = str(algorithm).replace("first_fit_decreasing", "FFD")
        found.append(Strategy(_key(packed), f"NeMo RL: {short}", packed, tool="NeMo RL"))
    found.append(Strategy("verl", "verl: use_dynamic_bsz", spec, tool="verl"))
    dynamic = replace(spec, layout="padded", algorithm=PackingAlgorithm.BALANCED, balance="flops")
    found.append(Strategy("dynamic", "dynamic, padded by length", dynamic))
    for algorithm, balance in _OWN:
        packed = replace(spec, algorithm=algorithm, balance=balance)
        found.append(Strategy(_key(packed), f"{algorithm} by {balance}", packed))
    if chosen is not None and not any(each.plans_as(chosen, stream) for each in found):
        found.append(Strategy("configured", "as configured", chosen, stream=stream))
    return found


def compare(
    lengths: np.ndarray,
    spec: PlanSpec,
    *,
    num_trained: np.ndarray | None = None,
    chosen: PlanSpec | None = None,
    stream: StreamSpec | None = None,
    balance: str = "flops",
    micro_batch_size: int | None = None,
    pp_size: int = 1,
    min_work: float = 0.0,
) -> Comparison:
    """Plan `lengths` int64 [B] in batches of `spec.global_batch_size` with every strategy.

    `num_trained` int64 [B] are the tokens with loss of each row; None: they are not known.
    The strategy that the report describes is `chosen`, whose steps `stream` forms if it is given;
    without `chosen` it is `balanced` with `balance`. Raises ConfigError for rows that cannot be
    planned.
    """
    assert spec.max_tokens is not None
    batch_size = spec.global_batch_size or len(lengths)
    longest = int(lengths.max())
    outcomes = []
    for strategy in strategies(
        spec, longest, chosen=chosen, stream=stream, micro_batch_size=micro_batch_size
    ):
        try:
            plan = strategy.plan(lengths, num_trained)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        outcomes.append(Outcome(strategy, plan, spec.max_tokens, pp_size, min_work))
    by_key = {outcome.strategy.key: outcome for outcome in outcomes}
    balanced_key = f"packed/balanced/{balance}"
    # The strategy of a config may be one of the compared ones; it then keeps that name.
    chosen_key = balanced_key
    for key, outcome in by_key.items():
        if chosen is not None and outcome.strategy.plans_as(chosen, stream):
            chosen_key = key
            break
    batches = [lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
    bounds = min_microbatches(by_key[balanced_key].plan, batches)
    return Comparison(lengths, batch_size, tuple(outcomes), chosen_key, float(bounds.mean()))


def _max_over_mean(values: np.ndarray, plan: BatchPlan) -> float:
    """Return the sum over steps of the max rank over that of the mean rank; `values` is [R, M]."""
    by_rank = rank_work(values, plan)
    max_loaded = by_rank.max(axis=0).sum()
    mean = by_rank.mean(axis=0).sum()
    return float(max_loaded / mean)


def _key(spec: PlanSpec) -> str:
    return f"packed/{spec.algorithm}/{spec.balance}"
