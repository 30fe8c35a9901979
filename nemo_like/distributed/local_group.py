"""A worker group of one worker in this process: no Ray, no copies, one rank."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_like.distributed import activity, process_groups
from nemo_like.distributed.errors import WorkerError, WorkerHung, advise
from nemo_like.distributed.worker_group import IN_MEMORY, Handle, WorkerContext, check_shards
from nemo_like.parallel_layout import ParallelLayout

logger = logging.getLogger(__name__)

_exit_now = os._exit


def local_context(
    *, device: str = "cpu", num_threads: int | None = None, collective_timeout_s: float = 600.0
) -> WorkerContext:
    """Return the context of a group of one rank; `num_threads` None means every core."""
    return WorkerContext(
        rank=0,
        world_size=1,
        local_rank=0,
        device=device,
        init_method=IN_MEMORY,
        collective_timeout_s=collective_timeout_s,
        num_threads=num_threads or len(os.sched_getaffinity(0)),
    )


class LocalGroup:
    """One worker in this process. Arguments and results are not copied; a handle has the value."""

    parallel_layout = ParallelLayout()
    world_size = 1
    is_local = True

    def __init__(
        self,
        worker_class: Callable[..., Any],
        kwargs: Mapping[str, Any],
        context: WorkerContext,
        *,
        name: str = "worker",
        progress_timeout_s: float = 0.0,
    ) -> None:
        """Construct the worker. `progress_timeout_s` above 0 ends the process when a call hangs."""
        self.name = name
        self._has_gpu = context.device != "cpu"
        # Read by the watch thread: a worker without a running call is idle and not hung.
        self._calls: list[str] = []
        self._closed = threading.Event()
        if progress_timeout_s > 0:
            watch = threading.Thread(
                target=self._watch, args=(progress_timeout_s,), daemon=True, name=f"watch-{name}"
            )
            watch.start()
        # Several local groups share the process; the one whose worker joined leaves.
        was_joined = process_groups.is_joined()
        self.worker = self._guard("__init__", worker_class, context, **kwargs)
        self._joined = process_groups.is_joined() and not was_joined

    def run_all_workers(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        return self.get(self.submit_all(method, *args, **kwargs))

    def run_all_workers_sharded_data(
        self, method: str, /, *sharded: Sequence[Any], num_results: int | None = None, **common: Any
    ) -> list[Any]:
        check_shards(self, method, sharded)
        return self.run_all_workers(method, *(items[0] for items in sharded), **common)

    def put(self, value: Any) -> Handle:
        return Handle(value)

    def put_shards(self, shards: Sequence[Any]) -> tuple[Handle, ...]:
        return tuple(map(self.put, shards))

    def submit_all(self, method: str, /, *args: Any, **kwargs: Any) -> list[Handle]:
        if self.worker is None:
            raise RuntimeError(f"the {self.name} group was shut down")
        arguments = [_value(argument) for argument in args]
        keywords = {name: _value(argument) for name, argument in kwargs.items()}
        result = self._guard(method, getattr(self.worker, method), *arguments, **keywords)
        return [Handle(result, None, 0, method)]

    def submit_one(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Handle:
        if rank != 0:
            raise ValueError(f"rank is {rank}; the {self.name} group has one worker, rank 0")
        return self.submit_all(method, *args, **kwargs)[0]

    def wait(self, handles: Sequence[Handle]) -> None:
        """Do nothing: a call is done when `submit_all` returns."""

    def is_done(self, handles: Sequence[Handle]) -> bool:
        return True

    def wait_any(self, handles: Sequence[Handle], timeout_s: float) -> list[Handle]:
        """Return all handles; see `wait`."""
        return list(handles)

    def get(self, handles: Sequence[Handle]) -> list[Any]:
        return [handle.value for handle in handles]

    def shutdown(self) -> None:
        """Release the worker and leave its process group, if it joined one.

        A worker may have a method `close`, which releases what it must not keep until the end of
        the process; workers in processes of their own end with them.
        """
        if self.worker is not None and hasattr(self.worker, "close"):
            # Not in a variable: a bound method would keep the worker through the collection below.
            self.worker.close()
        self.worker = None
        if self._has_gpu:
            # A model refers to itself through its hooks and replaced methods. Without this its
            # memory would be free some time later, but the next worker needs it now.
            gc.collect()
        self._closed.set()
        if self._joined:
            process_groups.destroy()
            self._joined = False

    def _guard(
        self, method: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call `function`; convert its exception to WorkerError."""
        activity.note(method)
        self._calls.append(method)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            raise WorkerError(
                group=self.name,
                rank=0,
                method=method,
                cause=error,
                traceback_text=text,
                advice=advise(error, self.name),
            ) from error
        finally:
            self._calls.pop()

    def _watch(self, timeout_s: float) -> None:
        """End the process when a call makes no progress, because a thread cannot interrupt it."""
        # At least four checks per timeout, so that it is exceeded by a quarter at most.
        while not self._closed.wait(min(1.0, timeout_s / 4)):
            last = activity.last()
            silent_s = time.monotonic() - last.time_s
            if not self._calls or silent_s < timeout_s:
                continue
            stack = activity.active_stack()
            hung = WorkerHung(
                group=self.name,
                rank=0,
                method=self._calls[-1],
                pid=os.getpid(),
                node="this machine",
                silent_s=silent_s,
                activity=last.text,
                state="It runs in the driver's process, which ends now.",
                stack=stack,
            )
            logger.info("%s\n%s", hung, stack)
            # Not by `print`, whose buffer the hung thread may have locked.
            os.write(2, f"error: {hung}\nThe stack of its last active thread:\n{stack}".encode())
            # The main thread does not return from its call, so an exception cannot reach it.
            _exit_now(1)


def _value(argument: Any) -> Any:
    return argument.value if isinstance(argument, Handle) else argument
