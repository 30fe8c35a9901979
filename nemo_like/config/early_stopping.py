"""Keys of `early_stopping`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingConfig:
    """End of a run whose metric no longer improves: it saves a checkpoint and ends normally."""

    metric: str | None = None
    """Name of a logged metric, e.g. `validation/reward_mean`; null turns early stopping off."""
    mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller value is better."""
    patience: Annotated[int, Ge(1)] = 3
    """The run ends after so many values in a row that are no improvement. Steps that do not log
    the metric do not count; a validation before the first step does."""
    min_delta: Annotated[float, Ge(0)] = 0.0
    """An improvement is larger than this."""
