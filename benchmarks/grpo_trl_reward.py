"""The reward of both systems in `grpo_trl.py`.

Only the standard library: two environments import it.
"""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MARK = "####"


def score(completion: str, answer: str) -> float:
    """Return 1 if the number after the last `####`, or else the last number, equals `answer`."""
    marked = completion.rpartition(_MARK)[2]
    numbers = _NUMBER.findall(marked)
    if not numbers:
        return 0.0
    # After a mark the answer is the first number, without a mark it is the last.
    found = numbers[0] if _MARK in completion else numbers[-1]
    return float(_value(found) == _value(answer))


def reward(sample: Any) -> float:
    """Score a `nemo_like.environments.reward.RewardSample`."""
    return score(sample.completion, sample.answer)


def _value(text: str) -> float:
    return float(text.replace(",", ""))
