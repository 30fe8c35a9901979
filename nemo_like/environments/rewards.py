"""The worker that scores samples with reward functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nemo_like.config.reward import OnError, RewardFunctionConfig
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.environments.calling import BadReward, Score, score_each
from nemo_like.environments.loading import function_kind, load_reward_functions
from nemo_like.environments.reward import RewardError, RewardProblem, RewardSample, RewardScores
from nemo_like.environments.reward_process import RewardProcess


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
        self._process: RewardProcess | None = None
        if timeout_s is not None:
            kinds = {name: function_kind(each) for name, each in self._functions.items()}
            self._process = RewardProcess(functions, kinds, timeout_s)

    def score(self, samples: Sequence[RewardSample]) -> RewardScores:
        """Return the values of every function for B samples.

        Raises RewardError with the sample if one fails and `on_error` is `stop`. Otherwise a failed
        function has the value 0, and the first problem of each sample is returned as well.
        """
        values = {}
        problems: list[RewardProblem | None] = [None] * len(samples)
        for name in self._functions:
            rewards = np.zeros(len(samples), dtype=np.float32)
            for index, score in enumerate(self._score(name, samples)):
                if not isinstance(score, BadReward):
                    rewards[index] = score
                elif self._on_error == "stop":
                    raise RewardError.from_sample(
                        name, self._paths[name], str(score), score.sample
                    ) from score
                elif problems[index] is None:
                    problems[index] = RewardProblem(
                        name, self._paths[name], score.kind, str(score).rstrip(",")
                    )
            values[name] = rewards
        return RewardScores(values, problems)

    def close(self) -> None:
        """End the child process, if there is one."""
        if self._process is not None:
            self._process.close()

    def _score(self, name: str, samples: Sequence[RewardSample]) -> list[Score]:
        label = f"reward.functions.{name} ({self._paths[name]})"
        if not samples:
            return []
        if self._process is not None:
            return self._process.score(name, samples, label)
        stops = self._on_error == "stop"
        try:
            return score_each(self._functions[name], samples, label, stops=stops)
        except BadReward as problem:
            # The first one, after which no other sample was scored.
            return [problem]
