"""Decides whether a run that lost a worker or a node starts again without a person.

The run continues from its latest complete checkpoint, as with `resume=true`. A failure that would
repeat is final: wrong input, an exception in a model or in the user's code, a failure before the
first step, and the same failure after the same step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nemo_like.config.schema import ClusterConfig
from nemo_like.distributed.errors import (
    ClusterError,
    WorkerDied,
    WorkerError,
    WorkerHung,
    is_collective_error,
)

_LAST_BYTES = 2**20
"""The last record of metrics.jsonl is at most this long."""


@dataclass(frozen=True)
class Restart:
    """The next start of a run that failed."""

    delay_s: float
    num_nodes: int
    """`cluster.num_nodes` of the next start."""
    number: int
    """Restarts within `cluster.restart.window_s`, this one included. A start with fewer nodes,
    which follows a restart, does not count."""


@dataclass
class RestartPolicy:
    """`cluster.restart` applied to the failures of one run, in order."""

    cluster: ClusterConfig
    clock: Callable[[], float] = time.monotonic
    _times: list[float] = field(default_factory=list)
    """Times of the restarts, by `clock`."""
    _previous: tuple[type[BaseException], int] | None = None
    """Kind of the previous failure, and the last step before it."""

    def next_start(
        self, error: BaseException, *, step: int, has_new_steps: bool, num_nodes: int
    ) -> Restart | None:
        """Return how the run starts again after `error`, or None if the failure is final.

        `step` is the last step whose metrics were written, 0 without one. `has_new_steps` is True
        if this start of the run completed a step. `num_nodes` is what this start requested.
        """
        config = self.cluster.restart
        failure = (type(error), step)
        previous, self._previous = self._previous, failure
        if isinstance(error, ClusterError):
            # At the first start the request is wrong; later, nodes are missing.
            if previous is None:
                return None
            fewer = _fewer_nodes(error, num_nodes, config.min_nodes)
            if fewer is not None:
                return Restart(0.0, fewer, len(self._times))
            if previous == failure:
                return None
        else:
            is_first_try = previous is None and not has_new_steps
            if not is_lost_worker(error) or is_first_try or previous == failure:
                return None
        now = self.clock()
        self._times = [before for before in self._times if now - before < config.window_s]
        if len(self._times) >= config.max_restarts:
            return None
        delay_s = config.backoff_s * 2 ** len(self._times)
        self._times.append(now)
        return Restart(delay_s, self.cluster.num_nodes, len(self._times))


def is_lost_worker(error: BaseException) -> bool:
    """Return True if a process, a node or a connection failed, and no code or input is wrong."""
    if isinstance(error, WorkerError):
        return is_collective_error(error.cause)
    # Exceptions of Ray by their module, so that a run without Ray does not import it.
    return isinstance(error, WorkerDied | WorkerHung) or type(error).__module__ == "ray.exceptions"


def last_step(metrics: Path) -> tuple[int, float]:
    """Return the step of the last complete record of metrics.jsonl, and when it was written.

    The time is that of `time.time`. (0, 0.0) without a record.
    """
    try:
        with metrics.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LAST_BYTES))
            lines = file.read(_LAST_BYTES).split(b"\n")
    except OSError:
        return 0, 0.0
    # After the last newline there is nothing, or a record that was cut off.
    for line in reversed(lines[:-1]):
        try:
            record = json.loads(line)
            return int(record["step"]), float(record["unix_time_s"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0, 0.0


def _fewer_nodes(error: ClusterError, num_nodes: int, min_nodes: int | None) -> int | None:
    """Return the number of nodes to continue with, or None if the run has to wait for more."""
    available = error.num_nodes
    if min_nodes is None or available is None or not min_nodes <= available < num_nodes:
        return None
    return available
