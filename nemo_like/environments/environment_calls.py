"""Calls of `reset` and `step` in a process that runs an environment.

Async steps run in the event loop, plain ones in a thread each, so a slow step delays its own
conversation only.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from typing import Any, TypeVar

from nemo_like.config.errors import ConfigError, error_text
from nemo_like.config.import_path import import_class, user_error_text
from nemo_like.config.rollout import EnvironmentConfig
from nemo_like.environments.environment import (
    BadStep,
    Conversation,
    Environment,
    EnvironmentFailure,
    StepOutcome,
    checked_outcome,
    checked_state,
    failure,
)

ResultT = TypeVar("ResultT")

_EXAMPLE = "nemo_like.environments.included.Calculator"
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


class EnvironmentCalls:
    """Calls the methods of one instance of the environment, with time limits and checks."""

    def __init__(self, config: EnvironmentConfig, *, max_threads: int, margin_s: float) -> None:
        """Construct the environment. Raises ConfigError.

        At most `max_threads` plain steps run at the same time, and as many may run on after their
        time limit. An async step may block the loop for the time limit of a conversation and
        `margin_s` more.
        """
        self._path = config.path or ""
        self._on_error = config.on_error
        self._environment = load_environment(config)
        self._is_plain = not iscoroutinefunction(self._environment.step)
        """`step` runs in a thread."""
        self._slots = asyncio.Semaphore(max_threads)
        self._max_threads = max_threads
        self._abandoned: list[threading.Thread] = []
        """Threads of plain steps that did not end in time."""
        self._blocked_limit_s = None
        if config.timeout_s is not None:
            self._blocked_limit_s = config.timeout_s + margin_s
        self._probe: threading.Event | None = None
        """Set by the loop when it runs its next calls."""
        self._probed_s = 0.0

    def check(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        """Raise EnvironmentFailure if steps never end, or block the loop, which runs in `thread`.

        A blocked loop has no time limits. There is no limit if conversations have no time limit.
        """
        if len(self._abandoned) > self._max_threads:
            raise EnvironmentFailure(
                f"environment.path {self._path}: {len(self._abandoned)} steps still run after"
                " environment.timeout_s; make them async functions, which are cancelled, or give"
                " their calls a time limit"
            )
        now = time.monotonic()
        if self._probe is None or self._probe.is_set():
            self._probe = threading.Event()
            loop.call_soon_threadsafe(self._probe.set)
            self._probed_s = now
        elif self._blocked_limit_s is not None and now - self._probed_s > self._blocked_limit_s:
            frame = sys._current_frames().get(thread.ident or 0)
            stack = "".join(traceback.format_stack(frame)[-_NUM_CALLS_SHOWN:]) if frame else ""
            raise EnvironmentFailure(
                f"environment.path {self._path}: an async step has blocked its process for"
                f" {now - self._probed_s:.0f} s, so no other step runs and environment.timeout_s"
                " has no effect; await in it, or make it a plain function, which runs in a thread."
                f" It is here:\n{stack}"
            )

    async def step(self, conversation: Conversation, timeout_s: float | None) -> StepOutcome:
        """Answer a turn within `timeout_s`; at the first turn the environment is reset before.

        Raises EnvironmentFailure if that fails and `environment.on_error` is `stop`.
        """
        # Before the time limit: the time of a step does not include the wait for a thread.
        async with self._slots if self._is_plain else nullcontext():
            started_s = time.monotonic()
            step = asyncio.ensure_future(self._step(conversation))
            # Not `wait_for`, which waits for a step that ignores its cancellation.
            await asyncio.wait({step}, timeout=timeout_s)
            seconds = time.monotonic() - started_s
            # Of a step that failed or did not end: it has no reward.
            no_result = StepOutcome(state=conversation.state, done=True, seconds=seconds)
            if not step.done():
                step.add_done_callback(_read_exception)
                step.cancel()
                return replace(no_result, is_timeout=True)
            error = step.exception()
            if isinstance(error, GeneratorExit):
                text = "step raised GeneratorExit"
                error = failure(self._path, "raised", text, conversation)
            if isinstance(error, EnvironmentFailure) and self._on_error != "stop":
                return replace(no_result, failure=error)
            if error is not None:
                raise error
            return replace(step.result(), seconds=seconds)

    async def _step(self, conversation: Conversation) -> StepOutcome:
        """Reset at the first turn, and step."""
        if conversation.turn == 1:
            state = await self._call("reset", conversation.row, conversation, checked_state)
            conversation = replace(conversation, state=state)
        check = partial(checked_outcome, conversation.state)
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
        loop = asyncio.get_running_loop()
        result: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def run() -> None:
            try:
                outcome = (function(argument), None)
            except BaseException as error:  # noqa: BLE001 (raised by the step that waits)
                outcome = (None, error)
            loop.call_soon_threadsafe(_resolve, result, outcome)

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
