"""Durable writing: old or new content after a failure, one clear message, no write through links,
the umask's permissions.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from nemo_like.run.files import (
    AppendedFile,
    WriteError,
    describe_write_error,
    finish_library_file,
    is_disk_full,
    replacing,
    reporting_write_errors,
    sync_file,
    system_error_number,
    write_json_lines,
    write_text,
)

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(
    not FULL.exists(), reason="needs /dev/full, a file that is always full"
)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_get_the_permissions_of_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "text", "x")
        log = AppendedFile(tmp_path / "log")
        log.close()
        save_file({"a": torch.ones(2)}, tmp_path / "weights")
        finish_library_file(tmp_path / "weights")
    finally:
        os.umask(before)
    for name in ("text", "log", "weights"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~umask, name


@pytest.mark.parametrize("target", ["a file", "nothing", "a directory"])
def test_a_planted_link_is_never_written_through(tmp_path: Path, target: str) -> None:
    victim = tmp_path / "victim"
    if target == "a file":
        victim.write_text("precious")
    elif target == "a directory":
        victim.mkdir()
    path = tmp_path / "config.yaml"
    path.write_text("old")
    (tmp_path / ".config.yaml.new").symlink_to(victim)
    write_text(path, "new")
    assert path.read_text() == "new" and not path.is_symlink()
    assert victim.exists() == (target != "nothing")
    assert target != "a file" or victim.read_text() == "precious"
    assert target != "a directory" or not list(victim.iterdir())


def test_a_failed_write_keeps_the_old_content_and_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), replacing(path) as aside:
        aside.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@given(text=st.text(st.characters(codec=None), max_size=20))
def test_lone_surrogates_survive_json_lines(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    write_json_lines(path, [{"text": text}, {"text": "end"}])
    assert [
        json.loads(line)["text"] for line in path.read_text(encoding="utf-8").split("\n")[:-1]
    ] == [text, "end"]


def test_a_removed_directory_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "plan"
    folder.mkdir(parents=True)
    log = AppendedFile(folder / "lengths.jsonl")
    log.append(b"1\n")
    shutil.rmtree(tmp_path / "run")
    expected = rf"{tmp_path}/run was removed or replaced\. Do not move"
    with pytest.raises(WriteError, match=expected):
        log.append(b"2\n")
    with pytest.raises(WriteError, match=expected):
        write_text(folder / "step_0.json", "{}")


def test_a_replaced_file_is_noticed(tmp_path: Path) -> None:
    """What goes to a file that has no name any more would be lost without an error."""
    log = AppendedFile(tmp_path / "metrics.jsonl")
    (tmp_path / "other").write_text("")
    (tmp_path / "other").replace(tmp_path / "metrics.jsonl")
    with pytest.raises(WriteError, match="the file was removed or replaced"):
        log.append(b"1\n", "the metrics of step 3")


@needs_full
def test_a_full_disk_is_named_with_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to(FULL)
    with pytest.raises(
        WriteError,
        match=r"the metrics of step 3 cannot be written to .*metrics\.jsonl: No space left .*MB",
    ):
        AppendedFile(tmp_path / "metrics.jsonl").append(b"1\n", "the metrics of step 3")


@pytest.mark.parametrize(
    ("number", "cause", "remedy"),
    [
        (errno.ENOSPC, "No space left", "Free some space"),
        (errno.EDQUOT, "quota", "Free some space"),
        (errno.EROFS, "Read-only file system", "Make it writable"),
        (errno.EACCES, "Permission denied", "write permission"),
        (errno.ENOENT, "was removed or replaced", "Do not move or remove"),
        (errno.EIO, "Input/output error", "Check the file system"),
        (errno.ENOMEM, "Cannot allocate memory", "Free some memory"),
    ],
)
def test_each_cause_has_its_remedy(tmp_path: Path, number: int, cause: str, remedy: str) -> None:
    text = describe_write_error(tmp_path / "metrics.jsonl", number)
    assert cause in text and remedy in text and str(tmp_path) in text and "\n" not in text


@pytest.mark.parametrize(
    "allocate", [partial(mmap.mmap, -1), bytearray, torch.empty], ids=["system", "Python", "torch"]
)
def test_no_memory_for_a_save_is_no_fault_of_the_file_system(
    tmp_path: Path, allocate: Callable[[int], object]
) -> None:
    with (
        pytest.raises(WriteError, match=r"weights: Cannot allocate memory\. Free some memory"),
        reporting_write_errors(tmp_path / "weights", "the model"),
    ):
        allocate(2**50)


def test_errors_of_other_libraries_are_recognised(tmp_path: Path) -> None:
    with (
        pytest.raises(WriteError, match=r"missing/x cannot be written: No such file"),
        reporting_write_errors(tmp_path / "missing" / "x"),
    ):
        save_file({"a": torch.ones(2)}, tmp_path / "missing" / "x")
    for number in (" (os error 28)", ""):
        assert is_disk_full(RuntimeError(f"I/O error: No space left on device{number}"))
    assert system_error_number(ConnectionResetError(errno.ECONNRESET, "reset")) is None
    with pytest.raises(ValueError, match="unrelated"), reporting_write_errors(tmp_path):
        raise ValueError("unrelated")


def test_a_file_system_that_cannot_synchronise_directories_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def refusing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)
    write_text(tmp_path / "file", "x")
    sync_file(tmp_path)
    assert (tmp_path / "file").read_text() == "x"
