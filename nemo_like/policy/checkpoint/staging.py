"""Copies of a rank's blocks in host memory, and the thread that writes them to safetensors files.

While the thread writes, training may change the tensors: the files have the values of the copies.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_like.distributed import activity
from nemo_like.run.files import FileRecord, reporting_write_errors, sync_file

_CHUNK_BYTES = 2**28
_WRITE_BYTES = 2**24
"""Bytes between two uses of the interpreter lock, which the training thread needs as well."""
_SYNC_BYTES = 2**26
"""Bytes after which the file is synchronized and leaves the page cache."""
_LOWEST_PRIORITY = 19


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
