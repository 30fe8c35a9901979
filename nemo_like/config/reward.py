"""Keys of `reward`: the functions that score completions, and what happens when one fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from nemo_like.config.constraints import Above, AtLeast, AtMost, ImportPath

OnError = Literal["stop", "zero", "drop"]


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    """One reward function."""

    path: Annotated[str, ImportPath()]
    """Import path of a function `(RewardSample) -> float`, e.g. `my_package.rewards.brevity`."""
    weight: float = 1.0
    """Weight of the function in the sum; may be negative."""
    batched: bool = False
    """The function takes a list of samples and returns a list, array or tensor of one number each.
    A function with the attribute `batched = True` is one as well."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function, e.g. `{time_limit_s: 5}`."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Rewards of completions: the weighted sum of plain functions."""

    functions: dict[str, RewardFunctionConfig] = field(default_factory=dict)
    num_workers: Annotated[int, AtLeast(1)] = 1
    """Processes that compute rewards."""
    timeout_s: Annotated[float | None, Above(0)] = None
    """Max seconds of one call of a reward function, which then failed: an async call is cancelled,
    and the process of another one is ended and replaced. null sets no limit, and functions run in
    the reward worker itself, where `cluster.progress_timeout_s` ends the run if one hangs."""
    on_error: Literal["stop", "zero", "drop"] = "stop"
    """A reward function that fails: it raises, exceeds `timeout_s`, ends its process, or returns
    something else than one finite number. `stop` ends the run with the sample, `zero` takes 0 as
    its value, `drop` leaves the completion out of training and of the statistics of its group."""
    max_error_share: Annotated[float, AtLeast(0), AtMost(1)] = 0.1
    """Max share of the completions of a rollout with a failed function, for `on_error` `zero` and
    `drop`; above it the run stops. The refills of dynamic sampling count with the rollout of their
    step."""
