"""The settings of a streaming planner, and the warmup of its token limit (VeOmni)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.streaming.selection import MicrobatchLimits, Selection
from nemo_like.integer_math import check_integer, nearest_multiples

Tail = Literal["emit", "drop", "wrap"]
CountMode = Literal["total", "effective"]

_WINDOW_BUDGETS = {"packed": 4, "padded": 16}
"""Default `window_tokens` as a multiple of the token limit. Packed microbatches are full with few
rows to choose from; padded ones need rows of similar length.
"""
_FULL_BUDGETS = {"packed": 1, "padded": 4}
"""Tokens that `window_rows` rows must have, as a multiple of the token limit."""


@dataclass(frozen=True)
class WarmupBudget:
    """Token budget that grows linearly from `init_tokens` to `max_tokens` in `num_steps` steps.

    Example: `WarmupBudget(1000, 200, 10)` is 200 tokens in step 0, 600 in step 5, and 1000 from
    step 10 on. The budget is a function of the step, so a resumed run needs no state of it. Raises
    ValueError for an `init_tokens` below 1 or above `max_tokens` and a negative `num_steps`.
    """

    max_tokens: int
    """Tokens per microbatch after the warmup."""
    init_tokens: int = 200
    """Tokens per microbatch in step 0."""
    num_steps: int = 0
    """Number of optimizer steps of the warmup; 0 for no warmup."""

    def __post_init__(self) -> None:
        if not 1 <= self.init_tokens <= self.max_tokens:
            raise ValueError(
                f"init_tokens is {self.init_tokens} but must be between 1 and max_tokens ="
                f" {self.max_tokens}"
            )
        if self.num_steps < 0:
            raise ValueError(f"num_steps is {self.num_steps} but must be at least 0")

    def at(self, step: int) -> int:
        """Return the budget in tokens of the optimizer step `step`, counted from 0.

        Raises ValueError for a negative step.
        """
        if step < 0:
            raise ValueError(f"step is {step} but must be at least 0")
        if step >= self.num_steps:
            return self.max_tokens
        return self.init_tokens + (self.max_tokens - self.init_tokens) * step // self.num_steps


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """All inputs of a streaming planner besides the rows. Raises ValueError for wrong values.

    Example: two ranks, two packed microbatches of 4,096 tokens per step and rank, chosen among at
    most 2 x 256 rows: `StreamSpec(plan=PlanSpec(max_tokens=4096, num_ranks=2),
    microbatches_per_step=2)`.
    """

    plan: PlanSpec
    """Layout, token limit, ranks, padding multiples, treatment of oversize rows and cost."""
    selection: Selection = "best_fit"
    """Rule that selects the rows of a microbatch, see `selection`."""
    microbatches_per_step: int = 1
    """Microbatches of each rank in one optimizer step."""
    window_rows: int = 256
    """Rows per rank from which a microbatch is formed. Unless `window_tokens` is 0, the window then
    also has rows for a full microbatch: their tokens reach the token limit (4 times the limit where
    a rule looks for padded rows of similar length), or they are `max_rows`.
    """
    window_tokens: int | None = None
    """Positions per rank from which a microbatch is formed although the window has fewer rows. None
    is 4 times the token limit in the packed layout and 16 times in the padded layout; 0 waits for
    `window_rows`.
    """
    tail: Tail = "emit"
    """Rows at the end of the stream that do not fill a step: a smaller step, or none. `wrap` is the
    same as `emit` here: a source that continues with the next epoch has no end.
    """
    max_rows: int | None = None
    """Maximum rows of a microbatch."""
    max_extra: int | None = None
    """Maximum of the second resource of a microbatch, for example image patches."""
    count_mode: CountMode = "total"
    """`effective` fills a microbatch up to the token limit with tokens that have loss. Its
    positions are limited by `physical_overflow_ratio`.
    """
    physical_overflow_ratio: float = 1.5
    """With `count_mode="effective"`: maximum positions over the token limit."""
    warmup_steps: int = 0
    """Steps over which the token limit grows linearly from `warmup_init_tokens`."""
    warmup_init_tokens: int = 200
    """Token limit of the first step of the warmup."""

    def __post_init__(self) -> None:
        if not isinstance(self.plan, PlanSpec):
            raise ValueError(
                f"plan is a {type(self.plan).__name__}; give a PlanSpec, such as"
                " PlanSpec(max_tokens=8192)"
            )
        for name, kind in (("tail", Tail), ("count_mode", CountMode), ("selection", Selection)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{name} is one of {', '.join(get_args(kind))}; got {getattr(self, name)!r}"
                )
        for name in ("microbatches_per_step", "window_rows", "warmup_init_tokens"):
            check_integer(name, getattr(self, name), 1)
        for name in ("max_rows", "max_extra"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        if self.window_tokens is not None:
            check_integer("window_tokens", self.window_tokens, 0)
        check_integer("warmup_steps", self.warmup_steps, 0)
        if not 1.0 <= self.physical_overflow_ratio < math.inf:
            raise ValueError(
                f"physical_overflow_ratio is {self.physical_overflow_ratio}; a microbatch has at"
                " least as many positions as tokens with loss, so it must be at least 1"
            )
        if self.plan.max_tokens is None:
            raise ValueError(
                "a streaming planner fills microbatches up to a token limit: set max_tokens of the"
                f" plan ({self.plan.budget_key} in a config, with its section enabled)"
            )
        if self.plan.max_rows is not None:
            raise ValueError(
                f"plan.max_rows is {self.plan.max_rows}, which a streaming planner does not use;"
                " set max_rows of the StreamSpec instead"
            )
        if self.plan.global_batch_size is not None:
            raise ValueError(
                "a streaming planner forms one step at a time: global_batch_size must be None, got"
                f" {self.plan.global_batch_size}"
            )
        if self.microbatches_per_step % self.plan.microbatch_multiple:
            raise ValueError(
                f"microbatches_per_step is {self.microbatches_per_step}; it must be a multiple of"
                f" {self.plan.microbatch_multiple} (microbatch_multiple of the plan; with"
                " parallel.virtual_pipeline the number of pipeline stages): set it to"
                f" {nearest_multiples(self.microbatches_per_step, self.plan.microbatch_multiple)}"
            )

    @property
    def num_bins(self) -> int:
        """Microbatches of a step over all ranks."""
        return self.plan.num_ranks * self.microbatches_per_step

    @cached_property
    def step_spec(self) -> PlanSpec:
        """Spec of the plans of single steps: `plan` with the limit of positions as `max_tokens`.

        It differs from `plan` with `count_mode="effective"` only.
        """
        assert self.plan.max_tokens is not None, "checked on construction"
        return replace(self.plan, max_tokens=self._max_positions(self.plan.max_tokens))

    def limits(self, step: int) -> MicrobatchLimits:
        """Return the limits of a microbatch in `step`, counted from 0."""
        assert self.plan.max_tokens is not None, "checked on construction"
        tokens = self.plan.max_tokens
        if self.warmup_steps:
            first = min(self.warmup_init_tokens, tokens)
            tokens = WarmupBudget(tokens, first, self.warmup_steps).at(step)
        positions = self._max_positions(tokens)
        return MicrobatchLimits(
            layout=self.plan.layout,
            # A microbatch is padded to a multiple, which must not exceed the limit, but is the
            # smallest one during a warm-up too.
            max_tokens=self.plan.padding_multiples.capacity(positions)
            or self.plan.padding_multiples.total,
            max_rows=self.max_rows,
            max_trained=tokens if self.count_mode == "effective" else None,
            max_extra=self.max_extra,
        )

    def _max_positions(self, tokens: int) -> int:
        """Return the maximum positions of a microbatch under a token limit."""
        if self.count_mode == "total":
            return tokens
        return math.ceil(tokens * self.physical_overflow_ratio)

    def min_window_tokens(self, limits: MicrobatchLimits) -> int | None:
        """Return the positions from which the window is ready; None if only rows count."""
        tokens = self.window_tokens
        if tokens is None:
            tokens = _WINDOW_BUDGETS[self.plan.layout] * limits.max_tokens
        return tokens * self.plan.num_ranks or None

    def min_full_tokens(self, limits: MicrobatchLimits) -> int:
        """Return the positions that `window_rows` rows must have; 0 if only rows count."""
        if self.window_tokens == 0:
            return 0
        if self.selection in ("first_fit", "in_order"):
            # They take the oldest rows, so further ones do not help.
            return limits.max_tokens
        return _FULL_BUDGETS[self.plan.layout] * limits.max_tokens
