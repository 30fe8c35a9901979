"""The processes that run an environment, and their driver side.

Async steps run in one event loop of a process, plain ones in a thread each. Both are outside of the
thread that the driver calls, so a slow step delays its own conversation only. The state of a
conversation travels with each step: the steps of a process that died or hung are given to its
successor, and nothing else is lost.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from typing import Any, TypeVar

from nemo_like.config.errors import ConfigError, error_text
from nemo_like.config.import_path import import_class, user_error_text
from nemo_like.config.rollout import EnvironmentConfig
from nemo_like.distributed import activity
from nemo_like.distributed.errors import WorkerFailure
from nemo_like.distributed.worker_group import Handle, WorkerContext, submit_one
from nemo_like.distributed.worker_pool import PooledWorker, StartWorker, WorkerPool
from nemo_like.environments.environment import (
    BadStep,
    Conversation,
    Environment,
    EnvironmentFailure,
    StepOutcome,
    StepTask,
    checked_outcome,
    checked_state,
    failure,
)

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_EXAMPLE = "nemo_like.environments.included.Calculator"
_CLOSE_S = 5.0
_NUM_CALLS_SHOWN = 5


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
    """Runs steps on one instance of the environment."""

    def __init__(
        self,
        context: WorkerContext | None,
        *,
        config: EnvironmentConfig,
        max_threads: int = 256,
        margin_s: float = 60.0,
    ) -> None:
        """Construct the environment and start the event loop; `context` is not needed.

        At most `max_threads` plain steps run at the same time, and as many may run on after their
        time limit. An async step may block the loop for the time limit of a conversation and
        `margin_s` more.
        """
        self._path = config.path or ""
        self._on_error = config.on_error
        self._environment = load_environment(config)
        self._is_plain = not iscoroutinefunction(self._environment.step)
        """`step` runs in a thread."""
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(max_threads)
        self._max_threads = max_threads
        self._abandoned: list[threading.Thread] = []
        """Threads of plain steps that did not end in time."""
        self._running: set[Future[StepOutcome]] = set()
        self._blocked_limit_s = None
        if config.timeout_s is not None:
            self._blocked_limit_s = config.timeout_s + margin_s
        self._probe: Future[None] | None = None
        """A call that the loop has not run yet, unless it is done."""
        self._probed_s = 0.0
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="environment", daemon=True
        )
        self._thread.start()

    def advance(self, tasks: Sequence[StepTask], max_seconds: float) -> list[StepOutcome]:
        """Start steps, and return the outcomes of those that ended since the last call.

        Waits up to `max_seconds` for one. Raises EnvironmentFailure if a step failed and
        `environment.on_error` is `stop`.
        """
        self._running |= {self._submit(self._run(task)) for task in tasks}
        done, self._running = wait(self._running, max_seconds, FIRST_COMPLETED)
        if len(self._abandoned) > self._max_threads:
            raise EnvironmentFailure(
                f"environment.path {self._path}: {len(self._abandoned)} steps still run after"
                " environment.timeout_s; make them async functions, which are cancelled, or give"
                " their calls a time limit"
            )
        if not done:
            self._check_loop()
        # A worker whose steps are slow is not hung: every step has its own limit.
        activity.note(f"{len(self._running)} steps run")
        return sorted((step.result() for step in done), key=lambda outcome: outcome.key)

    def close(self) -> None:
        """Stop the event loop; steps that still run are abandoned."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)

    def _submit(self, call: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def _check_loop(self) -> None:
        """Raise EnvironmentFailure if an async step blocks the loop, and with it all time limits.

        There is no limit if conversations have no time limit.
        """
        now = time.monotonic()
        if self._probe is None or self._probe.done():
            self._probe = self._submit(asyncio.sleep(0))
            self._probed_s = now
        elif self._blocked_limit_s is not None and now - self._probed_s > self._blocked_limit_s:
            frame = sys._current_frames().get(self._thread.ident or 0)
            stack = "".join(traceback.format_stack(frame)[-_NUM_CALLS_SHOWN:]) if frame else ""
            raise EnvironmentFailure(
                f"environment.path {self._path}: an async step has blocked its process for"
                f" {now - self._probed_s:.0f} s, so no other step runs and environment.timeout_s"
                " has no effect; await in it, or make it a plain function, which runs in a thread."
                f" It is here:\n{stack}"
            )

    async def _run(self, task: StepTask) -> StepOutcome:
        """Run a step for at most the time that is left to its conversation."""
        # Before the time limit: the time of a step does not include the wait for a thread.
        async with self._slots if self._is_plain else nullcontext():
            started_s = time.monotonic()
            step = asyncio.ensure_future(self._step(task))
            # Not `wait_for`, which waits for a step that ignores its cancellation.
            await asyncio.wait({step}, timeout=task.timeout_s)
            seconds = time.monotonic() - started_s
            # Of a step that failed or did not end: it has no reward.
            no_result = StepOutcome(
                key=task.key, state=task.conversation.state, done=True, seconds=seconds
            )
            if not step.done():
                step.add_done_callback(_read_exception)
                step.cancel()
                return replace(no_result, is_timeout=True)
            error = step.exception()
            if isinstance(error, GeneratorExit):
                text = "step raised GeneratorExit"
                error = failure(self._path, "raised", text, task.conversation)
            if isinstance(error, EnvironmentFailure) and self._on_error != "stop":
                return replace(no_result, failure=error)
            if error is not None:
                raise error
            return replace(step.result(), seconds=seconds)

    async def _step(self, task: StepTask) -> StepOutcome:
        """Reset at the first turn, and step."""
        conversation = task.conversation
        if conversation.turn == 1:
            state = await self._call("reset", conversation.row, conversation, checked_state)
            conversation = replace(conversation, state=state)
        check = partial(checked_outcome, task.key, conversation.state)
        return await self._call("step", conversation, conversation, check)

    async def _call(
        self,
        method: str,
        argument: Any,
        conversation: Conversation,
        check: Callable[[Any], ResultT],
    ) -> ResultT:
        """Call a method of the environment and check what it returns. Raises EnvironmentFailure."""
        function = getattr(self._environment, method)
        try:
            if iscoroutinefunction(function):
                value = await function(argument)
            else:
                value, error = await self._call_in_thread(function, argument)
                if error is not None:
                    raise error
                # A plain function may return a coroutine.
                value = await value if isawaitable(value) else value
        except GeneratorExit:
            # Also raised where a step that did not end is deleted.
            raise
        except BaseException as error:
            # Also one that would end a thread, the process or the event loop.
            problem = f"{method} raised {user_error_text(error)}"
            raise failure(self._path, "raised", problem, conversation) from error
        try:
            return check(value)
        except BadStep as error:
            problem, cause = f"{method} {error}", error
        except Exception as error:  # noqa: BLE001
            # What was returned is an object of the user, whose own methods may raise.
            text = error_text(error)
            problem, cause = f"{method} returned a value whose check raised {text}", error
        raise failure(self._path, "value", problem, conversation) from cause

    async def _call_in_thread(
        self, function: Callable[[Any], Any], argument: Any
    ) -> tuple[Any, BaseException | None]:
        """Call a plain function in a new thread; return its value or its exception."""
        result: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()

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
                return await result
            except asyncio.CancelledError:
                # A thread cannot be ended.
                alive = [other for other in self._abandoned if other.is_alive()]
                self._abandoned = [*alive, thread]
                raise


def _resolve(future: asyncio.Future[Any], outcome: tuple[Any, BaseException | None]) -> None:
    # The step may have been cancelled meanwhile.
    if not future.done():
        future.set_result(outcome)


def _read_exception(step: asyncio.Future[Any]) -> None:
    """Read the exception of a cancelled step, which asyncio would otherwise log as never read."""
    if not step.cancelled():
        step.exception()


@dataclass(eq=False)
class _Worker(PooledWorker):
    """One process."""

    tasks: dict[int, StepTask] = field(default_factory=dict)
    """Unfinished tasks by key."""
    new_tasks: list[StepTask] = field(default_factory=list)
    """Unfinished tasks that the process does not have yet."""


class EnvironmentWorkers(WorkerPool[_Worker]):
    """Runs steps on a number of worker processes."""

    def __init__(
        self,
        start_worker: StartWorker,
        num_workers: int,
        *,
        max_restarts: int = 0,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        """Start all workers; `start_worker` starts a group of one `EnvironmentWorker`.

        `report` also gets the first failure of each kind that does not stop the run.
        """
        super().__init__(
            "the environment",
            _Worker,
            start_worker,
            num_workers,
            max_restarts=max_restarts,
            report=report,
        )
        self._report = report
        self._reported: set[str] = set()
        """Kinds of failures that were reported."""

    @property
    def num_unfinished(self) -> int:
        """Tasks whose outcomes were not returned yet."""
        return sum(len(worker.tasks) for worker in self._workers)

    def submit(self, tasks: Sequence[StepTask]) -> None:
        """Start steps, each on the worker with the fewest unfinished ones. Returns at once."""
        for task in tasks:
            worker = min(self._workers, key=lambda each: len(each.tasks))
            worker.tasks[task.key] = task
            worker.new_tasks.append(task)
        self.start_calls(is_idle=False)

    def collect(self, timeout_s: float) -> list[StepOutcome]:
        """Return the outcomes of the steps that ended since the last call.

        Waits up to `timeout_s` for one, if any is unfinished. Raises WorkerFailure if a step
        failed, or a process that may not be restarted any more.
        """
        calls = self.start_calls(is_idle=timeout_s > 0)
        if not calls:
            return []
        self._workers[0].group.wait_any(calls, timeout_s)
        outcomes: list[StepOutcome] = []
        for worker, results in self._results():
            for outcome in results:
                del worker.tasks[outcome.key]
                if outcome.failure is not None:
                    self._report_failure(outcome.failure)
            outcomes += results
        return outcomes

    def _advance(self, worker: _Worker, max_seconds: float) -> Handle | None:
        if not worker.tasks:
            return None
        tasks, worker.new_tasks = worker.new_tasks, []
        return submit_one(worker.group, 0, EnvironmentWorker.advance, tasks, max_seconds)

    def _restarted(self, worker: _Worker, failure: WorkerFailure) -> None:
        del failure
        worker.new_tasks = list(worker.tasks.values())

    def _report_failure(self, failure: EnvironmentFailure) -> None:
        # Example: `step raised KeyError`.
        kind = str(failure.problem).partition(":")[0]
        if kind not in self._reported:
            self._reported.add(kind)
            self._report(f"warning: {failure}\n  Further failures of this kind are only counted.")
