"""A worker without torch, so that its process starts at once: for what groups do with calls, values
and failures.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nemo_like.distributed import activity
from nemo_like.distributed.activity import end_worker
from nemo_like.distributed.worker_group import WorkerContext


class Unpicklable(Exception):
    """Pickles, but does not come back: its constructor wants two arguments and its state holds
    one.
    """

    def __init__(self, what: str, detail: str) -> None:
        super().__init__(f"{what} ({detail})")


class Tripwire:
    """A value that may travel between workers but must never be loaded by the driver."""

    def __init__(self, driver_pid: int, content: int) -> None:
        self.driver_pid = driver_pid
        self.content = content

    def __setstate__(self, state: dict[str, int]) -> None:
        if os.getpid() == state["driver_pid"]:
            raise AssertionError("the driver fetched a value that it should only have passed on")
        self.__dict__.update(state)


class Counted:
    """A value that knows how often it was pickled."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.num_pickled = 0

    def __getstate__(self) -> dict[str, Any]:
        self.num_pickled += 1
        return {"array": self.array, "num_pickled": 0}


class Arrived(NamedTuple):
    """Properties of an array as a worker received it."""

    rank: int
    total: float
    is_writeable: bool
    common: dict[str, Any]


class PlainWorker:
    """Returns its arguments, and fails on request."""

    def __init__(self, context: WorkerContext, *, fail_rank: int | None = None) -> None:
        self.context = context
        if context.rank == fail_rank:
            raise KeyError("no such weight")

    def describe(self) -> tuple[WorkerContext, str, str | None]:
        """Its context, the threads its libraries may use, and the GPUs it sees."""
        return self.context, os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES")

    def variables(self, *names: str) -> tuple[str | None, ...]:
        """Environment variables of its process."""
        return tuple(os.environ.get(name) for name in names)

    def multiply(self, method: int) -> int:
        """Its argument is called what the group calls the name of a call."""
        return self.context.rank * method

    def give_back(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """All its arguments."""
        return (*args, *kwargs.values())

    def look(self, shard: Counted, **common: Any) -> Arrived:
        return Arrived(
            self.context.rank, float(shard.array.sum()), shard.array.flags.writeable, common
        )

    def add(self, array: np.ndarray, offset: int) -> np.ndarray:
        return array + offset

    def tripwire(self, driver_pid: int) -> Tripwire:
        return Tripwire(driver_pid, 10 + self.context.rank)

    def rank_or_tripwire(self, is_output: bool, driver_pid: int) -> int | Tripwire:
        return self.context.rank if is_output else Tripwire(driver_pid, 0)

    def open(self, tripwire: Tripwire) -> int:
        return tripwire.content + self.context.rank

    def fail_unpicklable(self) -> None:
        raise Unpicklable("no", "really")

    def return_unpicklable(self) -> Any:
        return sys._getframe()

    def fail_while_others_wait(self, rank: int) -> None:
        if self.context.rank == rank:
            time.sleep(0.2)
            raise ValueError(f"row 7 is bad on rank {rank}")
        time.sleep(1000)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_for_file(self, path: str) -> None:
        while not Path(path).exists():
            time.sleep(0.05)

    def work(self, seconds: float, hanging_rank: int | None = None) -> int:
        """Reports progress for so long; the hanging rank then loops without progress."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            activity.note(f"sample {self.context.rank} of 8")
            time.sleep(0.2)
        while self.context.rank == hanging_rank:
            time.sleep(0.2)
        return self.context.rank

    def lose_child(self) -> None:
        end_worker("Worker_TP1 of vLLM (pid 7) ended with exit code -9")

    def crash(self, rank: int) -> None:
        if self.context.rank == rank:
            print("last words before the end", file=sys.stderr, flush=True)
            ctypes.string_at(0)


def sleeping_reward(sample: Any) -> float:
    """Take as many seconds as the completion states."""
    time.sleep(float(sample.completion))
    return 1.0


class ClosingWorker:
    """Leaves a file when it is closed."""

    def __init__(self, context: WorkerContext, *, folder: Path) -> None:
        self.path = folder / str(context.rank)

    def close(self) -> None:
        self.path.touch()
