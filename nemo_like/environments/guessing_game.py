"""A game of several turns: the model guesses a number, and the answer is `higher` or `lower`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nemo_like.environments.environment import Conversation, State, StepResult

_INTEGER = re.compile(r"-?\d{1,18}(?!\d)")


class GuessingGame:
    """Rewards the guess that equals the row's `answer`, and gives hints for all others.

    The guess is the last integer of a turn. The reward is 1 for the number, less `guess_cost` for
    each wrong guess before it.
    """

    def __init__(
        self,
        higher: str = "higher",
        lower: str = "lower",
        invalid: str = "answer with one number",
        guess_cost: float = 0.0,
    ) -> None:
        """`higher`, `lower` and `invalid` are the texts of the answers to a wrong guess."""
        self._higher = higher
        self._lower = lower
        self._invalid = invalid
        self._guess_cost = guess_cost

    def reset(self, row: Mapping[str, Any]) -> State:
        """Return the number and the guesses so far. Raises ValueError for a row without number."""
        answer = str(row.get("answer", "")).strip()
        if _INTEGER.fullmatch(answer) is None:
            raise ValueError(
                f"the row's answer is {answer!r}; the guessing game needs rows with an integer in"
                " the column 'answer'"
            )
        return {"number": int(answer), "num_wrong": 0}

    def step(self, conversation: Conversation) -> StepResult:
        """Compare the guess with the number."""
        number = conversation.state["number"]
        num_wrong = conversation.state["num_wrong"]
        guesses = _INTEGER.findall(conversation.completion)
        if not guesses:
            return StepResult(
                observation=self._invalid,
                state={"number": number, "num_wrong": num_wrong + 1},
                metrics={"invalid_guesses": 1.0, "found": 0.0},
            )
        guess = int(guesses[-1])
        if guess == number:
            reward = 1.0 - self._guess_cost * num_wrong
            return StepResult(reward=reward, done=True, metrics={"found": 1.0})
        return StepResult(
            observation=self._higher if number > guess else self._lower,
            state={"number": number, "num_wrong": num_wrong + 1},
            metrics={"invalid_guesses": 0.0, "found": 0.0},
        )
