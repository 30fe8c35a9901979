"""A console that goes away, or was never there, ends no command and changes no exit code."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import logging, os, subprocess, sys
from nemo_like.console import lasting_console
from nemo_like.run.progress import Progress
logging.basicConfig(filename=sys.argv[1], level=logging.INFO)
with lasting_console():
    progress = Progress(interval_s=0.01)
    with progress.phase("work", 2):
        for step in (1, 2):
            progress.print_line(f"step {step}")
            print("printed", file=sys.stderr, flush=True)
            with open(sys.argv[1] + ".data", "a") as data:
                assert data.fileno() > 2, "of no standard stream"
                subprocess.run(["echo", "from another program"], check=True)
            assert sys.stdin is None or sys.stdin.read() == ""
    logging.info("end")
sys.stdout.write("after the block")
sys.exit(75)
"""


def broken_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def closed_terminal() -> int:
    master, terminal = os.openpty()
    os.close(master)
    return terminal


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        (broken_pipe, "Broken pipe"),
        (closed_terminal, "Input/output error"),
        (full_disk, "No space left on device"),
    ],
)
@pytest.mark.parametrize("both", [True, False], ids=["both", "stdout"])
def test_a_lost_console_is_logged_once_and_nothing_else_changes(
    tmp_path: Path, lost: Callable[[], int], reason: str, both: bool
) -> None:
    console = lost()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "log")],
        stdin=subprocess.DEVNULL,
        stdout=console,
        stderr=console if both else subprocess.PIPE,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    os.close(console)
    assert (done.returncode, done.stderr) == (75, None if both else "printed\nprinted\n")
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.count(reason) for line in lines] == [1] * (1 + both) + [0], lines
    assert lines[-1].endswith("end")


def test_standard_streams_that_are_closed_at_the_start_are_those_of_dev_null(
    tmp_path: Path,
) -> None:
    """Their descriptors are not given to files that are opened later."""
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    done = subprocess.run(
        [*command, sys.executable, "-c", SCRIPT, str(tmp_path / "log")], check=False
    )
    assert done.returncode == 75
    assert (tmp_path / "log").read_text().splitlines() == ["INFO:root:end"]
    assert (tmp_path / "log.data").read_text() == ""


def num_bytes(pipe: int) -> int:
    """Bytes that were written and not read yet."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0]


def test_a_slow_reader_of_a_non_blocking_pipe_gets_everything() -> None:
    script = """
from nemo_like.console import lasting_console
with lasting_console():
    for number in range(20_000):
        print(f"line {number:06}")
"""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    received: list[str] = []
    with os.fdopen(reading) as source:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=writing)
        os.close(writing)
        reader = threading.Thread(target=lambda: received.extend(source))
        # A pipe is full with less than a page of free space.
        while process.poll() is None and num_bytes(reading) < 60 * 1024:
            time.sleep(0.01)
        reader.start()
        assert process.wait(60) == 0
        reader.join()
    assert received == [f"line {number:06}\n" for number in range(20_000)]


def test_a_log_has_no_colors_no_bars_and_no_warnings_for_developers_of_libraries(
    tmp_path: Path,
) -> None:
    script = """
import sys, warnings
from nemo_like.cli import main
from nemo_like.console import lasting_console
main(["init", sys.argv[1]])
with lasting_console():
    print("\\x1b[36m(policy-0 pid=7)\\x1b[0m loaded", flush=True)
    warnings.warn("torch.distributed.reduce_op is deprecated", FutureWarning)
    warnings.warn("a row was left out", UserWarning)
    from transformers.utils import logging
    assert list(logging.tqdm([1, 2])) == [1, 2]
"""
    command = [sys.executable, "-c", script, str(tmp_path / "configs")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.endswith("(policy-0 pid=7) loaded\n")
    [warning] = [line for line in run.stderr.splitlines() if "Warning" in line]
    assert "UserWarning: a row was left out" in warning
    assert "2/2" not in run.stderr
