"""Starts the programs of agents, each with its own process group, limits and environment.

A program is the user's own code and is not isolated: it has the rights of the run. See
`nemo_like.agents.zygote` for the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nemo_like.agents.credit import named_rewards
from nemo_like.agents.endpoint import AgentEndpoint, Session
from nemo_like.agents.statuses import Status
from nemo_like.config.errors import ConfigError, shortened

_PACKAGE_PARENT = str(Path(__file__).parents[2])
# Only for the import: packages of this interpreter are not those of the user's.
_SERVE = (
    "import sys; sys.path.append(sys.argv[1]); from nemo_like.agents.zygote import main;"
    " sys.path.pop(); main()"
)
_START_LIMIT_S = 300.0
_MAX_RESULT_BYTES = 1 << 20
_MAX_TIMEOUT_S = 1e6
_MIN_WAIT_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Program:
    """A function or a command that runs one episode. One of `path` and `command` is given."""

    path: str | None = None
    """Import path of a plain or async function of a task; see `nemo_like.agents.zygote.Task`. It
    returns a number, numbers by name, or None."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function, as JSON has them."""
    command: tuple[str, ...] = ()
    """It may write its result as JSON to the file `NEMO_LIKE_RESULT`."""
    python: str = sys.executable
    """Interpreter of the function."""
    max_output_bytes: int = 64 << 20
    """Max bytes of stdout and stderr together."""
    max_kept_bytes: int = 1 << 16
    """The last bytes of the output that are kept for error messages."""


@dataclass(frozen=True)
class ProgramEnd:
    """How a program ended."""

    reason: Literal["ended", "timeout", "output", "cancelled", "lost"]
    """It `ended` itself; exceeded the time limit or the limit of its `output`; was `cancelled`; or
    its supervisor was `lost`."""
    status: int | None = None
    """Exit status, or minus the number of the signal, of a program that ended itself."""
    output: str = ""
    """The end of stdout and stderr, without the key."""
    rewards: Mapping[str, float] | None = None
    """What it returned; None without a reward."""
    problem: str = ""
    """Why it has no result."""

    def episode_status(self, session: Session) -> Status:
        """Return the status of the episode. A program may fail because a limit was reached.

        The limit of tokens is one of them where clients raise an exception for a cut answer.
        """
        if session.failure is not None:
            return session.failure
        if self.reason == "lost":
            return Status.FAILED_INFRA
        if self.reason == "cancelled":
            return Status.CANCELLED
        if self.reason == "timeout":
            return Status.LIMIT_TIME
        if session.limit is not None:
            return session.limit
        is_done = self.reason == "ended" and self.status == 0 and not self.problem
        if is_done:
            return Status.DONE
        is_cut = session.is_cut and self.reason == "ended"
        return Status.LIMIT_TOKENS if is_cut else Status.FAILED_PROGRAM


class Launcher:
    """Runs a program any number of times, also at the same time."""

    def __init__(self, program: Program) -> None:
        """Start the zygote, which imports the program.

        Raises ConfigError if it cannot, and unless there is either a path or a command.
        """
        if (program.path is None) == (not program.command):
            raise ConfigError("give either environment.path or environment.command")
        self._program = program
        self._folder = Path(tempfile.mkdtemp(prefix="nemo_like_agents_"))
        """Has the folders of the programs; the zygote removes it if this process is killed."""
        try:
            self._start()
        except ConfigError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def restart(self) -> None:
        """Start the zygote again after it has ended. Programs that run go on.

        Raises ConfigError if it cannot import the program.
        """
        self._end()
        self._start()

    def _start(self) -> None:
        program = self._program
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [program.python, "-c", _SERVE, _PACKAGE_PARENT]
        try:
            # Ctrl-C is for the driver.
            self._zygote = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True)
        except OSError as error:
            self._connection.close()
            problem = f"environment.python {program.python!r} cannot be started: {error}"
            raise ConfigError(problem) from None
        finally:
            theirs.close()
        self._connection.settimeout(_START_LIMIT_S)
        reply = b""
        with contextlib.suppress(OSError):
            start = {"path": program.path, "options": program.options, "folder": str(self._folder)}
            self._connection.send(json.dumps(start).encode())
            reply = self._connection.recv(_MAX_RESULT_BYTES)
        self._connection.settimeout(None)
        problem = json.loads(reply)["error"] if reply else "its process ended"
        if problem is not None:
            self._end()
            raise ConfigError(
                f"environment.path is {program.path!r}, which {program.python} cannot import:"
                f" {problem}"
            )

    @property
    def is_alive(self) -> bool:
        """False if the zygote has ended, and no program can be started."""
        return self._zygote.poll() is None

    def close(self) -> None:
        """End the zygote; programs that run end when their `run` is cancelled."""
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        self._connection.close()
        self._zygote.kill()
        self._zygote.wait()

    async def run(
        self, row: Mapping[str, Any], base_url: str, key: str, *, seed: int, timeout_s: float
    ) -> ProgramEnd:
        """Run the program on one row until it ends; all its processes have ended then as well.

        Cancelling this coroutine ends them, too. `key` is the secret of the episode in `base_url`.
        """
        scratch = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            (scratch / "task.json").write_text(json.dumps(row), encoding="utf-8")
            request = {
                "command": self._program.command,
                "environment": _environment(scratch, base_url, key),
                "seed": seed,
                "timeout_s": timeout_s,
                "max_output_bytes": self._program.max_output_bytes,
                "max_kept_bytes": self._program.max_kept_bytes,
            }
            reply = await self._supervised(request)
            if reply is None:
                return ProgramEnd("lost")
            output = reply["output"]
            if len(output.encode()) >= self._program.max_kept_bytes:
                # The first characters may be the end of a key.
                output = output[len(key) :]
            rewards, problem = None, ""
            if reply["status"] == 0:
                rewards, problem = _result(scratch / "result.json")
            return ProgramEnd(
                reply["reason"],
                reply["status"],
                output.replace(key, "<key>"),
                rewards,
                problem.replace(key, "<key>"),
            )
        finally:
            # A cancellation would take it from the queue of the threads.
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True))

    async def _supervised(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the reply of the supervisor of a program; None if it is lost."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._connection, [json.dumps(request).encode()], [theirs.fileno()])
            except OSError:
                ours.close()
                return None
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            # The supervisor ends with it.
            ours.close()
            raise
        reading = asyncio.ensure_future(reader.read())
        try:
            reply = await asyncio.shield(reading)
        finally:
            if not reading.done():
                # The supervisor ends the program, and then itself.
                writer.write_eof()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(reading)
            writer.close()
        return json.loads(reply) if reply else None


async def run_episode(
    endpoint: AgentEndpoint,
    launcher: Launcher,
    session: Session,
    row: Mapping[str, Any],
    *,
    timeout_s: float | None,
    grace_s: float = 10.0,
) -> tuple[Status, ProgramEnd]:
    """Run the program of an episode against its endpoint, and end the episode.

    After `timeout_s`, without the time in which it waits for answers, its calls are refused, and
    `grace_s` later it is killed.
    """
    running = asyncio.ensure_future(
        launcher.run(
            row,
            endpoint.base_url(session),
            session.key,
            seed=session.episode.seed,
            timeout_s=_MAX_TIMEOUT_S,
        )
    )
    try:
        await _wait(running, session, timeout_s)
        if not running.done():
            endpoint.stop(session, Status.LIMIT_TIME)
            await asyncio.wait({running}, timeout=grace_s)
        end = running.result() if running.done() else ProgramEnd("timeout")
    finally:
        running.cancel()
        await asyncio.wait({running})
        endpoint.end(session)
    return end.episode_status(session), end


async def _wait(
    running: asyncio.Future[ProgramEnd], session: Session, timeout_s: float | None
) -> None:
    """Return when a program has ended, or has run for `timeout_s` without waiting for answers."""
    started_s = time.monotonic()
    left = timeout_s
    while not running.done() and (left is None or left > 0):
        # Not again at once where the time stands still.
        await asyncio.wait({running}, timeout=None if left is None else max(left, _MIN_WAIT_S))
        if timeout_s is not None:
            left = timeout_s - (time.monotonic() - started_s - session.waited_s())


def _environment(scratch: Path, base_url: str, key: str) -> dict[str, str]:
    """Return the environment variables of a program."""
    hosts = [os.environ.get("NO_PROXY", ""), "127.0.0.1", "localhost"]
    no_proxy = ",".join(filter(None, hosts))
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": key,
        # A proxy would not reach the endpoint.
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "NEMO_LIKE_TASK": str(scratch / "task.json"),
        "NEMO_LIKE_RESULT": str(scratch / "result.json"),
        "TMPDIR": str(scratch),
    }


def _result(path: Path) -> tuple[dict[str, float] | None, str]:
    """Return the rewards in the file of a result, and why there are none if it is not valid."""
    try:
        with path.open("rb") as file:
            result = json.loads(file.read(_MAX_RESULT_BYTES))
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, RecursionError) as error:
        return None, f"the result is not JSON: {shortened(str(error))}"
    if result is None:
        return None, ""
    try:
        return named_rewards(result), ""
    except ConfigError as error:
        return None, f"the result {error}"
