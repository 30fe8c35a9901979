"""The keys of `grpo.dynamic_sampling` and `grpo.overlong`: which completions are trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from nemo_like.config.errors import Problem


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Groups whose rewards are all equal do not train the policy; they can be replaced (DAPO)."""

    enabled: bool = False
    """Drop groups whose rewards are all equal, before any penalty is added to the rewards, and
    sample completions for the following prompts of the epoch in their place. With
    `grpo.advantage.components=separate` the values of every reward function must be equal. Needs
    `grpo.max_staleness=0`."""
    max_refills: Annotated[int, Ge(0)] = 3
    """Max times that a step samples for further prompts. Each time it takes as many as groups are
    missing. After that the step trains on the groups it has; without any it trains nothing."""


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """Completions that reach the length limit (DAPO)."""

    filter: bool = False
    """Give truncated completions no loss, and conversations that `environment.max_tokens` ended.
    Their rewards stay in the baseline of their group."""
    penalty_buffer: Annotated[int, Ge(0)] = 0
    """Tokens before `policy.generation.max_new_tokens` in which the soft penalty grows from 0 to
    `grpo.overlong.penalty_factor`; 0 turns it off."""
    penalty_factor: Annotated[float, Gt(0)] = 1.0
    """Reward that a completion of `policy.generation.max_new_tokens` tokens loses."""

    def problems(self, max_new_tokens: int) -> Iterator[Problem]:
        """Yield values that have no effect, or would give a penalty to every completion."""
        key = "grpo.overlong"
        if self.penalty_buffer >= max_new_tokens:
            yield Problem(
                (f"{key}.penalty_buffer", "policy.generation.max_new_tokens"),
                f"{key}.penalty_buffer is {self.penalty_buffer} and"
                f" policy.generation.max_new_tokens {max_new_tokens}, so every completion would get"
                f" a penalty: set {key}.penalty_buffer below {max_new_tokens}, e.g. to"
                f" {max(max_new_tokens // 4, 0)}",
            )
        if self.penalty_buffer == 0 and self.penalty_factor != 1.0:
            yield Problem(
                (f"{key}.penalty_factor", f"{key}.penalty_buffer"),
                f"{key}.penalty_factor is {self.penalty_factor:g}, which has no effect with"
                f" {key}.penalty_buffer 0: set penalty_buffer above 0, or remove penalty_factor",
            )
