"""Processes are found by the mark that they inherit, and only the same one is signalled."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from nemo_like.run.processes import MARK, Process, marked, wait_gone


def test_only_processes_with_the_mark_are_found_and_only_the_same_one_is_killed() -> None:
    script = (
        "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('started', flush=True)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {MARK: "ours/node"},
        stdout=subprocess.PIPE,
        text=True,
    )
    others = [
        subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: mark})
        for mark in ("theirs", "ours2")
    ]
    try:
        assert parent.stdout is not None and parent.stdout.readline() == "started\n"
        parent.wait(30)  # its child has another parent now
        deadline = time.monotonic() + 30
        while len(found := marked("ours")) != 1 or found[0].program != "sleep":
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        (child,) = found
        assert marked("ours/node") == [child] and marked("ours/other") == []
        reused = Process(child.pid, child.start_time - 1, child.program)
        assert not reused.kill() and child.is_alive, (
            "a process that started at another time is not this one"
        )
        assert child.kill()
        assert wait_gone("ours", 30) == []
        assert all(other.poll() is None for other in others)
    finally:
        for other in others:
            other.kill()
            other.wait()
