"""The process that runs many episodes at the same time, in one event loop in a thread of its own.

It samples nothing itself. The driver calls `advance` again and again: it gives episodes to start
and answers to calls, and gets calls and ended episodes. A call names its parent, so that only new
tokens travel.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager

from nemo_like.agents.codec import ChatCodec
from nemo_like.agents.events import (
    CallAnswer,
    CallCancel,
    CallRequest,
    EpisodeEnd,
    EpisodeStart,
    Event,
)
from nemo_like.data.chat import ChatEncoder
from nemo_like.distributed import activity

_CLOSE_S = 10.0


class EpisodeWorker(ABC):
    """Runs episodes; a subclass defines what one is."""

    def __init__(self, serving: AbstractAsyncContextManager[object]) -> None:
        """Start the event loop, in which the block `serving` runs. Raises OSError of its start."""
        self._answers: dict[tuple[int, int], asyncio.Future[CallAnswer]] = {}
        """By episode and call."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._new_events: list[Event] = []
        """Those of the current pass of the loop."""
        self._events: list[Event] = []
        self._error: Exception | None = None
        """Ends the run."""
        self._changed = threading.Condition()
        """Guards `_events` and `_error`."""
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete,
            args=(self._serve(serving, started),),
            name="agents",
            daemon=True,
        )
        self._thread.start()
        started.result()

    def set_encoder(self, encoder: ChatEncoder) -> None:
        """Set the encoder of messages. It must be called before episodes are started."""
        # In a run without Ray the driver uses it in another thread.
        self._codec = ChatCodec(copy.deepcopy(encoder))

    @abstractmethod
    async def _episode(self, start: EpisodeStart) -> EpisodeEnd:
        """Run one episode. An exception ends the run."""

    def advance(
        self, starts: Sequence[EpisodeStart], answers: Sequence[CallAnswer], max_seconds: float
    ) -> list[Event]:
        """Start episodes and answer calls; return the events since the last call.

        Waits up to `max_seconds` for one.
        """
        self._loop.call_soon_threadsafe(self._receive, starts, answers)
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._error, max_seconds)
            events, self._events = self._events, []
            if self._error is not None:
                raise self._error
        # Episodes have time limits of their own.
        activity.note(f"{len(self._tasks)} episodes run")
        return events

    def close(self) -> None:
        """End all episodes and the thread."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(_CLOSE_S)

    async def _serve(
        self, serving: AbstractAsyncContextManager[object], started: Future[None]
    ) -> None:
        try:
            async with serving:
                started.set_result(None)
                await self._stopped.wait()
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        except OSError as error:
            if started.done():
                raise
            started.set_exception(error)

    def _receive(self, starts: Sequence[EpisodeStart], answers: Sequence[CallAnswer]) -> None:
        for start in starts:
            task = asyncio.ensure_future(self._run(start))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        for answer in answers:
            waiting = self._answers.get((answer.episode, answer.number))
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

    async def _run(self, start: EpisodeStart) -> None:
        try:
            self._emit(await self._episode(start))
        except Exception as error:  # noqa: BLE001 (raised by `advance`)
            with self._changed:
                self._error = error
                self._changed.notify()

    def _emit(self, event: Event) -> None:
        if not self._new_events:
            # All calls of one pass together: the generator decodes them in one batch.
            self._loop.call_soon(self._publish)
        self._new_events.append(event)

    def _publish(self) -> None:
        with self._changed:
            self._events += self._new_events
            self._new_events = []
            self._changed.notify()

    async def _answer(self, request: CallRequest) -> CallAnswer:
        """Let the driver sample the answer to a call."""
        key = (request.episode, request.number)
        waiting = self._loop.create_future()
        self._answers[key] = waiting
        self._emit(request)
        try:
            return await waiting
        except asyncio.CancelledError:
            self._emit(CallCancel(episode=request.episode, number=request.number))
            raise
        finally:
            del self._answers[key]
