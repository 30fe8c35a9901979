"""The loss that a run with rollouts trains with: built-in, or the user's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from nemo_like.config.loss import LogprobName, PolicyGradientLossConfig
from nemo_like.losses.custom import CustomLoss, load_custom_loss
from nemo_like.losses.policy_gradient import ClippedPolicyGradientLoss
from nemo_like.losses.reduce import Loss


class RolloutLoss(Loss, Protocol):
    """A loss of rollouts, which names the log-probs that are computed before training."""

    @property
    def logprob_names(self) -> tuple[LogprobName, ...]:
        """Columns that a log-prob pass has to compute; with none of them no pass is needed."""
        ...

    def for_num_steps(self, num_optimizer_steps: int) -> RolloutLoss:
        """Return the loss for a batch on which so many optimizer steps are taken."""
        ...


def rollout_loss(config: PolicyGradientLossConfig, max_new_tokens: int) -> RolloutLoss:
    """Return the loss of `config`.

    `max_new_tokens`, the longest completion, is the default of `constant_length`. Raises
    ConfigError for a loss of the user that cannot be used.
    """
    if config.path is not None:
        return CustomLoss(
            loss=load_custom_loss(config.path, config.options),
            logprob_names=config.logprob_names(is_single_step=False),
        )
    if config.divisor == "constant" and config.constant_length is None:
        config = replace(config, constant_length=max_new_tokens)
    return ClippedPolicyGradientLoss(config=config)
