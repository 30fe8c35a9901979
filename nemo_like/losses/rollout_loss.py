"""The loss of an RL run by its configuration: policy gradient, or a loss of the user by its import
path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from torch import Tensor

from nemo_like.config.errors import ConfigError, shown_value
from nemo_like.config.import_path import import_function, user_error_text
from nemo_like.config.loss import LogprobName, PolicyGradientLossConfig
from nemo_like.losses.policy_gradient import ClippedPolicyGradientLoss
from nemo_like.losses.reduce import GlobalCounts, Loss, LossInputs, LossTerms

_KEY = "loss_fn.path"
_MEMBERS = (
    "uses_sampling_distribution",
    "needs_entropy",
    "entropy_gradient",
    "denominator",
    "coupled_rows",
)
"""Members of `Loss` besides the call."""


@dataclass(frozen=True, kw_only=True)
class CustomLoss:
    """A loss of the user with the log-probs that a pass before training computes for it."""

    loss: Loss
    logprob_names: tuple[LogprobName, ...] = ()

    def for_num_steps(self, num_optimizer_steps: int) -> CustomLoss:
        """Return the loss itself: its columns do not depend on the number of optimizer steps."""
        return self

    @property
    def uses_sampling_distribution(self) -> bool:
        """See `Loss.uses_sampling_distribution`."""
        return self.loss.uses_sampling_distribution

    @property
    def needs_entropy(self) -> bool:
        """See `Loss.needs_entropy`."""
        return self.loss.needs_entropy

    @property
    def entropy_gradient(self) -> bool:
        """See `Loss.entropy_gradient`."""
        return self.loss.entropy_gradient

    def denominator(self, counts: GlobalCounts) -> float:
        """See `Loss.denominator`."""
        return self.loss.denominator(counts)

    def coupled_rows(self, inputs: LossInputs) -> Tensor | None:
        """See `Loss.coupled_rows`: int64 [R] or None."""
        return self.loss.coupled_rows(inputs)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Return the loss of one microbatch. Raises TypeError for a result of another type, and
        ValueError if the loss is not a sum over rows.
        """
        if self.loss.coupled_rows(inputs) is not None:
            raise ValueError(
                f"the loss {type(self.loss).__name__} of {_KEY} couples rows, but rows of"
                " rollouts are planned one by one and may be in different microbatches; return None"
                " from coupled_rows and a sum over rows"
            )
        terms = self.loss(inputs)
        if not isinstance(terms, LossTerms):
            raise TypeError(
                f"the loss {type(self.loss).__name__} of {_KEY} returned a"
                f" {type(terms).__name__}; return nemo_like.losses.LossTerms(loss_sum, metrics)"
            )
        return terms


def load_custom_loss(path: str, options: Mapping[str, Any]) -> Loss:
    """Import the class or function at `path`, call it with `options` as keyword arguments.

    Raises ConfigError that begins with `loss_fn.path` if the import or the call fails, or if the
    result is no `Loss`.
    """
    example = "my_package.losses.MyLoss"
    argument = "keyword argument for each key of loss_fn.options"
    factory = import_function(_KEY, path, example, argument)
    try:
        loss = factory(**options)
    except Exception as error:
        # Code of the user can fail in any way.
        raise ConfigError(
            f"{_KEY} is {path!r}, but calling it with loss_fn.options {shown_value(dict(options))}"
            f" as keyword arguments failed with {user_error_text(error)}"
        ) from error
    missing = [name for name in _MEMBERS if not hasattr(loss, name)]
    if not callable(loss):
        missing.append("__call__")
    if missing:
        raise ConfigError(
            f"{_KEY} is {path!r}, which returned a {type(loss).__name__} without"
            f" {', '.join(missing)}; a loss has the members of nemo_like.losses.Loss, see 'A loss'"
            " in docs/extending.md"
        )
    if "<locals>" in type(loss).__qualname__:
        raise ConfigError(
            f"{_KEY} is {path!r}, but its loss cannot be sent to the workers: its class"
            f" {type(loss).__name__} is defined inside a function. Define it at the top level of"
            " its module"
        )
    return cast(Loss, loss)


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
