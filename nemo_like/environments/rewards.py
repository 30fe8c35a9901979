"""Loads reward functions by import path; the worker that calls them on samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from nemo_like.config.import_path import import_function
from nemo_like.config.schema import RewardFunctionConfig
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.environments.calling import BadReward, score_samples
from nemo_like.environments.reward import RewardError, RewardFunction, RewardSample


def load_reward_functions(
    functions: Mapping[str, RewardFunctionConfig],
) -> dict[str, RewardFunction]:
    """Import every function of `reward.functions`.

    Raises ConfigError, with the key, for a path that cannot be imported or called.
    """
    return {
        name: _import_reward(f"reward.functions.{name}.path", function.path)
        for name, function in functions.items()
    }


class RewardWorker:
    """Scores samples with every configured function."""

    def __init__(
        self, context: WorkerContext, *, functions: Mapping[str, RewardFunctionConfig]
    ) -> None:
        self._functions = load_reward_functions(functions)
        self._paths = {name: function.path for name, function in functions.items()}

    def score(self, samples: Sequence[RewardSample]) -> dict[str, np.ndarray]:
        """Return the values of every function for B samples, float32 [B], by name.

        Raises RewardError with the sample if one fails.
        """
        return {name: self._score(name, samples) for name in self._functions}

    def _score(self, name: str, samples: Sequence[RewardSample]) -> np.ndarray:
        """Return the values of the function `name` for B samples, float32 [B].

        Raises RewardError with the sample if one fails.
        """
        label = f"reward.functions.{name} ({self._paths[name]})"
        try:
            rewards = score_samples(self._functions[name], samples, label)
        except BadReward as error:
            raise RewardError.from_sample(
                name,
                self._paths[name],
                str(error),
                error.sample,
            ) from error
        return np.array(rewards, dtype=np.float32)


def _import_reward(key: str, path: str) -> RewardFunction:
    """Import a reward function. Raises ConfigError that begins with `key`."""
    example = "nemo_like.environments.math.answer_reward"
    return cast(RewardFunction, import_function(key, path, example, "RewardSample"))
