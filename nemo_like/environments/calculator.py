"""An environment with one tool: a calculator that the model calls in its text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nemo_like.environments.arithmetic import BadExpression, evaluate, shown
from nemo_like.environments.environment import Conversation, State, StepResult


class Calculator:
    """Answers a turn with `<tool>12*7</tool>` by the value; a turn without a call is the answer.

    Only the last call of a turn is answered. The answer has no reward here: name a reward function,
    which gets the last turn, for example `nemo_like.environments.math.answer_reward`.
    """

    def __init__(
        self,
        opening: str = "<tool>",
        closing: str = "</tool>",
        role: str = "user",
        error_reward: float = 0.0,
    ) -> None:
        """`opening` and `closing` are the texts around an expression.

        `role` is that of the message with the value, and `error_reward` the reward of a call that
        cannot be evaluated, usually negative. Raises ValueError for an empty text.
        """
        if not opening or not closing:
            raise ValueError(
                f"opening is {opening!r} and closing {closing!r}; both need at least one character"
            )
        # Without the characters of another opening, so that the last call is found.
        inside = f"(?:(?!{re.escape(opening)}).)*?"
        self._call = re.compile(f"{re.escape(opening)}({inside}){re.escape(closing)}", re.DOTALL)
        self._role = role
        self._error_reward = error_reward

    def reset(self, row: Mapping[str, Any]) -> State:
        """Return no state: every call is independent of the others."""
        return {}

    def step(self, conversation: Conversation) -> StepResult:
        """Evaluate the call of the last turn, or end the conversation."""
        calls = self._call.findall(conversation.completion)
        if not calls:
            return StepResult(reward={}, done=True)
        metrics = {"tool_calls": 1.0, "tool_errors": 0.0}
        reward: float | dict[str, float] = {}
        try:
            text = shown(evaluate(calls[-1]))
        except BadExpression as error:
            text = f"error: {error}"
            metrics["tool_errors"] = 1.0
            if self._error_reward:
                reward = {"tool_errors": self._error_reward}
        return StepResult(
            observation=[{"role": self._role, "content": text}], reward=reward, metrics=metrics
        )
