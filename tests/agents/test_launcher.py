"""Programs of agents run in processes of their own, of which nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_like.agents.calls import Call, Episode, Sampled
from nemo_like.agents.endpoint import AgentEndpoint, EndpointLimits
from nemo_like.agents.launcher import Launcher, Program, ProgramEnd, run_episode
from nemo_like.agents.statuses import Status
from nemo_like.config.errors import ConfigError
from tests.agents.scripted import END, ScriptedModel, assert_exact, codec_of

KEY = "0-abcdef0123456789"
URL = f"http://127.0.0.1:9/e/{KEY}/v1"
ROW = {"question": "2 + 2?", "answer": "4"}


def program(name: str, **options: Any) -> Program:
    return Program(path=f"tests.agents.programs.{name}", **options)


def run(
    given: Program, row: dict[str, Any] | None = None, timeout_s: float = 60.0, seed: int = 1
) -> ProgramEnd:
    async def once() -> ProgramEnd:
        with contextlib.closing(Launcher(given)) as launcher:
            return await launcher.run(row or ROW, URL, KEY, seed=seed, timeout_s=timeout_s)

    return asyncio.run(once())


def processes_with(marker: str) -> list[str]:
    """Command lines of running processes that have a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if marker in text and "pytest" not in text:
            found.append(text)
    return found


def zygotes() -> list[int]:
    """Processes of launchers of this process."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if (
                parent == os.getpid()
                and b"nemo_like.agents.zygote" in (path / "cmdline").read_bytes()
            ):
                found.append(int(path.name))
    return found


def test_programs_go_on_when_the_zygote_has_ended_and_is_started_again(tmp_path: Path) -> None:
    row = {**ROW, "started": str(tmp_path / "started"), "go_on": str(tmp_path / "go_on")}

    async def run_two() -> list[ProgramEnd]:
        with contextlib.closing(Launcher(program("waits_for_a_file"))) as launcher:
            [pid] = zygotes()
            ends = [asyncio.ensure_future(launcher.run(row, URL, KEY, seed=1, timeout_s=60))]
            while not (tmp_path / "started").exists() and not ends[0].done():
                await asyncio.sleep(0.01)
            os.kill(pid, signal.SIGKILL)
            while launcher.is_alive:
                await asyncio.sleep(0.01)
            launcher.restart()
            ends.append(asyncio.ensure_future(launcher.run(row, URL, KEY, seed=2, timeout_s=60)))
            (tmp_path / "go_on").touch()
            return list(await asyncio.gather(*ends))

    for end in asyncio.run(run_two()):
        assert (end.reason, end.problem, end.rewards) == ("ended", "", {"reward": 0.5})


def test_a_function_returns_its_reward() -> None:
    end = run(program("is_async"))
    assert (end.reason, end.status, end.rewards) == ("ended", 0, {"reward": 2.0}), end
    end = run(program("gives_nothing"))
    assert end.rewards is None and end.problem == ""
    end = run(program("gives_text"))
    assert end.rewards is None and "not a finite number" in end.problem and KEY not in end.problem


def test_a_function_has_options() -> None:
    options = {"scale": 2.5, "names": ["a", "b"]}
    end = run(program("has_options", options=options), {"value": 2})
    assert end.rewards == {"a": 5.0, "b": 5.0}, end
    with pytest.raises(ConfigError, match="unexpected keyword argument 'size'"):
        Launcher(program("has_options", options={**options, "size": 1}))
    with pytest.raises(ConfigError, match=r"missing a required .*argument: 'names'"):
        Launcher(program("has_options", options={"scale": 1.0}))


def test_a_function_is_prepared_once_before_its_episodes() -> None:
    async def twice() -> list[Any]:
        with contextlib.closing(Launcher(program("is_prepared", options={"name": "x"}))) as found:
            return [await found.run(ROW, URL, KEY, seed=seed, timeout_s=60) for seed in (1, 2)]

    first, second = asyncio.run(twice())
    assert first.rewards is not None and first.rewards == second.rewards, first


def test_programs_of_one_launcher_draw_the_numbers_of_their_seeds() -> None:
    async def draw() -> list[Any]:
        with contextlib.closing(Launcher(program("draws"))) as launcher:
            ends = [launcher.run(ROW, URL, KEY, seed=seed, timeout_s=60) for seed in (1, 2, 1)]
            return [end.rewards for end in await asyncio.gather(*ends)]

    first, second, again = asyncio.run(draw())
    assert first == again != second


def test_the_end_of_a_program_is_its_status() -> None:
    end = run(program("exits"), {"status": 3})
    assert (end.reason, end.status) == ("ended", 3)
    end = run(program("kills_itself"))
    assert (end.reason, end.status) == ("ended", -11)
    end = run(program("floods", max_output_bytes=1 << 20))
    assert end.reason == "output" and len(end.output) <= 1 << 16
    assert run(program("kills_supervisor")).reason == "lost"


def test_the_key_is_in_no_output() -> None:
    for size in (1 << 16, 3 * len(URL) + 50, 200):
        end = run(program("prints_key", max_kept_bytes=size))
        assert end.status == 1 and "does not answer" in end.output
        # No part of it either.
        assert "abcdef" not in end.output and "0123456789" not in end.output


def test_nothing_is_left_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    marker = f"marker_{time.time_ns()}"
    end = run(program("never_ends"), {"marker": marker}, timeout_s=1.0)
    assert end.reason == "timeout"
    end = run(program("leaves_process"), {"marker": marker})
    assert end.rewards == {"reward": 1.0}
    assert processes_with(marker) == [] and list(tmp_path.iterdir()) == []


class QueuedThread(ThreadPoolExecutor):
    """One thread, which is free only after `release`."""

    def __init__(self) -> None:
        super().__init__(1)
        self.released = threading.Event()
        self.num_queued = 0
        super().submit(self.released.wait)

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        self.num_queued += 1
        return super().submit(*args, **kwargs)


def test_an_episode_that_is_cancelled_at_the_end_of_its_program_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def cancel() -> None:
        with QueuedThread() as thread, contextlib.closing(Launcher(program("draws"))) as launcher:
            asyncio.get_running_loop().set_default_executor(thread)
            running = asyncio.create_task(launcher.run(ROW, URL, KEY, seed=1, timeout_s=60))
            while thread.num_queued == 0 and not running.done():
                await asyncio.sleep(0.01)
            assert len(list(tmp_path.iterdir())) == 1
            running.cancel()
            await asyncio.wait({running})
            thread.released.set()

    asyncio.run(cancel())
    assert list(tmp_path.iterdir()) == []


LAUNCHES = """
import asyncio, sys
from nemo_like.agents.launcher import Launcher, Program
launcher = Launcher(Program(path="tests.agents.programs.never_ends"))
row = {"marker": sys.argv[1]}
asyncio.run(launcher.run(row, "http://x/k", "k", seed=1, timeout_s=60))
"""


def test_nothing_is_left_when_the_process_of_a_launcher_is_killed(tmp_path: Path) -> None:
    marker = f"marker_{time.time_ns()}"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", LAUNCHES, marker], env=environment)
    deadline = time.monotonic() + 300
    while len(processes_with(marker)) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    assert len(list(tmp_path.iterdir())) == 1
    process.kill()
    process.wait()
    while processes_with(marker) or list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_cancelling_ends_a_program() -> None:
    marker = f"marker_{time.time_ns()}"

    async def cancel() -> None:
        with contextlib.closing(Launcher(program("never_ends"))) as launcher:
            running = asyncio.create_task(
                launcher.run({"marker": marker}, URL, KEY, seed=1, timeout_s=60)
            )
            while not processes_with(marker):
                await asyncio.sleep(0.02)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert processes_with(marker) == []
            # Others run on.
            assert processes_with("nemo_like.agents.zygote")

    asyncio.run(cancel())


def test_a_program_that_cannot_be_imported_is_an_error() -> None:
    for path, problem in {
        "tests.agents.no_module.solve": "ModuleNotFoundError",
        "tests.agents.programs.missing": "AttributeError",
        "tests.agents.programs.os": "is a module, not a function",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            run(Program(path=path))
    with pytest.raises(ConfigError, match="cannot be started"):
        run(Program(path="a.b", python="/no/python"))
    for wrong in (Program(), Program(path="a.b", command=("x",))):
        with pytest.raises(ConfigError, match="either"):
            Launcher(wrong)


async def episode(
    given: Program,
    sample: Callable[[ScriptedModel, Call], Awaitable[Sampled]] | None = None,
    timeout_s: float = 60.0,
    **limits: Any,
) -> tuple[Status, ProgramEnd, Episode]:
    codec = codec_of()
    model = ScriptedModel(codec, lambda prompt: f"4{END}")

    async def sampled(call: Call) -> Sampled:
        return model.sample(call) if sample is None else await sample(model, call)

    endpoint = AgentEndpoint(sampled, limits=EndpointLimits(**limits))
    async with endpoint.serving():
        launcher = Launcher(given)
        session = endpoint.start(Episode(codec, 1, max_total_tokens=1000))
        with contextlib.closing(launcher):
            status, end = await run_episode(
                endpoint, launcher, session, ROW, timeout_s=timeout_s, grace_s=1.0
            )
        assert session.key not in end.output
        assert_exact(session.episode, model.log) if model.log else None
        return status, end, session.episode


def test_a_function_with_the_client_trains_behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.com")
    status, end, found = asyncio.run(episode(program("uses_client")))
    assert status is Status.DONE and end.rewards == {"reward": 1.0}, end
    assert len(found.rows()) == 1


COMMAND = """
import json, os
from types import SimpleNamespace
from tests.agents.programs import answers
row = json.load(open(os.environ["NEMO_LIKE_TASK"]))
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
assert base == os.environ["OPENAI_API_BASE"] and "127.0.0.1" in os.environ["NO_PROXY"]
reward = answers(SimpleNamespace(row=row, base_url=base, api_key=key))
json.dump(reward, open(os.environ["NEMO_LIKE_RESULT"], "w"))
"""


def test_a_command_gets_its_task_from_the_environment() -> None:
    given = Program(command=(sys.executable, "-c", COMMAND))
    status, end, found = asyncio.run(episode(given))
    assert status is Status.DONE and end.rewards == {"right": 1.0}, end
    assert len(found.calls) == 1
    missing = Program(command=("/no/command",))
    status, end, _ = asyncio.run(episode(missing))
    assert status is Status.FAILED_PROGRAM and "/no/command" in end.output


def test_statuses_of_episodes() -> None:
    async def slowly(model: ScriptedModel, call: Call) -> Sampled:
        await asyncio.sleep(6)
        return model.sample(call)

    async def fail(model: ScriptedModel, call: Call) -> Sampled:
        del model, call
        raise RuntimeError

    async def cut(model: ScriptedModel, call: Call) -> Sampled:
        return replace(model.sample(call), finish_reason="length")

    def status_of(name: str, *arguments: Any, **limits: Any) -> Status:
        return asyncio.run(episode(program(name), *arguments, **limits))[0]

    # The program fails because of the limit, which is a result of the model.
    assert status_of("calls_until_refused", max_turns=3) is Status.LIMIT_TURNS
    assert status_of("calls_until_refused", None, 1.0, max_turns=10**6) is Status.LIMIT_TIME
    # The time of the generator is not that of the program.
    assert status_of("answers", slowly, 5.0) is Status.DONE
    assert status_of("fails_after_answer") is Status.FAILED_PROGRAM
    assert status_of("fails_after_answer", cut) is Status.FAILED_PROGRAM
    # Clients raise an exception for a stream of the Responses API that ends early.
    assert status_of("fails_after_stream") is Status.FAILED_PROGRAM
    assert status_of("fails_after_stream", cut) is Status.LIMIT_TOKENS
    assert status_of("answers", cut) is Status.DONE
    assert status_of("answers", fail) is Status.FAILED_INFRA
    assert status_of("kills_itself") is Status.FAILED_PROGRAM
    assert status_of("gives_text") is Status.FAILED_PROGRAM
    assert status_of("kills_supervisor") is Status.FAILED_INFRA
