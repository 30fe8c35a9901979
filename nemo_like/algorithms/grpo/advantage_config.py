"""The section `grpo.advantage` and its problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from nemo_like.config.constraints import Gt, Le
from nemo_like.config.errors import Problem

_KEY = "grpo.advantage"


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Advantages from the rewards of one prompt's completions."""

    baseline: Literal["group_mean", "leave_one_out", "none"] = "group_mean"
    """Value that is subtracted from the reward: the mean of the group, the mean of the group's
    other completions (RLOO), or nothing (REINFORCE++ without a baseline; set
    `grpo.advantage.whiten`)."""
    normalize: Literal["group_std", "leave_one_out_std", "batch_std", "none"] = "group_std"
    """Divisor of the advantage: sample standard deviation of the group, of the group's other
    completions, or of all rewards of the step, or `none` (Dr. GRPO)."""
    whiten: Literal["none", "tokens", "rows"] = "none"
    """Subtract the mean and divide by the standard deviation of the advantages of the step, over
    all trained `tokens` (REINFORCE++), or over its `rows` (GDPO)."""
    components: Literal["sum", "separate"] = "sum"
    """`sum` computes the advantage of the weighted sum of reward functions and models. `separate`
    computes one advantage for each of them and adds these with their weights (GDPO)."""
    turns: Literal["none", "return_to_go"] = "none"
    """`return_to_go` gives each turn of a conversation or episode the rewards from this turn on,
    minus the mean return of the group's others. Turns have the rewards of `step`, or of requests to
    `reward`; all others are those of the last turn. `none` gives all turns one advantage."""
    turn_discount: Annotated[float, Gt(0), Le(1)] = 1.0
    """Discount of a reward per turn in `return_to_go`; exact is 1."""

    def problems(self, group_size: int) -> Iterator[Problem]:
        """Yield combinations that are not defined for `group_size` completions per prompt."""
        if self.baseline == "none" and self.normalize != "none":
            yield Problem(
                (f"{_KEY}.normalize", f"{_KEY}.baseline"),
                f"{_KEY}.normalize is {self.normalize}, but {_KEY}.baseline is none: a reward that"
                " is not centred would be divided by a standard deviation that may be 0. Set"
                f" normalize to none, and {_KEY}.whiten to tokens",
            )
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

    def turn_problems(
        self, *, has_turns: bool, surrogate: str, drops_groups: bool
    ) -> Iterator[Problem]:
        """Yield keys with which turns cannot have advantages of their own.

        `has_turns` is True for rollouts of several turns, `drops_groups` with dynamic sampling.
        """
        key = f"{_KEY}.turns"
        if self.turns == "none":
            if self.turn_discount != 1:
                yield Problem(
                    (f"{_KEY}.turn_discount", key),
                    f"{_KEY}.turn_discount is {self.turn_discount:g}, but {key} is none, which has"
                    f" no discount: set {key} to return_to_go, or remove the discount",
                )
            return
        if not has_turns:
            yield Problem(
                (key, "environment.path"),
                f"{key} is return_to_go, but without environment.path a completion is one turn: set"
                f" {key} to none",
            )
        for name, value, needed in (
            (f"{_KEY}.baseline", self.baseline, "leave_one_out"),
            (f"{_KEY}.normalize", self.normalize, "none"),
            (f"{_KEY}.components", self.components, "sum"),
        ):
            if value != needed:
                yield Problem(
                    (name, key),
                    f"{name} is {value}, but {key} return_to_go is defined for {needed} only: set"
                    f" {name} to {needed}",
                )
        if self.whiten == "rows":
            yield Problem(
                (f"{_KEY}.whiten", key),
                f"{_KEY}.whiten is rows, but with {key} return_to_go each token has its own"
                " advantage: set whiten to tokens or none",
            )
        if surrogate == "gspo":
            yield Problem(
                (key, "loss_fn.surrogate"),
                f"{key} is return_to_go, so that each token has its own advantage, but"
                " loss_fn.surrogate gspo has one loss per row: set the surrogate to gspo_token",
            )
        if drops_groups:
            yield Problem(
                ("grpo.dynamic_sampling.enabled", key),
                f"grpo.dynamic_sampling.enabled is true and {key} return_to_go: groups with equal"
                " rewards, which would be dropped, have turns with advantages. Set dynamic"
                " sampling to false",
            )
