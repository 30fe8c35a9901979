"""Hostile programs score 0 within their limits and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_like.environments import code
from nemo_like.environments.code import check_code, parse_tests
from nemo_like.environments.sandbox import linux
from nemo_like.environments.sandbox.isolation import remove_scratch
from nemo_like.environments.sandbox.sandbox import (
    CLEAN_UP,
    Mechanism,
    Sandbox,
    SandboxError,
    SandboxLimits,
)
from tests.environments.sandbox.hostile import ISSUE, MORE

_WALL_S = 2.0
_LIMITS = SandboxLimits(
    wall_s=_WALL_S,
    cpu_s=1.0,
    memory_mb=256,
    scratch_mb=8,
    max_processes=12,
    max_output_bytes=1 << 20,
)
_MARKER = "nemo-like-hostile-marker"
_SECRET = "a-secret-of-the-user"
_SYSTEM_PYTHON = "/usr/bin/python3"
_REASONS = {
    "fork_bomb": {"error", "timeout"},
    "infinite_loop": {"timeout"},
    "huge_allocation": {"memory"},
    "prints_1_gb": {"output"},
    "starts_daemon": {"left_processes"},
    "stops_itself": {"timeout"},
    "ignores_signals": {"timeout"},
    "forks_and_sleeps": {"timeout"},
    "many_allocations": {"memory", "timeout"},
    "recursion": {"signal", "memory", "error", "timeout"},
    "many_files": {"error", "disk"},
    "many_directories": {"error", "disk"},
    "deep_directories": {"error", "disk", "timeout"},
}
"""How a program ends; the others raise an exception of their own."""


def _sandbox(mode: str) -> Sandbox:
    if mode == "namespaces":
        try:
            return Sandbox(_LIMITS)
        except SandboxError as error:
            pytest.skip(str(error))
    if not Path(_SYSTEM_PYTHON).exists():
        pytest.skip(f"needs {_SYSTEM_PYTHON}, an interpreter that every user can execute")
    without: tuple[Mechanism, ...] = ("namespaces", "network")
    try:
        return Sandbox(_LIMITS, python=_SYSTEM_PYTHON, without=without)
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def scratch_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for scratch directories that every user can enter."""
    directory = Path(tempfile.mkdtemp(prefix="nemo-like-test-"))
    directory.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    remove_scratch(str(directory))


@pytest.fixture
def port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    directory = tmp_path / "home"
    (directory / ".ssh").mkdir(parents=True)
    (directory / ".ssh" / "id").write_text(_SECRET)
    directory.chmod(0o777)
    return directory


@pytest.mark.parametrize("mode", ["namespaces", "landlock"])
@pytest.mark.parametrize("name", [*ISSUE, *MORE])
def test_a_hostile_program_scores_0_and_leaves_nothing_behind(
    mode: str,
    name: str,
    scratch_parent: Path,
    home: Path,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NEMO_LIKE_SECRET", _SECRET)
    sandbox = _sandbox(mode)
    constants = {
        "HOME": str(home),
        "MARKER": _MARKER,
        "PORT": port,
        "SECRET_NAME": "NEMO_LIKE_SECRET",
        "SECRET_FILE": str(home / ".ssh" / "id"),
    }
    lines = [f"{key} = {value!r}" for key, value in constants.items()]
    attack = "\n".join(lines) + "\n" + (ISSUE | MORE)[name]
    before = set(linux.descendants(os.getpid()))
    files_before = sorted(home.rglob("*"))
    # Processes that are left behind become children of this one.
    linux.become_subreaper()
    start = time.monotonic()
    result = sandbox.run(attack)
    # The same as the module of a correct solution.
    solution = f"{attack}\ndef solve():\n    return 1\n"
    tested = asyncio.run(check_code(solution, parse_tests("assert solve() == 1"), sandbox))
    # The time limit, twice, and the end of the processes.
    assert time.monotonic() - start < 2 * _WALL_S + 120
    assert not result.is_ok and result.summary()
    assert result.reason in _REASONS.get(name, {"error"}), result
    assert tested.share == 0.0 and tested.problem
    assert _SECRET not in result.stdout + result.stderr
    assert len(result.stdout) + len(result.stderr) <= 2 * _LIMITS.max_kept_bytes
    assert set(linux.descendants(os.getpid())) == before
    assert sorted(home.rglob("*")) == files_before
    for thread in threading.enumerate():
        if thread.name == CLEAN_UP:
            thread.join()
    assert list(scratch_parent.iterdir()) == []
    assert not (Path("/tmp") / _MARKER).exists() and not (Path.home() / _MARKER).exists()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


@pytest.mark.parametrize("mode", ["namespaces", "landlock"])
def test_what_a_program_writes_is_gone_with_it(mode: str, scratch_parent: Path) -> None:
    sandbox = _sandbox(mode)
    source = f"""
import os, tempfile
os.makedirs("a/b")
open("a/b/c", "w").write("x")
open(os.path.join(tempfile.gettempdir(), {_MARKER!r}), "w").write("x")
try:
    open("/tmp/{_MARKER}", "w").write("x")
except PermissionError:
    pass
print(sorted(os.listdir()))
"""
    result = sandbox.run(source)
    assert result.is_ok, result
    assert "'a'" in result.stdout and _MARKER in result.stdout
    assert not (Path("/tmp") / _MARKER).exists()
    assert list(scratch_parent.iterdir()) == []


@pytest.mark.parametrize("mode", ["namespaces", "landlock"])
def test_a_program_has_no_privileges(mode: str) -> None:
    source = """
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
data = ctypes.create_string_buffer(24)
number = {"x86_64": 125, "aarch64": 90}[os.uname().machine]
header = struct.pack("=Ii", 0x20080522, 0)
assert libc.syscall(number, ctypes.c_char_p(header), data) == 0
print(os.getuid() == 0, os.getgroups(), data.raw == bytes(24), sorted(os.environ))
"""
    result = _sandbox(mode).run(source)
    assert result.is_ok, result
    user, groups, capabilities, names = result.stdout.strip().split(" ", 3)
    assert user == "False" and capabilities == "True"
    assert groups == "[]" or os.geteuid() != 0
    assert "PATH" in names and "NEMO_LIKE" not in names and "PYTHONPATH" not in names


@pytest.mark.parametrize("mode", ["namespaces", "landlock"])
def test_a_pair_of_stream_sockets_works_and_few_signals_can_be_pending(mode: str) -> None:
    source = """
import asyncio, resource, socket
first, second = socket.socketpair()
first.sendall(b"x")
assert second.recv(1) == b"x"
asyncio.run(asyncio.sleep(0))
print(resource.getrlimit(resource.RLIMIT_SIGPENDING)[1] <= 64)
"""
    result = _sandbox(mode).run(source)
    assert result.is_ok and result.stdout == "True\n", result


def test_a_removal_that_takes_long_is_continued(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    (scratch / "a" / "b" / "c").mkdir(parents=True)
    assert not remove_scratch(str(scratch), -1.0)
    assert remove_scratch(str(scratch))
    assert not scratch.exists()


def test_only_as_many_report_lines_as_tests_are_parsed() -> None:
    first, last = '{"test": 0}\n', '{"test": 1}\n'
    assert code._reports(first + "\n" * (1 << 20) + last, 2) == [{"test": 0}, {}]
    assert code._reports(first + last, 2) == [{"test": 0}, {"test": 1}]
