"""Keys of the health rules; the rules themselves are in `training.health`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from nemo_like.config.constraints import Ge, Gt, Le, subset_of

HEALTH_RULES = (
    "reward_flat",
    "entropy_collapse",
    "kl",
    "mismatch",
    "length_explosion",
    "truncated",
    "truncated_rows",
    "clipped",
    "grad_norm",
    "data_wait",
    "generator_idle",
    "slow_rank",
    "long_failures",
)
Action = Literal["warn", "stop", "ignore"]


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Rules on the metrics of a run. A rule whose condition holds gives a warning with the probable
    cause and the key to change, or ends the run. See docs/health.md.
    """

    action: Action = "warn"
    """Action of all rules that are in neither list: `warn`, `stop` (save a checkpoint and exit with
    code 3) or `ignore`."""
    stop: Annotated[tuple[str, ...], subset_of(HEALTH_RULES)] = ()
    """Rules that end the run, e.g. `[mismatch, grad_norm]`."""
    ignore: Annotated[tuple[str, ...], subset_of(HEALTH_RULES)] = ()
    """Rules that are not applied."""
    window: Annotated[int, Ge(3)] = 10
    """Steps that a rule looks at; it needs 3 of them, and rules of a change all of them."""
    max_equal_rewards: Annotated[float, Gt(0), Le(1)] = 0.8
    """`reward_flat`: min share of groups with equal rewards while the reward does not rise."""
    min_entropy: Annotated[float, Ge(0)] = 0.002
    """`entropy_collapse`: entropy in nats per token below which completions hardly differ."""
    max_kl: Annotated[float, Gt(0)] = 0.5
    """`kl`: KL of the policy to the reference in nats per token."""
    max_mismatch: Annotated[float, Gt(0)] = 0.05
    """`mismatch`: KL between generator and policy in nats per token, `mismatch/gen_kl_k3`."""
    max_length_growth: Annotated[float, Gt(1)] = 2.0
    """`length_explosion`: growth of the completions within the window, as a factor, while the
    reward does not rise."""
    max_truncated: Annotated[float, Gt(0), Le(1)] = 0.5
    """`truncated`, `truncated_rows`: share of completions, and of training rows, that the length
    limit cuts off."""
    max_clipped: Annotated[float, Gt(0), Le(1)] = 0.3
    """`clipped`: share of tokens whose gradient the loss clips."""
    max_grad_norm_growth: Annotated[float, Gt(1)] = 10.0
    """`grad_norm`: gradient norm of a step as a multiple of the median of the window before it."""
    max_data_wait: Annotated[float, Gt(0), Le(1)] = 0.5
    """`data_wait`: share of the time of a step spent waiting for its rows."""
    max_generator_idle: Annotated[float, Gt(0), Le(1)] = 0.7
    """`generator_idle`: share of the time without decoding of generation workers with resources of
    their own."""
    max_rank_slowdown: Annotated[float, Gt(1)] = 1.3
    """`slow_rank`: compute time of the slowest rank over the mean rank, as a multiple of the same
    ratio of the planned work, while one rank is the slowest in every step of the window."""
    max_failed_calls: Annotated[float, Ge(1)] = 1.5
    """`long_failures`: mean calls of failed attempts of agent programs as a multiple of the mean
    over all episodes."""

    def action_of(self, rule: str) -> Action:
        """Return the action of a rule."""
        if rule in self.ignore:
            return "ignore"
        return "stop" if rule in self.stop else self.action
