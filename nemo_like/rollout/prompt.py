"""The prompt of one row: the input of the policy in a rollout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One encoded prompt."""

    token_ids: np.ndarray
    """int32 [L], with the chat template's opening of the assistant turn."""
    text: str
    answer: str | None
    row: dict[str, Any] = field(default_factory=dict)
    """The row of the data file, for reward functions that use other columns than the answer."""
