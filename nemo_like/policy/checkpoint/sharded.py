"""Writing of sharded checkpoints: copies of a rank's blocks in host memory, and the thread that
writes them.

While the thread writes, training may change the tensors: the files have the values of the copies.

    <directory>/rank_00000_000.safetensors  blocks of weights and Adam moments that rank 0 owns
    <directory>/rank_00000_001.safetensors  ... more of them; no file is larger than 2 GiB
    <directory>/rank_00001_000.safetensors  ...
    <directory>/manifest.json               files, optimizer steps, full shapes; written last

A block is a rectangle of a full tensor under its Hugging Face name and in its Hugging Face layout.
The format is therefore independent of engine and parallel layout: each rank reads the regions it
needs from the blocks that contain them, bit by bit. `sharded_reader` reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_like.distributed import activity
from nemo_like.policy.checkpoint.sharded_reader import (
    FORMAT,
    MANIFEST,
    States,
    check_partition,
    full_shapes,
    read_headers,
)
from nemo_like.policy.rank_groups import RankGroups
from nemo_like.run.files import FileRecord, reporting_write_errors, sync_file, write_json

_CHUNK_BYTES = 2**28
_WRITE_BYTES = 2**24
"""Bytes between two uses of the interpreter lock, which the training thread needs as well."""
_SYNC_BYTES = 2**26
"""Bytes after which the file is synchronized and leaves the page cache."""
_LOWEST_PRIORITY = 19

_FILES = "rank_*.safetensors"
MAX_FILE_BYTES = 2 * 2**30


class HostBuffers:
    """Host memory in chunks of one size, float32 [n] each.

    With `pinned` the chunks are page-locked, so that copies from a GPU need no further copy, and
    are kept for the next save: page-locking takes longer than the copy itself. Without it the
    memory is freed after the save.
    """

    def __init__(self, *, pinned: bool, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._pinned = pinned
        self._chunk_numel = chunk_bytes // 4
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """Return a chunk, float32 [n], that no other file uses."""
        if self._free:
            return self._free.pop()
        return torch.empty(self._chunk_numel, dtype=torch.float32, pin_memory=self._pinned)

    def give_back(self, chunks: Sequence[Tensor]) -> None:
        """Take back chunks whose content is no longer needed, float32 [n] each."""
        if self._pinned:
            self._free.extend(chunks)

    def wait_for_copies(self) -> None:
        """Wait until all copies to the chunks are done."""
        if self._pinned:
            torch.cuda.current_stream().synchronize()


class StagedFile:
    """The content of one safetensors file with float32 tensors, in host memory."""

    def __init__(self, path: Path, buffers: HostBuffers) -> None:
        self.path = path
        self.num_bytes = 0
        """Bytes of all tensors so far."""
        self._buffers = buffers
        self._chunks: list[Tensor] = []
        self._num_free = 0
        self._entries: dict[str, Any] = {}
        self._positions: dict[str, Any] = {}

    def add(self, name: str, offset: Sequence[int], tensor: Tensor) -> None:
        """Copy `tensor` [...], the block of the tensor `name` at `offset`, as float32.

        On a GPU the copy may still run when this returns; see `HostBuffers.wait_for_copies`. Raises
        ValueError for a second block at the same position.
        """
        key = f"{name}@{','.join(map(str, offset))}"
        if key in self._entries:
            raise ValueError(f"a rank passes two blocks with the same position: {key}")
        start = self.num_bytes
        self._copy(tensor.detach().reshape(-1))
        self._entries[key] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [start, self.num_bytes],
        }
        self._positions[key] = {"name": name, "offset": list(offset)}

    def write(self, report: Callable[[int], None]) -> FileRecord:
        """Write the file durably and free the memory; `report` gets the size of each part written.

        Returns size and checksum, which is computed from the memory: the file is not read again.
        Raises WriteError, also if the file exists.
        """
        digest = hashlib.sha256()
        size = 0
        with reporting_write_errors(self.path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.path, flags, 0o666)
            try:
                for part in self._parts():
                    digest.update(part)
                    _write_all(descriptor, part)
                    size += len(part)
                    report(len(part))
                    if size % _SYNC_BYTES < len(part):
                        _sync_and_drop(descriptor)
            finally:
                os.close(descriptor)
            sync_file(self.path)
        self._buffers.give_back(self._chunks)
        self._chunks = []
        return FileRecord(size, digest.hexdigest())

    def _copy(self, flat: Tensor) -> None:
        """Append the elements of `flat` [n] to the chunks."""
        start = 0
        while start < len(flat):
            if self._num_free == 0:
                self._chunks.append(self._buffers.take())
                self._num_free = len(self._chunks[-1])
            count = min(len(flat) - start, self._num_free)
            chunk = self._chunks[-1]
            first = len(chunk) - self._num_free
            target = chunk[first : first + count]
            target.copy_(flat[start : start + count], non_blocking=True)
            self._num_free -= count
            start += count
        self.num_bytes += 4 * len(flat)

    def _header(self) -> bytes:
        """Return the header: its length as 8 bytes (little endian), then JSON.

        The format is documented at https://github.com/huggingface/safetensors#format.
        """
        metadata = {"blocks": json.dumps(self._positions)}
        text = json.dumps({"__metadata__": metadata, **self._entries}).encode()
        # Padded with spaces, so that the data begins at a multiple of 8.
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def _parts(self) -> Iterator[memoryview]:
        """Yield the content of the file in parts of at most `_WRITE_BYTES`, without a copy."""
        yield memoryview(self._header())
        remaining = self.num_bytes
        for chunk in self._chunks:
            # In terms of bytes; numpy's stub does not declare the buffer protocol.
            content = chunk.view(torch.uint8).numpy().data[:remaining]
            remaining -= len(content)
            for start in range(0, len(content), _WRITE_BYTES):
                yield content[start : start + _WRITE_BYTES]


class BackgroundWriter:
    """Writes staged files, in a thread of the lowest priority."""

    def __init__(self, files: Sequence[StagedFile]) -> None:
        """Start to write."""
        self._files = list(files)
        self._records: dict[str, FileRecord] = {}
        self._error: BaseException | None = None
        self._num_bytes = 0
        # A daemon: after an error elsewhere the process ends without this checkpoint.
        self._thread = threading.Thread(target=self._run, daemon=True, name="checkpoint-writer")
        self._thread.start()

    def is_done(self) -> bool:
        """Return True if all files are written or one failed."""
        return not self._thread.is_alive()

    def finish(self) -> dict[str, FileRecord]:
        """Wait for the thread; return the records of the files by name. Raises WriteError."""
        num_bytes = -1
        while self._thread.is_alive():
            # Noted here and only after progress: a note of the thread would hide that training
            # hangs, and one without progress that the file system hangs.
            if self._num_bytes != num_bytes:
                num_bytes = self._num_bytes
                activity.note(f"waiting for the files of a checkpoint, {num_bytes} bytes written")
            self._thread.join(timeout=0.2)
        if self._error is not None:
            raise self._error
        return self._records

    def _run(self) -> None:
        _lower_priority()
        try:
            for file in self._files:
                self._records[file.path.name] = file.write(self._add_bytes)
        except BaseException as error:  # noqa: BLE001 (`finish` raises it)
            self._error = error
        # The memory of files that were not written.
        self._files = []

    def _add_bytes(self, count: int) -> None:
        self._num_bytes += count


def _lower_priority() -> None:
    """Give this thread only processor time that training leaves."""
    # On Linux a priority belongs to a thread, elsewhere to the process.
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, _LOWEST_PRIORITY)
        with suppress(OSError):
            # A thread of training that wakes up at the end of a parallel region preempts this one
            # at once, and not at the end of its time slice.
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def _write_all(descriptor: int, content: memoryview) -> None:
    # A write may be partial, for example at a limit of the file size.
    while content:
        content = content[os.write(descriptor, content) :]


def _sync_and_drop(descriptor: int) -> None:
    """Write a file's pages to disk and remove them from the page cache.

    Otherwise a checkpoint would fill the cache with pages that nobody reads; to find free memory
    for them takes several times the processor time of the copy.
    """
    os.fsync(descriptor)
    if sys.platform == "linux":
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class Block(NamedTuple):
    """A rectangle of the full tensor `name`.

    The name is a Hugging Face name after `weight/` or the kind of a state, e.g. `exp_avg/`.
    Example: rows 4 to 7 of 8 are `Block("weight/lm_head.weight", (8, 32), (4, 0), tensor)` with a
    [4, 32] tensor.
    """

    name: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


class PendingSave:
    """A checkpoint whose files this rank may still be writing; every rank calls `finish`."""

    def __init__(
        self,
        writer: BackgroundWriter | None,
        written: dict[str, FileRecord],
        complete: Callable[[dict[str, FileRecord]], None],
    ) -> None:
        self._writer = writer
        self._written = written
        self._complete = complete

    def is_written(self) -> bool:
        """Return True if this rank's files are written or one failed: `finish` does not wait."""
        return self._writer is None or self._writer.is_done()

    def finish(self) -> dict[str, FileRecord]:
        """Wait for the files of all ranks; rank 0 writes the manifest.

        Returns size and checksum of every file that this rank wrote, by name. Raises WriteError if
        a file could not be written, CheckpointError for an incomplete partition.
        """
        if self._writer is not None:
            self._written |= self._writer.finish()
        self._complete(self._written)
        return self._written


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a checkpoint has, all ranks together."""

    num_optimizer_steps: int
    has_moments: bool
    shapes: Mapping[str, Sequence[int]]
    """Full shapes of the weights."""
    states: States
    """Names of the weights that have each kind of other tensors."""


def save(
    directory: Path,
    blocks: Iterable[Block],
    contents: Contents,
    ranks: RankGroups,
    *,
    buffers: HostBuffers,
    in_background: bool,
) -> PendingSave:
    """Copy this rank's blocks to host memory and write them to files; every rank calls.

    Together the ranks pass each element of all tensors of `contents` exactly once. Blocks are
    stored as float32. An earlier checkpoint in `directory` is removed.

    With `in_background` all blocks are copied to `buffers` and written by a thread while training
    continues. Otherwise they are kept in memory only until a file is full, and all files are
    written when this returns. In both cases the checkpoint is complete after `finish`.

    Raises WriteError if a file cannot be written, ValueError for a wrong block.
    """
    if ranks.rank == 0:
        _clear(directory)
    ranks.barrier()
    with reporting_write_errors(directory):
        # On a file system that nodes do not share, only a node's own ranks create its directory.
        directory.mkdir(parents=True, exist_ok=True)
    expected = full_shapes(contents.shapes, contents.states)
    checked = (_check_block(block, expected) for block in blocks)
    staged: list[StagedFile] = []
    written: dict[str, FileRecord] = {}
    for file in _stage(directory, ranks.rank, checked, buffers):
        if in_background:
            staged.append(file)
            continue
        buffers.wait_for_copies()
        written[file.path.name] = file.write(partial(_note_progress, file.path.name))
    writer = None
    if staged:
        buffers.wait_for_copies()
        writer = BackgroundWriter(staged)

    def complete(written: dict[str, FileRecord]) -> None:
        # The manifest marks the checkpoint as complete, so it follows every rank's files.
        ranks.barrier()
        if ranks.rank == 0:
            written[MANIFEST] = _write_manifest(directory, expected, contents)
        ranks.barrier()

    return PendingSave(writer, written, complete)


def _check_block(block: Block, expected: Mapping[str, tuple[int, ...]]) -> Block:
    """Return `block`; raises ValueError if it is not inside a tensor of the checkpoint."""
    name, full_shape, offset, tensor = block
    if expected.get(name) != tuple(full_shape):
        raise ValueError(
            f"a block of {name} has full shape {list(full_shape)}; the checkpoint's is"
            f" {expected.get(name)}"
        )
    for start, length, full_length in zip(offset, tensor.shape, full_shape, strict=True):
        if start < 0 or start + length > full_length:
            raise ValueError(
                f"a block of {name} at {list(offset)}, shape {list(tensor.shape)}, lies outside"
                f" {list(full_shape)}"
            )
    return block


def _clear(directory: Path) -> None:
    """Remove an earlier checkpoint, the manifest first, so that it is never taken for complete."""
    with reporting_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MANIFEST).unlink(missing_ok=True)
        for path in directory.glob(_FILES):
            path.unlink()


def _stage(
    directory: Path, rank: int, blocks: Iterable[Block], buffers: HostBuffers
) -> Iterator[StagedFile]:
    """Copy the blocks to host memory; yield each file when it is full, and the last one."""
    file: StagedFile | None = None
    num_files = 0
    for block in blocks:
        for part in _split(block):
            size = 4 * part.tensor.numel()
            if file is not None and file.num_bytes + size > MAX_FILE_BYTES:
                yield file
                file = None
            if file is None:
                name = f"rank_{rank:05d}_{num_files:03d}.safetensors"
                file = StagedFile(directory / name, buffers)
                num_files += 1
            activity.note(f"copying {part.name} for a checkpoint")
            file.add(part.name, part.offset, part.tensor)
    if file is not None:
        yield file


def _split(block: Block) -> Iterator[Block]:
    """Split a block along dim 0 into parts that fit in a file; an empty block has no parts."""
    tensor = block.tensor
    if tensor.numel() == 0:
        return
    if tensor.ndim == 0 or 4 * tensor.numel() <= MAX_FILE_BYTES:
        yield block
        return
    num_rows = max(1, MAX_FILE_BYTES // (4 * tensor[0].numel()))
    for start in range(0, len(tensor), num_rows):
        offset = (block.offset[0] + start, *block.offset[1:])
        yield block._replace(offset=offset, tensor=tensor[start : start + num_rows])


def _note_progress(name: str, num_bytes: int) -> None:
    """Note that this process has written `num_bytes` more bytes of the file `name`."""
    activity.note(f"writing {name} of a checkpoint, {num_bytes} bytes")


def _write_manifest(
    directory: Path, expected: Mapping[str, tuple[int, ...]], contents: Contents
) -> FileRecord:
    """Check that the ranks' blocks partition every tensor, then write the manifest."""
    files = {path.name: path.stat().st_size for path in sorted(directory.glob(_FILES))}
    blocks = read_headers(directory, files)
    for name, shape in expected.items():
        regions = [block.region for block in blocks.get(name, [])]
        check_partition(directory, name, shape, regions)
    manifest = {
        "format": FORMAT,
        "num_optimizer_steps": contents.num_optimizer_steps,
        "has_moments": contents.has_moments,
        "shapes": {name: list(shape) for name, shape in contents.shapes.items()},
        "states": {kind: list(names) for kind, names in contents.states.items()},
        "files": files,
    }
    record = write_json(directory / MANIFEST, manifest)
    with reporting_write_errors(directory):
        # The names of the files must be on disk before the checkpoint counts as complete.
        sync_file(directory)
    return record
