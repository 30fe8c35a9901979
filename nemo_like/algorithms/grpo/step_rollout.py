"""The rollout that one step trains on."""

from __future__ import annotations

from dataclasses import dataclass, field

from nemo_like.metrics import Metrics
from nemo_like.rollout.rollout import Rollout


@dataclass(frozen=True)
class StepRollout:
    """The rollout of one step, with what its training needs to know of its rows."""

    rollout: Rollout
    """The completions that are trained on."""
    locations: list[str]
    """File and line of each prompt."""
    sampled: Rollout | None = None
    """With dynamic sampling all completions of the step, those of dropped groups included."""
    sampling_metrics: Metrics = field(default_factory=dict)
    """Of dynamic sampling."""

    def metrics(self) -> Metrics:
        """Return the metrics of all completions of the step, whether they are trained on or not."""
        sampled = self.rollout if self.sampled is None else self.sampled
        return sampled.metrics() | self.sampling_metrics
