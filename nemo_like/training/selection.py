"""Selection by a logged metric: the best checkpoint, and the early end of a run.

Both compare the values of one metric in the records of the run. Their state is part of every
checkpoint, so a resumed run decides as the run without an interruption.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import RunConfig
from nemo_like.run.manifest import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class BestValue:
    """The best value of one metric so far."""

    key: str
    """Config key that names the metric, for messages."""
    metric: str
    mode: Literal["max", "min"]
    """Whether a larger or a smaller value is better."""
    min_delta: float = 0.0
    """A value must be better by more than this."""
    value: float | None = None
    step: int | None = None
    """Step of `value`."""
    num_without: int = 0
    """Values since `step` that were not better."""
    is_reported: bool = False
    """A record without the metric was reported."""

    def observe(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Compare the metric of the record of `step`; return True if it is the best so far.

        Records without the metric change nothing; a value that is not finite is never better.
        Raises ConfigError if the record of step 0 has metrics of the same section, but not this
        one; later, when a run would be lost, this is a warning.
        """
        if self.metric not in metrics:
            self._check_name(step, metrics)
            return False
        value = metrics[self.metric]
        if not self._is_better(value):
            self.num_without += 1
            return False
        self.value = value
        self.step = step
        self.num_without = 0
        return True

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.value is None:
            return True
        gain = value - self.value if self.mode == "max" else self.value - value
        return gain > self.min_delta

    def _check_name(self, step: int, metrics: Mapping[str, float]) -> None:
        section = self.metric.partition("/")[0]
        others = [name for name in metrics if name.partition("/")[0] == section]
        if not others or self.value is not None or self.is_reported:
            return
        text = (
            f"{self.key} is {self.metric!r}, which this run does not log; metrics of that section:"
            f" {', '.join(sorted(others))}"
        )
        if step == 0:
            raise ConfigError(text)
        logger.warning(text)
        self.is_reported = True

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "metric": self.metric,
            "mode": self.mode,
            "value": self.value,
            "step": self.step,
            "num_without": self.num_without,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state, unless it belongs to another metric or mode: then start again."""
        if state.get("metric") != self.metric or state.get("mode") != self.mode:
            return
        self.value = state["value"]
        self.step = state["step"]
        self.num_without = state["num_without"]


class Selection:
    """Best checkpoint and early stopping of one run."""

    def __init__(self, config: RunConfig) -> None:
        checkpointing = config.checkpointing
        stopping = config.early_stopping
        self.patience = stopping.patience
        self.best: BestValue | None = None
        """Of `checkpointing.keep_best`; None without it."""
        self.stopping: BestValue | None = None
        """Of `early_stopping`; None without it."""
        if checkpointing.keep_best is not None:
            self.best = BestValue(
                key="checkpointing.keep_best",
                metric=checkpointing.keep_best,
                mode=checkpointing.best_mode,
            )
        if stopping.metric is not None:
            self.stopping = BestValue(
                key="early_stopping.metric",
                metric=stopping.metric,
                mode=stopping.mode,
                min_delta=stopping.min_delta,
            )

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the values of the record of `step`. Raises ConfigError for an unknown metric."""
        # The initial model has no checkpoint to keep.
        if self.best is not None and step > 0:
            self.best.observe(step, metrics)
        if self.stopping is not None:
            self.stopping.observe(step, metrics)

    def is_best(self, step: int) -> bool:
        """Return True if the record of `step` has the best value so far."""
        return self.best is not None and self.best.step == step

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint; None without one."""
        return None if self.best is None else self.best.step

    @property
    def stops(self) -> bool:
        """True if the run must end because its metric has not improved for `patience` values."""
        return self.stopping is not None and self.stopping.num_without >= self.patience

    def _stop_text(self) -> str:
        assert self.stopping is not None, "only a run with early_stopping ends early"
        best = self.stopping
        reached = "it was never finite"
        if best.value is not None:
            reached = f"best was {best.value:.6g} at step {best.step}"
        return (
            f"early stopping: {best.metric} has not improved by more than {best.min_delta:g} in"
            f" {best.num_without} evaluations ({reached})"
        )

    def summary(self) -> list[str]:
        """Return the lines for the end of the run: early stopping, best step, missing metrics."""
        lines = []
        if self.stops:
            lines.append(self._stop_text())
        if self.best is not None and self.best.value is not None:
            best = self.best
            lines.append(f"best checkpoint: step {best.step}, {best.metric} {best.value:.6g}")
        for each in self._named().values():
            if each.step is None and each.num_without == 0:
                lines.append(f"{each.key} is {each.metric!r}, but no step logged it")
        return lines

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values, for a checkpoint."""
        return {name: each.state() for name, each in self._named().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint. Raises CheckpointError if it is damaged."""
        try:
            for name, each in self._named().items():
                each.restore(state.get(name, {}))
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the selection state is damaged: {error!r}") from error

    def _named(self) -> dict[str, BestValue]:
        named = {"best": self.best, "stopping": self.stopping}
        return {name: each for name, each in named.items() if each is not None}
