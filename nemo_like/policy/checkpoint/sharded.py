"""A policy's sharded checkpoint: safetensors for tensors, JSON for the rest, nothing is unpickled.

    <directory>/rank_00000_000.safetensors   blocks of weights and of Adam's two moments that rank 0 owns
    <directory>/rank_00000_001.safetensors   ... more of them; no file is larger than 2 GiB
    <directory>/rank_00001_000.safetensors   ...
    <directory>/manifest.json                files, optimizer steps, full shapes; written last, by rank 0

A block is a rectangle of a full tensor under its Hugging Face name and in its Hugging Face layout,
so neither the engine nor its layout shows: whoever loads reads the rectangles it needs from
whatever blocks they lie in, exact to the bit.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_like.checkpoint_manifest import CheckpointError, read_json
from nemo_like.config.errors import ConfigError
from nemo_like.distributed import activity
from nemo_like.files import (
    FileRecord,
    finish_library_file,
    remove_file,
    reporting_write_errors,
    sync_directory,
    write_json,
)

MANIFEST = "manifest.json"
WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
_FORMAT = 2
_FILES = "rank_*.safetensors"
_FILE_NAME = re.compile(r"rank_[0-9]{5,9}_[0-9]{3,9}\.safetensors")
_MAX_FILE_BYTES = 2 * 2**30


class Block(NamedTuple):
    """A rectangle of the full tensor `name`, which is `weight/`, `exp_avg/` or `exp_avg_sq/` and a
    Hugging Face name.

    Example: rows 4 to 7 of 8 are `Block("weight/lm_head.weight", (8, 32), (4, 0), tensor)` with a
    [4, 32] tensor.
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
    """Write this rank's blocks as they come; rank 0 writes the manifest once every rank has
    written. Called by all ranks.

    Returns size and checksum of every file that this rank wrote, by name. Raises WriteError where
    that is not possible.

    `shapes` are the full shapes of the weights. Together the ranks give each element of every
    weight, and with `has_moments` of both its moments, exactly once; ValueError says where they do
    not. Blocks are stored as float32, and not held longer than it takes to fill a file. What an
    earlier save left in `directory` is removed.
    """
    if rank == 0:
        _clear(directory)
    barrier()
    with reporting_write_errors(directory):
        directory.mkdir(
            parents=True, exist_ok=True
        )  # on a file system of its own, a node has only what its ranks create
    expected = _full_shapes(shapes, has_moments)
    written = _write_blocks(directory, rank, (_checked(block, expected) for block in blocks))
    barrier()
    if rank == 0:
        written[MANIFEST] = _write_manifest(
            directory, expected, num_optimizer_steps, has_moments, shapes
        )
    barrier()
    return written


@contextmanager
def open_checkpoint(directory: Path) -> Iterator[CheckpointReader]:
    """What `save` wrote in `directory`, by any number of ranks. Raises CheckpointError if that is
    no complete checkpoint.
    """
    manifest = _read_manifest(directory)
    with ExitStack() as stack:
        yield CheckpointReader(
            directory, manifest, _open_blocks(directory, manifest["files"], stack)
        )


def checkpoint_problem(directory: Path) -> str | None:
    """Why the policy's part of a checkpoint cannot be loaded, from its manifest and its files'
    headers; None if it can.
    """
    try:
        with open_checkpoint(directory) as reader:
            reader.check_partition()
    except CheckpointError as error:
        return str(error)
    return None


class CheckpointReader:
    """An open checkpoint. Nothing is read from its files before `read` asks for it."""

    def __init__(
        self, directory: Path, manifest: Mapping[str, Any], blocks: dict[str, list[_StoredBlock]]
    ):
        self.num_optimizer_steps: int = manifest["num_optimizer_steps"]
        self.has_moments: bool = manifest["has_moments"]
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(shape) for name, shape in manifest["shapes"].items()
        }
        self._directory = directory
        self._blocks = blocks

    def check_model(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise ConfigError unless the checkpoint is of a model with these weights."""
        now = {name: tuple(shape) for name, shape in shapes.items()}
        different = sorted(
            name for name in now.keys() | self.shapes if now.get(name) != self.shapes.get(name)
        )
        if different:
            name = different[0]
            saved, wanted = (
                None if shape is None else list(shape)
                for shape in (self.shapes.get(name), now.get(name))
            )
            raise ConfigError(
                f"{self._directory} is a checkpoint of another model: {len(different)} weights"
                f" differ, first {name}, saved as "
                f"{saved} and now {wanted}; check policy.model_name"
            )

    def check_partition(self) -> None:
        """Raise CheckpointError unless the blocks hold every value of every tensor exactly once."""
        for name, shape in _full_shapes(self.shapes, self.has_moments).items():
            _check_partition(
                self._directory, name, shape, [block.region for block in self._blocks.get(name, [])]
            )

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The part of the full tensor `name` that begins at `offset`, as a fresh float32 tensor on
        the CPU.
        """
        activity.note(f"reading {name} of a checkpoint")
        result = torch.empty(tuple(shape), dtype=torch.float32)
        region = _Region(tuple(offset), tuple(shape))
        num_found = 0
        for block in self._blocks.get(name, []):
            common = region.intersection(block.region)
            if common.numel:
                result[common.slices(region)] = block.file.get_slice(block.key)[
                    common.slices(block.region)
                ]
                num_found += common.numel
        if num_found != region.numel:
            raise CheckpointError(
                f"{self._directory} has {num_found} of the {region.numel} values of {name} at"
                f" {list(offset)}, "
                f"shape {list(shape)}; it does not hold this part"
            )
        return result


class _Region(NamedTuple):
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersection(self, other: _Region) -> _Region:
        starts, lengths = [], []
        for start, length, other_start, other_length in zip(*self, *other, strict=True):
            starts.append(max(start, other_start))
            lengths.append(max(0, min(start + length, other_start + other_length) - starts[-1]))
        return _Region(tuple(starts), tuple(lengths))

    def slices(self, within: _Region) -> tuple[slice, ...]:
        """Where this region lies in a tensor that holds `within`."""
        starts = [start - outer for start, outer in zip(self.offset, within.offset, strict=True)]
        return tuple(
            slice(start, start + length) for start, length in zip(starts, self.shape, strict=True)
        )


class _StoredBlock(NamedTuple):
    region: _Region
    file: Any
    key: str


def _full_shapes(
    shapes: Mapping[str, Sequence[int]], has_moments: bool
) -> dict[str, tuple[int, ...]]:
    """Full shape of every tensor in the checkpoint, by block name."""
    kinds = (WEIGHT, *MOMENTS) if has_moments else (WEIGHT,)
    return {f"{kind}/{name}": tuple(shape) for kind in kinds for name, shape in shapes.items()}


def _checked(block: Block, expected: Mapping[str, tuple[int, ...]]) -> Block:
    name, full_shape, offset, tensor = block
    if expected.get(name) != tuple(full_shape):
        raise ValueError(
            f"a block of {name} has full shape {list(full_shape)}; the checkpoint's is"
            f" {expected.get(name)}"
        )
    ends = [start + length for start, length in zip(offset, tensor.shape, strict=True)]
    if any(
        start < 0 or end > length
        for start, end, length in zip(offset, ends, full_shape, strict=True)
    ):
        raise ValueError(
            f"a block of {name} at {list(offset)}, shape {list(tensor.shape)}, lies outside"
            f" {list(full_shape)}"
        )
    return block


def _clear(directory: Path) -> None:
    with reporting_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        remove_file(directory / MANIFEST)
        for path in directory.glob(_FILES):
            remove_file(path)


def _write_blocks(directory: Path, rank: int, blocks: Iterable[Block]) -> dict[str, FileRecord]:
    pending: list[Block] = []
    written: dict[str, FileRecord] = {}
    num_bytes = 0

    def write() -> None:
        path = _rank_file(directory, rank, len(written))
        written[path.name] = _write_file(path, pending)

    for block in itertools.chain.from_iterable(map(_parts, blocks)):
        size = 4 * block.tensor.numel()
        if pending and num_bytes + size > _MAX_FILE_BYTES:
            write()
            pending, num_bytes = [], 0
        # A copy, so that what the tensor shares its storage with is neither written nor able to
        # change it meanwhile.
        copied = torch.empty(block.tensor.shape, dtype=torch.float32).copy_(block.tensor.detach())
        pending.append(block._replace(tensor=copied))
        num_bytes += size
    if pending:
        write()
    return written


def _parts(block: Block) -> Iterator[Block]:
    """The block cut along its first dimension so that each part fits in a file; nothing where it is
    empty.
    """
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
    keys = [f"{block.name}@{','.join(map(str, block.offset))}" for block in blocks]
    places = {
        key: {"name": block.name, "offset": list(block.offset)}
        for key, block in zip(keys, blocks, strict=True)
    }
    if len(places) < len(blocks):
        raise ValueError(
            f"a rank gives two blocks at one place:"
            f" {next(key for key in keys if keys.count(key) > 1)}"
        )
    tensors = {key: block.tensor for key, block in zip(keys, blocks, strict=True)}
    activity.note(f"writing {path.name} of a checkpoint")
    with reporting_write_errors(path):
        save_file(tensors, path, metadata={"blocks": json.dumps(places)})
        return finish_library_file(path)


def _write_manifest(
    directory: Path,
    expected: Mapping[str, tuple[int, ...]],
    num_optimizer_steps: int,
    has_moments: bool,
    shapes: Mapping[str, Sequence[int]],
) -> FileRecord:
    """Check that the ranks' blocks are the whole model, each part once, and say that the checkpoint
    is complete.
    """
    files = {path.name: path.stat().st_size for path in sorted(directory.glob(_FILES))}
    with ExitStack() as stack:
        blocks = _open_blocks(directory, files, stack)
    for name, shape in expected.items():
        _check_partition(directory, name, shape, [block.region for block in blocks.get(name, [])])
    manifest = {
        "format": _FORMAT,
        "num_optimizer_steps": num_optimizer_steps,
        "has_moments": has_moments,
        "shapes": {name: list(shape) for name, shape in shapes.items()},
        "files": files,
    }
    record = write_json(directory / MANIFEST, manifest)
    with reporting_write_errors(directory):
        sync_directory(directory)
    return record


def _check_partition(
    directory: Path, name: str, shape: tuple[int, ...], regions: list[_Region]
) -> None:
    """Blocks that lie within the tensor, do not overlap and add up to its size are exactly the
    tensor.
    """
    for region in regions:
        ends = [start + length for start, length in zip(*region, strict=True)]
        if len(ends) != len(shape) or any(
            end > length for end, length in zip(ends, shape, strict=True)
        ):
            raise CheckpointError(
                f"a block of {name} in {directory} lies outside the tensor: {region}"
            )
    num_written = sum(region.numel for region in regions)
    if num_written != math.prod(shape):
        raise CheckpointError(
            f"the ranks wrote {num_written} of the {math.prod(shape)} values of {name} to"
            f" {directory}"
        )
    starts = np.array([region.offset for region in regions], dtype=np.int64).reshape(
        len(regions), len(shape)
    )
    ends = starts + np.array([region.shape for region in regions], dtype=np.int64).reshape(
        starts.shape
    )
    overlaps = np.triu(((starts[:, None] < ends) & (starts < ends[:, None])).all(-1), k=1)
    if overlaps.any():
        first, second = (regions[index] for index in np.argwhere(overlaps)[0])
        raise CheckpointError(f"two blocks of {name} in {directory} overlap: {first} and {second}")


def _read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest, its entries of the types that `_write_manifest` gives them; CheckpointError for
    anything else.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist, so {directory} holds no complete policy checkpoint"
        )
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise CheckpointError(
            f"{path} has format {str(found)[:20]}; this version reads format {_FORMAT}"
        )
    files, shapes = manifest.get("files"), manifest.get("shapes")
    is_valid = (
        _is_count(manifest.get("num_optimizer_steps"))
        and isinstance(manifest.get("has_moments"), bool)
        and isinstance(files, dict)
        and all(_FILE_NAME.fullmatch(name) and _is_count(size) for name, size in files.items())
        and isinstance(shapes, dict)
        and len(shapes) > 0
        and all(isinstance(shape, list) and all(map(_is_count, shape)) for shape in shapes.values())
    )
    if not is_valid:
        raise CheckpointError(
            f"{path} is damaged: its entries are not those of a policy checkpoint"
        )
    return manifest


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _open_blocks(
    directory: Path, files: Mapping[str, int], stack: ExitStack
) -> dict[str, list[_StoredBlock]]:
    """Every stored block by the name of its tensor. Only the files' headers are read."""
    blocks: dict[str, list[_StoredBlock]] = {}
    for file_name, size in files.items():
        path = directory / file_name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise CheckpointError(
                f"{path} {state}; the checkpoint in {directory} is incomplete, copy it again or"
                f" load another one"
            )
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            for key, place in json.loads(file.metadata()["blocks"]).items():
                shape = tuple(file.get_slice(key).get_shape())
                name, offset = place["name"], tuple(place["offset"])
                if len(offset) != len(shape) or not all(map(_is_count, offset)):
                    raise ValueError(f"block {key[:80]!r} has offset {str(offset)[:80]}")
                blocks.setdefault(name, []).append(_StoredBlock(_Region(offset, shape), file, key))
        except (
            OSError,
            SafetensorError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__}: {str(error)[:200]})"
            ) from error
    return blocks


def _rank_file(directory: Path, rank: int, index: int) -> Path:
    return directory / f"rank_{rank:05d}_{index:03d}.safetensors"
