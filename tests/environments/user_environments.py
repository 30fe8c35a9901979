"""Environments for the tests: scripted turns, slow tools, and classes that misbehave."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_like.environments.environment import Conversation, StepResult
from nemo_like.environments.included import GuessingGame


class Scripted:
    """A conversation has `num_turns` of its row; observations and state depend on the turns."""

    def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"lengths": []}

    async def step(self, conversation: Conversation) -> StepResult:
        lengths = [*conversation.state["lengths"], len(conversation.completion)]
        is_last = conversation.turn >= int(conversation.row["num_turns"])
        return StepResult(
            observation=None if is_last else f"{conversation.turn}+{lengths[-1]}",
            reward={"turns": 1.0, "characters": float(lengths[-1])},
            done=is_last,
            state={"lengths": lengths},
            metrics={"tool_calls": 1.0},
        )


class Meeting:
    """A step about "wait" ends after a step about "go": it needs both to run at the same time."""

    def __init__(self, kind: str) -> None:
        self.is_async = kind == "async"
        self.went_async = asyncio.Event()
        self.went = threading.Event()

    def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def step(self, conversation: Conversation) -> Any:
        if self.is_async:
            return self._step(conversation)
        if conversation.row["do"] == "go":
            self.went.set()
        self.went.wait()
        return StepResult(done=True)

    async def _step(self, conversation: Conversation) -> StepResult:
        if conversation.row["do"] == "go":
            self.went_async.set()
        await self.went_async.wait()
        return StepResult(done=True)


class Hanging:
    """Steps about "hang" never end."""

    def __init__(self, kind: str) -> None:
        self.is_async = kind == "async"

    def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"kept": 1}

    def step(self, conversation: Conversation) -> Any:
        if self.is_async:
            return self._step(conversation)
        if conversation.row["do"] == "hang":
            threading.Event().wait()
        return StepResult(reward=1.0, done=True)

    async def _step(self, conversation: Conversation) -> StepResult:
        while conversation.row["do"] == "hang":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                # Code of a user may ignore its cancellation.
                continue
        return StepResult(reward=1.0, done=True)


class Unreadable(Exception):
    def __str__(self) -> str:
        return str(self.args[1])


class Unprintable:
    """A value that only its process can have; a state may have it."""

    def __repr__(self) -> str:
        raise RuntimeError("it is closed")

    def __reduce__(self) -> str:
        raise TypeError("it cannot be pickled")


class Misbehaving:
    """Returns or raises what the row names."""

    def reset(self, row: Mapping[str, Any]) -> Any:
        return {"state": 7, "handle": {"handle": Unprintable()}}.get(row["do"], {})

    def step(self, conversation: Conversation) -> Any:
        do = conversation.row["do"]
        if do in ("raise", "handle"):
            raise KeyError("no such tool")
        if do == "exit":
            raise SystemExit(3)
        if do == "interrupt":
            return self._interrupt()
        if do == "unreadable":
            raise Unreadable("one argument")
        if do == "close":
            return self._close()
        return {
            "nothing": None,
            "silent": StepResult(),
            "nan": StepResult(reward=float("nan"), done=True),
            "text": StepResult(reward="1", done=True),  # type: ignore[arg-type]
            "assistant": StepResult(observation=[{"role": "assistant", "content": "4"}]),
            "no content": StepResult(observation=[{"role": "tool"}]),
            "metric": StepResult(done=True, metrics={"a/b": 1.0}),
            "large": StepResult(done=True, reward=10**400),
            "array": StepResult(done=np.array([True, False])),  # type: ignore[arg-type]
        }[do]

    async def _interrupt(self) -> StepResult:
        # asyncio ends its loop at this exception.
        raise KeyboardInterrupt

    async def _close(self) -> StepResult:
        raise GeneratorExit


class Blocking:
    """An async step that waits without await."""

    def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    async def step(self, conversation: Conversation) -> StepResult:
        time.sleep(float(conversation.row["seconds"]))
        return StepResult(done=True)


class Sleeping:
    """A plain step that takes some time."""

    def __init__(self, num_turns: int = 1) -> None:
        self.num_turns = num_turns

    def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def step(self, conversation: Conversation) -> StepResult:
        time.sleep(float(conversation.row["seconds"]))
        return StepResult(observation="next", reward=1.0, done=conversation.turn >= self.num_turns)


class Flaky(GuessingGame):
    """Fails in one of four turns, by their texts; every turn has a reward."""

    def step(self, conversation: Conversation) -> StepResult:
        if zlib.crc32(conversation.completion.encode()) % 4 == 0:
            raise KeyError("city")
        return replace(super().step(conversation), reward=0.5)


class DiesOnce(Flaky):
    """Ends its process at the first step of a run, and fails sometimes afterwards."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.marker = Path(marker)

    def step(self, conversation: Conversation) -> StepResult:
        if not self.marker.exists():
            self.marker.touch()
            os._exit(9)
        return super().step(conversation)


class WithoutStep:
    def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {}
