"""Uploads run beside training: nothing waits for a slow or failing store before the end."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.metrics import metric_values
from nemo_like.run.checkpoint import Checkpointer
from nemo_like.run.directory import RunDirectory
from nemo_like.run.store import Store, restore
from nemo_like.run.upload import Uploader
from tests.run.uploads import Files, open_run, save, weights

WAIT_S = 20.0


class Run:
    """A run whose store does what a function returns; see `Files`."""

    def __init__(self, path: Path, before: Callable[[str, str], float]) -> None:
        self.directory, self.checkpointer = open_run(path, keep_latest=1)
        url = f"memory://{uuid.uuid4().hex}"
        self.store, self.reader = Store(url, "run"), Store(url, "run")
        self.store.file_system = Files(self.store.files, before)
        self.uploader = Uploader(self.store, self.checkpointer, path)

    def save(self, step: int, *, best: bool = False) -> None:
        save(self.directory, self.checkpointer, step, best=best)
        self.uploader.submit()

    def metrics(self) -> dict[str, float]:
        return metric_values(self.uploader.metrics)

    def await_metric(self, name: str, value: float) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.metrics().get(name) != value:
            assert time.monotonic() < deadline, self.metrics()
            time.sleep(0.01)


def test_a_slow_store_delays_nothing_and_gets_the_newest_checkpoint(tmp_path: Path, caplog) -> None:
    begun, released = threading.Event(), threading.Event()

    def before(method: str, path: str) -> float:
        begun.set()
        assert released.wait(WAIT_S)
        return 1.0

    run = Run(tmp_path / "run", before)
    run.save(1)
    assert begun.wait(WAIT_S)
    for step in (2, 3, 4):
        run.save(step)
    assert run.metrics() == {"upload/num_failed": 0.0}
    # The one that is being uploaded stays, although the run keeps one checkpoint.
    assert run.checkpointer.saved_steps() == [1, 4]
    assert caplog.text.count("take longer than the time between two checkpoints") == 1
    released.set()
    run.uploader.close(WAIT_S)
    assert run.reader.steps() == [4]
    assert run.metrics()["upload/latest_step"] == 4.0
    assert caplog.text.count("WARNING") == 1


def test_a_failed_upload_is_reported_once_and_repeated_with_the_next_checkpoint(
    tmp_path: Path, caplog
) -> None:
    parts = [0.0, 0.5]

    def before(method: str, path: str) -> float:
        return parts.pop(0) if parts and method == "put_file" else 1.0

    run = Run(tmp_path / "run", before)
    for step, failures in ((1, 1.0), (2, 2.0)):
        run.save(step)
        run.await_metric("upload/num_failed", failures)
        assert run.reader.named("latest") is None
    run.save(3)
    run.await_metric("upload/latest_step", 3.0)
    run.uploader.close(WAIT_S)
    assert run.metrics()["upload/num_failed"] == 2.0
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "the store is down" in warnings[0].message
    assert run.reader.steps() == [3], "incomplete uploads are removed"


def test_the_end_of_a_run_repeats_a_failed_upload_and_waits_no_longer_than_its_limit(
    tmp_path: Path, caplog
) -> None:
    parts = [0.0]
    run = Run(tmp_path / "a", lambda method, path: parts.pop() if parts else 1.0)
    run.save(1)
    run.await_metric("upload/num_failed", 1.0)
    run.uploader.close(WAIT_S)
    assert run.reader.steps() == [1] and "last files" not in caplog.text

    released = threading.Event()

    def wait(method: str, path: str) -> float:
        released.wait(WAIT_S)
        return 1.0

    run = Run(tmp_path / "b", wait)
    run.save(1)
    run.uploader.close(0.05)
    assert "does not have the last files of the run" in caplog.text
    released.set()
    for thread in threading.enumerate():
        if thread.name == "upload":
            thread.join(WAIT_S)
    # The request that was under way is the last one.
    assert run.reader.records("step_1") == {} and run.reader.named("latest") is None


def test_a_restart_in_the_same_process_does_not_wait_for_a_running_upload(tmp_path: Path) -> None:
    begun, released = threading.Event(), threading.Event()
    paths: list[str] = []

    def before(method: str, path: str) -> float:
        paths.append(path)
        begun.set()
        assert released.wait(WAIT_S)
        return 1.0

    run = Run(tmp_path / "run", before)
    run.save(1)
    assert begun.wait(WAIT_S)
    run.uploader.cancel()
    run.save(2)
    again = Store(run.store.address.rpartition("/")[0], "run")
    again.file_system = run.store.file_system
    uploader = Uploader(again, run.checkpointer, run.directory.path)
    uploader.submit()
    time.sleep(0.05)
    assert len(paths) == 1, "the next thread begins after the last request of the first"
    released.set()
    uploader.close(WAIT_S)
    assert run.reader.steps() == [2] and run.reader.named("latest") == "step_2"


def test_the_best_checkpoint_and_exports_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", lambda method, path: 1.0)
    run.save(1, best=True)
    run.await_metric("upload/latest_step", 1.0)
    for step in (2, 3):
        run.save(step)
        run.await_metric("upload/latest_step", float(step))
    run.directory.hf.mkdir()
    (run.directory.hf / "model").write_bytes(b"model")
    run.uploader.submit([run.directory.hf])
    run.uploader.close(WAIT_S)
    assert run.reader.steps() == [3, 1]
    assert run.reader.named("latest") == "step_3" and run.reader.named("best") == "step_1"
    assert run.reader.records("hf").keys() == {"model"}
    other = RunDirectory(tmp_path / "other")
    other.path.mkdir()
    assert restore(run.reader, other.path) == 3
    restored = Checkpointer(other.path, run.checkpointer.config)
    assert restored.saved_steps() == [1, 3]
    assert (other.path / "checkpoints/step_1/policy/weights").read_bytes() == weights(1)


def test_a_resume_uploads_nothing_that_the_store_has(tmp_path: Path) -> None:
    changes: list[str] = []

    def before(method: str, path: str) -> float:
        changes.append(method)
        return 1.0

    run = Run(tmp_path / "run", before)
    run.save(1)
    run.uploader.close(WAIT_S)
    changes.clear()
    resumed = Uploader(run.store, run.checkpointer, run.directory.path)
    run.store.is_cancelled = False
    resumed.submit()
    resumed.close(WAIT_S)
    assert changes == ["pipe_file"], "the pointer alone"
    assert metric_values(resumed.metrics) == {"upload/latest_step": 1.0, "upload/num_failed": 0.0}
    # Other content of the same step replaces it.
    path = run.directory.path / "checkpoints/step_1"
    (path / "manifest.json").write_text((path / "manifest.json").read_text() + "\n")
    run.store.is_cancelled = False
    again = Uploader(run.store, run.checkpointer, run.directory.path)
    again.submit()
    again.close(WAIT_S)
    assert changes.count("put_file") == 4


def test_a_resume_behind_the_store_warns_before_it_replaces_the_latest(
    tmp_path: Path, caplog
) -> None:
    run = Run(tmp_path / "run", lambda method, path: 1.0)
    run.save(3)
    run.uploader.close(WAIT_S)
    other = Run(tmp_path / "other", lambda method, path: 1.0)
    other.store.root = run.store.root
    # Its files are of an earlier step than those in the store.
    save(other.directory, other.checkpointer, 1)
    other.uploader.submit()
    deadline = time.monotonic() + WAIT_S
    while "has step_3, and this run continues from its local step_1" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    reader = run.reader
    assert reader.named("latest") == "step_3" and reader.steps() == [3]
    other.save(2)
    other.uploader.close(WAIT_S)
    assert reader.named("latest") == "step_2" and reader.steps() == [3, 2]
    assert caplog.text.count("WARNING") == 1


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    names = [thread.name for thread in threading.enumerate()]
    assert "upload" not in names
