"""Which prompts a step samples: keys of `grpo.dynamic_sampling` and `grpo.prompt_selection`.

Also the checks of `grpo.oversampling_factor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from nemo_like.config.constraints import Ge, Gt, Le
from nemo_like.config.errors import Problem


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Groups whose rewards are all equal do not train the policy; they can be replaced (DAPO)."""

    enabled: bool = False
    """Drop groups whose rewards are all equal, and sample completions for the following prompts of
    the epoch in their place. With `grpo.advantage.components=separate` the values of every reward
    function must be equal. Needs `grpo.max_staleness=0`."""
    max_refills: Annotated[int, Ge(0)] = 3
    """Max times that a step samples for further prompts. After that the step trains on the groups
    it has."""

    @property
    def max_tries(self) -> int:
        """Max times that a step samples prompts."""
        return 1 + self.max_refills if self.enabled else 1


@dataclass(frozen=True, kw_only=True)
class PromptSelectionConfig:
    """Prompts whose groups had equal rewards are sampled less often in later epochs (GRESO)."""

    enabled: bool = False
    """Skip prompts of the training data before they are sampled, from the history of their groups;
    the following prompts of the epoch take their places. With `grpo.dynamic_sampling.enabled` a
    step samples as many prompts as it needs at the share of groups with unequal rewards of the last
    steps, and trains on the first `grpo.num_prompts_per_step` of these groups."""
    decay: Annotated[float, Gt(0), Le(1)] = 0.5
    """A prompt is sampled with the probability `decay` to the power of the number of its last
    visits whose rewards were all equal."""
    exploration: Annotated[float, Gt(0), Le(1)] = 0.1
    """Lower limit of that probability."""
    importance_weights: bool = True
    """Divide the advantages of a group by the probability with which its prompt was sampled, and
    all advantages of the step by the mean of these weights, so that prompts count as they do
    without selection. Without it often skipped prompts count less."""

    def problems(self, *, baseline: str, turns: str) -> Iterator[Problem]:
        """Yield advantages with which a group with equal rewards trains the policy."""
        key = "grpo.prompt_selection.enabled"
        if self.enabled and baseline == "none":
            yield Problem(
                (key, "grpo.advantage.baseline"),
                f"{key} is true and grpo.advantage.baseline none: without a baseline a group with"
                " equal rewards has advantages and trains the policy, so there is no reason to skip"
                " its prompt. Set baseline to group_mean, or prompt selection to false",
            )
        if self.enabled and turns != "none":
            yield Problem(
                (key, "grpo.advantage.turns"),
                f"{key} is true and grpo.advantage.turns {turns}: the turns of a group with equal"
                " rewards have advantages, so there is no reason to skip its prompt. Set prompt"
                " selection to false",
            )

    def warnings(self, num_visits: int, num_rows: int) -> list[str]:
        """Return a warning if `num_visits` visits of `num_rows` prompts are all first ones."""
        if not self.enabled or num_visits > num_rows:
            return []
        text = (
            f"grpo.prompt_selection.enabled is true, but the run samples at most"
            f" {num_visits:,} prompts of {num_rows:,}, and prompts are skipped from their second"
            " epoch on: raise grpo.max_num_steps, or set prompt selection to false"
        )
        return [text]


def oversampling_problems(
    factor: float, *, max_staleness: int, dynamic_sampling: bool, has_environment: bool
) -> Iterator[Problem]:
    """Yield what `grpo.oversampling_factor` cannot be combined with."""
    if factor == 1:
        return
    key = "grpo.oversampling_factor"
    reasons = {
        "grpo.max_staleness": max_staleness > 0
        and "an asynchronous run samples the next step instead of waiting for long completions",
        "grpo.dynamic_sampling.enabled": dynamic_sampling
        and "dynamic sampling chooses the number of prompts of a step itself",
        "environment.path": has_environment and "episodes are not cancelled",
    }
    for other, reason in reasons.items():
        if reason:
            yield Problem(
                (key, other),
                f"{key} is {factor:g}, which needs a synchronous run without dynamic sampling and"
                f" environment: {reason}. Set {key} to 1, or remove {other}",
            )
