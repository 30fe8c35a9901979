"""A staged file has the bits of the tensors at the time of the copy, or one error with its path."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from nemo_like.distributed import activity
from nemo_like.policy.checkpoint.sharded import BackgroundWriter, HostBuffers, StagedFile
from nemo_like.run.files import WriteError, file_record

CHUNK_BYTES = 64


def staged(path: Path, tensor: torch.Tensor, chunk_bytes: int = CHUNK_BYTES) -> StagedFile:
    file = StagedFile(path, HostBuffers(pinned=False, chunk_bytes=chunk_bytes))
    file.add("weight/a", (0,) * tensor.ndim, tensor)
    return file


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    chunk_bytes=st.sampled_from([4, 36, 4096]),
)
def test_safetensors_reads_what_was_staged(tmp_path_factory, sizes, chunk_bytes):
    path = tmp_path_factory.mktemp("staged") / "file.safetensors"
    file = StagedFile(path, HostBuffers(pinned=False, chunk_bytes=chunk_bytes))
    expected = {}
    for index, size in enumerate(sizes):
        tensor = torch.randn(2, size)
        file.add(f"t{index}", (0, index), tensor)
        expected[f"t{index}@0,{index}"] = tensor
    num_reported = 0

    def report(num_bytes: int) -> None:
        nonlocal num_reported
        num_reported += num_bytes

    record = file.write(report)
    assert record == file_record(path)
    assert num_reported == record.size
    found = load_file(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_other_precisions_and_strides_are_stored_as_float32(tmp_path: Path) -> None:
    source = torch.randn(6, 5, dtype=torch.bfloat16).t()
    path = tmp_path / "file.safetensors"
    staged(path, source[1:4]).write(lambda count: None)
    assert torch.equal(load_file(path)["weight/a@0,0"], source[1:4].float())


def test_a_change_after_the_copy_does_not_reach_the_file(tmp_path: Path) -> None:
    tensor = torch.randn(100)
    expected = tensor.clone()
    file = staged(tmp_path / "file.safetensors", tensor)
    tensor.zero_()
    writer = BackgroundWriter([file])
    tensor.fill_(7)
    records = writer.finish()
    assert records == {"file.safetensors": file_record(file.path)}
    assert torch.equal(load_file(file.path)["weight/a@0"], expected)


def test_the_thread_writes_file_after_file_and_reports_no_activity(tmp_path: Path) -> None:
    files = [staged(tmp_path / f"{index}.safetensors", torch.randn(9)) for index in range(3)]
    before = activity.last().num_notes
    writer = BackgroundWriter(files)
    while not writer.is_done():
        pass
    # A note of the thread would hide that training hangs.
    assert activity.last().num_notes == before
    assert list(writer.finish()) == ["0.safetensors", "1.safetensors", "2.safetensors"]


@pytest.fixture
def largest_file_bytes() -> Iterator[int]:
    """Limit the size of files; Python ignores the signal, so that a write fails with EFBIG."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    yield 2**16
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_limit_of_the_file_size_is_one_message_with_the_path(
    tmp_path: Path, largest_file_bytes: int
) -> None:
    path = tmp_path / "file.safetensors"
    writer = BackgroundWriter([staged(path, torch.randn(largest_file_bytes))])
    with pytest.raises(WriteError, match=r"File too large.*ulimit -f") as caught:
        writer.finish()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", ["no directory", "the file exists"])
def test_a_file_that_cannot_be_created_is_an_error_with_its_path(
    tmp_path: Path, fault: str
) -> None:
    path = tmp_path / "policy" / "file.safetensors"
    if fault == "the file exists":
        path.parent.mkdir()
        path.symlink_to(tmp_path / "elsewhere")
    writer = BackgroundWriter([staged(path, torch.randn(3))])
    with pytest.raises(WriteError, match="cannot be written") as caught:
        writer.finish()
    assert str(path) in str(caught.value)
    assert not (tmp_path / "elsewhere").exists()


def test_an_error_ends_the_writing_and_keeps_the_files_before_it(tmp_path: Path) -> None:
    files = [staged(tmp_path / name, torch.randn(3)) for name in ("a", "missing/b", "c")]
    writer = BackgroundWriter(files)
    with pytest.raises(WriteError, match="missing"):
        writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
