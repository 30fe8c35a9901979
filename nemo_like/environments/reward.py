"""The input of reward functions, and `RewardEnvironment`, which scores completions with them.

A reward is a plain or async function of a `RewardSample` that returns a number, named by import
path in the YAML. There is nothing to register.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.config.reward import RewardConfig
from nemo_like.config.text import shown_value
from nemo_like.data.messages import Message
from nemo_like.distributed.worker_group import Handle, WorkerGroup, submit_one

RewardSection = Literal["functions", "models"]
"""Section of `reward` that names what scored a sample."""

BadRewardKind = Literal["raised", "timeout", "value", "ended"]
"""`raised` an exception; exceeded the `timeout`; the `value` is not one finite number; called
sys.exit or os._exit, or its process `ended`."""

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
    messages: Sequence[Message] = ()
    """All turns of a conversation with an environment, whose `completion` is the last turn of the
    model; empty for one completion of a prompt."""

    def __str__(self) -> str:
        fields = {"prompt": self.prompt, "completion": self.completion, "answer": self.answer}
        # Part of an error message, and a completion may have thousands of tokens.
        return "\n".join(
            f"  {name}: {shown_value(text, _MAX_TEXT_SHOWN)}" for name, text in fields.items()
        )


RewardFunction = Callable[[Any], Any]
"""Takes a `RewardSample` and returns a float, or a coroutine of one. A batched function takes a
list of samples and returns one float for each."""


class RewardError(Exception):
    """A reward function failed; the message has the function, the problem and the sample."""

    @classmethod
    def from_problem(cls, problem: RewardProblem, sample: RewardSample) -> RewardError:
        """Return the error of a problem on `sample`."""
        return cls(
            f"{problem}, on this sample:\n{sample}\n"
            "  reward.on_error=zero or drop continues a run in spite of such samples"
        )


@dataclass(frozen=True, slots=True)
class RewardProblem:
    """Why a reward function or a reward model failed on one sample.

    Example: `RewardProblem("tests", "my_rewards.tests", "timeout", "exceeded reward.timeout_s 5")`.
    """

    name: str
    """Name in `reward.functions` or `reward.models`."""
    path: str
    """Import path of the function, or `model_name` of the model."""
    kind: BadRewardKind
    text: str
    section: RewardSection = "functions"

    def __str__(self) -> str:
        return f"reward.{self.section}.{self.name} ({self.path}) {self.text}"


@dataclass(frozen=True, slots=True)
class RewardScores:
    """What a reward worker returns for B samples."""

    values: dict[str, np.ndarray]
    """float32 [B] of every function, by name; 0 where it failed."""
    problems: list[RewardProblem | None]
    """The first problem of each sample."""


class RewardWorkerProtocol(Protocol):
    """The method of `reward_worker.RewardWorker` that the driver calls."""

    def score(self, samples: Sequence[RewardSample]) -> RewardScores:
        """Return the values of every function, and problems unless they stop the run."""
        ...


@dataclass(frozen=True, slots=True)
class ScoredSamples:
    """Rewards of n samples that were submitted together."""

    keys: list[int]
    """The keys that `RewardEnvironment.submit` got."""
    rewards: np.ndarray
    """float32 [n]: weighted sums."""
    components: dict[str, np.ndarray]
    """float32 [n] each: unweighted values of every function, by name; 0 where it failed."""
    problems: list[RewardProblem | None]
    """The first problem of each sample."""


class RewardEnvironment:
    """Scores completions on a group of `RewardWorker`.

    The reward is the weighted sum of the values of the configured functions. Samples are scored
    while others are still generated: `submit` them as they arrive, and `collect` the results.
    """

    def __init__(self, group: WorkerGroup, config: RewardConfig) -> None:
        if not config.functions:
            raise ConfigError(
                "reward.functions is empty; name at least one, e.g."
                " nemo_like.environments.math.answer_reward"
            )
        self.group = group
        self.config = config
        self._weights = config.weights
        self._waiting: list[tuple[int, RewardSample]] = []
        self._running: dict[int, tuple[list[int], Handle]] = {}
        """By rank of the worker: the keys of its samples, and its call."""

    def submit(self, keys: Sequence[int], samples: Sequence[RewardSample]) -> None:
        """Add samples; `collect` returns their rewards under these keys, in any order."""
        self._waiting += zip(keys, samples, strict=True)
        self._start()

    def collect(self, timeout_s: float) -> list[ScoredSamples]:
        """Return the samples that were scored since the last call.

        Waits up to `timeout_s` for one, if any is unfinished. Raises WorkerFailure if a function
        or a worker fails.
        """
        handles = [handle for _, handle in self._running.values()]
        if not handles:
            return []
        self.group.wait_any(handles, timeout_s)
        scored = []
        for rank, (keys, handle) in list(self._running.items()):
            if self.group.is_done([handle]):
                scores: RewardScores = self.group.get([handle])[0]
                del self._running[rank]
                rewards = self._weighted_sum(scores.values, len(keys))
                scored.append(ScoredSamples(keys, rewards, scores.values, scores.problems))
        self._start()
        return scored

    def shutdown(self) -> None:
        """Stop the reward workers."""
        self.group.shutdown()

    def _start(self) -> None:
        """Divide the waiting samples over the workers that have none."""
        idle = [rank for rank in range(self.group.world_size) if rank not in self._running]
        if not idle or not self._waiting:
            return
        bounds = np.linspace(0, len(self._waiting), len(idle) + 1).astype(int).tolist()
        for rank, (start, stop) in zip(idle, pairwise(bounds), strict=True):
            chunk = self._waiting[start:stop]
            if chunk:
                keys = [key for key, _ in chunk]
                samples = [sample for _, sample in chunk]
                handle = submit_one(self.group, rank, RewardWorkerProtocol.score, samples)
                self._running[rank] = (keys, handle)
        self._waiting = []

    def _weighted_sum(self, components: Mapping[str, np.ndarray], num_rows: int) -> np.ndarray:
        """Return the rewards, float32 [n], of the values of each function, float32 [n]."""
        # Summed in float64; the components stay unweighted for the metrics.
        rewards = np.zeros(num_rows)
        for name, values in components.items():
            rewards = rewards + self._weights[name] * values
        return rewards.astype(np.float32)
