"""The planning behind `nemo-like plan`: `make_plan` turns a `PlanRequest` into a `PlanReport`.

The report has everything that the table, the page and the JSON record show.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.planning.oversize import OversizeWarning, trained_after_truncation
from nemo_like.data.planning.plan import PlanSpec
from nemo_like.data.planning.prefixes import SharedPrefixMode
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.integer_math import ceil_div, round_up
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import Oversize
from nemo_like.prediction.comparison import Comparison, Outcome, Strategy, compare, packed_spec
from nemo_like.prediction.duration import StepDuration
from nemo_like.prediction.lengths import PastRun, RowLengths
from nemo_like.prediction.memory import GIB, MemoryModel, usable_bytes
from nemo_like.prediction.placement import Placement

BUDGET_MULTIPLE = 256
"""Recommended token budgets are multiples of this."""


@dataclass(frozen=True, kw_only=True)
class MeasuredTime:
    """Training time of a past run over the prediction from the assumed rates."""

    scale: float
    """Median over the steps."""
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Row lengths, model, parallel layout and batch formation to plan for."""

    rows: RowLengths
    spec: PlanSpec
    """The strategy of the config, which the report describes, with `global_batch_size`."""
    max_tokens: int
    """Token budget of a microbatch; without one in `spec`, its largest possible microbatch."""
    model: ModelSpec
    placement: Placement = field(default_factory=Placement)
    oversize: Oversize = "error"
    """Treatment of rows above the budget."""
    budget_name: str = "policy.sequence_packing.train_mb_tokens"
    """Key of the token budget, for messages."""
    shared_prefix: SharedPrefixMode = "auto"
    """`policy.shared_prefix`, for rows whose common leading tokens are known."""
    stream: StreamSpec | None = None
    """Settings of the streaming planner that forms the steps; None: fixed batches."""
    memory_gib: float | None = None
    """Memory of one GPU; None: no budget is recommended."""
    num_gpus: int = 0
    """GPUs of the run; 0 on a CPU, whose time is predicted from a past run only."""
    measured: MeasuredTime | None = None
    """Training time of a past run on such devices; None: the rates are assumed."""
    logged: dict[str, tuple[float, float]] = field(default_factory=dict)
    """For a past run: metric -> (logged value, value predicted from the lengths)."""
    notes: tuple[str, ...] = ()

    @property
    def batch_size(self) -> int:
        """Rows per optimizer step."""
        return self.spec.global_batch_size or len(self.rows.counts.lengths)

    @property
    def duration(self) -> StepDuration:
        """Rates of the model."""
        return StepDuration(self.model, self.placement)

    @property
    def has_seconds(self) -> bool:
        """True if the time is predicted in seconds: the assumed rates are of GPUs in bfloat16."""
        is_assumed = self.num_gpus > 0 and self.placement.precision == "bfloat16"
        return is_assumed or self.measured is not None

    @property
    def time_scale(self) -> float:
        """Factor of the time that is predicted from the assumed rates."""
        return 1.0 if self.measured is None else self.measured.scale

    @property
    def overheads(self) -> dict[str, float]:
        """What `Outcome` adds to the work of rows: pipeline bubble and communication."""
        linear = self.spec.cost.linear
        return {
            "bubble": self.spec.bubble_microbatches,
            "min_work": linear * self.duration.min_tokens,
            "token_work": linear * self.duration.token_share,
            "exchange_share": self.duration.exchange_share,
        }


@dataclass(frozen=True)
class Recommendation:
    """The largest token budget whose predicted peak fits and which makes a difference."""

    max_tokens: int
    """A multiple of 256 and of what cp and tp need; 0 if nothing fits."""
    usable_gib: float
    max_useful_tokens: int
    """With this budget a step is one microbatch per rank; a larger budget has no effect."""
    outcome: Outcome | None
    """The chosen strategy with `max_tokens`; None if the longest row does not fit."""


@dataclass(frozen=True, eq=False)
class PlanReport:
    """All strategies for the planned rows, with predicted time and memory."""

    request: PlanRequest
    lengths: np.ndarray
    """int64 [B], in the order they were planned."""
    comparison: Comparison
    memory: MemoryModel
    notes: tuple[str, ...]

    @property
    def spec(self) -> PlanSpec:
        """The spec of the strategy that the report describes."""
        return self.comparison.chosen.plan.spec

    @cached_property
    def recommendation(self) -> Recommendation | None:
        """None if the memory of a GPU is not known."""
        request = self.request
        memory = self.memory
        if request.memory_gib is None:
            return None
        memory = replace(memory, image_share=None)
        multiple = math.lcm(BUDGET_MULTIPLE, self.spec.total_multiple)
        usable = usable_bytes(request.memory_gib)
        useful = max_useful_tokens(self.lengths, request.spec, multiple)
        # A larger budget than the useful one changes nothing.
        budget = min(memory.largest_budget(usable, multiple), useful)
        outcome = None
        if budget >= round_up(int(self.lengths.max()), self.spec.row_multiple):
            outcome = _outcome_with(self.comparison.chosen, budget)
        return Recommendation(budget, usable / GIB, useful, outcome)

    def peak_bytes(self, outcome: Outcome) -> float:
        """Return the predicted peak memory of one GPU, reached by the largest microbatch."""
        keys, share = outcome.keys_per_token, outcome.image_share
        memory = replace(self.memory, keys_per_token=keys, image_share=share)
        return memory.peak(outcome.largest_microbatch)

    def parts(self, max_tokens: int) -> dict[str, float]:
        """Return part -> bytes for the largest microbatch planned, or for another budget."""
        is_planned = max_tokens == self.comparison.chosen.largest_microbatch
        memory = self.memory if is_planned else replace(self.memory, image_share=None)
        return memory.parts(max_tokens)


def make_plan(request: PlanRequest) -> PlanReport:
    """Plan the rows with every strategy. Raises ConfigError if they cannot be planned."""
    counts, spec, notes = _prepared(request)
    with warnings.catch_warnings():
        # Every stream would warn; the notes of the report mention the rows once.
        warnings.simplefilter("ignore", OversizeWarning)
        comparison = compare(
            counts,
            spec,
            request.max_tokens,
            shared_prefix=request.shared_prefix,
            stream=request.stream,
            **request.overheads,
        )
    return PlanReport(
        request=request,
        lengths=counts.lengths,
        comparison=comparison,
        memory=MemoryModel(
            request.model,
            request.placement,
            comparison.chosen.keys_per_token,
            comparison.chosen.image_share,
        ),
        notes=(*request.notes, *notes),
    )


def plan_configured(request: PlanRequest) -> Outcome:
    """Plan the rows as the config does, in fixed batches. Raises ConfigError if that fails."""
    counts, spec, _ = _prepared(request)
    strategy = Strategy("configured", "as configured", spec)
    try:
        plan = strategy.plan(counts)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Outcome(strategy, plan, request.max_tokens, **request.overheads)


def _prepared(request: PlanRequest) -> tuple[TokenCounts, PlanSpec, list[str]]:
    """Return the rows in full batches and within the budget, the spec for them, and notes."""
    counts, notes = _global_batches(request)
    counts, more_notes = _apply_oversize(request, counts)
    # Truncation and dropping were applied to the lengths.
    oversize = "singleton" if request.oversize == "singleton" else "error"
    return counts, replace(request.spec, oversize=oversize), [*notes, *more_notes]


def seconds_per_step(request: PlanRequest, outcome: Outcome) -> float:
    """Return the mean predicted seconds of the training steps of an outcome."""
    duration = request.duration
    # The work of a spec may have another unit than FLOPs.
    num_flops = outcome.total_work / request.spec.cost.linear * duration.token_flops
    return num_flops / duration.flops_per_s / outcome.plan.num_steps * request.time_scale


def measured_time(request: PlanRequest, past: PastRun, num_epochs: int) -> MeasuredTime | None:
    """Compare the training time of the steps of a run with the prediction; None without steps.

    `request` is of the config of the run, whose steps train `num_epochs` times on their rows.
    """
    strategy = Strategy("configured", "as configured", request.spec)
    scales = []
    for metrics, plan in past.logged_plans(request.spec, request.shared_prefix):
        outcome = Outcome(strategy, plan, request.max_tokens, **request.overheads)
        predicted = seconds_per_step(request, outcome) * plan.num_steps * num_epochs
        scales.append(metrics.get("timing/train_s", 0.0) / predicted)
    # The first step after a start compiles; a mean would include it.
    return MeasuredTime(scale=median(scales), num_steps=len(scales)) if any(scales) else None


def max_useful_tokens(lengths: np.ndarray, spec: PlanSpec, multiple: int) -> int:
    """Return a budget with which every step is one microbatch per rank, for `lengths` int64 [B].

    Assigning each row to the rank with the least tokens gives no rank more than the mean plus one
    row (list scheduling), so a budget of that size is enough for every packer.
    """
    longest = int(lengths.max())
    starts = np.arange(0, len(lengths), spec.global_batch_size)
    step_tokens = np.add.reduceat(lengths, starts)
    mean_rank = ceil_div(int(step_tokens.max()), spec.num_ranks)
    return round_up(mean_rank + longest, multiple)


def _global_batches(request: PlanRequest) -> tuple[TokenCounts, list[str]]:
    """Return the rows in the order of the steps, full batches only, and notes."""
    rows = request.rows
    batch_size = request.batch_size
    num_rows = len(rows.counts.lengths)
    order = np.arange(num_rows)
    if not rows.is_ordered:
        # Rows of a group are trained in one step.
        trees = rows.counts.in_trees()
        rng = np.random.default_rng(request.spec.seed)
        order = trees.take(rng.permutation(trees.num_bins)).perm
    notes = []
    # A smaller last batch would not be a typical step.
    num_left = num_rows % batch_size
    if num_rows < batch_size:
        notes.append(
            f"only {num_rows:,} rows are there for a batch of {batch_size:,}: one smaller batch is"
            " planned"
        )
    elif num_left:
        notes.append(f"{num_left:,} rows do not fill a batch and are not planned")
        order = order[: num_rows - num_left]
    return rows.counts.take(order), notes


def _apply_oversize(request: PlanRequest, counts: TokenCounts) -> tuple[TokenCounts, list[str]]:
    """Apply the oversize policy to rows above the budget, once for every strategy.

    Returns the rows to plan and notes; raises ConfigError with the policy `error`.
    """
    spec = packed_spec(request.spec, request.max_tokens)
    lengths = counts.lengths
    is_over = round_up(lengths, spec.row_multiple) > spec.max_row_tokens
    num_over = int(is_over.sum())
    if not num_over:
        return counts, []
    longest = int(lengths.max())
    text = (
        f"{num_over:,} of {len(lengths):,} rows are above {request.budget_name}"
        f" {request.max_tokens:,}"
    )
    if request.oversize == "error":
        # `lengths` are shuffled; the location is the place of the row in its file.
        row = int(np.flatnonzero(request.rows.counts.lengths == longest)[0])
        needed = spec.padding_multiples.tokens_of_row(longest)
        raise ConfigError(
            f"{text}, the longest with {longest:,} tokens ({request.rows.location(row)}); raise it"
            f" to {needed:,}, or set policy.oversize_rows to truncate (remove the end), drop or"
            " singleton (a microbatch of its own)"
        )
    if request.oversize == "singleton":
        return counts, [f"{text} and are microbatches of their own, above the budget"]
    if request.oversize == "truncate":
        kept = np.minimum(lengths, spec.max_row_tokens)
        num_trained = trained_after_truncation(counts.num_trained, lengths, kept)
        prefixes = None if counts.prefixes is None else counts.prefixes.limited(kept)
        images = None if counts.image_tokens is None else np.minimum(counts.image_tokens, kept)
        counts = replace(
            counts, lengths=kept, num_trained=num_trained, prefixes=prefixes, image_tokens=images
        )
        return counts, [f"{text} and their ends are removed"]
    kept = np.flatnonzero(~is_over)
    if not len(kept):
        raise ConfigError(f"{text}, so none is left; raise it to {longest:,}")
    # Fewer rows may fill fewer batches; a single smaller batch is kept.
    num_full = len(kept) // request.batch_size * request.batch_size
    return counts.take(kept[: num_full or None]), [f"{text} and are left out"]


def _outcome_with(outcome: Outcome, max_tokens: int) -> Outcome:
    """Return the outcome of the same strategy and rows with another token budget."""
    spec = outcome.strategy.spec.with_budget(max_tokens, None)
    strategy = replace(outcome.strategy, spec=spec)
    # The plan has lengths in execution order; planning needs them in the order of the rows.
    done = outcome.plan
    in_order = TokenCounts(
        done.lengths, done.num_trained, image_tokens=done.image_tokens, image_work=done.image_work
    )
    counts = in_order.take(np.argsort(done.rows))
    plan = strategy.plan(replace(counts, prefixes=done.prefixes))
    return replace(outcome, strategy=strategy, plan=plan, max_tokens=max_tokens)
