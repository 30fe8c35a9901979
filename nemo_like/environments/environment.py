"""The protocol of environments for rollouts of several turns, and checks of what a step returns.

An environment answers the turns of the model: it runs a tool that the model calls, replies as a
user, or ends the conversation. It is a class of the user, named by its import path in
`environment.path`; there is nothing to register. One instance in a worker process serves any number
of conversations at the same time. It keeps nothing about them: each has a state.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nemo_like.config.errors import shown_value
from nemo_like.data.messages import Message
from nemo_like.environments.reward import BadRewardKind, RewardProblem, finite_number

ENVIRONMENT = "environment"
"""Name of the reward component of an environment; named components have it as a prefix."""
_MAX_SHOWN = 500

State = Mapping[str, Any]
"""State of a conversation, which stays in one process; the environment defines keys and values."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation whose last message is a turn of the model that an environment answers.

    Example: `Conversation(messages=({"role": "user", "content": "2+2=?"}, {"role": "assistant",
    "content": "<tool>2+2</tool>"}), row={"prompt": "2+2=?", "answer": "4"}, state={}, turn=1)`.
    """

    messages: tuple[Message, ...]
    """All turns, starting with the data row. The texts of the model have no special tokens."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """All columns of the row in the data file."""
    state: State = field(default_factory=dict)
    """What `reset` or the previous `step` returned."""
    turn: int = 1
    """Number of turns of the model so far."""
    is_truncated: bool = False
    """The model's last turn reached a token limit before it ended."""

    @property
    def completion(self) -> str:
        """Text of the model's last turn."""
        return str(self.messages[-1].get("content") or "")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The answer of an environment to one turn of the model."""

    observation: str | Sequence[Message] | None = None
    """What the model reads before its next turn: the content of a message of role `user`, or
    messages of any role but `assistant`. None only with `done`."""
    reward: float | Mapping[str, float] = 0.0
    """Reward of this turn: a number, or named components whose sum is the reward. Rewards are
    summed over the turns."""
    done: bool = False
    """The conversation has ended; the observation is not shown to the model."""
    state: State | None = None
    """State for the next turn; None keeps the state of the conversation."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are summed over the turns of a conversation and averaged over conversations,
    logged as `environment/<name>`. Example: `{"tool_calls": 1}`."""


class Environment(Protocol):
    """What a class named by `environment.path` has; it is constructed with `environment.options`.

    Both methods may be plain or async functions. Plain functions run in a thread of their own, so
    an instance must not change attributes of itself in them.
    """

    def reset(self, row: Mapping[str, Any]) -> State | Awaitable[State]:
        """Return the initial state of a conversation about `row`.

        Called once per conversation, before its first `step`.
        """
        ...

    def step(self, conversation: Conversation) -> StepResult | Awaitable[StepResult]:
        """Answer the model's last turn.

        An exception ends the conversation as `environment.on_error` decides, and the run above the
        share `reward.max_error_share`. A turn that the environment does not understand is the
        model's mistake, so answer it with an observation or a reward.
        """
        ...


class EnvironmentFailure(Exception):
    """An environment failed; the message has the key, the problem, the row and the last turn."""

    problem: RewardProblem | None = None
    """Why the environment failed in one conversation; None if it failed as such."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """The checked result of a step."""

    state: State
    """State for the next turn."""
    observation: tuple[Message, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Components of the reward of this turn, by name."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    done: bool
    is_timeout: bool = False
    """The time of the conversation was over before the step ended; it has no reward then."""
    failure: EnvironmentFailure | None = None
    """Why the step has no result, unless `environment.on_error` is `stop`."""
    seconds: float = 0.0
    """Time of the step."""


class BadStep(Exception):
    """A step returned an invalid value; `str()` continues the name of the method."""


def checked_state(value: Any) -> State:
    """Return the state that `reset` returned. Raises BadStep unless it is a mapping."""
    if not isinstance(value, Mapping):
        raise BadStep(f"returned {_shown(value)}, which is not a mapping; return {{}} for no state")
    return dict(value)


def checked_outcome(state: State, value: Any) -> StepOutcome:
    """Return the outcome of a step that returned `value`.

    `state` is the state before the step. Raises BadStep for an invalid value.
    """
    if not isinstance(value, StepResult):
        raise BadStep(
            f"returned {_shown(value)}; return a nemo_like.environments.environment.StepResult"
        )
    if value.state is not None:
        state = checked_state(value.state)
    observation = _checked_observation(value.observation)
    if not observation and not value.done:
        raise BadStep(
            "returned neither an observation nor done=True, so the model has nothing to answer;"
            " return one of the two"
        )
    return StepOutcome(
        state=state,
        observation=observation,
        rewards=_checked_rewards(value.reward),
        metrics=_checked_numbers("metrics", value.metrics),
        done=bool(value.done),
    )


def failure(
    path: str, kind: BadRewardKind, text: str, conversation: Conversation
) -> EnvironmentFailure:
    """Return the error of the environment with import path `path` on `conversation`."""
    problem = RewardProblem(ENVIRONMENT, path, kind, text, section="environment")
    advice = (
        "A mistake of the model should be answered with an observation or a reward; any other"
        " exception ends the conversation, and with environment.on_error stop the run"
    )
    lines = [
        f"{problem}. {advice}. The conversation:",
        f"  row: {_shown(dict(conversation.row))}",
        f"  state: {_shown(dict(conversation.state))}",
        f"  turn {conversation.turn} of the model: {_shown(conversation.completion)}",
    ]
    error = EnvironmentFailure("\n".join(lines))
    error.problem = problem
    return error


def _checked_observation(value: Any) -> tuple[Message, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, Sequence):
        raise BadStep(
            f"returned the observation {_shown(value)}; return a text, a list of messages or None"
        )
    for message in value:
        problem = _message_problem(message)
        if problem is not None:
            raise BadStep(f"returned an observation with {_shown(message)}: {problem}")
    return tuple(value)


def _message_problem(message: Any) -> str | None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return "a message is a mapping with role and content"
    if message["role"] == "assistant":
        return "only the model has turns of role assistant; use user or tool"
    content = message.get("content")
    if not isinstance(content, str):
        return "its content is not text"
    problem = _json_problem(message)
    if problem is not None:
        return f"it is not JSON ({problem})"
    try:
        content.encode()
    except UnicodeEncodeError:
        return "its content has half of a surrogate pair, which no tokenizer encodes; remove it"
    return None


def _json_problem(value: Any) -> str | None:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    return None


def _checked_rewards(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {ENVIRONMENT: _checked_number("the reward", value)}
    components = _checked_numbers("the reward", value)
    return {f"{ENVIRONMENT}_{name}": reward for name, reward in components.items()}


def _checked_numbers(what: str, values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise BadStep(f"returned {_shown(values)} as {what}; return a mapping of names to numbers")
    checked = {}
    for name, value in values.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise BadStep(
                f"returned the name {_shown(name)} in {what}; names have letters, digits and '_'"
            )
        checked[name] = _checked_number(f"{what} {name!r}", value)
    return checked


def _checked_number(what: str, value: Any) -> float:
    """Return a number as float. Raises BadStep unless it is finite."""
    number = finite_number(value)
    if number is None:
        raise BadStep(f"returned {_shown(value)} as {what}, which is not a finite number")
    return number


def _shown(value: Any) -> str:
    # A part of an error message; a turn may have thousands of tokens.
    return shown_value(value, _MAX_SHOWN)
