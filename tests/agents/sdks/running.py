"""Runs programs in the environments of `make agent-env` against an endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_like.agents.calls import Call, Episode, Sampled
from nemo_like.agents.codec import ChatCodec
from nemo_like.agents.endpoint import AgentEndpoint, EndpointLimits, Session
from nemo_like.agents.launcher import Launcher, Program, ProgramEnd, run_episode
from nemo_like.agents.statuses import Status
from tests.agents.scripted import END, ScriptedModel, codec_of

ROOT = Path(__file__).parents[3]
PROGRAMS = Path(__file__).parent / "programs"


def interpreter(name: str) -> str:
    """Python of an environment; skips the test without it."""
    path = ROOT / ".agent-env" / name / "bin" / "python"
    if not path.exists():
        pytest.skip(f"{path.relative_to(ROOT)} does not exist: run make agent-env")
    return str(path)


def call_text(name: str, text: str = "", **arguments: Any) -> str:
    """A turn with a call, with other white space than json.dumps."""
    body = json.dumps({"name": name, "arguments": arguments}).replace(": ", ":  ")
    return f"{text}\n<tool_call>\n{body}\n</tool_call>{END}"


def run_scripted(
    program: Program, script: Sequence[str] | Callable[[str], str], row: dict[str, Any]
) -> tuple[Session, ScriptedModel, Status, ProgramEnd]:
    """One episode whose calls a scripted model answers."""
    codec = codec_of()
    model = ScriptedModel(codec, script)

    async def sample(call: Call) -> Sampled:
        await asyncio.sleep(0)
        return model.sample(call)

    session, status, end = run_sampled(program, codec, sample, row)
    return session, model, status, end


def run_sampled(
    program: Program,
    codec: ChatCodec,
    sample: Callable[[Call], Awaitable[Sampled]],
    row: dict[str, Any],
    max_total_tokens: int = 100_000,
) -> tuple[Session, Status, ProgramEnd]:
    """One episode."""

    async def run() -> tuple[Session, Status, ProgramEnd]:
        endpoint = AgentEndpoint(sample, limits=EndpointLimits(max_turns=8))
        async with endpoint.serving():
            session = endpoint.start(Episode(codec, 1, max_total_tokens=max_total_tokens))
            with contextlib.closing(Launcher(program)) as launcher:
                status, end = await run_episode(endpoint, launcher, session, row, timeout_s=100)
        return session, status, end

    return asyncio.run(run())
