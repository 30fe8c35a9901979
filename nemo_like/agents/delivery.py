"""Sends answers while they are sampled, and finds out whether they reached their program."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nemo_like.agents.calls import Call
from nemo_like.agents.protocol import ApiError, ApiRequest, stream_chunks


@dataclass(eq=False)
class Answer:
    """The answer to one request, while it is sampled and for repetitions of the request."""

    request: ApiRequest
    digest: bytes
    """Of path and body."""
    calls: list[Call]
    task: asyncio.Task[dict[str, Any]]
    num_waiting: int = 0
    """Connections that wait for it."""

    @property
    def is_delivered(self) -> bool:
        """True if it reached the program, as far as this side of the connection can tell."""
        return self.calls[0].is_delivered

    @property
    def is_repeatable(self) -> bool:
        """False if it failed."""
        task = self.task
        return not task.done() or not (task.cancelled() or task.exception())

    def set_delivered(self) -> None:
        """Mark the calls as delivered."""
        for call in self.calls:
            call.is_delivered = True


class Delivery(Response):
    """Sends an answer when it is sampled, with heartbeats before."""

    def __init__(self, answer: Answer, heartbeat_s: float, on_left: Callable[[], None]) -> None:
        super().__init__()
        self._answer = answer
        self._heartbeat_s = heartbeat_s
        self._on_left = on_left
        self._is_stream = answer.request.is_streamed
        self._is_open = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer unless the client leaves before."""
        del scope
        answer = self._answer
        answer.num_waiting += 1
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await self._wait(send, gone)
            if answer.task.done() and not gone.done():
                await self._finish(send)
        finally:
            gone.cancel()
            answer.num_waiting -= 1
            self._on_left()

    async def _wait(self, send: Send, gone: asyncio.Future[None]) -> None:
        """Return when the answer is sampled, or the client has left."""
        task = self._answer.task
        if self._is_stream and not task.done():
            await self._open(send, 200)
        while True:
            await asyncio.wait(
                {task, gone}, timeout=self._heartbeat_s, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done() or gone.done():
                return
            if not self._is_open:
                await self._open(send, 200)
            # A comment of the stream, or white space before a JSON value.
            await self._write(send, b": waiting\n\n" if self._is_stream else b" ")

    async def _finish(self, send: Send) -> None:
        """Send the answer, or its error."""
        status, content = self._content()
        if status == 200:
            # The connection is open; what becomes of it later is not known here.
            self._answer.set_delivered()
        elif self._is_open and not self._is_stream:
            # The status is sent already. The server closes an unfinished connection, and a client
            # that repeats its request gets the error.
            return
        if not self._is_open:
            await self._open(send, status)
        await self._write(send, content, is_last=True)

    def _content(self) -> tuple[int, bytes]:
        """Return status and body of the answer."""
        try:
            body = self._answer.task.result()
        except asyncio.CancelledError:
            error = ApiError(410, "the episode has ended", "episode_ended")
        except ApiError as failure:
            error = failure
        else:
            if not self._is_stream:
                return 200, json.dumps(body).encode()
            chunks = stream_chunks(self._answer.request, body)
            events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
            return 200, "".join([*events, "data: [DONE]\n\n"]).encode()
        text = json.dumps(error.body)
        if self._is_stream and self._is_open:
            text = f"data: {text}\n\n"
        return error.status, text.encode()

    async def _open(self, send: Send, status: int) -> None:
        self._is_open = True
        is_events = self._is_stream and status == 200
        kind = b"text/event-stream" if is_events else b"application/json"
        # Clients repeat a request after status 500 otherwise.
        headers = [(b"content-type", kind), (b"x-should-retry", b"false")]
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, send: Send, content: bytes, *, is_last: bool = False) -> None:
        await send({"type": "http.response.body", "body": content, "more_body": not is_last})


async def _disconnected(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
