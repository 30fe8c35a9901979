"""`nemo-like plan` without its command line: a request of plain values in, everything a table or a
page shows out.
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
from nemo_like.data.planning.balance import Sync
from nemo_like.data.planning.cost import CostModel
from nemo_like.data.planning.oversize import OversizeWarning, round_up_all
from nemo_like.data.planning.plan import PlanSpec
from nemo_like.data.planning.spec import Oversize, round_up
from nemo_like.models.spec import ModelSpec
from nemo_like.prediction.comparison import Comparison, Outcome, compare
from nemo_like.prediction.lengths import RowLengths
from nemo_like.prediction.memory import MemoryModel, Placement, usable_bytes
from nemo_like.prediction.step_time import ACHIEVED_BYTES_PER_S, ACHIEVED_FLOPS, traffic_tokens

_LEAST_BUDGET = 8192
"""Tokens of a microbatch where neither a budget nor a memory is given, unless a row is longer."""
_BUDGET_MULTIPLE = 256
"""What a recommended budget is a multiple of."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is asked for."""

    rows: RowLengths
    batch_size: int = 512
    """Rows per optimizer step."""
    placement: Placement = field(default_factory=Placement)
    model: ModelSpec | None = None
    """None: work as of a dense 7B model, and nothing about memory."""
    max_tokens: int | None = None
    """Token budget of a microbatch; None: what the memory holds, or enough for the longest row."""
    memory_gib: float | None = None
    """Memory of one GPU."""
    balance: Literal["flops", "tokens"] = "flops"
    sync: Sync | None = None
    """None: as the engine does for this model."""
    oversize: Oversize = "error"
    budget_name: str = "--max-tokens"
    """What a user would change to raise the budget."""
    oversize_name: str = "--oversize"
    sequence_length_round: int = 1
    micro_batch_size: int | None = None
    """Rows of a plainly padded microbatch; None: as many of the longest row as the budget holds."""
    seed: int = 0
    chosen: PlanSpec | None = None
    """How a configuration forms its batches, where that is among the strategies or not; its numbers
    are replaced.
    """
    logged: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of a past run: metric -> (what it logged, what is predicted from its lengths)."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recommendation:
    """The largest token budget whose predicted peak fits."""

    max_tokens: int
    """A multiple of 256 and of what cp and tp need; 0 if nothing fits."""
    usable_gib: float
    enough: int
    """From here on a whole step is one microbatch, so a larger budget buys nothing."""
    outcome: Outcome | None
    """The chosen strategy under this budget (or under `enough`); None where the longest row does
    not fit.
    """
    other_max_tokens: int
    """The largest budget with activation checkpointing the other way round."""


@dataclass(frozen=True, eq=False)
class PlanReport:
    """What was found."""

    request: PlanRequest
    lengths: np.ndarray
    """int64 [B], in the order they were planned."""
    max_tokens: int
    comparison: Comparison
    memory: MemoryModel | None
    notes: tuple[str, ...]

    @property
    def spec(self) -> PlanSpec:
        return self.comparison.chosen.plan.spec

    @cached_property
    def recommendation(self) -> Recommendation | None:
        """None without a model or a memory."""
        request, memory = self.request, self.memory
        if memory is None or request.memory_gib is None:
            return None
        multiple = math.lcm(_BUDGET_MULTIPLE, self.spec.total_multiple)
        usable = usable_bytes(request.memory_gib)
        budget = memory.largest_budget(usable, multiple)
        enough = enough_tokens(self.lengths, request, multiple)
        tried, outcome = min(budget, enough), None
        if tried >= round_up(int(self.lengths.max()), self.spec.row_multiple):
            outcome = _outcome_under(self.comparison.chosen, tried)
        other = replace(
            request.placement,
            activation_checkpointing=not request.placement.activation_checkpointing,
        )
        other_budget = MemoryModel(memory.spec, other).largest_budget(usable, multiple)
        return Recommendation(budget, usable / 2**30, enough, outcome, other_budget)

    def peak_gib(self, outcome: Outcome) -> float | None:
        """Predicted memory of one GPU under a strategy: that of its largest microbatch."""
        return None if self.memory is None else self.memory.peak(outcome.largest_microbatch) / 2**30

    def assumptions(self) -> list[str]:
        """How the numbers were made."""
        return [
            *_time_assumptions(self),
            *([] if self.memory is None else self.memory.assumptions()),
        ]


def make_plan(request: PlanRequest) -> PlanReport:
    """Plan the rows under every strategy. Raises ConfigError for what does not fit together."""
    _check(request)
    lengths, notes = _global_batches(request)
    multiple = math.lcm(_BUDGET_MULTIPLE, base_spec(request, None).total_multiple)
    memory = None if request.model is None else MemoryModel(request.model, request.placement)
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens, note = _default_budget(request, lengths, memory, multiple)
        notes.append(note)
    try:
        spec = base_spec(request, max_tokens)
    except ValueError as error:
        raise ConfigError(
            str(error).replace("policy.sequence_packing.train_mb_tokens", request.budget_name)
        ) from error
    lengths, more_notes = _fitted(request, lengths, spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OversizeWarning)  # said once, in the notes
        comparison = compare(
            lengths,
            spec,
            chosen=request.chosen and replace(request.chosen, **_shared(spec, request.chosen)),
            micro_batch_size=request.micro_batch_size,
            balance=request.balance,
            pp_size=request.placement.topology.pp,
            least_work=spec.cost.linear * least_tokens(request),
        )
    return PlanReport(
        request, lengths, max_tokens, comparison, memory, (*request.notes, *notes, *more_notes)
    )


def base_spec(request: PlanRequest, max_tokens: int | None) -> PlanSpec:
    """What every strategy shares."""
    topology = request.placement.topology
    return PlanSpec(
        max_tokens=max_tokens or 2**40,
        num_ranks=topology.dp,
        global_batch_size=request.batch_size,
        sync=sync_of(request),
        sequence_length_round=request.sequence_length_round,
        cp_size=topology.cp,
        tp_size=topology.tp,
        sequence_parallel=request.placement.sequence_parallel,
        oversize=request.oversize if request.oversize == "singleton" else "error",
        cost=CostModel() if request.model is None else CostModel.from_spec(request.model),
        seed=request.seed,
    )


def sync_of(request: PlanRequest) -> Sync:
    """Where ranks wait for each other, by the rule of the engines."""
    if request.sync is not None:
        return request.sync
    placement = request.placement
    if placement.engine == "megatron":
        return "microbatch" if placement.topology.pp > 1 else "step"
    is_whole = request.model is not None and MemoryModel(request.model, placement).keeps_whole
    return "step" if is_whole else "microbatch"


def least_tokens(request: PlanRequest) -> float:
    """Tokens of a microbatch below which moving the weights takes longer than computing with them;
    0 where they stay.
    """
    placement, spec = request.placement, request.model
    is_whole = spec is not None and MemoryModel(spec, placement).keeps_whole
    if placement.engine == "megatron" or placement.num_shards == 1 or is_whole:
        return 0.0
    per_rank = traffic_tokens(
        placement.compute_bytes, recomputes=placement.activation_checkpointing
    )
    return per_rank * placement.topology.cp


def enough_tokens(lengths: np.ndarray, request: PlanRequest, multiple: int) -> int:
    """A budget under which every step is one microbatch per rank, whatever the packer: least-loaded
    dealing never exceeds the mean rank plus one row."""
    longest = int(lengths.max())
    steps = np.add.reduceat(lengths, np.arange(0, len(lengths), request.batch_size))
    return round_up(-(-int(steps.max()) // request.placement.topology.dp) + longest, multiple)


def _check(request: PlanRequest) -> None:
    """What of the parallel degrees does not divide the batch or the model."""
    topology, spec = request.placement.topology, request.model
    if request.batch_size < topology.dp:
        raise ConfigError(
            f"a batch of {request.batch_size} rows on {topology.dp} data-parallel ranks leaves some"
            f" without a row; use a batch"
            f" of {topology.dp} rows or more, or fewer ranks"
        )
    if topology.pp > 1 and request.placement.engine == "dtensor":
        raise ConfigError(
            f"pp is {topology.pp}, but the dtensor engine has no pipeline; use the megatron engine,"
            f" or pp 1"
        )
    if request.placement.sequence_parallel and topology.tp == 1:
        raise ConfigError(
            "sequence parallelism shares what tensor parallelism leaves whole: raise tp, which is"
            " 1, or turn it off"
        )
    if spec is None:
        return
    kv_heads = spec.num_kv_heads
    if request.placement.engine == "megatron" and topology.tp % kv_heads == 0:
        kv_heads = spec.num_heads  # it has each key-value head on several ranks
    shown = f"dp {topology.dp} x tp {topology.tp} x cp {topology.cp} x pp {topology.pp}: {spec.name} has"
    for what, count in (("attention heads", spec.num_heads), ("key-value heads", kv_heads)):
        if count % topology.tp:
            divided = math.gcd(spec.num_heads, kv_heads)
            legal = ", ".join(
                str(number) for number in range(1, divided + 1) if divided % number == 0
            )
            raise ConfigError(
                f"{shown} {count} {what}, which tp {topology.tp} does not divide; tp may be {legal}"
            )
    if spec.num_layers < topology.pp:
        raise ConfigError(f"{shown} {spec.num_layers} layers, fewer than pp {topology.pp} stages")


def _global_batches(request: PlanRequest) -> tuple[np.ndarray, list[str]]:
    """The rows in the order of the steps, whole batches only, and what is to be said of it."""
    values = request.rows.values
    if not request.rows.is_ordered:
        values = np.random.default_rng(request.seed).permutation(values)
    size = request.batch_size
    if len(values) < size:
        return values, [
            f"only {len(values):,} rows are there for a batch of {size:,}: one smaller batch is"
            f" planned"
        ]
    left = len(values) % size
    return values[: len(values) - left], [
        f"{left:,} rows are left over from whole batches and not planned"
    ] if left else []


def _default_budget(
    request: PlanRequest, lengths: np.ndarray, memory: MemoryModel | None, multiple: int
) -> tuple[int, str]:
    longest = round_up(int(lengths.max()), multiple)
    if memory is None or request.memory_gib is None:
        budget = max(round_up(_LEAST_BUDGET, multiple), longest)
        return (
            budget,
            f"{request.budget_name} was not given: {budget:,} tokens, enough for the longest row",
        )
    fits = memory.largest_budget(usable_bytes(request.memory_gib), multiple)
    enough = enough_tokens(lengths, request, multiple)
    if fits < longest:
        return longest, (
            f"the longest row does not fit into {request.memory_gib:g} GiB: planned with"
            f" {longest:,} tokens all the same; use"
            " activation checkpointing, more cp, tp or dp, or truncate the rows"
        )
    if fits >= enough:
        return (
            enough,
            f"{request.budget_name} was not given: {enough:,} tokens, all that a step needs;"
            f" {fits:,} would fit",
        )
    return (
        fits,
        f"{request.budget_name} was not given: {fits:,} tokens, the most that fits into"
        f" {request.memory_gib:g} GiB",
    )


def _fitted(
    request: PlanRequest, lengths: np.ndarray, spec: PlanSpec
) -> tuple[np.ndarray, list[str]]:
    """Rows above the budget refused, cut or left out, the same for every strategy."""
    padded = round_up_all(lengths, spec.row_multiple)
    is_over = padded > spec.max_row_tokens
    num_over = int(is_over.sum())
    if not num_over:
        return lengths, []
    longest = int(lengths.max())
    values = request.rows.values
    place = request.rows.location(int(np.flatnonzero(values == longest)[0]))
    what = (
        f"{num_over:,} of {len(lengths):,} rows are above {request.budget_name} {spec.max_tokens:,}"
    )
    if request.oversize == "error":
        raise ConfigError(
            f"{what}, the longest with {longest:,} tokens ({place}); raise it to"
            f" {round_up(round_up(longest, spec.row_multiple), spec.total_multiple):,}, or set"
            f" {request.oversize_name} to"
            " truncate (cut the end), drop or singleton (run it alone)"
        )
    if request.oversize == "singleton":
        return lengths, [f"{what} and run alone, above the budget"]
    if request.oversize == "truncate":
        return np.minimum(lengths, spec.max_row_tokens), [f"{what} and their ends are cut off"]
    kept = lengths[~is_over]
    if not len(kept):
        raise ConfigError(f"{what}, so none is left; raise it to {longest:,}")
    return kept[: len(kept) // request.batch_size * request.batch_size or None], [
        f"{what} and are left out"
    ]


def _shared(spec: PlanSpec, chosen: PlanSpec) -> dict[str, object]:
    """What a configuration's own way to form batches takes from the request."""
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
    return shared if chosen.max_tokens is None else {**shared, "max_tokens": spec.max_tokens}


def _outcome_under(outcome: Outcome, max_tokens: int) -> Outcome:
    strategy = replace(outcome.strategy, spec=outcome.strategy.spec.with_budget(max_tokens, None))
    by_row = np.zeros(outcome.plan.num_rows, dtype=np.int64)
    by_row[outcome.plan.rows] = outcome.plan.lengths
    return replace(outcome, strategy=strategy, plan=strategy.plan(by_row), max_tokens=max_tokens)


def _time_assumptions(report: PlanReport) -> Iterator[str]:
    request, spec = report.request, report.spec
    cost, topology = spec.cost, request.placement.topology
    name = "a dense 7B model (no model was given)" if request.model is None else request.model.name
    yield (
        f"work of a row of L positions, padding included: {cost.linear:.4g} L +"
        f" {cost.quadratic:.4g} L^2"
        + (f" (sliding window {cost.window})" if cost.window else "")
        + f", forward FLOPs of {name} with causal attention; a step does three times that."
    )
    where = (
        "at every microbatch: sum over microbatches of the dearest rank"
        if spec.sync == "microbatch"
        else ("once a step: the dearest rank's sum")
    )
    bubble = f", times (M + {topology.pp} - 1) / M for the pipeline" if topology.pp > 1 else ""
    yield (
        f"step time: ranks wait for each other {where}{bubble}; 1.00 is the real tokens' work"
        f" spread evenly, without padding or"
        " waiting. Other communication and kernel efficiency are not in it."
    )
    least = least_tokens(request)
    if least:
        yield (
            f"a microbatch takes no less time than {least:,.0f} tokens do: FSDP2 moves the weights"
            f" twice and the gradients once"
            f" for each, (2 c + 4) bytes a parameter at {ACHIEVED_BYTES_PER_S / 1e9:.0f} GB/s,"
            f" against"
            f" {8 if request.placement.activation_checkpointing else 6} FLOPs a parameter and token"
            f" at"
            f" {ACHIEVED_FLOPS / 1e12:.0f} TFLOP/s."
        )
    yield (
        "least: ceil(L2 / ranks) microbatches of each rank, L2 by Martello and Toth: no packing can"
        " do with fewer. over bound:"
        " the time over the least proven possible in as many microbatches (1 is optimal; - where"
        " rows are padded)."
    )
