"""The planning behind `nemo-like plan`: `make_plan` turns a `PlanRequest` into a `PlanReport`.

The request has plain values, independent of command-line flags. The report has everything that the
table, the page and the JSON record show.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.collate import TokenCounts
from nemo_like.data.planning.cost import CostModel
from nemo_like.data.planning.oversize import OversizeWarning, trained_after_truncation
from nemo_like.data.planning.plan import PlanSpec
from nemo_like.data.planning.spec import Oversize
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.integer_math import ceil_div, round_up
from nemo_like.models.layout_check import model_problems
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import Sync, engine_problems
from nemo_like.prediction.comparison import Comparison, Outcome, compare
from nemo_like.prediction.grpo_request import GrpoStepRequest, MeasuredTimes
from nemo_like.prediction.grpo_step import GrpoStepPrediction, calibrate, predict_grpo_step
from nemo_like.prediction.lengths import RowLengths
from nemo_like.prediction.memory import MemoryModel, usable_bytes
from nemo_like.prediction.placement import Placement
from nemo_like.prediction.step_time import (
    ACHIEVED_BYTES_PER_S,
    ACHIEVED_FLOPS,
    min_microbatch_tokens,
    train_passes,
)

_MIN_BUDGET = 8192
"""Token budget if neither a budget nor a memory is given, unless the longest row needs more."""
_ASSUMED_PARAMS = 7_000_000_000
"""Parameters of the dense 7B model whose work is assumed without a model."""
_BUDGET_MULTIPLE = 256
"""Recommended token budgets are multiples of this."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Row lengths, model, parallel layout and batch formation to plan for."""

    rows: RowLengths
    batch_size: int = 512
    """Rows per optimizer step."""
    placement: Placement = field(default_factory=Placement)
    model: ModelSpec | None = None
    """None: the work of a dense 7B model is assumed, and memory is not predicted."""
    max_tokens: int | None = None
    """Token budget of a microbatch; None: as many as fit into memory, or the longest row."""
    memory_gib: float | None = None
    """Memory of one GPU."""
    balance: Literal["flops", "tokens"] = "flops"
    sync: Sync | None = None
    """None: as the engine does for this model."""
    oversize: Oversize = "error"
    budget_name: str = "--max-tokens"
    """Flag or key of the token budget, for messages."""
    oversize_name: str = "--oversize"
    """Flag or key of the oversize policy, for messages."""
    sequence_length_round: int = 1
    micro_batch_size: int | None = None
    """Rows of a padded microbatch; None: as many as fit into the budget at the longest length."""
    seed: int = 0
    chosen: PlanSpec | None = None
    """The strategy of a config, which the report then describes; parallel sizes, cost, token budget
    and seed are those of the request.
    """
    stream: StreamSpec | None = None
    """Settings of the streaming planner that forms the steps of `chosen`; None: fixed batches."""
    logged: dict[str, tuple[float, float]] = field(default_factory=dict)
    """For a past run: metric -> (logged value, value predicted from the lengths)."""
    notes: tuple[str, ...] = ()
    grpo: GrpoStepRequest | None = None
    """The GRPO run of a config, before the flags that replace its keys; None for other jobs."""
    measured: MeasuredTimes | None = None
    """For a past GRPO run: its mean times, which calibrate the prediction of a step."""


@dataclass(frozen=True)
class Recommendation:
    """The largest token budget whose predicted peak fits."""

    max_tokens: int
    """A multiple of 256 and of what cp and tp need; 0 if nothing fits."""
    usable_gib: float
    max_useful_tokens: int
    """With this budget a step is one microbatch per rank; a larger budget has no effect."""
    outcome: Outcome | None
    """The chosen strategy with the smaller of the two budgets; None if the longest row does not
    fit.
    """
    other_max_tokens: int
    """The largest budget with the opposite setting of activation checkpointing."""


@dataclass(frozen=True, eq=False)
class PlanReport:
    """All strategies for the planned rows, with predicted time and memory."""

    request: PlanRequest
    lengths: np.ndarray
    """int64 [B], in the order they were planned."""
    max_tokens: int
    comparison: Comparison
    memory: MemoryModel | None
    notes: tuple[str, ...]
    grpo: GrpoStepPrediction | None = None
    """None for jobs without rollouts."""

    @property
    def spec(self) -> PlanSpec:
        return self.comparison.chosen.plan.spec

    @cached_property
    def recommendation(self) -> Recommendation | None:
        """None without a model or a memory."""
        request = self.request
        memory = self.memory
        if memory is None or request.memory_gib is None:
            return None
        multiple = math.lcm(_BUDGET_MULTIPLE, self.spec.total_multiple)
        usable = usable_bytes(request.memory_gib)
        budget = memory.largest_budget(usable, multiple)
        # A larger budget than the useful one changes nothing, so its effect is that of the latter.
        useful = max_useful_tokens(self.lengths, request, multiple)
        planned = min(budget, useful)
        outcome = None
        longest = round_up(int(self.lengths.max()), self.spec.row_multiple)
        if planned >= longest:
            outcome = _outcome_with(self.comparison.chosen, planned)
        is_off = request.placement.activation_checkpointing == "none"
        other_kind = "full" if is_off else "none"
        other = replace(request.placement, activation_checkpointing=other_kind)
        other_budget = MemoryModel(memory.spec, other).largest_budget(usable, multiple)
        return Recommendation(budget, usable / 2**30, useful, outcome, other_budget)

    def peak_gib(self, outcome: Outcome) -> float | None:
        """Return the predicted peak memory of one GPU in GiB: that of the largest microbatch."""
        if self.memory is None:
            return None
        return self.memory.peak(outcome.largest_microbatch) / 2**30

    def assumptions(self) -> list[str]:
        """Return the formulas behind the numbers, one sentence or more each."""
        lines = [*_time_assumptions(self)]
        if self.memory is not None:
            lines += self.memory.assumptions()
        if self.grpo is not None:
            lines += self.grpo.assumptions()
        return lines


def make_plan(request: PlanRequest) -> PlanReport:
    """Plan the rows with every strategy. Raises ConfigError if they cannot be planned."""
    _check(request)
    counts, notes = _global_batches(request)
    # A budget that is no multiple of the alignment could not be used completely.
    multiple = math.lcm(_BUDGET_MULTIPLE, base_spec(request, None).total_multiple)
    memory = None if request.model is None else MemoryModel(request.model, request.placement)
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens, note = _default_budget(request, counts.lengths, memory, multiple)
        notes.append(note)
    try:
        spec = base_spec(request, max_tokens)
    except ValueError as error:
        # The planner names the key; the user may have given a flag.
        text = str(error).replace("policy.sequence_packing.train_mb_tokens", request.budget_name)
        raise ConfigError(text) from error
    (lengths, num_trained), more_notes = _apply_oversize(request, counts, spec)
    chosen = None
    if request.chosen is not None:
        chosen = replace(request.chosen, **_shared(spec, request.chosen))
    with warnings.catch_warnings():
        # Every strategy would warn; the notes of the report mention the rows once.
        warnings.simplefilter("ignore", OversizeWarning)
        comparison = compare(
            lengths,
            spec,
            num_trained=num_trained,
            chosen=chosen,
            stream=None if chosen is None else request.stream,
            micro_batch_size=request.micro_batch_size,
            balance=request.balance,
            pp_size=request.placement.parallel_layout.pp,
            min_work=spec.cost.linear * _min_microbatch_tokens(request),
        )
    return PlanReport(
        request,
        lengths,
        max_tokens,
        comparison,
        memory,
        (*request.notes, *notes, *more_notes),
        _grpo_prediction(request, comparison.chosen.plan.spec),
    )


def _grpo_prediction(request: PlanRequest, spec: PlanSpec) -> GrpoStepPrediction | None:
    """Predict the GRPO step of the config with the layout of the request and its `spec`."""
    configured = request.grpo
    if configured is None:
        return None
    calibration = None
    if request.measured is not None:
        # The measured times are those of the run as it was configured.
        calibration = calibrate(configured, request.measured)
    num_workers = request.placement.parallel_layout.world_size
    split = replace(configured.split, policy=num_workers)
    if split.is_colocated:
        split = replace(split, generation=num_workers)
    changed = replace(configured, placement=request.placement, spec=spec, split=split)
    return predict_grpo_step(changed, calibration)


def base_spec(request: PlanRequest, max_tokens: int | None) -> PlanSpec:
    """Return the spec that every strategy starts from; without `max_tokens` there is no limit."""
    parallel_layout = request.placement.parallel_layout
    return PlanSpec(
        max_tokens=max_tokens or 2**40,
        num_ranks=parallel_layout.dp,
        global_batch_size=request.batch_size,
        sync=sync_of(request),
        sequence_length_round=request.sequence_length_round,
        cp_size=parallel_layout.cp,
        tp_size=parallel_layout.tp,
        sequence_parallel=parallel_layout.sequence_parallel,
        # Truncation and dropping were applied to the lengths before.
        oversize=request.oversize if request.oversize == "singleton" else "error",
        cost=CostModel() if request.model is None else CostModel.from_spec(request.model),
        seed=request.seed,
    )


def sync_of(request: PlanRequest) -> Sync:
    """Return where data-parallel ranks synchronize: as requested, or as in a run."""
    if request.sync is not None:
        return request.sync
    placement = request.placement
    return placement.parallel_layout.sync(placement.engine, _num_params(request))


def _min_microbatch_tokens(request: PlanRequest) -> float:
    """See `step_time.min_microbatch_tokens`."""
    return min_microbatch_tokens(request.placement, _num_params(request))


def _num_params(request: PlanRequest) -> int:
    """Parameters of the model, or of the model that is assumed without one."""
    return _ASSUMED_PARAMS if request.model is None else request.model.num_params


def max_useful_tokens(lengths: np.ndarray, request: PlanRequest, multiple: int) -> int:
    """Return a budget with which every step is one microbatch per rank, for `lengths` int64 [B].

    Assigning each row to the rank with the least tokens gives no rank more than the mean plus one
    row (list scheduling), so a budget of that size is enough for every packer.
    """
    longest = int(lengths.max())
    step_tokens = np.add.reduceat(lengths, np.arange(0, len(lengths), request.batch_size))
    mean_rank = ceil_div(int(step_tokens.max()), request.placement.parallel_layout.dp)
    return round_up(mean_rank + longest, multiple)


def _check(request: PlanRequest) -> None:
    """Raise ConfigError for a layout that does not fit the batch, the engine or the model."""
    placement = request.placement
    layout = placement.parallel_layout
    if request.batch_size < layout.dp:
        raise ConfigError(
            f"a batch of {request.batch_size} rows on {layout.dp} data-parallel ranks leaves some"
            f" without a row; use a batch of {layout.dp} rows or more, or fewer ranks"
        )
    problems = engine_problems(
        placement.engine,
        pp=layout.pp,
        ep=layout.ep,
        num_replicas=layout.num_replicas,
        reshard=layout.reshard,
    )
    if request.model is not None:
        problems += model_problems(layout, placement.engine, request.model)
    if problems:
        raise ConfigError("; ".join(problem.text() for problem in problems))


def _global_batches(request: PlanRequest) -> tuple[TokenCounts, list[str]]:
    """Return the rows in the order of the steps, full batches only, and notes."""
    rows = request.rows
    num_rows = len(rows.values)
    order = np.arange(num_rows)
    if not rows.is_ordered:
        order = np.random.default_rng(request.seed).permutation(num_rows)
    notes = []
    # A smaller last batch would not be a typical step.
    num_left = num_rows % request.batch_size
    if num_rows < request.batch_size:
        notes.append(
            f"only {num_rows:,} rows are there for a batch of {request.batch_size:,}: one smaller"
            " batch is planned"
        )
    elif num_left:
        notes.append(f"{num_left:,} rows do not fill a batch and are not planned")
        order = order[: num_rows - num_left]
    num_trained = None if rows.num_trained is None else rows.num_trained[order]
    return TokenCounts(rows.values[order], num_trained), notes


def _default_budget(
    request: PlanRequest, lengths: np.ndarray, memory: MemoryModel | None, multiple: int
) -> tuple[int, str]:
    """Return the token budget of a request without one, and a note about it.

    `lengths` is int64 [B].
    """
    longest = round_up(int(lengths.max()), multiple)
    not_given = f"{request.budget_name} was not given"
    if memory is None or request.memory_gib is None:
        budget = max(round_up(_MIN_BUDGET, multiple), longest)
        return budget, f"{not_given}: {budget:,} tokens, enough for the longest row"
    fitting = memory.largest_budget(usable_bytes(request.memory_gib), multiple)
    useful = max_useful_tokens(lengths, request, multiple)
    if fitting < longest:
        note = (
            f"the longest row does not fit into {request.memory_gib:g} GiB: planned with"
            f" {longest:,} tokens all the same; use activation checkpointing, more cp, tp or dp,"
            " or truncate the rows"
        )
        return longest, note
    if fitting >= useful:
        note = (
            f"{not_given}: {useful:,} tokens, with which a step is one microbatch per rank;"
            f" {fitting:,} would fit"
        )
        return useful, note
    note = f"{not_given}: {fitting:,} tokens, the max that fits into {request.memory_gib:g} GiB"
    return fitting, note


def _apply_oversize(
    request: PlanRequest, counts: TokenCounts, spec: PlanSpec
) -> tuple[TokenCounts, list[str]]:
    """Apply the oversize policy to rows above the budget, once for every strategy.

    Returns the rows to plan and notes; raises ConfigError with the policy `error`.
    """
    lengths, num_trained = counts
    padded = round_up(lengths, spec.row_multiple)
    is_over = padded > spec.max_row_tokens
    num_over = int(is_over.sum())
    if not num_over:
        return counts, []
    longest = int(lengths.max())
    # `lengths` are shuffled; the location is that of the row in its file.
    row = int(np.flatnonzero(request.rows.values == longest)[0])
    location = request.rows.location(row)
    text = (
        f"{num_over:,} of {len(lengths):,} rows are above {request.budget_name} {spec.max_tokens:,}"
    )
    if request.oversize == "error":
        needed = spec.padding_multiples.tokens_of_row(longest)
        raise ConfigError(
            f"{text}, the longest with {longest:,} tokens ({location}); raise it to {needed:,}, or"
            f" set {request.oversize_name} to truncate (remove the end), drop or singleton (a"
            " microbatch of its own)"
        )
    if request.oversize == "singleton":
        return counts, [f"{text} and are microbatches of their own, above the budget"]
    if request.oversize == "truncate":
        kept = np.minimum(lengths, spec.max_row_tokens)
        num_trained = trained_after_truncation(num_trained, lengths, kept)
        return TokenCounts(kept, num_trained), [f"{text} and their ends are removed"]
    kept = np.flatnonzero(~is_over)
    if not len(kept):
        raise ConfigError(f"{text}, so none is left; raise it to {longest:,}")
    # Fewer rows may fill fewer batches; a single smaller batch is kept.
    num_full = len(kept) // request.batch_size * request.batch_size
    if num_full > 0:
        kept = kept[:num_full]
    num_trained = None if num_trained is None else num_trained[kept]
    return TokenCounts(lengths[kept], num_trained), [f"{text} and are left out"]


def _shared(spec: PlanSpec, chosen: PlanSpec) -> dict[str, object]:
    """Return the fields of a config's strategy that are replaced by those of the request."""
    names = (
        "num_ranks",
        "global_batch_size",
        "sync",
        "cp_size",
        "tp_size",
        "sequence_parallel",
        "oversize",
        "cost",
        "seed",
    )
    shared: dict[str, object] = {name: getattr(spec, name) for name in names}
    # Without a token budget the strategy has a fixed number of rows per microbatch, which is kept.
    if chosen.max_tokens is not None:
        shared["max_tokens"] = spec.max_tokens
    return shared


def _outcome_with(outcome: Outcome, max_tokens: int) -> Outcome:
    """Return the outcome of the same strategy and rows with another token budget."""
    spec = outcome.strategy.spec.with_budget(max_tokens, None)
    strategy = replace(outcome.strategy, spec=spec)
    # The plan has lengths in execution order; planning needs them in the order of the rows.
    of_row = np.argsort(outcome.plan.rows)
    num_trained = outcome.plan.num_trained
    plan = strategy.plan(
        outcome.plan.lengths[of_row], None if num_trained is None else num_trained[of_row]
    )
    return replace(outcome, strategy=strategy, plan=plan, max_tokens=max_tokens)


def _time_assumptions(report: PlanReport) -> Iterator[str]:
    request, spec = report.request, report.spec
    cost = spec.cost
    pp_size = request.placement.parallel_layout.pp
    name = "a dense 7B model (no model was given)" if request.model is None else request.model.name
    window = f" (sliding window {cost.window})" if cost.window else ""
    unknown = ""
    if report.comparison.chosen.plan.num_trained is None:
        unknown = " (not known here: none)"
    times = "three times"
    if request.placement.lora is not None:
        times = "two times (the gradients of frozen weights are not computed)"
    yield (
        f"work of a row of L positions, padding included: {cost.linear:.4g} L +"
        f" {cost.quadratic:.4g} L^2{window}, forward FLOPs of {name} with causal attention, less"
        f" {cost.head:.4g} for each position without loss{unknown}; a training step does {times}"
        " that."
    )
    if spec.sync == "microbatch":
        sync = "in every microbatch: sum over microbatches of the slowest rank"
    else:
        sync = "once per step: total of the slowest rank"
    bubble = f", times (M + {pp_size} - 1) / M for the pipeline bubble" if pp_size > 1 else ""
    yield (
        f"step time: data-parallel ranks synchronize {sync}{bubble}; 1.00 is the work of the real"
        " tokens spread evenly over the ranks, without padding and idle time. Other communication"
        " and kernel efficiency are not included."
    )
    min_tokens = _min_microbatch_tokens(request)
    if min_tokens:
        flops = 2 * train_passes(request.placement)
        moved = "all-gathers the weights twice and reduce-scatters the gradients once"
        num_bytes = "(2 c + 4)"
        if request.placement.lora is not None:
            moved = "all-gathers the frozen weights twice"
            num_bytes = "2 c"
        yield (
            f"communication bound: a microbatch takes at least the time of {min_tokens:,.0f}"
            f" tokens, because FSDP2 {moved} for each: {num_bytes} bytes per parameter at"
            f" {ACHIEVED_BYTES_PER_S / 1e9:.0f} GB/s, against {flops} FLOPs per parameter and token"
            f" at {ACHIEVED_FLOPS / 1e12:.0f} TFLOP/s."
        )
    yield (
        "transformers, NeMo RL and verl: their layouts, with the work and the synchronization of"
        " this system; speed: step time of the fastest of them over that of the row. A microbatch"
        " of verl may exceed the token budget. FFD: first fit decreasing."
    )
    yield (
        "over min: microbatches over the lower bound ceil(L2 / ranks) per rank, with L2 of Martello"
        " and Toth. over bound: time over its lower bound for the same number of microbatches (1 is"
        " optimal; - for padded rows and verl, for which there is no bound)."
    )
