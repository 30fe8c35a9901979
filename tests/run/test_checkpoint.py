"""The promise under test: `latest` names a complete checkpoint or nothing, whatever happens and
wherever it happens.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemo_like.config.schema import CheckpointingConfig
from nemo_like.run import checkpoint as checkpoint_manifest
from nemo_like.run.checkpoint import (
    Checkpointer,
    CheckpointError,
    OpenCheckpoint,
    TrainingState,
    incomplete_reason,
)
from nemo_like.run.files import FileRecord, file_record, write_json

FILES = {
    "policy/model.safetensors": b"\x00weights" * 40,
    "policy/optimizer.safetensors": b"\x01moments" * 80,
}


def checkpointer_at(run: Path, *, save_period: int = 10, keep_latest: int = 2) -> Checkpointer:
    return Checkpointer(run, CheckpointingConfig(save_period=save_period, keep_latest=keep_latest))


@contextmanager
def writing(checkpointer: Checkpointer, step: int) -> Iterator[OpenCheckpoint]:
    """Fill a checkpoint in the block, and publish it."""
    checkpoint = checkpointer.begin(step)
    with checkpointer.discarding(checkpoint):
        yield checkpoint
    checkpointer.publish(checkpoint)


def save(checkpointer: Checkpointer, step: int) -> None:
    """A checkpoint as the loop writes one: two files of a policy, whose content depends on the
    step, and the state.
    """
    with writing(checkpointer, step) as checkpoint:
        checkpoint.add("policy", write_policy(checkpoint, step))
        TrainingState(step=step, loader={"epoch": 0, "cursor": step * 8}).save(checkpoint.path)


def write_policy(checkpoint: OpenCheckpoint, step: int) -> list[dict[str, FileRecord]]:
    """The files of two ranks, and what each rank reports of its own."""
    reports = []
    for name, content in FILES.items():
        path = checkpoint.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content + str(step).encode())
        reports.append({path.name: file_record(path)})
    return reports


def assert_complete(checkpoint, step: int) -> None:
    assert checkpoint is not None and checkpoint.step == step
    for name, content in FILES.items():
        assert (checkpoint.path / name).read_bytes() == content + str(step).encode()
    assert checkpoint.state().loader == {"epoch": 0, "cursor": step * 8}


def test_save_then_find(tmp_path: Path) -> None:
    save(checkpointer_at(tmp_path), 10)
    assert_complete(checkpointer_at(tmp_path).find_latest(), 10)
    assert (tmp_path / "latest").read_text() == "checkpoints/step_10\n"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_10"]


def test_manifest_lists_every_file_with_size_and_hash(tmp_path: Path) -> None:
    save(checkpointer_at(tmp_path), 10)
    manifest = json.loads((tmp_path / "checkpoints/step_10/manifest.json").read_text())
    assert manifest["step"] == 10
    assert set(manifest["files"]) == {*FILES, "training_state.json"}
    entry = manifest["files"]["policy/model.safetensors"]
    assert entry["size"] == len(FILES["policy/model.safetensors"]) + 2
    assert len(entry["sha256"]) == 64


def test_find_latest_returns_none_without_checkpoints(tmp_path: Path) -> None:
    assert checkpointer_at(tmp_path).find_latest() is None


def test_keep_hours_keeps_checkpoints_by_age_as_well(tmp_path: Path) -> None:
    config = CheckpointingConfig(keep_latest=1, keep_hours=2)
    checkpointer = Checkpointer(tmp_path, config)
    save(checkpointer, 1)
    save(checkpointer, 2)
    assert checkpointer.saved_steps() == [1, 2]
    old = time.time() - 2 * 3600 - 1
    os.utime(tmp_path / "checkpoints/step_1/manifest.json", (old, old))
    save(checkpointer, 3)
    assert checkpointer.saved_steps() == [2, 3]


def test_keep_latest_prunes_after_the_save(tmp_path: Path) -> None:
    checkpointer = checkpointer_at(tmp_path, keep_latest=2)
    for step in (10, 20, 30):
        save(checkpointer, step)
    assert sorted(path.name for path in checkpointer.path.iterdir()) == ["step_20", "step_30"]
    assert_complete(checkpointer.find_latest(), 30)


def test_should_save(tmp_path: Path) -> None:
    checkpointer = checkpointer_at(tmp_path, save_period=10)
    assert [step for step in range(1, 31) if checkpointer.should_save(step)] == [10, 20, 30]
    assert checkpointer.should_save(33, is_last=True)
    save(checkpointer, 30)
    assert not checkpointer.should_save(30, is_last=True)
    assert not Checkpointer(tmp_path, CheckpointingConfig(enabled=False)).should_save(
        10, is_last=True
    )
    assert not checkpointer_at(tmp_path, save_period=0).should_save(10)


def test_saving_the_latest_step_again_is_refused(tmp_path: Path) -> None:
    checkpointer = checkpointer_at(tmp_path)
    save(checkpointer, 10)
    with pytest.raises(ValueError, match="step_10 is the latest checkpoint already"):
        save(checkpointer, 10)
    assert_complete(checkpointer.find_latest(), 10)


def test_a_failing_writer_leaves_the_old_checkpoint_and_no_folder(tmp_path: Path) -> None:
    checkpointer = checkpointer_at(tmp_path)
    save(checkpointer, 10)
    with pytest.raises(ZeroDivisionError), writing(checkpointer, 20) as checkpoint:
        (checkpoint.path / "half").write_text("half")
        raise ZeroDivisionError
    assert [path.name for path in checkpointer.path.iterdir()] == ["step_10"]
    assert_complete(checkpointer.find_latest(), 10)


def test_a_checkpoint_without_weights_is_not_published(tmp_path: Path) -> None:
    checkpointer = checkpointer_at(tmp_path)
    save(checkpointer, 10)
    match = (
        "no policy worker reported a file of the checkpoint of step 20, so it would have no weights"
    )
    with pytest.raises(CheckpointError, match=match), writing(checkpointer, 20) as checkpoint:
        TrainingState(step=20).save(checkpoint.path)
    assert_complete(checkpointer.find_latest(), 10)


@pytest.mark.parametrize("fault", ["missing", "shorter"])
def test_a_file_that_the_driver_does_not_see_as_reported_is_not_published(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_manifest, "VISIBLE_WITHIN_S", 0.2)
    checkpointer = checkpointer_at(tmp_path, keep_latest=1)
    save(checkpointer, 10)
    with (
        pytest.raises(
            CheckpointError,
            match=r"model\.safetensors, but the driver .* must share the file system",
        ),
        writing(checkpointer, 20) as checkpoint,
    ):
        checkpoint.add("policy", write_policy(checkpoint, 20))
        path = checkpoint.path / "policy" / "model.safetensors"
        path.unlink()
        if fault == "shorter":
            path.write_bytes(b"x")
    assert [path.name for path in checkpointer.path.iterdir()] == ["step_10"], (
        "the older checkpoint stays"
    )
    assert_complete(checkpointer.find_latest(), 10)


def test_checksums_of_the_ranks_are_taken_over_and_not_computed_again(tmp_path: Path) -> None:
    checkpointer = checkpointer_at(tmp_path)
    save(checkpointer, 10)
    with writing(checkpointer, 20) as checkpoint:
        reports = write_policy(checkpoint, 20)
        checkpoint.add(
            "policy",
            [
                {name: FileRecord(r.size, "0" * 64) for name, r in report.items()}
                for report in reports
            ],
        )
        TrainingState(step=20).save(checkpoint.path)
    problem = incomplete_reason(checkpointer.path / "step_20", 20)
    assert problem is not None and "does not have the content that was written" in problem
    assert_complete(checkpointer.find_latest(), 10)


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs /dev/full, a file that is always full"
)
def test_full_disk_is_one_paragraph_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    checkpointer = checkpointer_at(tmp_path)
    save(checkpointer, 10)
    with pytest.raises(CheckpointError) as caught, writing(checkpointer, 20) as checkpoint:
        (checkpoint.path / "weights").symlink_to("/dev/full")
        (checkpoint.path / "weights").write_bytes(b"x")
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "checkpoint of step 20",
        "No space left",
        "step_10 is intact",
        "keep_latest",
        "output_dir",
    ):
        assert part in message
    assert [path.name for path in checkpointer.path.iterdir()] == ["step_10"]
    assert_complete(checkpointer.find_latest(), 10)


def test_full_disk_reported_by_another_library_is_recognised(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="There is no earlier one"),
        writing(checkpointer_at(tmp_path), 10),
    ):
        raise RuntimeError("worker 1 failed") from ValueError(
            "I/O error: No space left on device (os error 28)"
        )


def test_latest_decides_over_a_newer_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = checkpointer_at(tmp_path)
    save(checkpointer, 10)
    save(checkpointer, 20)
    (tmp_path / "latest").write_text("checkpoints/step_10\n")
    assert_complete(checkpointer.find_latest(), 10)
    assert "ignoring steps [20]: `latest` names the older step_10" in caplog.text
    save(checkpointer, 20)  # the run comes by again
    assert_complete(checkpointer.find_latest(), 20)


def test_going_back_removes_what_lies_ahead(tmp_path: Path) -> None:
    checkpointer = checkpointer_at(tmp_path, keep_latest=3)
    for step in (10, 20, 30):
        save(checkpointer, step)
    (tmp_path / "latest").write_text("checkpoints/step_10\n")
    save(checkpointer, 15)
    assert sorted(path.name for path in checkpointer.path.iterdir()) == ["step_10", "step_15"]


@pytest.mark.parametrize("pointer", [None, "", "checkpoints/step_99\n", "../../elsewhere\n"])
def test_a_lost_or_wrong_pointer_falls_back_to_the_newest_complete_folder(
    tmp_path: Path, pointer: str | None
) -> None:
    checkpointer = checkpointer_at(tmp_path)
    save(checkpointer, 10)
    save(checkpointer, 20)
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_text(pointer)
    assert_complete(checkpointer.find_latest(), 20)


def test_a_renamed_folder_is_not_the_step_it_claims(tmp_path: Path) -> None:
    checkpointer = checkpointer_at(tmp_path)
    save(checkpointer, 10)
    (checkpointer.path / "step_10").rename(checkpointer.path / "step_90")
    assert incomplete_reason(checkpointer.path / "step_90", 90) == "its manifest.json is of step 10"
    with pytest.raises(CheckpointError, match=r"step_90: its manifest\.json is of step 10"):
        checkpointer.find_latest()


def test_a_resume_without_a_usable_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpointer = checkpointer_at(tmp_path)
    for step in (10, 20):
        save(checkpointer, step)
        (checkpointer.path / f"step_{step}" / "training_state.json").write_text("{")
    with pytest.raises(CheckpointError) as caught:
        checkpointer_at(tmp_path).find_latest()
    for part in (
        "no checkpoint in",
        "step_20: training_state.json has",
        "step_10: ",
        "another run_name",
    ):
        assert part in str(caught.value)


def manifest_with(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: {**manifest, **changes}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (manifest_with(format=3), "format 3"),
        (manifest_with(format="2"), None),
        (manifest_with(format=None), "format None"),
        (manifest_with(files=[]), "damaged"),
        (manifest_with(files={"gone": {"size": 3, "sha256": "0"}}), "gone is missing"),
        (manifest_with(files={"training_state.json": {"size": 3}}), "damaged"),
        (manifest_with(files={"training_state.json": 7}), "damaged"),
        (manifest_with(step="20"), None),
        (lambda manifest: [manifest], "damaged"),
        (lambda manifest: None, "damaged"),
        (lambda manifest: "{", "cannot read"),
    ],
)
def test_an_odd_manifest_is_passed_over_with_a_reason(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[dict[str, Any]], Any],
    reason: str | None,
) -> None:
    checkpointer = checkpointer_at(tmp_path)
    save(checkpointer, 10)
    save(checkpointer, 20)
    path = checkpointer.path / "step_20" / "manifest.json"
    changed = change(json.loads(path.read_text()))
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    assert_complete(checkpointer.find_latest(), 10)
    assert reason is None or reason in caplog.text
    assert f"ignoring {checkpointer.path}/step_20" in caplog.text


@pytest.mark.parametrize(
    "content", [None, "checkpoints/step_" + "1" * 5000, "checkpoints/step_-1", "x" * 100_000]
)
def test_an_odd_pointer_is_ignored(tmp_path: Path, content: str | None) -> None:
    checkpointer = checkpointer_at(tmp_path)
    save(checkpointer, 10)
    (checkpointer.path / ("step_" + "9" * 200)).mkdir()
    checkpointer.latest_path.unlink()
    if content is None:
        checkpointer.latest_path.mkdir()
    else:
        checkpointer.latest_path.write_text(content)
    assert_complete(checkpointer.find_latest(), 10)
    if content is None:
        with pytest.raises(CheckpointError, match=r"latest cannot be written: Is a directory"):
            save(checkpointer, 20)
    else:
        save(checkpointer, 20)
        assert_complete(checkpointer.find_latest(), 20)


def test_planted_links_are_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / ".latest.new").symlink_to(victim)
    save(checkpointer_at(run), 10)
    assert_complete(checkpointer_at(run).find_latest(), 10)
    assert victim.read_text() == "precious" and not victim.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "victim"]


def test_a_checkpoints_directory_that_cannot_be_made_is_one_paragraph(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(
        CheckpointError,
        match=r"the checkpoint of step 10 was not written: .*There is no earlier one",
    ):
        save(checkpointer_at(tmp_path), 10)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([*FILES, "training_state.json", "manifest.json"]),
    damage=st.sampled_from(["cut", "remove", "flip"]),
    share=st.floats(0, 0.999),
)
@example(name="manifest.json", damage="cut", share=0.999)  # its last byte
def test_any_damage_makes_a_folder_unloadable_and_the_older_one_is_used(
    name: str, damage: str, share: float
) -> None:
    with tempfile.TemporaryDirectory() as run:
        checkpointer = checkpointer_at(Path(run))
        save(checkpointer, 10)
        save(checkpointer, 20)
        path = checkpointer.path / "step_20" / name
        content = bytearray(path.read_bytes())
        position = int(share * len(content))
        path.unlink()
        if damage == "cut":
            path.write_bytes(content[:position])
        elif damage == "flip":
            content[position] ^= 0x80
            path.write_bytes(content)
        assert incomplete_reason(checkpointer.path / "step_20", 20) is not None
        assert_complete(checkpointer.find_latest(), 10)


KILL_AT_EACH_FILE_OPERATION = """
import os, shutil, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_checkpoint import checkpointer_at, save

base = Path(sys.argv[1])
FILE_EVENTS = {{"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}}

def killed_at(kill_at, run):
    seen = 0
    def hook(event, args):
        nonlocal seen
        seen += event in FILE_EVENTS
        if seen == kill_at:
            os.kill(os.getpid(), 9)
    sys.addaudithook(hook)
    save(checkpointer_at(run, keep_latest=1), 20)

save(checkpointer_at(base / "before"), 10)
for kill_at in range(1, 1000):
    run = base / f"run_{{kill_at}}"
    shutil.copytree(base / "before", run)
    child = os.fork()
    if child == 0:
        killed_at(kill_at, run)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        print(kill_at)
        break
"""


def test_a_kill_at_any_file_operation_never_yields_half_a_checkpoint(tmp_path: Path) -> None:
    script = KILL_AT_EACH_FILE_OPERATION.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    num_kills = int(done.stdout) - 1
    assert num_kills >= 20  # opens, mkdirs, the two renames, the removals of the old folder
    steps = []
    for kill_at in range(1, num_kills + 2):
        checkpointer = checkpointer_at(tmp_path / f"run_{kill_at}")
        found = checkpointer.find_latest()
        assert found is not None
        steps.append(found.step)
        assert_complete(found, found.step)
        save(checkpointer, 30)  # and the run goes on from there
        assert_complete(checkpointer.find_latest(), 30)
        assert not list(checkpointer.path.glob(".writing_*"))
    assert steps == sorted(steps) and steps[0] == 10 and steps[-1] == 20


def test_interrupted_save_is_ignored_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = checkpointer_at(tmp_path)
    save(checkpointer, 10)
    shutil.copytree(checkpointer.path / "step_10", checkpointer.path / ".writing_step_20")
    (checkpointer.path / "step_15").mkdir()
    with caplog.at_level(logging.INFO):
        assert_complete(checkpointer.find_latest(), 10)
    assert ".writing_step_20: its save was interrupted" in caplog.text
    assert "resuming from" in caplog.text


def test_numbers_survive_json(tmp_path: Path) -> None:
    TrainingState(step=3, counters={"num_tokens": 0.1 + 0.2}).save(tmp_path)
    assert TrainingState.load(tmp_path).counters["num_tokens"] == 0.1 + 0.2


def test_state_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training_state\.json can have only plain JSON values"):
        TrainingState(step=1, counters={"loss": float("nan")}).save(tmp_path)
    with pytest.raises(ValueError, match="plain JSON values"):
        TrainingState(step=1, loader={"order": np.arange(3)}).save(tmp_path)


def test_state_of_another_version_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "training_state.json", {"step": 3, "cursor": 5})
    with pytest.raises(CheckpointError, match="another version wrote it"):
        TrainingState.load(tmp_path)
