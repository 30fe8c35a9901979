"""Megatron-Core's timers, reduced to the two a rank needs: forward and backward compute."""

from __future__ import annotations

from typing import Any

from nemo_like.policy.compute_clock import ComputeClock

_COMPUTE = ("forward-compute", "backward-compute")


class ScheduleTimers:
    """The `config.timers` of a model: runs `clock` in the forward and backward of a microbatch.

    Pipeline communication and gradient reduction have other names and are not timed.
    """

    def __init__(self, clock: ComputeClock) -> None:
        self._clock = clock

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        return _Timer(self._clock if name in _COMPUTE else None)


class _Timer:
    """Starts and stops a clock; does nothing without one."""

    def __init__(self, clock: ComputeClock | None) -> None:
        self._clock = clock

    def start(self, *_: Any, **__: Any) -> None:
        if self._clock is not None:
            self._clock.start()

    def stop(self, *_: Any, **__: Any) -> None:
        if self._clock is not None:
            self._clock.stop()
