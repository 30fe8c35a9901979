"""Distinguishes a hung worker from a slow one by heartbeats.

Every worker process has a thread that writes its last activity to the key-value store of the Ray
cluster. The driver reads it while it waits for calls. If the activity advances the worker is slow;
if only the thread's own counter advances the worker hangs; if neither does, its process is stopped,
or native code holds the interpreter.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from ray.experimental import internal_kv

from nemo_like.distributed import activity

logger = logging.getLogger(__name__)

_PREFIX = "nemo_like/heartbeat/"
_MAX_PERIOD_S = 30.0
_MIN_PERIOD_S = 0.5
_MAX_MISSED = 3
"""Number of missing heartbeats after which a process counts as not responding."""
_KEPT_S = 7 * 86400
"""Records of runs that were killed are removed by a later run on the same cluster after this."""
_MAX_POLL_S = 5.0
"""Maximum delay between the loss of the head, or a missed deadline, and its detection."""


def period_s(timeout_s: float) -> float:
    """Return the seconds between heartbeats for a progress deadline of `timeout_s`."""
    return min(_MAX_PERIOD_S, max(_MIN_PERIOD_S, timeout_s / 10))


def start_heartbeat(key: str, timeout_s: float) -> None:
    """Report this process's activity under `key` from a thread, until the process ends."""

    def report() -> None:
        beat = 0
        while True:
            beat += 1
            last = activity.last()
            idle_s = time.monotonic() - last.time_s
            # Only when it may be needed: the stack of a busy process is of no use and costs time.
            stack = activity.main_thread_stack() if idle_s > timeout_s / 2 else ""
            record = {
                "beat": beat,
                "unix_time_s": time.time(),
                "count": last.num_notes,
                "idle_s": idle_s,
                "text": last.text,
                "stack": stack,
            }
            with suppress(Exception):  # the head is unreachable; the driver detects that itself
                internal_kv._internal_kv_put(
                    key.encode(), json.dumps(record).encode(), overwrite=True
                )
            time.sleep(period_s(timeout_s))

    # A thread of Python: it stops with the process, and while native code has the GIL.
    threading.Thread(target=report, daemon=True, name="heartbeat").start()


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A worker that reported no progress.

    Example: `Silence(rank=1, silent_s=1800.2, responds=True, text="train, microbatch 3 of 8")`.
    """

    rank: int
    silent_s: float
    responds: bool
    """True if its process still sends heartbeats."""
    text: str
    """Its last activity."""
    stack: str = ""


@dataclass(slots=True)
class _LastReport:
    """The last known progress of one worker; times are of the driver's monotonic clock.

    The clocks of the nodes are not compared.
    """

    count: int = -1
    progressed_s: float = 0.0
    beat: int = -1
    beat_s: float = 0.0
    text: str = "none reported"
    stack: str = ""


@dataclass
class ProgressMonitor:
    """The driver's side: checks the progress of the workers whose calls it waits for."""

    group: str
    timeout_s: float
    """The progress deadline; 0 means none."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    _reports: dict[int, _LastReport] = field(default_factory=dict)
    _next_check_s: float = 0.0

    def __post_init__(self) -> None:
        if self.timeout_s > 0:
            _remove_old_records()

    @property
    def poll_s(self) -> float:
        """Seconds that the driver may wait between two checks."""
        if self.timeout_s <= 0:
            return _MAX_POLL_S
        return min(_MAX_POLL_S, period_s(self.timeout_s))

    def key(self, rank: int) -> str:
        """Return the key under which the worker of `rank` reports."""
        return f"{_PREFIX}{self.group}-{self.token}/{rank}"

    def start_waiting(self, ranks: Iterable[int]) -> None:
        """Restart the deadline of these workers."""
        now = time.monotonic()
        for rank in ranks:
            # A worker that was idle since the last call has not been silent.
            report = self._reports.setdefault(rank, _LastReport())
            report.progressed_s = now
            report.beat_s = now
        self._next_check_s = now + self.poll_s

    def check(self, ranks: Iterable[int]) -> Silence | None:
        """Return the worker that most likely hangs, if one of `ranks` is past the deadline."""
        # A check reads one record per rank from the head, so it is not made at every poll.
        if self.timeout_s <= 0 or time.monotonic() < self._next_check_s:
            return None
        self._next_check_s = time.monotonic() + self.poll_s
        return self.longest_silence(ranks, min_silent_s=self.timeout_s)

    def longest_silence(self, ranks: Iterable[int], *, min_silent_s: float) -> Silence | None:
        """Return the worker with the longest silence of at least `min_silent_s`, if any.

        A worker that does not respond comes first: the others may wait for it in a collective.
        """
        if self.timeout_s <= 0:
            return None
        silences = [self._update(rank) for rank in ranks]
        too_long = [silence for silence in silences if silence.silent_s >= min_silent_s]
        return max(
            too_long, key=lambda silence: (not silence.responds, silence.silent_s), default=None
        )

    def close(self, num_ranks: int) -> None:
        """Remove the records of the group."""
        if self.timeout_s > 0:
            for rank in range(num_ranks):
                with suppress(Exception):  # the cluster is gone, and the records with it
                    internal_kv._internal_kv_del(self.key(rank).encode())

    def _update(self, rank: int) -> Silence:
        """Read the worker's record and return how long it has reported no progress."""
        report = self._reports.setdefault(rank, _LastReport())
        now = time.monotonic()
        record = _read(self.key(rank))
        # Without a record yet the clock runs from `start_waiting`.
        if record is not None:
            # Only changes count: times of the worker's own clock are not compared with this one.
            if record["count"] != report.count:
                report.count = record["count"]
                report.progressed_s = now
            if record["beat"] != report.beat:
                report.beat = record["beat"]
                report.beat_s = now
            report.text = record["text"]
            report.stack = record["stack"]
        return Silence(
            rank=rank,
            silent_s=now - report.progressed_s,
            responds=now - report.beat_s <= _MAX_MISSED * period_s(self.timeout_s),
            text=report.text,
            stack=report.stack,
        )


def _read(key: str) -> dict | None:
    value = internal_kv._internal_kv_get(key.encode())
    return None if value is None else json.loads(value)


def _remove_old_records() -> None:
    """Remove the records of runs that were killed and could not remove them."""
    for key in internal_kv._internal_kv_list(_PREFIX.encode()):
        record = _read(key.decode())
        if record is not None and time.time() - record["unix_time_s"] > _KEPT_S:
            internal_kv._internal_kv_del(key)
