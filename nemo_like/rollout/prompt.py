"""What is asked of the policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question, encoded."""

    token_ids: np.ndarray
    """int32 [L], with the chat template's opening of the assistant turn."""
    text: str
    answer: str | None
    row: dict[str, Any] = field(default_factory=dict)
    """The data file's row, for reward functions that want more than the answer."""
