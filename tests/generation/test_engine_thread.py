"""The thread of an engine: order of steps and calls, exceptions, end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from nemo_like.generation.engine_thread import EngineThread


class Counter:
    """An engine that has work for some steps, and notes what it does and in which thread."""

    def __init__(self) -> None:
        self.num_left = 0
        self.events: list[str] = []
        self.threads: set[int] = set()
        self.error: Exception | None = None

    def step(self) -> bool:
        self.threads.add(threading.get_ident())
        if self.error is not None:
            error = self.error
            self.error = None
            raise error
        if self.num_left == 0:
            return False
        self.num_left -= 1
        self.events.append("step")
        time.sleep(0.001)
        return True

    def add(self, num_steps: int) -> None:
        self.threads.add(threading.get_ident())
        self.events.append("call")
        self.num_left += num_steps


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_steps_run_between_calls_in_one_thread() -> None:
    engine = Counter()
    thread = EngineThread(engine.step)
    for _ in range(3):
        thread.call(lambda: engine.add(4))
        _wait(lambda: engine.num_left == 0)
    thread.call(lambda: thread.call(lambda: engine.add(0)))
    thread.close()
    assert engine.events == (["call"] + ["step"] * 4) * 3 + ["call"]
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_a_call_waits_for_one_step_and_not_for_all() -> None:
    engine = Counter()
    thread = EngineThread(engine.step)
    thread.call(lambda: engine.add(10**9))
    _wait(lambda: len(engine.events) > 3)
    assert thread.call(lambda: engine.num_left) > 0
    thread.close()
    num_events = len(engine.events)
    time.sleep(0.02)
    assert len(engine.events) == num_events
    with pytest.raises(RuntimeError, match="closed"):
        thread.call(lambda: None)


def test_the_exception_of_a_step_is_raised_by_the_next_call() -> None:
    engine = Counter()
    thread = EngineThread(engine.step)
    thread.call(lambda: engine.add(1))
    _wait(lambda: engine.num_left == 0)
    engine.error = FloatingPointError("not finite")
    thread.call(lambda: engine.add(1))
    _wait(lambda: engine.error is None)
    with pytest.raises(FloatingPointError, match="not finite"):
        thread.call(lambda: engine.add(5))
    assert engine.events.count("call") == 2, "the call did not run"
    thread.call(lambda: engine.add(1))
    _wait(lambda: engine.num_left == 0)
    thread.close()


def test_the_exception_of_a_call_is_raised_by_the_call() -> None:
    engine = Counter()
    thread = EngineThread(engine.step)
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)
    thread.call(lambda: engine.add(2))
    _wait(lambda: engine.num_left == 0)
    thread.close()
