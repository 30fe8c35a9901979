"""Reward workers, which load reward functions by their import paths, and their driver side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any, cast

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.config.import_path import import_function
from nemo_like.config.rollout import OnError, RewardConfig, RewardFunctionConfig
from nemo_like.distributed import activity
from nemo_like.distributed.worker_group import Handle, WorkerContext, WorkerGroup, submit_one
from nemo_like.environments.reward import (
    RewardError,
    RewardFunction,
    RewardProblem,
    RewardSample,
    RewardScores,
)
from nemo_like.environments.reward_calls import (
    BadReward,
    Score,
    function_kind,
    score_each,
    timed_out,
)
from nemo_like.environments.user_process import Handler, ProcessEnded, ProcessHung, UserProcess

_MARGIN_S = 2.0
"""An async call is cancelled in the process first, and the process killed so much later."""


class RewardWorker:
    """Scores samples with every configured function.

    With `timeout_s` the functions run in a child process, which is replaced when a call hangs.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        functions: Mapping[str, RewardFunctionConfig],
        timeout_s: float | None = None,
        on_error: OnError = "stop",
    ) -> None:
        self._functions = load_reward_functions(functions)
        self._paths = {name: function.path for name, function in functions.items()}
        self._on_error: OnError = on_error
        self._timeout_s = timeout_s
        self._process = UserProcess(_prepare_scoring, dict(functions), timeout_s)

    def score(self, samples: Sequence[RewardSample]) -> RewardScores:
        """Return the values of every function for B samples.

        Raises RewardError with the sample if one fails and `on_error` is `stop`. Otherwise a failed
        function has the value 0, and the first problem of each sample is returned as well.
        """
        values = {}
        problems: list[RewardProblem | None] = [None] * len(samples)
        for name, function in self._functions.items():
            label = f"reward.functions.{name} ({self._paths[name]})"
            stops = self._on_error == "stop"
            if self._timeout_s is None:
                scores = score_each(function, samples, label, stops=stops)
            else:
                scores = self._score_in_process(name, samples, label, self._timeout_s)
            rewards = np.zeros(len(samples), dtype=np.float32)
            for index, score in scores.items():
                if not isinstance(score, BadReward):
                    rewards[index] = score
                    continue
                problem = RewardProblem(name, self._paths[name], score.kind, score.text)
                if stops:
                    raise RewardError.from_problem(problem, samples[index])
                problems[index] = problems[index] or problem
            values[name] = rewards
        return RewardScores(values, problems)

    def close(self) -> None:
        """End the child process, if there is one."""
        self._process.close()

    def _score_in_process(
        self, name: str, samples: Sequence[RewardSample], label: str, timeout_s: float
    ) -> dict[int, Score]:
        """Return the score of each sample by its index.

        A call that exceeds the timeout, or whose process dies, is the failure of its sample; of all
        samples if the function is batched. If an async function blocks, the unfinished samples are
        scored again one at a time, so that the one that blocks is found.
        """
        kind = function_kind(self._functions[name])
        limit_s = timeout_s if kind == "sync" else timeout_s + _MARGIN_S
        max_concurrent: int | None = None
        scores: dict[int, Score] = {}
        while len(scores) < len(samples):
            waiting = [index for index in range(len(samples)) if index not in scores]
            self._process.send((name, [samples[index] for index in waiting], max_concurrent))
            try:
                for _ in waiting:
                    activity.note(f"{label}, {len(scores)} of {len(samples)} samples done")
                    position, score = self._process.receive(limit_s)
                    scores[waiting[position]] = score
                continue
            except ProcessHung:
                failure = timed_out(timeout_s)
            except ProcessEnded as error:
                failure = BadReward("ended", f"ended its process ({error})")
            if kind == "async" and max_concurrent is None:
                max_concurrent = 1
                continue
            unfinished = [index for index in waiting if index not in scores]
            scores |= dict.fromkeys(unfinished if kind == "batched" else unfinished[:1], failure)
        return scores


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
                handle = submit_one(self.group, rank, RewardWorker.score, samples)
                self._running[rank] = (keys, handle)
        self._waiting = []

    def _weighted_sum(self, components: Mapping[str, np.ndarray], num_rows: int) -> np.ndarray:
        """Return the rewards, float32 [n], of the values of each function, float32 [n]."""
        # Summed in float64; the components stay unweighted for the metrics.
        rewards = np.zeros(num_rows)
        for name, values in components.items():
            rewards = rewards + self._weights[name] * values
        return rewards.astype(np.float32)


def load_reward_functions(
    functions: Mapping[str, RewardFunctionConfig],
) -> dict[str, RewardFunction]:
    """Import every function of `reward.functions`.

    Raises ConfigError, with the key, for a path that cannot be imported or called, and for options
    that the function does not have.
    """
    return {name: _import_reward(name, function) for name, function in functions.items()}


def _prepare_scoring(functions: Mapping[str, RewardFunctionConfig], timeout_s: float) -> Handler:
    """Load the functions in the child process; it replies (index, score) for each sample."""
    loaded = load_reward_functions(functions)

    def handle(
        request: tuple[str, Sequence[RewardSample], int | None], reply: Callable[[Any], None]
    ) -> None:
        name, samples, max_concurrent = request
        score_each(
            loaded[name],
            samples,
            name,
            timeout_s=timeout_s,
            max_concurrent=max_concurrent,
            report=lambda index, score: reply((index, score)),
        )

    return handle


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
