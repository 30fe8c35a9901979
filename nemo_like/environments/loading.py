"""Loads reward functions by import path."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from inspect import iscoroutinefunction
from typing import Literal, cast

from nemo_like.config.import_path import import_function
from nemo_like.config.reward import RewardFunctionConfig
from nemo_like.environments.calling import is_batched
from nemo_like.environments.reward import RewardFunction


def load_reward_functions(
    functions: Mapping[str, RewardFunctionConfig],
) -> dict[str, RewardFunction]:
    """Import every function of `reward.functions`.

    Raises ConfigError, with the key, for a path that cannot be imported or called.
    """
    return {name: _import_reward(name, function) for name, function in functions.items()}


def function_kind(function: RewardFunction) -> Literal["sync", "async", "batched"]:
    """Return how a function is called: per sample, concurrently, or once for many samples."""
    if is_batched(function):
        return "batched"
    return "async" if iscoroutinefunction(function) else "sync"


def _import_reward(name: str, config: RewardFunctionConfig) -> RewardFunction:
    """Import a reward function. Raises ConfigError that begins with its key."""
    example = "nemo_like.environments.math.answer_reward"
    key = f"reward.functions.{name}.path"
    imported = import_function(key, config.path, example, "RewardSample")
    function = imported
    if config.batched and not is_batched(imported):
        # The attribute is set on an object of our own, and not on the user's function.
        function = partial(imported)
        function.batched = True  # type: ignore[attr-defined]
    return cast(RewardFunction, function)
