"""The fault-injection benchmark: a killed and resumed run equals the reference, and the benchmark
notices when it does not.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import fault_processes
from benchmarks.fault_injection import PHASES, TARGETS, compare, main, make_plan
from benchmarks.fault_processes import MARK, Process, marked


@pytest.mark.exhaustive
def test_killed_runs_are_resumed_and_equal_the_reference(tmp_path: Path):
    report_path = tmp_path / "report.json"
    arguments = [
        "--algorithm",
        "sft",
        "--steps",
        "4",
        "--workers",
        "1",
        # The driver is killed early in its start-up, before it has started Ray.
        "--seed",
        "1",
        "--plan",
        "startup:driver",
        "saving:policy",
    ]
    code = main([*arguments, "--out", str(report_path), "--folder", str(tmp_path / "runs")])
    report = json.loads(report_path.read_text())
    assert code == 0, json.dumps(report, indent=1)
    assert report["num_kills"] == 2 and report["num_problems"] == 0
    assert [kill["target"] for kill in report["kills"]] == ["driver", "policy"]
    assert all(kill["phase"] in PHASES and kill["problems"] == [] for kill in report["kills"])
    assert report["kills"][0]["exit_code"] == -9
    assert report["kills"][1]["exit_code"] == 1 and report["kills"][1]["message"].startswith(
        "error: "
    )

    # The comparison must see a difference in each thing that it compares.
    reference, run = (tmp_path / "runs" / "sft" / "out" / name for name in ("reference", "run_1"))
    assert compare(reference, run) == []
    for name in ("hf/model.safetensors", "plan/lengths.jsonl"):
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert compare(reference, run) == [f"{name} differs"]
        (run / name).write_bytes(content)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    assert compare(reference, run) == ["metrics.jsonl: 3 lines instead of 4, different at steps []"]
    shutil.rmtree(run / "hf")
    assert any(difference.startswith("hf/") for difference in compare(reference, run))


def test_only_processes_with_the_mark_are_found_and_only_the_same_one_is_killed():
    script = (
        "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('started', flush=True)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {MARK: "ours"},
        stdout=subprocess.PIPE,
        text=True,
    )
    other = subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: "theirs"})
    try:
        assert parent.stdout is not None and parent.stdout.readline() == "started\n"
        parent.wait(30)  # its child has another parent now
        deadline = time.monotonic() + 30
        while len(found := marked("ours")) != 1 or "sleep" not in found[0].command:
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        (child,) = found
        reused = Process(child.pid, child.start_time - 1, child.command)
        assert not reused.kill() and child.is_alive, (
            "a process that started at another time is not this one"
        )
        assert child.kill()
        assert fault_processes.wait_gone("ours", 30) == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("algorithm", TARGETS)
def test_every_phase_and_target_is_killed_about_as_often(algorithm):
    plan = make_plan(50, TARGETS[algorithm], random.Random(0))
    counts = {combination: plan.count(combination) for combination in plan}
    assert len(plan) == 50 and len(counts) == len(PHASES) * len(TARGETS[algorithm])
    assert max(counts.values()) - min(counts.values()) <= 1
