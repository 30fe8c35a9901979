"""What a program in the sandbox gets and returns, and what is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.environments.sandbox import linux
from nemo_like.environments.sandbox.isolation import remove_scratch, size_bytes
from nemo_like.environments.sandbox.sandbox import (
    Sandbox,
    SandboxError,
    SandboxLimits,
    find_problems,
    missing_isolation,
)
from nemo_like.environments.sandbox.supervisor import decode, encode

_LIMITS = SandboxLimits(wall_s=20.0, cpu_s=5.0, max_processes=8, max_kept_bytes=1000)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0) | st.floats(0, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return Sandbox(_LIMITS)
    except SandboxError as error:
        pytest.skip(str(error))


@given(_VALUES)
def test_decoded_values_equal_the_encoded_ones(value: object) -> None:
    assert decode(encode(value)) == value


@given(_VALUES, st.data())
def test_incomplete_data_is_refused(value: object, data: st.DataObject) -> None:
    encoded = encode([value]).rstrip()
    length = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises((SyntaxError, ValueError)):
        decode(encoded[:length])


@pytest.mark.parametrize("text", [b"open", b"f()", b"{**{}}", b"-1", b"[x for x in ()]"])
def test_only_plain_data_is_decoded(text: bytes) -> None:
    with pytest.raises(ValueError, match="is not plain data"):
        decode(text)


def test_a_program_has_input_output_and_a_report(sandbox: Sandbox) -> None:
    source = """
import os, sys
name = input()
print("hello", name, "\\u20ac")
print("warning", file=sys.stderr)
os.write(3, os.read(4, 100).upper())
sys.exit(7)
"""
    result = sandbox.run(source, stdin="w\u00f6rld\n", message="a message")
    assert result.stdout == "hello w\u00f6rld \u20ac\n" and result.stderr == "warning\n"
    assert result.report == "A MESSAGE"
    assert (result.reason, result.exit_status, result.signal) == ("error", 7, None)
    assert result.summary() == "exit status 7: warning"
    assert 0 < result.seconds < 20 and result.max_rss_mb > 1 and not result.is_ok


def test_a_signal_is_reported(sandbox: Sandbox) -> None:
    result = sandbox.run("import os\nos.abort()")
    assert (result.reason, result.signal, result.exit_status) == ("signal", signal.SIGABRT, None)
    assert "signal 6" in result.summary()


def test_output_is_kept_up_to_its_limit(sandbox: Sandbox) -> None:
    result = sandbox.run("print('x' * 5000)")
    assert result.is_ok and result.stdout == "x" * 1000


def test_sets_have_the_same_order_in_every_run(sandbox: Sandbox) -> None:
    source = "print(list({'alpha', 'beta', 'gamma', 'delta', 'epsilon'}))"
    assert sandbox.run(source).stdout == sandbox.run(source).stdout


def test_programs_may_use_processes_and_threads(sandbox: Sandbox) -> None:
    source = """
import asyncio, subprocess, sys, threading
thread = threading.Thread(target=print, args=("thread",))
thread.start()
thread.join()
print(subprocess.run([sys.executable, "-S", "-c", "print('child')"],
                     capture_output=True, text=True, check=True).stdout)
async def main():
    await asyncio.sleep(0.01)
    print("async")
asyncio.run(main())
"""
    result = sandbox.run(source)
    assert result.is_ok, result
    assert result.stdout.split() == ["thread", "child", "async"]


def test_programs_import_packages_of_the_python_path(tmp_path: Path) -> None:
    (tmp_path / "given_package.py").write_text("value = 5")
    tmp_path.chmod(0o755)
    sandbox = Sandbox(_LIMITS, python_path=[str(tmp_path)])
    assert sandbox.run("import given_package; print(given_package.value)").stdout == "5\n"
    result = sandbox.run(f"open({str(tmp_path / 'given_package.py')!r}, 'w')")
    assert result.reason == "error"
    assert Sandbox(_LIMITS).run("import given_package").reason == "error"


def test_a_stopped_program_ends_at_once(sandbox: Sandbox) -> None:
    stop = threading.Event()
    timer = threading.Timer(0.5, stop.set)
    timer.start()
    start = time.monotonic()
    with pytest.raises(SandboxError, match="the program was stopped"):
        sandbox.run("import time\ntime.sleep(1000)", stop=stop)
    assert time.monotonic() - start < 500
    timer.join()


def test_a_cancelled_call_ends_the_program(sandbox: Sandbox) -> None:
    before = set(linux.descendants(os.getpid()))

    async def run() -> None:
        async with asyncio.timeout(0.5):
            await sandbox.run_async("import time\ntime.sleep(1000)")

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    deadline = time.monotonic() + 60
    while set(linux.descendants(os.getpid())) != before:
        assert time.monotonic() < deadline, "the program runs on"
        time.sleep(0.05)


def test_a_program_ends_with_a_caller_that_is_killed(sandbox: Sandbox, tmp_path: Path) -> None:
    script = f"""
import tempfile
from nemo_like.environments.sandbox.sandbox import Sandbox
from nemo_like.environments.sandbox.sandbox import SandboxLimits
tempfile.tempdir = {str(tmp_path)!r}
sandbox = Sandbox(SandboxLimits(wall_s=1000))
print("ready", flush=True)
sandbox.run("import time; time.sleep(1000)")
"""
    linux.become_subreaper()
    before = set(linux.descendants(os.getpid()))
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None and caller.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 120
    while len(linux.descendants(caller.pid)) < 3:
        assert time.monotonic() < deadline, "the program did not start"
        time.sleep(0.05)
    caller.kill()
    caller.communicate()
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, "the scratch directory is left"
        time.sleep(0.05)
    while True:
        left = set(linux.descendants(os.getpid())) - before
        if not left:
            break
        assert time.monotonic() < deadline, f"processes {left} are left"
        os.waitpid(-1, os.WNOHANG)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("available", "missing"),
    [
        (("namespaces", "network", "seccomp"), ""),
        (("namespaces", "network"), ""),
        (("namespaces", "seccomp"), ""),
        (("landlock", "seccomp", "user"), ""),
        (("namespaces",), "reaching a network"),
        (("seccomp", "user"), "reading and writing files of the user"),
        (("landlock", "user"), "reaching a network, signalling other processes"),
        (("landlock", "seccomp"), "starting any number of processes"),
    ],
)
def test_isolation_needs_files_networks_and_processes(
    available: tuple[str, ...], missing: str
) -> None:
    assert missing_isolation(available) == missing


def test_weak_isolation_is_refused_with_reasons() -> None:
    with pytest.raises(SandboxError, match="reading and writing files") as caught:
        Sandbox(without=("namespaces", "landlock"))
    assert "require=limits" in str(caught.value)


def test_limits_run_without_isolation_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    sandbox = Sandbox(
        _LIMITS, require="limits", without=("namespaces", "network", "landlock", "seccomp")
    )
    assert "cannot keep programs from reading and writing files" in caplog.text
    # The interpreter may be executable by this user only, who then runs the program.
    assert sandbox.run("print(1)").stdout == "1\n"


def test_invalid_settings_are_named() -> None:
    with pytest.raises(ValueError, match="wall_s is 0"):
        SandboxLimits(wall_s=0)
    with pytest.raises(ValueError, match="require is 'none'"):
        Sandbox(require="none")  # type: ignore[arg-type]


def test_the_log_has_one_line_about_the_machine(caplog: pytest.LogCaptureFixture) -> None:
    find_problems.cache_clear()
    with caplog.at_level("INFO", "nemo_like.environments.sandbox.sandbox"):
        Sandbox(require="limits")
        Sandbox(require="limits")
    assert caplog.text.count("sandbox: ") == 1


def test_a_scratch_directory_is_removed_without_following_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    scratch = tmp_path / "scratch"
    inner = scratch / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x" * 10_000)
    (inner / "link").symlink_to(outside)
    (scratch / "link").symlink_to(outside)
    inner.chmod(0)
    here = os.getcwd()
    os.chdir(scratch)
    try:
        for _ in range(1000):
            os.mkdir("deep")
            os.chdir("deep")
    finally:
        os.chdir(here)
    assert size_bytes(str(scratch), 1 << 40) > 10_000
    remove_scratch(str(scratch))
    assert not scratch.exists() and (outside / "kept").exists()
    remove_scratch(str(scratch))
