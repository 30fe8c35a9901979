"""The loss of the Ray head is noticed by a thread, which ends a process that blocks in Ray
afterwards.
"""

from __future__ import annotations

import subprocess
import sys
import time

_BLOCKED_DRIVER = """
import socket, time
from nemo_like.distributed.ray import head_monitor
head_monitor._GRACE_S = 0.2
head = socket.create_server(("127.0.0.1", 0))
port = head.getsockname()[1]
monitor = head_monitor.HeadMonitor("127.0.0.1:" + str(port))
time.sleep(0.5)
assert not monitor.is_lost
head.close()
DEADLINE = time.monotonic() + 60
while not monitor.is_lost and time.monotonic() < DEADLINE:
    time.sleep(0.05)
{after}
"""


def run_driver(after: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _BLOCKED_DRIVER.format(after=after)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_process_that_blocks_after_the_loss_of_the_head_ends_with_one_message() -> None:
    started = time.monotonic()
    ended = run_driver("time.sleep(100)")
    assert ended.returncode == 1
    assert ended.stderr.count("error: the head of the Ray cluster (GCS, 127.0.0.1:") == 1
    assert "Traceback" not in ended.stderr
    assert time.monotonic() - started < 90


def test_a_driver_that_handles_the_loss_is_left_alone() -> None:
    ended = run_driver("monitor.stop(); time.sleep(1); print(monitor.is_lost); raise SystemExit(7)")
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (7, "True", "")
