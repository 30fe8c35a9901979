"""Warmup of the token budget of a batch, as `bsz_warmup_ratio` of VeOmni."""

from __future__ import annotations

from dataclasses import dataclass


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
