"""The keys of `grpo.dynamic_sampling`, `grpo.overlong` and `grpo.advantage`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from nemo_like.config.constraints import Ge, Gt
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
    """Give truncated completions no loss, and conversations without room for another turn.
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


_KEY = "grpo.advantage"


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Advantages from the rewards of one prompt's completions."""

    baseline: Literal["group_mean", "leave_one_out", "none"] = "group_mean"
    """Value that is subtracted from the reward: the mean of the group, the mean of the group's
    other completions (RLOO), or nothing (REINFORCE++ without a baseline; set
    `grpo.advantage.whiten`)."""
    normalize: Literal["group_std", "leave_one_out_std", "batch_std", "none"] = "group_std"
    """Divisor of the advantage: sample standard deviation (n-1) of the group, of the group's other
    completions (NeMo RL with a leave-one-out baseline), or of all rewards of the step, or `none`
    (Dr. GRPO). The advantages of a group with equal rewards are 0 before whitening."""
    whiten: Literal["none", "tokens", "rows"] = "none"
    """Subtract the mean and divide by the standard deviation of the advantages of the step, over
    all trained `tokens` (REINFORCE++), or over its `rows` (GDPO)."""
    components: Literal["sum", "separate"] = "sum"
    """`sum` computes the advantage of the weighted sum of reward functions and models. `separate`
    computes one advantage for each of them and adds these with their weights (GDPO)."""

    def problems(self, group_size: int, num_components: int | None) -> Iterator[Problem]:
        """Yield combinations that are not defined or have no effect.

        `group_size` is the number of completions per prompt, `num_components` that of the parts of
        the reward; None if an environment decides it.
        """
        yield from self._group_problems(group_size)
        if self.baseline == "none" and self.normalize != "none":
            yield Problem(
                (f"{_KEY}.normalize", f"{_KEY}.baseline"),
                f"{_KEY}.normalize is {self.normalize}, but {_KEY}.baseline is none: a reward that"
                " is not centred would be divided by a standard deviation that may be 0. Set"
                f" normalize to none, and {_KEY}.whiten to tokens",
            )
        is_constant = self.normalize == "batch_std" and self.components == "sum"
        if is_constant and self.whiten != "none":
            yield Problem(
                (f"{_KEY}.normalize", f"{_KEY}.whiten"),
                f"{_KEY}.normalize is batch_std, which divides all advantages of a step by one"
                f" number, and {_KEY}.whiten {self.whiten} divides that number out again: set"
                " normalize to none or whiten to none",
            )
        if self.components == "separate":
            yield from self._component_problems(num_components)

    def _group_problems(self, group_size: int) -> Iterator[Problem]:
        """Yield the problems of a group that is too small."""
        key = "grpo.num_generations_per_prompt"
        if group_size < 2 and self.baseline != "none":
            yield Problem(
                (key, f"{_KEY}.baseline"),
                f"{key} is {group_size}; it must be at least 2 (the advantage compares the"
                f" completions of one prompt), unless {_KEY}.baseline is none",
            )
        elif group_size < 3 and self.normalize == "leave_one_out_std":
            yield Problem(
                (key, f"{_KEY}.normalize"),
                f"{key} is {group_size}, so the standard deviation of the other completions"
                f" ({_KEY}.normalize leave_one_out_std) is not defined: set it to at least 3, or"
                f" {_KEY}.normalize to group_std or none",
            )

    def _component_problems(self, num_components: int | None) -> Iterator[Problem]:
        """Yield the reasons for which separate components equal their sum."""
        if num_components == 1:
            yield Problem(
                (f"{_KEY}.components", "reward.functions", "reward.models"),
                f"{_KEY}.components is separate, but reward.functions and reward.models have one"
                " entry, so there is nothing to separate: set components to sum, or add a reward"
                " function or a reward model",
            )
        if self.normalize == "none":
            yield Problem(
                (f"{_KEY}.components", f"{_KEY}.normalize"),
                f"{_KEY}.components is separate, which has no effect with {_KEY}.normalize none:"
                " the sum of the centred rewards is the centred sum. Set normalize to group_std, or"
                " components to sum",
            )
