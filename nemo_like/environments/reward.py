"""The input of reward functions, and the problems of their calls.

A reward is a plain or async function of a `RewardSample` that returns a number, named by import
path in the YAML. There is nothing to register.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np

from nemo_like.config.errors import shown_value
from nemo_like.data.messages import Message

RewardSection = Literal["functions", "models", "environment"]
"""Section of `reward` that names what scored a sample, or the environment."""

BadRewardKind = Literal["raised", "timeout", "value", "ended"]
"""`raised` an exception; exceeded the `timeout`; the `value` is not one finite number; called
sys.exit, or its process `ended`."""

_MAX_TEXT_SHOWN = 500
MAX_NUMBER = 3.4028234e38
"""Advantages are float32, in which larger rewards are infinite."""


def _no_ids() -> np.ndarray:
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """One completion to score.

    Example: `RewardSample(prompt="2+2=?", completion="#### 4", answer="4", row={"prompt": "2+2=?",
    "answer": "4"})`.
    """

    prompt: str
    """The question as the data file has it, without the chat template."""
    completion: str
    """The text that the model generated; special tokens are removed unless the function has
    `keep_special_tokens`."""
    answer: str | None = None
    """The data row's answer, if it has one."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """All columns of the row in the data file; a copy for this call."""
    completion_ids: np.ndarray = field(default_factory=_no_ids, compare=False, repr=False)
    """Token ids of the completion, int32 [L], with the end token if it was sampled."""
    finish_reason: Literal["stop", "length"] = "stop"
    """`length` if the completion reached a token limit, or the conversation had no room for another
    turn."""
    group: int = 0
    """Equal for the completions of one prompt that are compared, and for no others of the run."""
    messages: Sequence[Message] = ()
    """All turns of a conversation with an environment, whose `completion` is the last turn of the
    model; empty for one completion of a prompt."""

    def __str__(self) -> str:
        fields = {"prompt": self.prompt, "completion": self.completion, "answer": self.answer}
        # Part of an error message, and a completion may have thousands of tokens.
        return "\n".join(
            f"  {name}: {shown_value(text, _MAX_TEXT_SHOWN)}" for name, text in fields.items()
        )


RewardFunction = Callable[[Any], Any]
"""Takes a `RewardSample` and returns a float, or a coroutine of one. A batched function takes a
list of samples and returns one float for each."""


class RewardError(Exception):
    """A reward function failed; the message has the function, the problem and the sample."""

    @classmethod
    def from_problem(cls, problem: RewardProblem, sample: RewardSample) -> RewardError:
        """Return the error of a problem on `sample`."""
        return cls(
            f"{problem}, on this sample:\n{sample}\n"
            "  reward.on_error=zero or drop continues a run in spite of such samples"
        )


@dataclass(frozen=True, slots=True)
class RewardProblem:
    """Why a reward function, a reward model or the environment failed on one sample.

    Example: `RewardProblem("tests", "my_rewards.tests", "timeout", "exceeded reward.timeout_s 5")`.
    """

    name: str
    """Name in `reward.functions` or `reward.models`; `command` for the command of a program."""
    path: str
    """Import path of the function or the environment, or `model_name` of the model."""
    kind: BadRewardKind
    text: str
    section: RewardSection = "functions"

    def __str__(self) -> str:
        if self.section == "environment":
            key = "command" if self.name == "command" else "path"
            return f"environment.{key} {self.path} {self.text}"
        return f"reward.{self.section}.{self.name} ({self.path}) {self.text}"


def finite_number(value: Any) -> float | None:
    """Return a number of Python, NumPy or torch as float, None for anything else.

    None as well for numbers that are not finite in float32. A text is not a number.
    """
    # The libraries are not imported for the check; scalars of both have `ndim` and `item`.
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, numbers.Real):
        # An int may be too large.
        with suppress(OverflowError):
            number = float(cast(float, value))
            if abs(number) <= MAX_NUMBER:
                return number
    return None
