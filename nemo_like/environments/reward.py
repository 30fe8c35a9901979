"""The input of reward functions, and `RewardEnvironment`, which scores completions with them.

A reward is a plain or async function of a `RewardSample` that returns a number, named by import
path in the YAML. There is nothing to register.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import RewardFunctionConfig
from nemo_like.distributed.worker_calls import call_sharded
from nemo_like.distributed.worker_group import WorkerGroup

_MAX_TEXT_SHOWN = 500


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """One completion to score.

    Example: `RewardSample(prompt="2+2=?", completion="#### 4", answer="4", row={"prompt": "2+2=?",
    "answer": "4"})`.
    """

    prompt: str
    """The question as the data file has it, without the chat template."""
    completion: str
    """The text that the model generated, special tokens removed."""
    answer: str | None = None
    """The data row's answer, if it has one."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """All columns of the row in the data file."""

    def __str__(self) -> str:
        fields = {
            "prompt": self.prompt,
            "completion": self.completion,
            "answer": self.answer,
        }
        return "\n".join(f"  {name}: {_shorten(text)}" for name, text in fields.items())


RewardFunction = Callable[[RewardSample], Any]
"""Returns a float, or a coroutine of one."""


class RewardError(Exception):
    """A reward function failed; the message has the function, the problem and the sample."""

    @classmethod
    def from_sample(
        cls,
        name: str,
        path: str,
        problem: str,
        sample: RewardSample,
    ) -> RewardError:
        """Return the error of `reward.functions.<name>`, whose import path is `path`."""
        return cls(f"reward.functions.{name} ({path}) {problem} on this sample:\n{sample}")


class RewardWorkerProtocol(Protocol):
    """The method of `rewards.RewardWorker` that the driver calls."""

    def score(self, samples: Sequence[RewardSample]) -> dict[str, np.ndarray]:
        """Return the values of every function, float32 [B], by name."""
        ...


class RewardEnvironment:
    """Scores completions on a group of `RewardWorker`.

    The reward is the weighted sum of the values of the configured functions.
    """

    def __init__(self, group: WorkerGroup, functions: Mapping[str, RewardFunctionConfig]) -> None:
        if not functions:
            raise ConfigError(
                "reward.functions is empty; name at least one, e.g."
                " nemo_like.environments.math.answer_reward"
            )
        self.group = group
        self._weights = {name: function.weight for name, function in functions.items()}

    def score(self, samples: Sequence[RewardSample]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the rewards, float32 [B], and the unweighted values of each function, float32 [B].

        The functions run on all reward workers, each on a contiguous chunk of the samples.
        """
        # Contiguous chunks of nearly equal size, so concatenation restores the order.
        num_workers = self.group.parallel_layout.dp
        bounds = np.linspace(0, len(samples), num_workers + 1).astype(int)
        chunks = [list(samples[start:stop]) for start, stop in pairwise(bounds)]
        parts = call_sharded(self.group, RewardWorkerProtocol.score, chunks)
        components = {
            name: np.concatenate([part[name] for part in parts]) for name in self._weights
        }
        # Summed in float64; the components stay unweighted for the metrics.
        reward = np.zeros(len(samples))
        for name, values in components.items():
            reward = reward + self._weights[name] * values
        return reward.astype(np.float32), components

    def shutdown(self) -> None:
        """Stop the reward workers."""
        self.group.shutdown()


def _shorten(text: str | None) -> str:
    # The sample is part of an error message, and a completion may have thousands of tokens.
    if text is None or len(text) <= _MAX_TEXT_SHOWN:
        return repr(text)
    return f"{text[:_MAX_TEXT_SHOWN]!r}... ({len(text)} characters)"
