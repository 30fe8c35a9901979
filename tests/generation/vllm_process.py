"""A vLLM worker in a process of its own.

vLLM changes its process: it binds memory, replaces `torch.set_num_threads`, seeds the global random
generators. A test process must not become one.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from nemo_like.distributed.worker_group import Handle, WorkerGroup
from nemo_like.parallel_layout import ParallelLayout


class VLLMProcess:
    """Calls the methods of `worker_class(local_context(), **kwargs)` in a child process.

    Its standard error is written to `errors`, if given; pytest does not capture it.
    """

    def __init__(self, worker_class: type, *, errors: Path | None = None, **kwargs: Any) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        self._connection, other = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(other, worker_class, kwargs, errors), daemon=False
        )
        self.process.start()
        other.close()
        self._receive()

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._connection.send((method, args, kwargs))
            return self._receive()

        return call

    def as_group(self) -> WorkerGroup:
        """A group of this one worker, as far as weight updates use it."""
        return cast("WorkerGroup", _Group(self))

    def stop(self) -> None:
        """End the process."""
        self._connection.close()
        self.process.join(timeout=30)
        if self.process.is_alive():
            self.process.kill()

    def _receive(self) -> Any:
        error, value = self._connection.recv()
        if error is not None:
            raise error
        return value


class _Group:
    parallel_layout = ParallelLayout()
    world_size = 1

    def __init__(self, worker: VLLMProcess) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(1)

    def submit_all(self, method: str, *args: Any) -> list[Handle]:
        values = [arg.value if isinstance(arg, Handle) else arg for arg in args]
        return [Handle(self._thread.submit(getattr(self._worker, method), *values))]

    def get(self, handles: Sequence[Handle]) -> list[Any]:
        return [handle.value.result() for handle in handles]


def _serve(
    connection: Connection, worker_class: type, kwargs: dict[str, Any], errors: Path | None
) -> None:
    from nemo_like.distributed.local_group import local_context

    if errors is not None:
        with errors.open("w") as file:
            os.dup2(file.fileno(), 2)
    process_context = dataclasses.replace(local_context(num_threads=1), owns_process=True)
    try:
        worker = worker_class(process_context, **kwargs)
    except BaseException as error:  # noqa: BLE001 (raised in the test)
        connection.send((error, None))
        return
    connection.send((None, None))
    while True:
        try:
            method, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            connection.send((None, getattr(worker, method)(*args, **kwargs)))
        except Exception as error:  # noqa: BLE001 (raised in the test)
            error.add_note(traceback.format_exc())
            connection.send((error, None))
