"""What the driver and the workers of agents exchange about episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from nemo_like.agents.history import Reason
from nemo_like.agents.statuses import Status
from nemo_like.data.messages import Message
from nemo_like.environments.environment import EnvironmentFailure


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeStart:
    """One attempt to run a program or a conversation on a row of data."""

    episode: int
    """Number of the attempt among all of the run."""
    row: Mapping[str, Any]
    seed: int
    max_total_tokens: int
    prompt_ids: np.ndarray
    """int32 [L]: the first prompt of a conversation."""
    messages: Sequence[Message] = ()
    """Those of the row, of a conversation."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CallRequest:
    """A call that the generator answers."""

    episode: int
    number: int
    """Counted from 0 in its episode."""
    parent: int | None
    """Number of the call that it continues."""
    given: np.ndarray
    """int32 [L]: the prompt, or with a parent what follows the tokens of the parent."""
    seed: int
    max_tokens: int | None = None
    """Limit of the request; None has only that of the run."""
    stop: tuple[str, ...] = ()
    is_blocking: bool = False
    """The episode waits for the answer and does nothing else."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CallAnswer:
    """The sampled tokens of a call."""

    episode: int
    number: int
    token_ids: np.ndarray
    """int32 [L]."""
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class CallCancel:
    """A call whose answer nobody waits for."""

    episode: int
    number: int


@dataclass(frozen=True, kw_only=True)
class EpisodeEnd:
    """An episode that has ended. At most cancelled calls of it follow."""

    episode: int
    status: Status
    problem: str = ""
    """Why a program failed."""
    failure: EnvironmentFailure | None = None
    """Why an environment failed."""
    rewards: Mapping[str, float] | None = None
    """Named rewards of the program and of its requests, None if there are none; or components of
    the reward of an environment."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of an environment, summed over turns."""
    rows: Sequence[tuple[Sequence[int], Sequence[bool]]] = ()
    """Training rows: the numbers of their calls, and which of them the row trains."""
    last_row: int = -1
    """Index of the row with the last call; -1 without rows."""
    answered: Sequence[int] = ()
    """Numbers of the answered calls, in the order of their answers."""
    call_rewards: Sequence[float] = ()
    """What requests, or the steps of an environment, gave to each answered call."""
    messages: Sequence[Message] = ()
    """Messages and reply of the last call."""
    reasons: Mapping[Reason, int] = field(default_factory=dict)
    """Number of calls that continue no other, by reason."""
    seconds: float = 0.0
    """Time of the program, or of the steps of the environment."""


Event = CallRequest | CallCancel | EpisodeEnd
