"""The protocol of environments for rollouts of several turns, and what passes through it.

An environment answers the turns of the model: it runs a tool that the model calls, replies as a
user, or ends the conversation. It is a class of the user, named by its import path in
`environment.path`; there is nothing to register. One instance in a worker process serves any number
of conversations at the same time. It keeps nothing about them: their state travels with the
conversation, so that any worker can answer the next turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from nemo_like.data.messages import Message

State = Mapping[str, Any]
"""State of a conversation as JSON values; the environment defines its keys."""


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

    def with_state(self, state: State) -> Conversation:
        """Return the conversation with another state."""
        return replace(self, state=state)


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
    """State for the next turn, as JSON values; None keeps the state of the conversation."""
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

        An exception stops the run with a message that names the row. A turn that the environment
        does not understand is the model's mistake, so answer it with an observation or a reward.
        """
        ...


class EnvironmentFailure(Exception):
    """An environment failed; the message has the key, the problem, the row and the last turn."""
