"""Uploads to a real S3 server on this machine, from processes that are killed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_like.run.checkpoint import incomplete_reason
from nemo_like.run.directory import RunDirectory
from nemo_like.run.store import Store, restore
from tests.run.uploads import open_run, save, weights

pytestmark = pytest.mark.exhaustive

NUM_KILLS = 8
NUM_STEPS = 6
PROGRAM = f"""
import sys
from pathlib import Path
from nemo_like.run.store import Store
store = Store("s3://checkpoints/prefix", "run")
run = Path(sys.argv[1])
print("ready", flush=True)
for step in range(1, {NUM_STEPS + 1}):
    store.put_checkpoint(run, run / f"checkpoints/step_{{step}}")
    store.point("latest", f"step_{{step}}")
    store.prune(step, 2, None)
    print(step, flush=True)
"""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server_module = pytest.importorskip("moto.server", reason="needs the package moto[server,s3]")
    s3fs = pytest.importorskip("s3fs", reason="needs the extra s3")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}"),
        ("AWS_ACCESS_KEY_ID", "testing"),
        ("AWS_SECRET_ACCESS_KEY", "testing"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("checkpoints")
    yield "s3://checkpoints/prefix"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_a_kill_during_an_upload_to_s3_leaves_complete_checkpoints(
    bucket: str, tmp_path: Path
) -> None:
    directory, checkpointer = open_run(tmp_path / "run", keep_latest=NUM_STEPS)
    for step in range(1, NUM_STEPS + 1):
        save(directory, checkpointer, step)
    rng = random.Random(0)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    cut = 0
    for attempt in range(NUM_KILLS):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(directory.path)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.05, 1.2))
        process.kill()
        lines = process.stdout.read().split()
        process.wait()
        done = int(lines[-1]) if lines else None
        cut += done != NUM_STEPS
        store = Store(bucket, "run")
        other = RunDirectory(tmp_path / f"other_{attempt}")
        other.path.mkdir()
        found = restore(store, other.path)
        expected = {None, 1} if done is None else {done, done + 1}
        assert found in expected
        if found is not None:
            path = other.path / f"checkpoints/step_{found}"
            assert incomplete_reason(path, found) is None
            assert (path / "policy/weights").read_bytes() == weights(found)
            assert (other.path / "metrics.jsonl").read_bytes() == directory.metrics.read_bytes()
        for step in store.steps():
            store.remove(f"step_{step}")
    assert cut > 0, "no process was killed during its uploads"
