"""A store has complete uploads or none, and a directory without checkpoints continues from them."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
import uuid
from pathlib import Path

import fsspec.core
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemo_like.config.errors import ConfigError
from nemo_like.run.checkpoint import CheckpointError, incomplete_reason
from nemo_like.run.directory import RunDirectory
from nemo_like.run.store import Store, check_unused, restore
from tests.run.uploads import Files, Interrupted, open_run, save, weights

STEPS = (1, 10, 11, 100)
"""Names that begin with one another."""


def upload(store: Store, directory: RunDirectory, step: int, keep_latest: int = 2) -> None:
    store.put_checkpoint(directory.path, directory.path / f"checkpoints/step_{step}")
    store.point("latest", f"step_{step}")
    store.prune(step, keep_latest, None)


def new_store(root: str = "memory://") -> Store:
    return Store(f"{root}/{uuid.uuid4().hex}", "run")


def restored_step(store: Store, path: Path) -> int | None:
    """Restore into an empty directory and check everything that is there."""
    path.mkdir(exist_ok=True)
    step = restore(store, path)
    if step is None:
        assert not (path / "latest").exists()
        return None
    checkpoint = path / "checkpoints" / f"step_{step}"
    assert (path / "latest").read_text() == f"checkpoints/step_{step}\n"
    assert incomplete_reason(checkpoint, step) is None
    assert (checkpoint / "policy/weights").read_bytes() == weights(step)
    assert (path / "config.yaml").read_text() == "seed: 1\n"
    lines = (path / "metrics.jsonl").read_text().splitlines()
    assert {"step": step} in [json.loads(line) for line in lines]
    return step


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    directory, checkpointer = open_run(tmp_path_factory.mktemp("four") / "run", keep_latest=4)
    for step in STEPS:
        save(directory, checkpointer, step)
    return directory


@settings(max_examples=100, deadline=None)
@given(
    num_changes=st.integers(0, 60),
    part=st.sampled_from([0.0, 0.5]),
    keep_latest=st.integers(1, 3),
    is_local=st.booleans(),
)
@example(num_changes=7, part=0.5, keep_latest=1, is_local=True)
def test_an_upload_that_is_interrupted_anywhere_is_complete_or_absent(
    four_steps: RunDirectory, num_changes: int, part: float, keep_latest: int, is_local: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = new_store(f"file://{folder}/store" if is_local else "memory://")
        files = store.files
        left = num_changes

        def before(method: str, path: str) -> float:
            nonlocal left
            left -= 1
            return 1.0 if left >= 0 else part

        store.file_system = Files(files, before)
        done: list[int] = []
        begun = 0
        try:
            for begun in STEPS:
                upload(store, four_steps, begun, keep_latest)
                done.append(begun)
        except Interrupted:
            pass
        store.file_system = files
        found = restored_step(store, Path(folder, "other"))
        last = done[-1] if done else None
        assert found in (last, begun)
        if done == list(STEPS):
            assert sorted(store.steps()) == done[-keep_latest:]


def test_a_run_that_went_back_continues_from_its_latest_step(tmp_path: Path) -> None:
    store = new_store()
    directory, checkpointer = open_run(tmp_path / "run", keep_latest=5)
    for step in (1, 2, 3):
        save(directory, checkpointer, step)
        upload(store, directory, step)
    upload(store, directory, 2)
    # The later step is kept until it is replaced, but is not the latest one.
    assert store.steps() == [3, 2]
    assert restored_step(store, tmp_path / "other") == 2


@pytest.mark.parametrize("damage", ["content", "missing", "manifest", "outside"])
def test_a_damaged_upload_is_passed_over(tmp_path: Path, caplog, damage: str) -> None:
    store = new_store()
    directory, checkpointer = open_run(tmp_path / "run")
    for step in (1, 2):
        save(directory, checkpointer, step)
        upload(store, directory, step)
    path = f"{store.root}/step_2/checkpoints/step_2/policy/weights"
    manifest = f"{store.root}/step_2/upload.json"
    if damage == "content":
        store.files.pipe_file(path, weights(2)[::-1])
    elif damage == "missing":
        store.files.rm_file(path)
    elif damage == "manifest":
        store.files.pipe_file(manifest, store.files.cat_file(manifest)[:-1])
    else:
        records = json.loads(store.files.cat_file(manifest))
        records["../stolen"] = records["metrics.jsonl"]
        store.files.pipe_file(manifest, json.dumps(records).encode())
    assert restored_step(store, tmp_path / "other") == 1
    assert "step_2" in caplog.text
    store.remove("step_1")
    # `latest` is written after the checksums, so an upload that it names was not interrupted.
    is_content = damage in ("content", "missing")
    problem = "checkpoints/step_2/policy/weights" if is_content else "its checksums are damaged"
    with pytest.raises(CheckpointError, match=f"step_2: {problem}"):
        restored_step(store, tmp_path / "third")


def test_an_interrupted_download_is_repeated(tmp_path: Path) -> None:
    store = new_store()
    directory, checkpointer = open_run(tmp_path / "run")
    for step in (1, 2):
        save(directory, checkpointer, step, best=step == 1)
        upload(store, directory, step)
    store.point("best", "step_1")
    other = tmp_path / "other"
    assert restored_step(store, other) == 2
    assert (other / "checkpoints/step_1/policy/weights").read_bytes() == weights(1)
    # As a kill before the last file leaves it.
    (other / "latest").unlink()
    (other / "checkpoints/step_2/policy/weights").unlink()
    (other / "checkpoints/.writing_download").mkdir()
    assert restored_step(store, other) == 2
    assert restore(store, other) is None, "local checkpoints are used as they are"


def test_a_store_that_cannot_be_read_does_not_start_a_resume_again(tmp_path: Path, caplog) -> None:
    store = new_store()

    class Unreachable:
        def __getattr__(self, name: str):
            raise PermissionError("Access Denied")

    store.file_system = Unreachable()
    with pytest.raises(CheckpointError, match=r"Access Denied.*start again at step 0.*credentials"):
        restore(store, tmp_path)
    check_unused(store)
    assert "Access Denied" in caplog.text


class Emptied:
    """A store whose checkpoints a running training replaces after they were listed."""

    def __init__(self, store: Store, replace_all) -> None:
        self.files, self.replace_all = store.files, replace_all

    def __getattr__(self, name: str):
        return getattr(self.files, name)

    def ls(self, path: str, **options: bool):
        found = self.files.ls(path, **options)
        self.replace_all()
        return found


def test_a_download_beside_a_run_that_removes_old_checkpoints(tmp_path: Path) -> None:
    store = new_store()
    directory, checkpointer = open_run(tmp_path / "run", keep_latest=3)
    for step in (1, 2, 3):
        save(directory, checkpointer, step)
    writer = Store.__new__(Store)
    writer.__dict__ |= store.__dict__
    upload(writer, directory, 1, keep_latest=1)
    steps = [2, 3]

    def replace_all() -> None:
        if steps:
            upload(writer, directory, steps.pop(0), keep_latest=1)

    store.file_system = Emptied(store, replace_all)
    assert restored_step(store, tmp_path / "other") == 3


def test_readers_of_a_pointer_see_a_complete_name(tmp_path: Path) -> None:
    """An object store replaces objects atomically; a local file system would truncate the file."""
    store = new_store(f"file://{tmp_path}/store")
    store.point("latest", "step_1")
    files = store.file_system
    store.file_system = Files(files, lambda method, path: 0.5)
    with pytest.raises(Interrupted):
        store.point("latest", "step_200")
    store.file_system = files
    assert store.named("latest") == "step_1"
    store.point("latest", "step_200")
    assert store.named("latest") == "step_200"


def test_uploads_are_kept_by_age_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_store(f"file://{tmp_path}/store")
    directory, checkpointer = open_run(tmp_path / "run", keep_latest=5)
    for step in (1, 2, 3, 4):
        save(directory, checkpointer, step)
        store.put_checkpoint(directory.path, directory.path / f"checkpoints/step_{step}")
    store.files.rm_file(f"{store.root}/step_2/upload.json")
    old = time.time() - 3 * 3600
    os.utime(f"{store.root}/step_1/upload.json", (old, old))
    store.prune(4, 1, None, keep_hours=4)
    assert store.steps() == [4, 3, 1], "2 is not complete"
    store.prune(4, 1, None, keep_hours=2)
    assert store.steps() == [4, 3]
    store.prune(4, 1, None)
    assert store.steps() == [4]


def test_a_missing_bucket_is_not_an_empty_store(tmp_path: Path) -> None:
    store = new_store()
    assert store.steps() == []
    store._bucket = "/missing"
    with pytest.raises(ConfigError, match=r"upload_to: the bucket '/missing' .* does not exist"):
        check_unused(store)
    with pytest.raises(ConfigError, match="does not exist"):
        restore(store, tmp_path)


def test_a_new_run_does_not_replace_the_uploads_of_another(tmp_path: Path) -> None:
    store = new_store()
    check_unused(store)
    directory, checkpointer = open_run(tmp_path / "run")
    save(directory, checkpointer, 1)
    upload(store, directory, 1)
    with pytest.raises(ConfigError, match=r"run_name: .* resume=true"):
        check_unused(store)


def test_an_export_replaces_the_earlier_one(tmp_path: Path) -> None:
    store = new_store()
    export = tmp_path / "hf"
    export.mkdir()
    for names in (("a", "b"), ("a",)):
        for path in export.iterdir():
            path.unlink()
        for name in names:
            (export / name).write_text(name * 10)
        store.put("hf", export, [export / name for name in names])
        assert store.records("hf").keys() == set(names)
    names = [path.rpartition("/")[2] for path in store.files.find(store.root)]
    assert sorted(names) == ["a", "upload.json"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("bucket/prefix", r"upload_to: 'bucket/prefix' is not a URL such as s3://"),
        ("nope://bucket", r"upload_to: 'nope://bucket': .*Protocol not known: nope"),
    ],
)
def test_a_wrong_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Store(url, "run")


@pytest.mark.parametrize(("url", "extra"), [("s3://bucket", "s3"), ("gs://bucket/a", "gcs")])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, url: str, extra: str) -> None:
    def missing(url: str) -> None:
        raise ImportError("Install it to access the store")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ConfigError, match=rf"Install it .*pip install 'nemo-like\[{extra}\]'"):
        Store(url, "run")


@pytest.mark.parametrize("content", [None, b"", b"{}"])
def test_a_store_whose_checksums_are_all_damaged_does_not_start_a_resume_again(
    tmp_path: Path, content: bytes | None
) -> None:
    store = new_store()
    directory, checkpointer = open_run(tmp_path / "run", keep_latest=5)
    for step in (2, 4):
        save(directory, checkpointer, step)
        upload(store, directory, step)
    for step in (2, 4):
        path = f"{store.root}/step_{step}/upload.json"
        store.files.rm_file(path)
        if content is not None:
            store.files.pipe_file(path, content)
    with pytest.raises(CheckpointError, match="step_4: its checksums are damaged"):
        restore(store, tmp_path / "other")


def test_warnings_are_of_this_module(tmp_path: Path, caplog) -> None:
    store = new_store()
    store.files.pipe_file(f"{store.root}/step_4/metrics.jsonl", b"")
    with caplog.at_level(logging.WARNING, "nemo_like.run.store"):
        assert restored_step(store, tmp_path) is None
    assert "step_4: its upload was interrupted" in caplog.text
