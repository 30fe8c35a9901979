"""The thread of an engine: its steps, and the calls of a worker between two steps."""

from __future__ import annotations

import atexit
import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")
_ResultT = TypeVar("_ResultT")


class EngineThread:
    """Runs steps as long as there is work, and calls of other threads between two steps.

    The engine is started and used in this thread only: libraries keep the device, the stream and
    the number of threads per thread. An exception of a step is raised by the next call.
    """

    def __init__(self, step: Callable[[], bool]) -> None:
        """`step` does one step and returns True, or returns False if there is nothing to do."""
        self._step = step
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._is_closed = False
        # A daemon, because a worker may be dropped without `close`.
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine")
        self._thread.start()
        # A step must not run while the interpreter ends.
        atexit.register(self.close)

    def call(self, function: Callable[[], _ResultT]) -> _ResultT:
        """Run `function` between two steps; return its result or raise its exception.

        A call from within a call runs at once.
        """
        if threading.current_thread() is self._thread:
            return function()
        if self._is_closed:
            raise RuntimeError("the engine was closed")
        future: Future[_ResultT] = Future()
        self._calls.put((function, future))
        return future.result()

    def close(self) -> None:
        """End the thread after the running step."""
        atexit.unregister(self.close)
        self._is_closed = True
        # Wakes the thread if it waits for a call.
        self._calls.put((lambda: None, Future()))
        self._thread.join()

    def _run(self) -> None:
        has_work = False
        while not self._is_closed:
            try:
                function, future = self._calls.get(block=not has_work)
            except queue.Empty:
                has_work = self._try_step()
                continue
            self._answer(function, future)
            has_work = self._error is None
            # Otherwise this frame would keep the results of the last call.
            del function, future
        # Calls that came while the thread was closed.
        while not self._calls.empty():
            _, future = self._calls.get()
            future.set_exception(RuntimeError("the engine was closed"))

    def _try_step(self) -> bool:
        try:
            return self._step()
        except BaseException as error:  # noqa: BLE001 (raised by the next call)
            self._error = error
            return False

    def _answer(self, function: Callable[[], Any], future: Future[Any]) -> None:
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            future.set_result(function())
        except BaseException as raised:  # noqa: BLE001 (raised by the caller)
            future.set_exception(raised)


class _HasThread(Protocol):
    _thread: EngineThread


_WorkerT = TypeVar("_WorkerT", bound=_HasThread)


def between_steps(
    method: Callable[Concatenate[_WorkerT, _P], _ResultT],
) -> Callable[Concatenate[_WorkerT, _P], _ResultT]:
    """Run a method in the engine's thread of its worker, see `EngineThread.call`."""

    @functools.wraps(method)
    def call(self: _WorkerT, /, *args: _P.args, **kwargs: _P.kwargs) -> _ResultT:
        return self._thread.call(lambda: method(self, *args, **kwargs))

    return call
