"""How an episode ended, and what follows: training, another attempt, or none of both."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import numpy as np

Outcome = Literal["train", "zero", "drop", "retry", "stop"]
"""`train` with the reward of the episode, or with a reward of `zero`; `drop`: the group trains with
its other episodes; `retry` with a new environment; `stop` the run."""


class Status(StrEnum):
    """The end of an episode.

    A limit is a result of the model. A failure is not: it has no reward, above all not 0.
    """

    DONE = "done"
    """The program returned."""
    LIMIT_TURNS = "limit_turns"
    LIMIT_TOKENS = "limit_tokens"
    """The last request had no room for an answer."""
    LIMIT_TIME = "limit_time"
    FAILED_PROGRAM = "failed_program"
    """The program failed: its exit status, its result, or its use of the endpoint."""
    FAILED_INFRA = "failed_infra"
    """A worker, a replica or an environment server was lost."""
    CANCELLED = "cancelled"
    """The step ended without the episode, or its weights are too old."""

    @property
    def is_limit(self) -> bool:
        """True if a limit ended the episode."""
        return self in (Status.LIMIT_TURNS, Status.LIMIT_TOKENS, Status.LIMIT_TIME)

    @property
    def is_failure(self) -> bool:
        """True if the episode counts as failed."""
        return self in (Status.FAILED_PROGRAM, Status.FAILED_INFRA)


def outcome_of(
    status: Status,
    attempt: int,
    *,
    retries: int,
    on_failure: Literal["drop", "zero", "stop"],
    on_limit: Literal["score", "drop", "zero"],
) -> Outcome:
    """Return what follows attempt number `attempt`, counted from 0, of an episode.

    Failures are retried `retries` times. A lost worker or replica never gives a reward of 0 and
    never stops the run: that is not a result of the program.
    """
    if status is Status.DONE:
        return "train"
    if status is Status.CANCELLED:
        return "drop"
    if status.is_limit:
        return "train" if on_limit == "score" else on_limit
    if attempt < retries:
        return "retry"
    return "drop" if status is Status.FAILED_INFRA else on_failure


def attempt_seed(seed: int, attempt: int) -> int:
    """Return the seed of an attempt; attempt 0 has the seed of the episode."""
    if attempt == 0:
        return seed
    return int(np.random.SeedSequence((seed, attempt)).generate_state(1, np.uint64)[0])


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn's sampling stream in a conversation; turn 0 has that of the row.

    It depends on the row's seed and the turn only, so a turn that is sampled again after the loss
    of a replica or of an environment's process has the same stream.
    """
    if turn == 0:
        return seed
    sequence = np.random.SeedSequence((seed, turn))
    return int(sequence.generate_state(1, np.uint64)[0])
