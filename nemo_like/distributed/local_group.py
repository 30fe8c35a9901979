"""The calls of a worker group for one worker in this process: no Ray, no copies, one rank."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_like.distributed import mesh
from nemo_like.distributed.errors import WorkerError
from nemo_like.distributed.post_mortem import advise
from nemo_like.distributed.topology import Topology
from nemo_like.distributed.worker_group import Handle, WorkerContext


def local_context(
    *,
    device: str = "cpu",
    num_threads: int | None = None,
    collective_timeout_s: float = 600.0,
    folder: Path | None = None,
) -> WorkerContext:
    """The context of a group of one, which meets in a file of `folder`; None makes a temporary one, which stays.

    `num_threads` None means every core.
    """
    meeting = (folder or Path(tempfile.mkdtemp(prefix="nemo_like_"))) / "rendezvous"
    return WorkerContext(
        rank=0,
        world_size=1,
        local_rank=0,
        device=device,
        init_method=meeting.as_uri(),
        collective_timeout_s=collective_timeout_s,
        num_threads=num_threads or len(os.sched_getaffinity(0)),
    )


class LocalGroup:
    """One worker in this process. Arguments and results are the objects themselves, so a handle holds the value."""

    topology = Topology()
    world_size = 1

    def __init__(
        self,
        worker_class: Callable[..., Any],
        kwargs: Mapping[str, Any],
        context: WorkerContext,
        *,
        name: str = "worker",
    ) -> None:
        self.name = name
        was_joined = mesh.is_joined()
        self._worker = self._guard("__init__", worker_class, context, **kwargs)
        self._joined = mesh.is_joined() and not was_joined

    def run_all_workers(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        return self.get(self.submit_all(method, *args, **kwargs))

    def run_all_workers_sharded_data(self, method: str, /, *sharded: Sequence[Any], **common: Any) -> list[Any]:
        for position, items in enumerate(sharded):
            if len(items) != 1:
                raise ValueError(f"argument {position} of {method} has {len(items)} items; the {self.name} group has dp 1")
        return self.run_all_workers(method, *(items[0] for items in sharded), **common)

    def put(self, value: Any) -> Handle:
        return Handle(value)

    def submit_all(self, method: str, /, *args: Any, **kwargs: Any) -> list[Handle]:
        if self._worker is None:
            raise RuntimeError(f"the {self.name} group was shut down")
        arguments = [_value(argument) for argument in args]
        keywords = {name: _value(argument) for name, argument in kwargs.items()}
        return [Handle(self._guard(method, getattr(self._worker, method), *arguments, **keywords), None, 0, method)]

    def wait(self, handles: Sequence[Handle]) -> None:
        """Nothing: a call is done when `submit_all` returns."""

    def get(self, handles: Sequence[Handle]) -> list[Any]:
        return [handle.value for handle in handles]

    def shutdown(self) -> None:
        """Drop the worker and leave its process group, if it joined one."""
        self._worker = None
        if self._joined:
            mesh.destroy()
            self._joined = False

    def _guard(self, method: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            raise WorkerError(
                group=self.name, rank=0, method=method, cause=error, traceback_text=text, advice=advise(error)
            ) from error


def _value(argument: Any) -> Any:
    return argument.value if isinstance(argument, Handle) else argument
