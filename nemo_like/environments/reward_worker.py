"""Reward workers, which load reward functions by their import paths and call them, and their driver
side.

Reward functions are code of the user, which may be async; their failures become `BadReward`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.config.rollout import OnError, RewardConfig, RewardFunctionConfig
from nemo_like.data.jagged import Jagged
from nemo_like.distributed import activity
from nemo_like.distributed.worker_group import (
    Handle,
    WorkerContext,
    WorkerGroup,
    submit_all,
    submit_one,
)
from nemo_like.environments.reward import MAX_NUMBER, RewardError, RewardProblem, RewardSample
from nemo_like.environments.reward_calls import (
    MAX_CONCURRENT,
    TIMED_OUT,
    BadReward,
    Score,
    function_kind,
    load_reward_functions,
    score_each,
)
from nemo_like.environments.user_process import Handler, ProcessEnded, ProcessHung, UserProcess

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_CHECK_S = 1.0
"""Time between two checks of the workers: each costs a call per worker."""
_MARGIN_S = 2.0
"""An async call is cancelled in the process first, and the process killed so much later."""


@dataclass(frozen=True, slots=True)
class ScoredSamples:
    """Rewards of n samples that were submitted together."""

    keys: Sequence[int]
    """The keys that `RewardEnvironment.submit` got."""
    rewards: np.ndarray
    """float64 [n]: weighted sums."""
    components: dict[str, np.ndarray]
    """float64 [n] each: unweighted values of every function, by name; 0 where it failed, NaN where
    it does not apply."""
    problems: list[RewardProblem | None]
    """The first problem of each sample."""


class RewardWorker:
    """Scores samples with every configured function.

    With `timeout_s` the functions run in a child process, which is replaced when a call hangs.
    """

    def __init__(
        self,
        context: WorkerContext | None,
        *,
        functions: Mapping[str, RewardFunctionConfig],
        timeout_s: float | None = None,
        timeout_name: str | None = None,
        on_error: OnError = "stop",
    ) -> None:
        """`timeout_name` names the limit in messages; None is the key `reward.timeout_s`."""
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._functions = load_reward_functions(functions)
        self._configs = functions
        self._on_error: OnError = on_error
        self._timeout_s = timeout_s
        self._timeout_name = timeout_name
        self._process = UserProcess(_prepare_scoring, dict(functions), timeout_s)

    def score(
        self,
        samples: Sequence[RewardSample],
        keys: Sequence[int] = (),
        completion_ids: Jagged | None = None,
    ) -> ScoredSamples:
        """Return the values of every function for n samples, and their weighted sum.

        The completions are those of the samples, or the texts of `completion_ids` (int32, n rows).
        The samples of a group are consecutive if a function is grouped. Raises RewardError with the
        sample if one fails and `on_error` is `stop`. Otherwise a failed function has the value 0,
        and the first problem of each sample is returned as well.
        """
        if completion_ids is not None:
            samples = self._decoded(samples, completion_ids)
        components = {}
        problems: list[RewardProblem | None] = [None] * len(samples)
        # In float64, in which equal sums of other components differ by rounding errors only; the
        # components stay unweighted for the metrics.
        rewards = np.zeros(len(samples))
        for name, config in self._configs.items():
            components[name] = self.values(name, samples, problems)
            total = rewards + config.weight * np.nan_to_num(components[name])
            for index in np.flatnonzero(np.abs(total) > MAX_NUMBER).tolist():
                text = f"makes the reward {total[index]:g}, which is not finite in float32"
                self._add_problem(name, BadReward("value", text), samples, index, problems)
                components[name][index] = 0.0
                total[index] = rewards[index]
            rewards = total
        name = next(reversed(components), "")
        for index in np.flatnonzero(_has_no_value(components, len(samples))).tolist():
            text = "returned None, which is not a finite number, and no other function applies"
            self._add_problem(name, BadReward("value", text), samples, index, problems)
            components[name][index] = 0.0
        return ScoredSamples(keys, rewards, components, problems)

    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Decode the completions that arrive as token ids with `tokenizer`."""
        self._tokenizer = tokenizer

    def close(self) -> None:
        """End the child process, if there is one."""
        self._process.close()

    def _decoded(
        self, samples: Sequence[RewardSample], completion_ids: Jagged
    ) -> list[RewardSample]:
        """Return the samples with the texts of their completions, int32 rows."""
        assert self._tokenizer is not None
        decoded = []
        for sample, token_ids in zip(samples, completion_ids, strict=True):
            text = self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
            decoded.append(replace(sample, completion=text, completion_ids=token_ids))
        return decoded

    def values(
        self, name: str, samples: Sequence[RewardSample], problems: list[RewardProblem | None]
    ) -> np.ndarray:
        """Return the values of a function, float64 [n]; the first of the `problems` are kept.

        NaN where it does not apply. Raises RewardError as `score` does.
        """
        config = self._configs[name]
        if config.keep_special_tokens:
            samples = [self._with_special_tokens(sample) for sample in samples]
        # A function may change its row, which is shared by the completions of a prompt.
        samples = [replace(sample, row=deepcopy(sample.row)) for sample in samples]
        values = np.zeros(len(samples))
        label = f"reward.functions.{name} ({config.path})"
        num_scored = 0

        def add(index: int, score: Score) -> None:
            nonlocal num_scored
            num_scored += 1
            # A slow reward function is progress, sample by sample, and not a hung worker.
            activity.note(f"{label}, {num_scored} of {len(samples)} samples done")
            if not isinstance(score, BadReward):
                values[index] = score
                return
            self._add_problem(name, score, samples, index, problems)

        activity.note(f"{label}, 0 of {len(samples)} samples done")
        try:
            for indices in _parts(samples) if config.grouped else [range(len(samples))]:
                part = [samples[index] for index in indices]
                report = partial(_add_at, add, indices)
                if self._timeout_s is None:
                    score_each(self._functions[name], part, report=report)
                else:
                    self._score_in_process(name, part, self._timeout_s, report)
        except RewardError:
            # A child process still scores the other samples.
            self._process.close()
            raise
        return values

    def _add_problem(
        self,
        name: str,
        bad: BadReward,
        samples: Sequence[RewardSample],
        index: int,
        problems: list[RewardProblem | None],
    ) -> None:
        """Keep the first problem of a sample. Raises RewardError if `on_error` is `stop`."""
        text = bad.text
        if bad.kind == "timeout":
            text = f"exceeded {self._timeout_name or f'reward.timeout_s {self._timeout_s:g}'}"
        problem = RewardProblem(name, self._configs[name].path, bad.kind, text)
        if self._on_error == "stop":
            raise RewardError.from_problem(problem, samples[index])
        problems[index] = problems[index] or problem

    def _with_special_tokens(self, sample: RewardSample) -> RewardSample:
        if self._tokenizer is None or len(sample.completion_ids) == 0:
            return sample
        text = self._tokenizer.decode(sample.completion_ids.tolist(), skip_special_tokens=False)
        return replace(sample, completion=text)

    def _score_in_process(
        self,
        name: str,
        samples: Sequence[RewardSample],
        timeout_s: float,
        add: Callable[[int, Score], None],
    ) -> None:
        """Call `add` with the index and the score of each sample.

        A call that exceeds the timeout, or whose process dies, is the failure of its sample; of all
        samples if the function is batched. If an async function blocks, the unfinished samples are
        scored again one at a time, so that the one that blocks is found.
        """
        kind = function_kind(self._functions[name])
        limit_s = timeout_s if kind == "sync" else timeout_s + _MARGIN_S
        max_concurrent = MAX_CONCURRENT
        waiting = list(range(len(samples)))
        while waiting:
            sent = list(waiting)
            self._process.send((name, [samples[index] for index in sent], max_concurrent))
            try:
                while waiting:
                    position, score = self._process.receive(limit_s)
                    waiting.remove(sent[position])
                    add(sent[position], score)
                return
            except ProcessHung:
                failure = TIMED_OUT
            except ProcessEnded as error:
                failure = BadReward("ended", f"ended its process ({error})")
            if kind == "async" and max_concurrent > 1:
                max_concurrent = 1
                continue
            failed = waiting if kind == "batched" else waiting[:1]
            for index in list(failed):
                waiting.remove(index)
                add(index, failure)


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
        self.is_grouped = any(function.grouped for function in config.functions.values())
        """The samples of a group are submitted together."""
        self._waiting: list[tuple[int, RewardSample, np.ndarray | None]] = []
        """Key, sample and token ids of its completion, int32 [L]."""
        self._running: dict[int, Handle] = {}
        """Running calls by rank of the worker."""
        self._starting: list[Handle] = []
        """Calls of `set_tokenizer`."""
        self._checked_s = 0.0

    @property
    def running_calls(self) -> list[Handle]:
        """Running calls of the workers; `collect` has results when one ends."""
        return list(self._running.values())

    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Send the tokenizer that decodes completions to the workers. Returns at once."""
        self._starting = submit_all(self.group, RewardWorker.set_tokenizer, tokenizer)

    def submit(
        self,
        keys: Sequence[int],
        samples: Sequence[RewardSample],
        completion_ids: Sequence[np.ndarray] = (),
    ) -> None:
        """Add samples; `collect` returns their rewards under these keys, in any order.

        With `completion_ids`, int32 [L] of each sample, the workers decode the completions.
        """
        self._waiting += zip(keys, samples, completion_ids or [None] * len(keys), strict=True)
        self._start()

    def collect(self, timeout_s: float) -> list[ScoredSamples]:
        """Return the samples that were scored since the last call.

        Waits up to `timeout_s` for one, if any is unfinished. Raises WorkerFailure if a function
        or a worker fails.
        """
        handles = self.running_calls
        if not handles:
            return []
        ended = self.group.wait_any(handles, timeout_s)
        scored: list[ScoredSamples] = self.group.get(ended)
        for rank, handle in list(self._running.items()):
            if handle in ended:
                del self._running[rank]
        now = time.monotonic()
        if now - self._checked_s >= _CHECK_S:
            self._checked_s = now
            # Raises the failure of a worker that hangs.
            self.group.is_done(list(self._running.values()))
        self._start()
        return scored

    def shutdown(self) -> None:
        """Stop the reward workers."""
        self.group.shutdown()

    def _start(self) -> None:
        """Divide the waiting samples over the workers that have none."""
        if self._starting:
            self.group.get(self._starting)
            self._starting = []
        idle = [rank for rank in range(self.group.world_size) if rank not in self._running]
        if not idle or not self._waiting:
            return
        bounds = np.linspace(0, len(self._waiting), len(idle) + 1).astype(int).tolist()
        if self.is_grouped:
            bounds = [self._group_start(bound) for bound in bounds]
        for rank, (start, stop) in zip(idle, pairwise(bounds), strict=True):
            chunk = self._waiting[start:stop]
            if chunk:
                keys = [key for key, _, _ in chunk]
                samples = [sample for _, sample, _ in chunk]
                rows = [token_ids for _, _, token_ids in chunk if token_ids is not None]
                completion_ids = Jagged.from_rows(rows, np.int32) if rows else None
                self._running[rank] = submit_one(
                    self.group, rank, RewardWorker.score, samples, keys, completion_ids
                )
        self._waiting = []

    def _group_start(self, index: int) -> int:
        """Return the first of the waiting samples from `index` on that begins a group."""
        samples = [sample for _, sample, _ in self._waiting]
        while 0 < index < len(samples) and samples[index].group == samples[index - 1].group:
            index += 1
        return index


def _prepare_scoring(functions: Mapping[str, RewardFunctionConfig], timeout_s: float) -> Handler:
    """Load the functions in the child process; it replies (index, score) for each sample."""
    loaded = load_reward_functions(functions)

    def handle(
        request: tuple[str, Sequence[RewardSample], int], reply: Callable[[Any], None]
    ) -> None:
        name, samples, max_concurrent = request
        score_each(
            loaded[name],
            samples,
            timeout_s=timeout_s,
            max_concurrent=max_concurrent,
            report=lambda index, score: reply((index, score)),
        )

    return handle


def _has_no_value(components: Mapping[str, np.ndarray], num_samples: int) -> np.ndarray:
    """Return True for samples to which no function applies, bool [n]."""
    is_missing = np.full(num_samples, bool(components))
    for values in components.values():
        is_missing &= np.isnan(values)
    return is_missing


def _parts(samples: Sequence[RewardSample]) -> list[list[int]]:
    """Return the indices of the samples of each group."""
    parts: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        parts.setdefault(sample.group, []).append(index)
    return list(parts.values())


def _add_at(
    add: Callable[[int, Score], None], indices: Sequence[int], position: int, score: Score
) -> None:
    add(indices[position], score)
