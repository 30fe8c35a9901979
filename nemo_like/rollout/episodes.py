"""Episodes of programs, and conversations with an environment: their calls become requests of the
generator, and their ends become rows.

The driver keeps what was sampled; the worker of an episode gets the token ids only, and names the
calls of each row when the episode ends.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np

from nemo_like.agents.events import CallAnswer, CallCancel, CallRequest, EpisodeEnd, EpisodeStart
from nemo_like.agents.history import Reason
from nemo_like.agents.statuses import Status, attempt_seed, outcome_of
from nemo_like.agents.workers import AgentWorkers
from nemo_like.config.errors import shown_value
from nemo_like.config.rollout import EnvironmentConfig, RewardConfig
from nemo_like.data.jagged import Jagged
from nemo_like.environments.environment import ENVIRONMENT
from nemo_like.environments.reward import RewardError, RewardProblem
from nemo_like.generation.generator import Generator
from nemo_like.generation.requests import Completions, SamplingParams
from nemo_like.metrics import Max, Mean, Metrics, Sum
from nemo_like.rollout.conversations import (
    ConversationRow,
    EndReason,
    EpisodeOutcome,
    check_prompt_lengths,
    prompt_messages,
)
from nemo_like.rollout.rows import Rollout

logger = logging.getLogger(__name__)

Ended = tuple[ConversationRow, RewardProblem | None]
"""A row whose episode has ended, and why it failed."""
_END_REASONS: dict[Status, EndReason] = {
    Status.DONE: "done",
    Status.LIMIT_TURNS: "turns",
    Status.LIMIT_TOKENS: "tokens",
    Status.LIMIT_TIME: "timeout",
    Status.FAILED_PROGRAM: "error",
}


@dataclass(eq=False)
class _Recorded:
    """A call as the driver knows it."""

    request: CallRequest
    parent: _Recorded | None
    request_id: int = -1
    """Of the generator; -1 for one that was not submitted."""
    answer: tuple[Completions, int] | None = None
    """Completions, and the row that is its answer."""
    token_ids: np.ndarray | None = None
    """Those of the answer, int32 [L]."""

    @property
    def path(self) -> list[_Recorded]:
        """The calls that this one continues, and itself."""
        calls: list[_Recorded] = [self]
        while (parent := calls[-1].parent) is not None:
            calls.append(parent)
        return calls[::-1]

    @property
    def prompt_ids(self) -> np.ndarray:
        """Token ids that the answer follows, int32 [L]."""
        parts = []
        for call in self.path[:-1]:
            assert call.token_ids is not None
            parts += [call.request.given, call.token_ids]
        return np.concatenate([*parts, self.request.given])


@dataclass(eq=False)
class _Attempt:
    """One run of a program or a conversation on a row."""

    row: ConversationRow
    sampling: SamplingParams
    max_total_tokens: int
    length: float | None = None
    """Predicted tokens of all turns of the model; None without a prediction."""
    number: int = 0
    """Attempts before."""
    calls: dict[int, _Recorded] = field(default_factory=dict)
    """By number."""

    @property
    def num_left(self) -> float | None:
        """Predicted tokens of the turns that are left, at least one; None without a prediction."""
        if self.length is None:
            return None
        sampled = [each.token_ids for each in self.calls.values() if each.token_ids is not None]
        return max(self.length - sum(map(len, sampled)), 1.0)


class EpisodeDriver:
    """Runs episodes on rows until they have ended, with further attempts after failures."""

    def __init__(
        self,
        workers: AgentWorkers,
        generator: Generator,
        config: EnvironmentConfig,
        rewards: RewardConfig,
    ) -> None:
        """`rewards` are the functions and limits of the run."""
        self.workers = workers
        self.config = config
        self.rewards = rewards
        self._generator = generator
        self._num_attempts = 0
        self._attempts: dict[int, _Attempt] = {}
        """By number among all attempts of the run."""
        self._calls: dict[int, tuple[int, _Recorded]] = {}
        """By request id: the attempt and the call."""
        self._held: list[CallRequest] = []
        """Calls that wait until requests are submitted again."""

    def start(
        self,
        rows: Sequence[ConversationRow],
        sampling: SamplingParams,
        max_total_tokens: int,
        lengths: np.ndarray | None = None,
    ) -> None:
        """Start an episode on each of `rows`, which consist of their prompts.

        `lengths` float [B] are the predicted tokens of the model in each episode, by which replicas
        are assigned; the longest begin first. Raises ConfigError for a prompt that leaves no room
        in a conversation.
        """
        if not self.config.is_program:
            check_prompt_lengths([row.prompt for row in rows], max_total_tokens)
        attempts = [_Attempt(row, sampling, max_total_tokens) for row in rows]
        if lengths is not None:
            for attempt, length in zip(attempts, lengths.tolist(), strict=True):
                attempt.length = length
            attempts = [attempts[index] for index in np.argsort(-lengths, kind="stable")]
        self._start(attempts)

    def add_completions(self, request_ids: Sequence[int], completions: Completions) -> None:
        """Answer the calls with these requests."""
        answers = []
        for position, request_id in enumerate(request_ids):
            number, call = self._calls.pop(request_id)
            call.answer = (completions, position)
            call.token_ids = completions.token_ids[position]
            answers.append(
                CallAnswer(
                    episode=number,
                    number=call.request.number,
                    token_ids=call.token_ids,
                    finish_reason=completions.finish_reasons[position],
                )
            )
        self.workers.answer(answers)

    def advance(self, *, submits: bool) -> list[Ended]:
        """Request the answers to new calls, unless not `submits`; return the rows that have ended.

        Raises WorkerFailure, and RewardError after a failure with `environment.on_error` `stop`.
        """
        ended: list[Ended] = []
        for event in self.workers.collect():
            if isinstance(event, CallRequest):
                self._held.append(event)
            elif isinstance(event, CallCancel):
                self._cancel(event)
            else:
                ended += self._end(event)
        if submits:
            self._submit()
        return ended

    def _problem(self, outcome: EpisodeOutcome) -> RewardProblem | None:
        """Return the problem of a failed episode of a program."""
        if not outcome.status.is_failure:
            return None
        config = self.config
        name = "environment" if config.path is not None else "command"
        kind = "ended" if outcome.status is Status.FAILED_INFRA else "raised"
        text = f"failed: {outcome.problem}"
        what = config.path or " ".join(config.command)
        return RewardProblem(name, what, kind, text, section="environment")

    def _start(self, attempts: Sequence[_Attempt]) -> None:
        starts = []
        for attempt in attempts:
            row = attempt.row
            starts.append(
                EpisodeStart(
                    episode=self._num_attempts,
                    row=row.prompt.row,
                    seed=attempt_seed(row.seed, attempt.number),
                    max_total_tokens=attempt.max_total_tokens,
                    prompt_ids=row.prompt.token_ids,
                    messages=() if self.config.is_program else prompt_messages(row.prompt),
                )
            )
            row.num_started += 1
            self._attempts[self._num_attempts] = attempt
            self._num_attempts += 1
        self.workers.start(starts)

    def _submit(self) -> None:
        """Request the answers to the calls that wait; those of equal options together."""
        groups: dict[tuple[SamplingParams, int], list[CallRequest]] = {}
        for request in self._held:
            attempt = self._attempts[request.episode]
            run = attempt.sampling
            sampling = replace(
                run,
                max_new_tokens=min(request.max_tokens or run.max_new_tokens, run.max_new_tokens),
                stop_strings=(*run.stop_strings, *request.stop),
            )
            groups.setdefault((sampling, attempt.max_total_tokens), []).append(request)
        self._held = []
        for (sampling, max_total_tokens), requests in groups.items():
            calls = []
            attempts = [self._attempts[each.episode] for each in requests]
            rows = [attempt.row for attempt in attempts]
            lengths = [attempt.num_left for attempt in attempts]
            for request in requests:
                known = self._attempts[request.episode].calls
                parent = None if request.parent is None else known[request.parent]
                known[request.number] = _Recorded(request, parent)
                calls.append(known[request.number])
            request_ids = self._generator.submit(
                Jagged.from_rows([call.prompt_ids for call in calls], np.int32),
                np.array([request.seed for request in requests], dtype=np.uint64),
                sampling,
                lengths=None if None in lengths else np.array(lengths),
                max_total_length=max_total_tokens,
                affinity=[row.episode for row in rows],
                images=[row.prompt.images for row in rows],
            )
            for request_id, call in zip(request_ids, calls, strict=True):
                call.request_id = request_id
                self._calls[request_id] = (call.request.episode, call)

    def _cancel(self, event: CallCancel) -> None:
        """Discard the request of a call for which nobody waits."""
        attempt = self._attempts.get(event.episode)
        if attempt is None:
            # Its end has cancelled all calls.
            return
        key = (event.episode, event.number)
        self._held = [each for each in self._held if (each.episode, each.number) != key]
        call = attempt.calls.get(event.number)
        if call is not None and self._calls.pop(call.request_id, None):
            self._generator.cancel([call.request_id])

    def _end(self, end: EpisodeEnd) -> list[Ended]:
        """Return the row of an episode that has ended, or nothing if it is tried again.

        Raises RewardError if a failure stops the run.
        """
        attempt = self._attempts.pop(end.episode)
        self._held = [each for each in self._held if each.episode != end.episode]
        # Of a lost worker; another one has cancelled them.
        running = [call.request_id for call in attempt.calls.values()]
        running = [each for each in running if self._calls.pop(each, None)]
        self._generator.cancel(running)
        if self.config.is_program:
            return self._end_program(attempt, end)
        if end.status is Status.FAILED_INFRA:
            # Its process was lost. With the same seeds the turns are sampled again.
            self._start([replace(attempt, calls={})])
            return []
        row = attempt.row
        row.ended_by = _END_REASONS[end.status]
        row.rewards, row.turn_rewards = dict(end.rewards or {}), end.call_rewards
        row.metrics, row.step_s = dict(end.metrics), end.seconds
        row.messages = list(end.messages)
        _add_rows(attempt, end)
        # It is one row in any case, and not an episode of several rows in the batch.
        row.rows = ()
        return [(row, None if end.failure is None else end.failure.problem)]

    def _end_program(self, attempt: _Attempt, end: EpisodeEnd) -> list[Ended]:
        """Do what `_end` does for a program."""
        has_functions = any(weight != 0 for weight in self.rewards.weights.values())
        if end.status is Status.DONE and end.rewards is None and not has_functions:
            # No reward is not a reward of 0.
            problem = "it has no reward: return a number, send one to the path /reward of its"
            problem += " endpoint, or set reward.functions"
            end = replace(end, status=Status.FAILED_PROGRAM, problem=problem)
        if end.status.is_failure:
            # The driver knows them also where the worker was lost.
            answered = [call for call in attempt.calls.values() if call.answer is not None]
            attempt.row.failed_calls = [*attempt.row.failed_calls, len(answered)]
        result = outcome_of(
            end.status,
            attempt.number,
            retries=self.config.retries,
            on_failure=self.config.on_error,
            on_limit=self.config.on_limit,
        )
        if result == "retry":
            logger.info("an episode is tried again: %s", end.problem)
            self._start([replace(attempt, number=attempt.number + 1, calls={})])
            return []
        row = attempt.row
        row.outcome = EpisodeOutcome(
            status=end.status,
            is_dropped=result == "drop",
            num_attempts=attempt.number + 1,
            num_calls=len(end.answered),
            reasons=end.reasons,
            seconds=end.seconds,
            problem=end.problem,
        )
        problem = self._problem(row.outcome)
        if result == "stop":
            raise RewardError(
                f"{problem}, on the row {shown_value(dict(row.prompt.row))};"
                " environment.on_error=drop or zero continues a run in spite of such episodes"
            )
        if result == "train":
            for name, value in (end.rewards or {}).items():
                # A number without a name has this one.
                own = ENVIRONMENT if name == "reward" else f"{ENVIRONMENT}_{name}"
                row.rewards[own] = value
            row.turn_rewards = end.call_rewards
        row.messages = list(end.messages)
        _add_rows(attempt, end)
        return [(row, problem)]


def _add_rows(attempt: _Attempt, end: EpisodeEnd) -> None:
    """Set the training rows of an episode; the row of the attempt becomes that of the last call."""
    base = attempt.row
    rows = []
    for index, (numbers, is_trained) in enumerate(end.rows):
        row = base if index == end.last_row else replace(base, messages=[], rows=())
        row.segments, row.is_trained = [], is_trained
        row.calls = [end.answered.index(number) for number in numbers]
        row.logprobs, row.weight_versions, row.routed_experts = [], [], []
        for number in numbers:
            call = attempt.calls[number]
            assert call.answer is not None
            row.segments.append(call.request.given)
            row.add_turn(*call.answer)
        if end.status is Status.LIMIT_TOKENS:
            row.finish_reason = "length"
        rows.append(row)
    base.rows = rows or [base]


def episode_metrics(rollout: Rollout, trained_groups: np.ndarray) -> Metrics:
    """Return the counts of episodes by what became of them, and their calls and rows.

    `trained_groups` int64 [n] are the groups that were not dropped by dynamic sampling. Raises
    RuntimeError unless every attempt that was started is trained, dropped, cancelled or replaced by
    another one, and only one of them.
    """
    first_rows = rollout.first_rows
    outcomes = []
    for row in first_rows.tolist():
        outcome = rollout.conversations[row].outcome
        assert outcome is not None, "the episode has ended"
        outcomes.append(outcome)
    statuses = Counter(each.status for each in outcomes)
    is_kept = np.isin(rollout.batch["group"][first_rows], trained_groups)
    is_trained = is_kept & rollout.batch["reward_mask"][first_rows]
    is_cancelled = np.array([each.status is Status.CANCELLED for each in outcomes])
    has_problem = np.array([rollout.reward_problems[row] is not None for row in first_rows])
    is_dropped = np.array([each.is_dropped for each in outcomes]) | has_problem | ~is_kept
    counts = {
        "episodes/trained": int(is_trained.sum()),
        "episodes/dropped": int((is_dropped & ~is_trained & ~is_cancelled).sum()),
        "episodes/cancelled": int(is_cancelled.sum()),
        "episodes/replaced": sum(each.num_attempts - 1 for each in outcomes),
    }
    if sum(counts.values()) != rollout.num_started:
        raise RuntimeError(
            f"{rollout.num_started} episodes were started, but the sum of {counts} differs"
        )
    metrics: Metrics = {name: Sum(float(each)) for name, each in counts.items()}
    metrics["episodes/started"] = Sum(float(rollout.num_started))
    for status in Status:
        metrics[f"episodes/num_{status.value}"] = Sum(float(statuses[status]))
    num_calls = [each.num_calls for each in outcomes]
    seconds = [each.seconds for each in outcomes]
    failed = [
        calls for row in first_rows.tolist() for calls in rollout.conversations[row].failed_calls
    ]
    if failed:
        # Failures that depend on the length bias what is trained.
        metrics["episodes/failed_calls_mean"] = Mean(float(sum(failed)), len(failed))
    reasons: Counter[str] = Counter()
    for each in outcomes:
        reasons.update(each.reasons)
    for reason in get_args(Reason):
        metrics[f"episodes/num_calls_{reason}"] = Sum(float(reasons[reason]))
    metrics |= {
        "episodes/calls_mean": Mean(float(sum(num_calls)), len(outcomes)),
        "episodes/rows_mean": Mean(float(len(rollout.conversations)), len(outcomes)),
        "episodes/seconds_mean": Mean(sum(seconds), len(outcomes)),
        "episodes/seconds_max": Max(max(seconds)),
    }
    return metrics
