"""An endpoint in the form of OpenAI's API for the programs of many episodes.

It samples nothing itself: `sample(call)` does, one request of the generator per call. All methods
run in one event loop. A call is recorded when it is answered, and trained if its answer reached the
program.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nemo_like.agents.calls import Call, Episode, Sampled
from nemo_like.agents.credit import named_rewards
from nemo_like.agents.delivery import Answer, Delivery
from nemo_like.agents.protocol import (
    ApiError,
    ApiRequest,
    Dialect,
    RequestRules,
    answer_body,
    parse_request,
)
from nemo_like.agents.statuses import Status
from nemo_like.config.errors import ConfigError, error_text

Sampler = Callable[[Call], Awaitable[Sampled]]

_MAX_KEPT = 64
"""Answers of an episode that are kept for repeated requests."""
_BYTES_PER_TOKEN = 64
"""Far more than requests have; longer ones would take minutes to encode."""
_MARGIN_TOKENS = 1024
_DIALECTS: dict[str, Dialect] = {
    "chat/completions": "chat",
    "completions": "completions",
    "responses": "responses",
}


@dataclass(frozen=True, kw_only=True)
class EndpointLimits:
    """Limits of each episode."""

    max_turns: int = 64
    """Max calls."""
    max_concurrent: int = 64
    """Max requests at a time."""
    max_refused: int = 1000
    """Refused requests after which the program counts as failed."""
    heartbeat_s: float = 5.0
    """Seconds between two heartbeats while an answer is sampled. Clients wait 10 minutes for the
    next byte."""
    retry_grace_s: float = 10.0
    """Seconds that sampling goes on after its client has left: it may repeat the request."""


@dataclass(frozen=True)
class RewardEvent:
    """A reward that a program has given while it runs."""

    call: int
    """Number of the call, counted from 0 in the order of answers; -1 before the first."""
    values: Mapping[str, float]


@dataclass(eq=False)
class Session:
    """The requests of one episode."""

    episode: Episode
    key: str = field(repr=False)
    num_turns: int = 0
    """Calls that were accepted."""
    num_refused: int = 0
    not_applied: Counter[str] = field(default_factory=Counter)
    """Requests with fields that were accepted but not applied, by field."""
    rewards: list[RewardEvent] = field(default_factory=list)
    limit: Status | None = None
    """The limit that the last request met."""
    is_cut: bool = False
    """Whether the last answer, a stream or of the Responses API, ended at `max_tokens`: clients
    raise an exception for it."""
    failure: Status | None = None
    problem: str = ""
    """What failed; empty without a failure."""
    answers: list[Answer] = field(default_factory=list)
    _num_waiting: int = 0
    _waiting_since_s: float = 0.0
    _waited_s: float = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as time in which the program waits for an answer."""
        if self._num_waiting == 0:
            self._waiting_since_s = time.monotonic()
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                self._waited_s += time.monotonic() - self._waiting_since_s

    def waited_s(self) -> float:
        """Return the seconds in which at least one answer was sampled."""
        now = time.monotonic()
        return self._waited_s + (now - self._waiting_since_s if self._num_waiting else 0.0)

    @property
    def num_unfinished(self) -> int:
        """Answers that are being sampled."""
        return sum(not answer.task.done() for answer in self.answers)

    def call_rewards(self) -> list[float]:
        """Return the sum of the rewards of each call; an episode without calls has none."""
        totals = [0.0] * len(self.episode.calls)
        for event in self.rewards if totals else ():
            # No call has caused one before the first, so that its place has no effect on average.
            totals[max(event.call, 0)] += sum(event.values.values())
        return totals


class AgentEndpoint:
    """Serves the requests of the programs of any number of episodes."""

    def __init__(
        self,
        sample: Sampler,
        *,
        rules: RequestRules | None = None,
        limits: EndpointLimits | None = None,
        model: str = "policy",
    ) -> None:
        self._sample = sample
        self._rules = rules or RequestRules()
        self._limits = limits or EndpointLimits()
        self._model = model
        self._secret = secrets.token_bytes(32)
        self._num_sessions = 0
        self._sessions: dict[str, Session] = {}
        """By key."""
        self._url = ""
        routes = []
        for base in ("/e/{key}/v1", "/e/{key}/untrained/v1", "/v1"):
            for path in _DIALECTS:
                routes.append(Route(f"{base}/{path}", self._respond, methods=["POST"]))
            routes.append(Route(f"{base}/reward", self._reward, methods=["POST"]))
        self.app = Starlette(routes=routes, exception_handlers={ApiError: _refusal})

    @contextlib.asynccontextmanager
    async def serving(self, host: str = "127.0.0.1") -> AsyncIterator[AgentEndpoint]:
        """Serve at a free port while the block runs."""
        server = uvicorn.Server(
            uvicorn.Config(
                self.app,
                # A line per request would have the keys.
                access_log=False,
                log_level="error",
                # Its own would close the log files of the run, whose process it may share.
                log_config=None,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=1,
            )
        )
        # The process handles signals itself.
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        listener = socket.create_server((host, 0))
        self._url = f"http://{host}:{listener.getsockname()[1]}"
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started and not task.done():
                await asyncio.sleep(0.005)
            yield self
        finally:
            for session in list(self._sessions.values()):
                self.end(session)
            server.should_exit = True
            await task
            listener.close()

    def start(self, episode: Episode) -> Session:
        """Accept requests for an episode."""
        number = str(self._num_sessions)
        self._num_sessions += 1
        session = Session(episode, f"{number}-{self._mac(number)}")
        self._sessions[session.key] = session
        return session

    def base_url(self, session: Session) -> str:
        """Return the URL for clients of OpenAI's API. It has the key of the session."""
        return f"{self._url}/e/{session.key}/v1"

    def stop(self, session: Session, limit: Status) -> None:
        """Refuse further calls of an episode that has reached a limit."""
        session.limit = limit
        session.num_turns = max(session.num_turns, self._limits.max_turns)

    def end(self, session: Session) -> None:
        """Refuse further requests of an episode, and cancel those that are not answered."""
        self._sessions.pop(session.key, None)
        for answer in session.answers:
            answer.task.cancel()

    def _mac(self, number: str) -> str:
        return hmac.digest(self._secret, number.encode(), "sha256").hex()[:40]

    def _authenticated(self, request: Request) -> Session:
        """Return the session of a request. Raises ApiError."""
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        keys = [request.path_params.get("key"), bearer, request.headers.get("x-session-id")]
        # A program may have a dummy key beside the one in the path.
        valid = {key for key in keys if key is not None and self._is_valid(key)}
        if len(valid) != 1 or keys[0] not in (None, *valid):
            raise ApiError(401, "the key is not that of an episode", "invalid_api_key")
        session = self._sessions.get(valid.pop())
        if session is None:
            raise ApiError(410, "the episode has ended", "episode_ended")
        return session

    def _is_valid(self, key: str) -> bool:
        """Return whether a key belongs to an episode, which may have ended."""
        number, _, mac = key.partition("-")
        return hmac.compare_digest(mac.encode(), self._mac(number).encode())

    async def _reward(self, request: Request) -> Response:
        session = self._authenticated(request)
        body = await self._body(request, session)
        try:
            content = json.loads(body)
            values, call = named_rewards(content["reward"]), content.get("call")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problem = str(error) if isinstance(error, ConfigError) else "the body has none"
            raise ApiError(400, f'reward: {problem}; give {{"reward": a number}}') from None
        ids = [_call_id(index) for index in range(len(session.episode.calls))]
        if call is not None and call not in ids:
            raise ApiError(400, "call is not the id of an answer of this episode")
        index = len(ids) - 1 if call is None else ids.index(call)
        session.rewards.append(RewardEvent(index, values))
        return JSONResponse({"object": "reward"})

    async def _respond(self, request: Request) -> Response:
        session = self._authenticated(request)
        try:
            body = await self._body(request, session)
            path = request.url.path
            digest = hashlib.blake2b(path.encode() + b"\n" + body, digest_size=16).digest()
            answer = _repeated(session, digest, request.headers)
            if answer is None:
                is_trained = "/untrained/" not in path
                is_trained &= request.headers.get("x-nemo-like-train", "").lower() != "false"
                parsed = parse_request(_DIALECTS[path.rpartition("/v1/")[2]], body, self._rules)
                answer = self._new_answer(session, parsed, digest, is_trained=is_trained)
        except ApiError:
            session.num_refused += 1
            if session.num_refused > self._limits.max_refused:
                session.failure = Status.FAILED_PROGRAM
                session.problem = f"more than {self._limits.max_refused} requests were refused"
            raise
        return Delivery(answer, self._limits.heartbeat_s, lambda: self._left(answer))

    async def _body(self, request: Request, session: Session) -> bytes:
        """Read the body. Raises ApiError."""
        body = bytearray()
        limit = _BYTES_PER_TOKEN * (session.episode.max_total_tokens + _MARGIN_TOKENS)
        with contextlib.suppress(ClientDisconnect):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise _context_error(session, f"more than {limit} bytes")
        # The episode may have ended meanwhile.
        if session.failure is not None or session.key not in self._sessions:
            raise ApiError(410, "the episode has ended", "episode_ended")
        return bytes(body)

    def _new_answer(
        self, session: Session, request: ApiRequest, digest: bytes, *, is_trained: bool
    ) -> Answer:
        """Start to sample the answer to a request. Raises ApiError."""
        limits = self._limits
        if session.num_unfinished >= limits.max_concurrent:
            raise ApiError(429, f"more than {limits.max_concurrent} requests at a time")
        if session.num_turns + request.num_answers > limits.max_turns:
            if session.limit is not Status.LIMIT_TIME:
                session.limit = Status.LIMIT_TURNS
            raise ApiError(400, "the episode has reached its limit", session.limit.value)
        options = request.options
        if options.temperature is not None or options.top_p is not None:
            is_trained = False
        episode = session.episode
        try:
            first = episode.request(request.content, options, is_trained=is_trained)
        except (ValueError, TypeError, RecursionError) as error:
            # Texts that cannot be encoded, or values that are too deep, beside ConfigError.
            raise ApiError(400, str(error)) from None
        num_tokens = len(first.prompt_ids)
        if num_tokens >= episode.max_total_tokens:
            raise _context_error(session, f"{num_tokens} tokens")
        session.limit = None
        session.num_turns += request.num_answers
        session.not_applied.update(request.not_applied)
        calls = [first, *(episode.sibling(first) for _ in range(request.num_answers - 1))]
        for call in calls:
            call.is_delivered = False
        task = asyncio.create_task(self._answered(session, request, calls))
        # A failure is known without a client that waits for it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # Without its messages, which the recorded tokens replace.
        answer = Answer(replace(request, content=""), digest, calls, task)
        kept = [each for each in session.answers if each.task.done()]
        if len(kept) >= _MAX_KEPT:
            session.answers.remove(kept[0])
        session.answers.append(answer)
        return answer

    async def _answered(
        self, session: Session, request: ApiRequest, calls: list[Call]
    ) -> dict[str, Any]:
        """Sample and record the answers; return the body. Raises ApiError."""
        try:
            with session.waiting():
                sampled = await asyncio.gather(*map(self._sample, calls))
            may_raise = request.dialect == "responses" or request.is_streamed
            session.is_cut = may_raise and any(each.finish_reason == "length" for each in sampled)
            answer_id = _call_id(len(session.episode.calls))
            for call, each in zip(calls, sampled, strict=True):
                session.episode.answer(call, each)
            return answer_body(request, calls, answer_id, self._model, int(time.time()))
        except Exception as error:  # noqa: BLE001 (whatever the generator raises)
            session.failure = Status.FAILED_INFRA
            session.problem = error_text(error)
            raise ApiError(500, "the generator failed", "generator_failed") from None

    def _left(self, answer: Answer) -> None:
        """Give up an answer for which nobody waits, unless its request is repeated in time."""
        if answer.is_delivered:
            return

        def give_up() -> None:
            if answer.num_waiting == 0 and not answer.task.done():
                answer.task.cancel()

        asyncio.get_running_loop().call_later(self._limits.retry_grace_s, give_up)


def _repeated(session: Session, digest: bytes, headers: Mapping[str, str]) -> Answer | None:
    """Return the answer to a request that repeats an earlier one.

    That is the last equal request if a client marks a repetition, or one whose answer did not
    reach its client. Programs may send equal requests on purpose.
    """
    equal = [each for each in session.answers if each.digest == digest and each.is_repeatable]
    for answer in equal:
        if not answer.is_delivered and answer.num_waiting == 0:
            return answer
    is_repetition = headers.get("x-stainless-retry-count", "0") != "0"
    return equal[-1] if is_repetition and equal else None


async def _refusal(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status)


def _context_error(session: Session, size: str) -> ApiError:
    """Return the error for a request without room for an answer, and record the limit."""
    session.limit = Status.LIMIT_TOKENS
    return ApiError(
        400,
        f"the prompt has {size}, and the maximum context length is"
        f" {session.episode.max_total_tokens} tokens with the answer",
        "context_length_exceeded",
    )


def _call_id(index: int) -> str:
    """Return the id of the answer whose first call has this number in its episode."""
    return f"call-{index}"
