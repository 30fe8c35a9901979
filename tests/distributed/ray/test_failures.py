from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from nemo_like.distributed.activity import count_oom_kills
from nemo_like.distributed.errors import is_collective_error
from nemo_like.distributed.ray.failures import (
    Evidence,
    Failure,
    Location,
    Raised,
    Silence,
    advise,
    diagnose,
    explain_hung,
    read_evidence,
)

LOST = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"
    " Worker exit detail: Worker"
)
SIGKILL = (
    f"{LOST} unexpectedly exits with a connection error code 2."
    " Some common causes include: (1) the OOM killer"
)
SEGFAULT = "hello\nFatal Python error: Segmentation fault\n\nStack (most recent call first):"


@pytest.mark.parametrize(
    ("report", "log", "num_oom_kills", "cause", "key"),
    [
        (SIGKILL, "", 0, "ended without a message, as after SIGKILL", "train_mb_tokens"),
        (SIGKILL, "", 1, "the kernel killed it because memory ran out", "train_mb_tokens"),
        (SIGKILL, SEGFAULT, 0, "it crashed (Segmentation fault)", "cluster.backend=local"),
        (SIGKILL, "Fatal Python error: Bus error\n", 0, "/dev/shm", "/dev/shm"),
        (
            SIGKILL,
            "terminate called after throwing an instance of 'c10::Error'\n",
            0,
            "c10::Error",
            "native library",
        ),
        (
            f"{LOST} exits unexpectedly. Worker exits with an exit code 5.",
            "",
            0,
            "exit code 5",
            "sys.exit",
        ),
        (
            "1 worker(s) were killed due to the node running low on memory.",
            "",
            0,
            "Ray killed it",
            "workers_per_node",
        ),
        (f"{LOST} exits. The process receives a SIGTERM.", "", 0, "SIGTERM", "job scheduler"),
    ],
)
def test_the_cause_is_diagnosed_from_the_evidence(
    report: str, log: str, num_oom_kills: int, cause: str, key: str
) -> None:
    diagnosis = diagnose(report, Evidence(log_tail=log), num_oom_kills)
    assert diagnosis is not None
    told, advice = diagnosis
    assert cause in told
    assert key in advice


def test_without_evidence_no_cause_is_claimed() -> None:
    assert diagnose(SIGKILL, None, 0) is None
    lost_node = Evidence(log_tail="*** SIGABRT", has_raylet=False)
    assert diagnose(SIGKILL, lost_node, 0) == (
        "its node left the cluster",
        "Check that machine, or remove it from the cluster.",
    )
    told, _ = diagnose(SIGKILL, Evidence(process_state="S"), 0) or ("", "")
    assert "still ran" in told


def test_evidence_is_read_from_the_log_and_the_process_table(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text(":job_id:01000000\n" + "".join(f"line {i}\n" for i in range(80)))
    process = subprocess.Popen(["sleep", "100"])
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    evidence = read_evidence(str(log), process.pid)
    assert evidence.log_tail.splitlines()[0] == "line 30"
    assert (evidence.process_state, evidence.is_running) == ("T", True)
    process.kill()
    process.wait()
    assert not read_evidence(str(log), process.pid).is_running
    assert read_evidence(str(log), process.pid, os.getpid()).has_raylet
    assert not read_evidence(str(log), os.getpid(), process.pid).has_raylet


def test_exceptions_with_a_known_way_out_have_advice() -> None:
    slow = RuntimeError(
        "[.../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv"
    )
    assert "cluster.progress_timeout_s" in advise(slow)
    assert "train_mb_tokens" in advise(torch.OutOfMemoryError("CUDA out of memory"))
    assert "train_mb_tokens" in advise(MemoryError())
    assert advise(ValueError("CUDA")) == ""


@pytest.mark.parametrize(
    ("error", "is_collective"),
    [
        (
            RuntimeError(
                "[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:28593."
            ),
            True,
        ),
        (
            RuntimeError(
                "[.../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv"
            ),
            True,
        ),
        (torch.distributed.DistBackendError("NCCL communicator was aborted on rank 1."), True),
        (torch.distributed.DistNetworkError("The client socket has timed out after 60000ms"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("the gloo backend"), False),
        (TimeoutError("timed out"), False),
    ],
)
def test_an_error_of_a_collective_is_secondary(error: Exception, is_collective: bool) -> None:
    assert is_collective_error(error) is is_collective
    assert Failure(0, "train", Raised.from_exception(error)).is_secondary is is_collective


def test_kills_for_memory_are_counted() -> None:
    assert count_oom_kills() >= 0


@pytest.mark.parametrize(
    ("group", "method", "key"),
    [
        ("generation-1", "poll", "policy.generation.progress_timeout_s"),
        ("generation-1", "__init__", "cluster.progress_timeout_s"),
        ("policy", "train", "cluster.progress_timeout_s"),
    ],
)
def test_a_hung_worker_names_the_deadline_of_its_call(group: str, method: str, key: str) -> None:
    silence = Silence(rank=0, silent_s=30.0, responds=True, text="loading")
    location = Location(1, "node", "10.0.0.1", "/log", 0, "machine")
    hung = explain_hung(silence, group, method, location)
    assert f"({key})" in str(hung)
    assert f"raise {key}." in str(hung)
