"""A policy's sharded checkpoint: safetensors for tensors, JSON for the rest; nothing is unpickled.

    <directory>/rank_00000_000.safetensors  blocks of weights and Adam moments that rank 0 owns
    <directory>/rank_00000_001.safetensors  ... more of them; no file is larger than 2 GiB
    <directory>/rank_00001_000.safetensors  ...
    <directory>/manifest.json               files, optimizer steps, full shapes; written last

A block is a rectangle of a full tensor under its Hugging Face name and in its Hugging Face layout.
The format is therefore independent of engine and parallel layout: each rank reads the regions it
needs from the blocks that contain them, bit by bit. `sharded_reader` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from nemo_like.distributed import activity
from nemo_like.policy.checkpoint.sharded_reader import (
    FORMAT,
    MANIFEST,
    States,
    adam_states,
    check_partition,
    full_shapes,
    read_headers,
)
from nemo_like.policy.checkpoint.staging import BackgroundWriter, HostBuffers, StagedFile
from nemo_like.run.files import FileRecord, reporting_write_errors, sync_file, write_json

_FILES = "rank_*.safetensors"
_MAX_FILE_BYTES = 2 * 2**30


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


def save(
    directory: Path,
    blocks: Iterable[Block],
    *,
    rank: int,
    num_optimizer_steps: int,
    barrier: Callable[[], None],
    has_moments: bool,
    shapes: Mapping[str, Sequence[int]],
    buffers: HostBuffers,
    in_background: bool,
    states: States | None = None,
) -> PendingSave:
    """Copy this rank's blocks to host memory and write them to files; every rank calls.

    `shapes` are the full shapes of the weights, and `states` names the other tensors; without it
    they are with `has_moments` both moments of every weight. Together the ranks pass each element
    of all of them exactly once. Blocks are stored as float32. An earlier checkpoint in `directory`
    is removed.

    With `in_background` all blocks are copied to `buffers` and written by a thread while training
    continues. Otherwise they are kept in memory only until a file is full, and all files are
    written when this returns. In both cases the checkpoint is complete after `finish`.

    Raises WriteError if a file cannot be written, ValueError for a wrong block.
    """
    if rank == 0:
        _clear(directory)
    barrier()
    with reporting_write_errors(directory):
        # On a file system that nodes do not share, only a node's own ranks create its directory.
        directory.mkdir(parents=True, exist_ok=True)
    if states is None:
        states = adam_states(shapes, has_moments)
    expected = full_shapes(shapes, states)
    checked = (_check_block(block, expected) for block in blocks)
    staged: list[StagedFile] = []
    written: dict[str, FileRecord] = {}
    for file in _stage(directory, rank, checked, buffers):
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
        barrier()
        if rank == 0:
            written[MANIFEST] = _write_manifest(
                directory, expected, num_optimizer_steps, has_moments, shapes, states
            )
        barrier()

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
            if file is not None and file.num_bytes + size > _MAX_FILE_BYTES:
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
    if tensor.ndim == 0 or 4 * tensor.numel() <= _MAX_FILE_BYTES:
        yield block
        return
    num_rows = max(1, _MAX_FILE_BYTES // (4 * tensor[0].numel()))
    for start in range(0, len(tensor), num_rows):
        offset = (block.offset[0] + start, *block.offset[1:])
        yield block._replace(offset=offset, tensor=tensor[start : start + num_rows])


def _note_progress(name: str, num_bytes: int) -> None:
    """Note that this process has written `num_bytes` more bytes of the file `name`."""
    activity.note(f"writing {name} of a checkpoint, {num_bytes} bytes")


def _write_manifest(
    directory: Path,
    expected: Mapping[str, tuple[int, ...]],
    num_optimizer_steps: int,
    has_moments: bool,
    shapes: Mapping[str, Sequence[int]],
    states: States,
) -> FileRecord:
    """Check that the ranks' blocks partition every tensor, then write the manifest."""
    files = {path.name: path.stat().st_size for path in sorted(directory.glob(_FILES))}
    blocks = read_headers(directory, files)
    for name, shape in expected.items():
        regions = [block.region for block in blocks.get(name, [])]
        check_partition(directory, name, shape, regions)
    manifest = {
        "format": FORMAT,
        "num_optimizer_steps": num_optimizer_steps,
        "has_moments": has_moments,
        "shapes": {name: list(shape) for name, shape in shapes.items()},
        "states": {kind: list(names) for kind, names in states.items()},
        "files": files,
    }
    record = write_json(directory / MANIFEST, manifest)
    with reporting_write_errors(directory):
        # The names of the files must be on disk before the checkpoint counts as complete.
        sync_file(directory)
    return record
