"""The process that runs an environment: many steps at the same time, each with its own time limit.

Async steps run in one event loop, plain ones in a thread each. Both are outside of the thread that
the driver calls, which only passes tasks and outcomes on: a slow step delays its own conversation.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from inspect import isawaitable, iscoroutinefunction
from typing import Any, Protocol

from nemo_like.config.environment import EnvironmentConfig
from nemo_like.config.errors import ConfigError
from nemo_like.config.import_path import import_class, user_error_text
from nemo_like.config.text import error_text
from nemo_like.distributed import activity
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.environments.environment import Environment, EnvironmentFailure, State
from nemo_like.environments.steps import (
    BadStep,
    StepOutcome,
    StepTask,
    checked_outcome,
    checked_state,
    failure,
    timed_out,
)

_EXAMPLE = "nemo_like.environments.calculator.Calculator"
_MAX_THREADS = 256
"""Max plain steps that run at the same time, and max that may run on after their time limit."""
_CLOSE_S = 5.0
_NUM_CALLS_SHOWN = 5
_BLOCKED_MARGIN_S = 60.0
"""An async step may block the event loop for the time limit of a conversation and so much more."""


class EnvironmentWorkerProtocol(Protocol):
    """The methods of `EnvironmentWorker` that the driver calls."""

    def submit(self, tasks: Sequence[StepTask]) -> None:
        """Start steps; `poll` returns their outcomes in the order in which they end."""
        ...

    def poll(self, max_seconds: float) -> list[StepOutcome]:
        """Return the steps that ended; waits up to `max_seconds` for one.

        Raises EnvironmentFailure if a step failed.
        """
        ...


def load_environment(config: EnvironmentConfig) -> Environment:
    """Import `environment.path` and construct it. Raises ConfigError that names the key."""
    assert config.path is not None, "the run has an environment"
    key = "environment.path"
    environment_class = import_class(key, config.path, _EXAMPLE, ("reset", "step"))
    try:
        return environment_class(**config.options)
    except Exception as error:
        # The constructor is code of the user.
        raise ConfigError(
            f"environment.options: {config.path}(**{config.options}) failed with"
            f" {user_error_text(error)}; give the arguments that the class takes"
        ) from error


class EnvironmentWorker:
    """Implements `EnvironmentWorkerProtocol` with one instance of the environment."""

    def __init__(self, context: WorkerContext | None, *, config: EnvironmentConfig) -> None:
        """Construct the environment and start the event loop; `context` is not needed."""
        self._path = config.path or ""
        self._environment = load_environment(config)
        self._is_plain = not iscoroutinefunction(self._environment.step)
        """`step` runs in a thread."""
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(_MAX_THREADS)
        self._abandoned: list[threading.Thread] = []
        """Threads of plain steps that did not end in time."""
        self._running: set[asyncio.Future[None]] = set()
        """References to the tasks of the loop, which itself keeps weak ones only."""
        self._finished: queue.SimpleQueue[StepOutcome | EnvironmentFailure] = queue.SimpleQueue()
        self._timeout_s = config.timeout_s
        self._probed_s: float | None = None
        """Time of a call that the loop has not run yet; None if it has run the last one."""
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="environment", daemon=True
        )
        self._thread.start()

    def submit(self, tasks: Sequence[StepTask]) -> None:
        """See `EnvironmentWorkerProtocol.submit`."""
        for task in tasks:
            self._loop.call_soon_threadsafe(self._start, task)

    def poll(self, max_seconds: float) -> list[StepOutcome]:
        """See `EnvironmentWorkerProtocol.poll`."""
        outcomes: list[StepOutcome] = []
        timeout_s = max_seconds
        while True:
            try:
                finished = self._finished.get(timeout=timeout_s)
            except queue.Empty:
                break
            if isinstance(finished, EnvironmentFailure):
                raise finished
            outcomes.append(finished)
            timeout_s = 0.0
        if not outcomes:
            self._check_loop()
        # A worker whose steps are slow is not hung: every step has its own limit.
        activity.note(f"{len(self._running)} steps run")
        return outcomes

    def close(self) -> None:
        """Stop the event loop; steps that still run are abandoned."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)

    def _check_loop(self) -> None:
        """Raise EnvironmentFailure if an async step blocks the loop, and with it all time limits.

        Without a time limit of conversations there is none here.
        """
        if self._timeout_s is None:
            return
        now = time.monotonic()
        probed_s = self._probed_s
        if probed_s is None:
            self._probed_s = now
            self._loop.call_soon_threadsafe(self._answer)
        elif now - probed_s > self._timeout_s + _BLOCKED_MARGIN_S:
            frame = sys._current_frames().get(self._thread.ident or 0)
            stack = "".join(traceback.format_stack(frame)[-_NUM_CALLS_SHOWN:]) if frame else ""
            raise EnvironmentFailure(
                f"environment.path {self._path}: an async step has blocked its process for"
                f" {now - probed_s:.0f} s, so no other step runs and environment.timeout_s has no"
                " effect; await in it, or make it a plain function, which runs in a thread. It is"
                f" here:\n{stack}"
            )

    def _answer(self) -> None:
        """Note that the loop runs, in its thread."""
        self._probed_s = None

    def _start(self, task: StepTask) -> None:
        """Start a step, in the thread of the loop."""
        running = asyncio.ensure_future(self._run(task), loop=self._loop)
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _run(self, task: StepTask) -> None:
        """Run a step and add its outcome, or its failure, to the queue."""
        try:
            # Before the time limit: waiting for the threads of others is no time of the step.
            async with self._slots if self._is_plain else nullcontext():
                outcome: StepOutcome | EnvironmentFailure = await self._limited(task)
        except EnvironmentFailure as error:
            outcome = error
        self._finished.put(outcome)

    async def _limited(self, task: StepTask) -> StepOutcome:
        """Run a step for at most the time that is left to its conversation."""
        started_s = time.monotonic()
        step = asyncio.ensure_future(self._step(task))
        # Not `wait_for`, which waits for a step that ignores its cancellation.
        await asyncio.wait({step}, timeout=task.timeout_s)
        if step.done():
            if step.cancelled():
                raise failure(self._path, "step was cancelled by its own code", task.conversation)
            if isinstance(step.exception(), GeneratorExit):
                raise failure(self._path, "step raised GeneratorExit", task.conversation)
            return step.result()
        step.add_done_callback(_read_exception)
        step.cancel()
        return timed_out(task, time.monotonic() - started_s)

    async def _step(self, task: StepTask) -> StepOutcome:
        """Reset at the first turn, and step."""
        started_s = time.monotonic()
        conversation = task.conversation
        method = "step"
        try:
            state: State = conversation.state
            if conversation.turn == 1:
                method = "reset"
                value = await self._call(self._environment.reset, conversation.row)
                state = checked_state(value)
                conversation = conversation.with_state(state)
            method = "step"
            value = await self._call(self._environment.step, conversation)
            return checked_outcome(task, state, value, time.monotonic() - started_s)
        except BadStep as error:
            raise failure(self._path, f"{method} {error}", conversation) from error
        except _Raised as raised:
            cause = raised.cause
            problem = f"{method} raised {user_error_text(cause)}"
            raise failure(self._path, problem, conversation) from cause
        except Exception as error:
            # What was returned is an object of the user, whose own methods may raise.
            problem = f"{method} returned a value whose check raised {error_text(error)}"
            raise failure(self._path, problem, conversation) from error

    async def _call(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Call a method of the environment. Raises _Raised for its exception."""
        try:
            if iscoroutinefunction(function):
                return await function(argument)
            value = await self._call_in_thread(function, argument)
            # A plain function that returns a coroutine.
            return await value if isawaitable(value) else value
        except (asyncio.CancelledError, GeneratorExit, _Raised):
            raise
        except BaseException as error:
            raise _Raised(error) from error

    async def _call_in_thread(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Call a plain function in a thread of its own. Raises _Raised for its exception."""
        result: asyncio.Future[Any] = self._loop.create_future()

        def run() -> None:
            try:
                outcome = (function(argument), None)
            except BaseException as error:  # noqa: BLE001 (raised by the step that waits)
                outcome = (None, error)
            self._loop.call_soon_threadsafe(_resolve, result, outcome)

        # A plain step has its slot already.
        async with nullcontext() if self._is_plain else self._slots:
            # A daemon, so that a step that never ends does not keep the process alive.
            thread = threading.Thread(target=run, name="environment-step", daemon=True)
            thread.start()
            try:
                value, error = await result
            except asyncio.CancelledError:
                self._abandon(thread)
                raise
        if error is not None:
            raise _Raised(error) from error
        return value

    def _abandon(self, thread: threading.Thread) -> None:
        """Note a plain step that runs on after its time limit; a thread cannot be ended."""
        self._abandoned = [other for other in self._abandoned if other.is_alive()]
        self._abandoned.append(thread)
        if len(self._abandoned) > _MAX_THREADS:
            text = (
                f"environment.path {self._path}: {len(self._abandoned)} steps still run after"
                " environment.timeout_s; make them async functions, which are cancelled, or give"
                " their calls a time limit"
            )
            self._finished.put(EnvironmentFailure(text))


class _Raised(Exception):
    """A method of the environment raised `cause`."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause


def _resolve(future: asyncio.Future[Any], outcome: tuple[Any, BaseException | None]) -> None:
    # The step may have been cancelled meanwhile.
    if not future.done():
        future.set_result(outcome)


def _read_exception(step: asyncio.Future[Any]) -> None:
    """Read the exception of a cancelled step, which asyncio would otherwise log as never read."""
    if not step.cancelled():
        step.exception()
