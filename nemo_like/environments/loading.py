"""Loads reward functions by import path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import iscoroutinefunction, signature
from typing import Any, Literal, cast

from nemo_like.config.errors import ConfigError
from nemo_like.config.import_path import import_function
from nemo_like.config.reward import RewardFunctionConfig
from nemo_like.environments.calling import is_batched
from nemo_like.environments.reward import RewardFunction


def load_reward_functions(
    functions: Mapping[str, RewardFunctionConfig],
) -> dict[str, RewardFunction]:
    """Import every function of `reward.functions`.

    Raises ConfigError, with the key, for a path that cannot be imported or called, and for options
    that the function does not have.
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
    if not config.batched and not config.options:
        return cast(RewardFunction, imported)
    _check_options(f"reward.functions.{name}.options", imported, config)
    function = partial(imported, **config.options)
    if config.batched:
        # Set on an object of our own, and not on the user's function.
        function.batched = True  # type: ignore[attr-defined]
    return cast(RewardFunction, function)


def _check_options(key: str, function: Callable[..., Any], config: RewardFunctionConfig) -> None:
    """Raise ConfigError if the function cannot be called with a sample and its options."""
    try:
        parameters = signature(function)
    except (TypeError, ValueError):
        # Functions of C extensions may have none; the first call shows a mistake.
        return
    try:
        parameters.bind("sample", **config.options)
    except TypeError as error:
        raise ConfigError(
            f"{key} is {config.options}, but {config.path}{parameters} cannot be called with a"
            f" sample and these: {error}"
        ) from error
