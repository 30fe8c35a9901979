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

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from nemo_like.distributed import activity
from nemo_like.files import (
    FileRecord,
    finish_library_file,
    remove_file,
    reporting_write_errors,
    sync_directory,
    write_json,
)
from nemo_like.policy.checkpoint.sharded_reader import (
    FORMAT,
    MANIFEST,
    check_partition,
    full_shapes,
    open_blocks,
)

_FILES = "rank_*.safetensors"
_MAX_FILE_BYTES = 2 * 2**30


class Block(NamedTuple):
    """A rectangle of the full tensor `name`.

    The name is a Hugging Face name after `weight/`, `exp_avg/` or `exp_avg_sq/`. Example: rows 4 to
    7 of 8 are `Block("weight/lm_head.weight", (8, 32), (4, 0), tensor)` with a [4, 32] tensor.
    """

    name: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


def save(
    directory: Path,
    blocks: Iterable[Block],
    *,
    rank: int,
    num_optimizer_steps: int,
    barrier: Callable[[], None],
    has_moments: bool,
    shapes: Mapping[str, Sequence[int]],
) -> dict[str, FileRecord]:
    """Write this rank's blocks, and on rank 0 the manifest; every rank calls.

    `shapes` are the full shapes of the weights. Together the ranks pass each element of every
    weight, and with `has_moments` of both its moments, exactly once. Blocks are stored as float32
    and are kept in memory only until a file is full. An earlier checkpoint in `directory` is
    removed.

    Returns size and checksum of every file that this rank wrote, by name. Raises WriteError if a
    file cannot be written, ValueError for a wrong block, CheckpointError for an incomplete
    partition.
    """
    if rank == 0:
        _clear(directory)
    barrier()
    with reporting_write_errors(directory):
        # On a file system that nodes do not share, only a node's own ranks create its directory.
        directory.mkdir(parents=True, exist_ok=True)
    expected = full_shapes(shapes, has_moments)
    checked = (_check_block(block, expected) for block in blocks)
    written = _write_blocks(directory, rank, checked)
    # The manifest marks the checkpoint as complete, so it follows every rank's files.
    barrier()
    if rank == 0:
        written[MANIFEST] = _write_manifest(
            directory,
            expected,
            num_optimizer_steps,
            has_moments,
            shapes,
        )
    barrier()
    return written


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
        remove_file(directory / MANIFEST)
        for path in directory.glob(_FILES):
            remove_file(path)


def _write_blocks(
    directory: Path,
    rank: int,
    blocks: Iterable[Block],
) -> dict[str, FileRecord]:
    """Write the blocks to as many files as needed; returns the files' records by name."""
    pending: list[Block] = []
    written: dict[str, FileRecord] = {}
    num_bytes = 0

    def write() -> None:
        path = directory / f"rank_{rank:05d}_{len(written):03d}.safetensors"
        written[path.name] = _write_file(path, pending)

    for block in blocks:
        for part in _split(block):
            size = 4 * part.tensor.numel()
            if pending and num_bytes + size > _MAX_FILE_BYTES:
                write()
                pending = []
                num_bytes = 0
            # A copy, so that other views of the same storage are neither written nor able to change
            # the block before the file is written.
            copied = torch.empty(part.tensor.shape, dtype=torch.float32)
            copied.copy_(part.tensor.detach())
            pending.append(part._replace(tensor=copied))
            num_bytes += size
    if pending:
        write()
    return written


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


def _write_file(path: Path, blocks: list[Block]) -> FileRecord:
    tensors: dict[str, Tensor] = {}
    positions = {}
    for block in blocks:
        key = f"{block.name}@{','.join(map(str, block.offset))}"
        if key in tensors:
            raise ValueError(f"a rank passes two blocks with the same position: {key}")
        tensors[key] = block.tensor
        positions[key] = {"name": block.name, "offset": list(block.offset)}
    activity.note(f"writing {path.name} of a checkpoint")
    with reporting_write_errors(path):
        save_file(tensors, path, metadata={"blocks": json.dumps(positions)})
        return finish_library_file(path)


def _write_manifest(
    directory: Path,
    expected: Mapping[str, tuple[int, ...]],
    num_optimizer_steps: int,
    has_moments: bool,
    shapes: Mapping[str, Sequence[int]],
) -> FileRecord:
    """Check that the ranks' blocks partition every tensor, then write the manifest."""
    files = {path.name: path.stat().st_size for path in sorted(directory.glob(_FILES))}
    with ExitStack() as stack:
        blocks = open_blocks(directory, files, stack)
    for name, shape in expected.items():
        regions = [block.region for block in blocks.get(name, [])]
        check_partition(directory, name, shape, regions)
    manifest = {
        "format": FORMAT,
        "num_optimizer_steps": num_optimizer_steps,
        "has_moments": has_moments,
        "shapes": {name: list(shape) for name, shape in shapes.items()},
        "files": files,
    }
    record = write_json(directory / MANIFEST, manifest)
    with reporting_write_errors(directory):
        # The names of the files must be on disk before the checkpoint counts as complete.
        sync_directory(directory)
    return record
