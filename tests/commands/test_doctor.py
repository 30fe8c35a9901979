"""What `nemo-like doctor` finds in the files of a run, and what its archive does not have."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from nemo_like.cli import main
from nemo_like.run.directory import locked

NAMED_TOKEN, OLD_VALUE = "named-token-value", "old-env-value"
SECRETS = {
    "cluster.env": "mlx5-in-an-env",
    "a name of the config": "configured-password-1",
    "the environment": "environment-secret-2",
    "a token by its form": "hf_abcdefghijklmnopqrst",
    "a token after its name": NAMED_TOKEN,
    "a header": "bearervalue123",
    "a URL": "user:pass-of-url",
    "an earlier value of cluster.env": OLD_VALUE,
}
DATA = "text of a row"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A GRPO run of 12 steps: generation becomes slower, and the last step saves a checkpoint."""
    path = tmp_path / "run"
    for folder in ("logs/ray", "rollouts", "plan", "skipped"):
        (path / folder).mkdir(parents=True)
    config = {
        "run_name": "run",
        "policy": {"tokenizer_name": "models/tokenizer"},
        "cluster": {"env": {"NCCL_IB_HCA": SECRETS["cluster.env"], "MY_TOKEN": None}},
        "reward": {"functions": {"a": {"kwargs": {"password": SECRETS["a name of the config"]}}}},
        "checkpointing": {"upload_to": f"ftp://{SECRETS['a URL']}@host/prefix"},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    records = [{"step": 0, "validation/loss": 1.0}]
    for step in range(1, 13):
        record = {
            "step": step,
            "timing/step_s": 1.0 + step,
            "timing/train_s": 1.0,
            "timing/rollout_wait_s": float(step),
            "timing/start_ray_s": 99.0,
            "policy/rank_time_worst_over_mean": 1.25,
            # A mean over optimizer steps is no rank.
            "policy/rank_time_slowest": 0.5 if step == 2 else 1.0,
        }
        if step == 12:
            record["timing/checkpoint_s"] = 50.0
        records.append(record)
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lines = [
        f"INFO nemo_like.run.tracking: process {os.getpid()} on host {socket.gethostname()} starts",
        "INFO nemo_like.training.groups: worker 1 of the policy group: pid 9 on node 10.0.0.7",
        f"WARNING nemo_like.a: config has {SECRETS['a name of the config']}",
        f"WARNING nemo_like.b: the reward gets {SECRETS['the environment']}",
        f"WARNING nemo_like.c: downloads with {SECRETS['a token by its form']}",
        f"WARNING nemo_like.d: https://{SECRETS['a URL']}@host/?token={NAMED_TOKEN}",
        f"WARNING nemo_like.e: Authorization: Bearer {SECRETS['a header']}",
        f"WARNING nemo_like.f: changed since: cluster.env.X: {OLD_VALUE} -> 1",
        f"INFO nemo_like.g: uses {SECRETS['cluster.env']}",
        "INFO nemo_like.run.tracking: ended by WorkerDied: worker 1 of the policy group died",
    ]
    log = "".join(f"2026-01-01 00:00:00,000 {line}\n" for line in lines)
    (path / "logs/driver.log").write_text(log)
    (path / "logs/ray/worker-1.err").write_text(f"API_KEY={SECRETS['the environment']}\n")
    for name in ("media.jsonl", "rollouts/step_1.jsonl", "skipped/step_1.jsonl"):
        (path / name).write_text(json.dumps({"step": 1, "text": DATA}) + "\n")
    (path / "logs/ray/worker-1.out").write_text(DATA)
    return path


def test_the_steps_and_the_end_of_a_run_are_shown_on_one_screen(run: Path, capsys) -> None:
    assert main(["doctor", str(run)]) == 0
    output = capsys.readouterr().out
    assert len(output.splitlines()) <= 24
    assert "failed" in output and "worker 1 of the policy group died" in output
    # Means of quarters of steps 1-8, by hand, then single steps.
    assert "1-2: 2.50 s: rollout_wait 1.50 s, train 1.00 s; slowest rank" in output
    assert "7-8: 8.50 s: rollout_wait 7.50 s" in output
    assert "12: 13.00 s: checkpoint 50.00 s, rollout_wait 12.00 s, train 1.00 s; slowest" in output
    assert "slowest rank (1 on 10.0.0.7 in 1 of 2 steps) 1.25 times the mean" in output
    assert (
        "slowest rank (1 on 10.0.0.7 in 2 of 2 steps) 1.25 times the mean" in output
        and "start_ray" not in output
    )
    for name in ("torch", "GiB free", "/dev/shm", "memlock", "open files", "RAY_ADDRESS"):
        assert name in output
    assert "stacks" not in output, "the run has ended"


def test_json_has_the_same(run: Path, capsys) -> None:
    assert main(["doctor", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"][0] == "run: failed" and len(found["steps"]) == 8
    assert found["stacks"] == {}


def test_the_machine_alone_and_an_unreachable_ray(monkeypatch, capsys) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "cannot connect to the Ray cluster of RAY_ADDRESS=127.0.0.1:1" in output
    assert "steps" not in output


def test_a_directory_without_a_run_and_a_file_that_cannot_be_written_are_errors(
    run: Path, tmp_path: Path, capsys
) -> None:
    assert main(["doctor", str(tmp_path)]) == 2
    assert main(["doctor", str(run), "--archive", str(tmp_path / "missing/a.tar.gz")]) == 2
    errors = capsys.readouterr().err
    assert "is not the directory of a run" in errors and "--archive: " in errors


def test_the_archive_has_no_secret_and_no_data(
    run: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("SERVICE_SECRET", SECRETS["the environment"])
    path = tmp_path / "report.tar.gz"
    assert main(["doctor", str(run), "--archive", str(path)]) == 0
    with tarfile.open(path) as archive:
        contents = {}
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            contents[member.name] = file.read().decode()
    assert contents.keys() == {
        f"doctor/{name}"
        for name in (
            "doctor.json",
            "config.yaml",
            "metrics.jsonl",
            "logs/driver.log",
            "logs/ray/worker-1.err",
        )
    }
    assert contents["doctor/metrics.jsonl"] == (run / "metrics.jsonl").read_text()
    found = [name for name, value in SECRETS.items() if value in "".join(contents.values())]
    assert found == [] and DATA not in "".join(contents.values())
    config = yaml.safe_load(contents["doctor/config.yaml"])
    assert config["policy"]["tokenizer_name"] == "models/tokenizer"
    assert config["cluster"]["env"] == {"NCCL_IB_HCA": "(removed)", "MY_TOKEN": None}
    assert "downloads with (removed)" in contents["doctor/logs/driver.log"]


def test_stacks_of_a_live_run(run: Path, capsys, monkeypatch, tmp_path: Path) -> None:
    with locked(run):
        monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
        assert main(["doctor", str(run)]) == 0
        pids = {"driver": f"{os.getpid()}", "worker 1 of the policy group": "9"}
        advice = f"py-spy dump --pid PID, of {pids}"
        assert f"pip install py-spy shows them: {advice}" in capsys.readouterr().out
        # Stands for py-spy, which needs rights over other processes.
        program = tmp_path / "py-spy"
        program.write_text(
            '#!/bin/sh\necho "Process $4: python"\necho \'Thread 1 (idle): "MainThread"\'\n'
            "echo '    wait (threading.py:1)'\necho '    step (loop.py:2)'\n"
        )
        program.chmod(0o755)
        monkeypatch.setattr(shutil, "which", lambda *_, **__: str(program))
        assert main(["doctor", str(run)]) == 0
    assert f"driver (pid {os.getpid()}): wait (threading.py:1)" in capsys.readouterr().out


def test_py_spy_reads_the_stack_of_a_process(run: Path, capsys) -> None:
    if shutil.which("py-spy") is None:
        pytest.skip("py-spy is not installed")
    program = "import time; print(1, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    log = run / "logs/driver.log"
    log.write_text(log.read_text().replace(f"process {os.getpid()}", f"process {process.pid}"))
    with locked(run):
        assert main(["doctor", str(run)]) == 0
    process.kill()
    process.wait()
    output = capsys.readouterr().out
    if "ermission" in output:
        pytest.skip("py-spy is not permitted here")
    assert f"driver (pid {process.pid}): <module> (<string>:1)" in output
