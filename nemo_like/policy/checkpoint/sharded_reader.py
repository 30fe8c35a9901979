"""Reading of a policy's sharded checkpoint; `sharded` documents the format and writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_like.config.errors import ConfigError
from nemo_like.distributed import activity
from nemo_like.integer_math import block_index
from nemo_like.policy.checkpoint.hf_reader import TensorFiles
from nemo_like.run.checkpoint import CheckpointError, read_json

MANIFEST = "manifest.json"
FORMAT = 2
WEIGHT = "weight"
EMA = "ema"
"""Kind of the averages of `policy.ema`."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""State of AdamW of one parameter."""
States = Mapping[str, Collection[str]]
"""Kind of tensor besides `weight`, e.g. `exp_avg` -> names of the weights that have one."""


class Region(NamedTuple):
    """A rectangle of a full tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersection(self, other: Region) -> Region:
        """Return the common rectangle; a length is 0 if there is no overlap."""
        starts = []
        lengths = []
        for start, length, other_start, other_length in zip(*self, *other, strict=True):
            end = start + length
            other_end = other_start + other_length
            common_start = max(start, other_start)
            common_end = min(end, other_end)
            starts.append(common_start)
            lengths.append(max(0, common_end - common_start))
        return Region(tuple(starts), tuple(lengths))

    def slices(self, within: Region) -> tuple[slice, ...]:
        """Return the index of this region in a tensor of the region `within`."""
        start = [own - outer for own, outer in zip(self.offset, within.offset, strict=True)]
        return block_index(start, self.shape)


class StoredBlock(NamedTuple):
    """A region of a tensor in a file."""

    region: Region
    path: Path
    key: str


class CheckpointReader:
    """An open checkpoint. `read` reads from its files; before that only headers are read."""

    def __init__(
        self, directory: Path, manifest: Mapping[str, Any], blocks: dict[str, list[StoredBlock]]
    ):
        self.num_optimizer_steps: int = manifest["num_optimizer_steps"]
        self.has_moments: bool = manifest["has_moments"]
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(shape) for name, shape in manifest["shapes"].items()
        }
        self.states: States = manifest["states"]
        self._full_shapes = full_shapes(self.shapes, self.states)
        self._directory = directory
        self._blocks = blocks
        self._files = TensorFiles()

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the full shape of each weight by Hugging Face name."""
        return self.shapes

    def full_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each name with its weight, float32 [*shape] as in `weight_shapes`."""
        for name in names:
            shape = self.shapes[name]
            yield name, self.read(f"{WEIGHT}/{name}", (0,) * len(shape), shape)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def check_model(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise ConfigError unless the checkpoint is of a model with these weights."""
        # Lists, because a shape may be a tuple or a torch.Size.
        expected = {name: list(shape) for name, shape in shapes.items()}
        saved = {name: list(shape) for name, shape in self.shapes.items()}
        different = []
        for name in sorted(expected.keys() | saved):
            if expected.get(name) != saved.get(name):
                different.append(name)
        if different:
            name = different[0]
            raise ConfigError(
                f"{self._directory} is a checkpoint of another model: {len(different)} weights"
                f" differ, first {name}, saved as {saved.get(name)} and now {expected.get(name)};"
                " check policy.model_name and policy.lora"
            )

    def check_states(self, states: States) -> None:
        """Raise ConfigError unless the checkpoint has these optimizer states."""
        for kind, names in states.items():
            missing = sorted(set(names) - set(self.states.get(kind, ())))
            if missing:
                raise ConfigError(
                    f"{self._directory} has no {kind} of {len(missing)} weights, first"
                    f" {missing[0]}: policy.optimizer.name or policy.freeze has changed. Set them"
                    " as in the run that saved it, or export its model and start a new run"
                )

    def check_partition(self) -> None:
        """Raise CheckpointError unless every value of every tensor is stored exactly once."""
        for name, shape in self._full_shapes.items():
            regions = [block.region for block in self._blocks.get(name, [])]
            check_partition(self._directory, name, shape, regions)

    def use_ema(self) -> None:
        """Let `read` return averaged weights in the place of weights that have an average.

        Raises CheckpointError for a checkpoint without averages.
        """
        names = self.states.get(EMA, ())
        if not names:
            raise CheckpointError(
                f"{self._directory} has no averaged weights; it was saved without policy.ema"
            )
        for name in names:
            self._blocks[f"{WEIGHT}/{name}"] = self._blocks[f"{EMA}/{name}"]

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read a region of the tensor `name` as a new float32 tensor [*shape] on the CPU.

        Raises CheckpointError if the stored blocks do not cover it. Returns a tensor of the given
        shape, [...].
        """
        activity.note(f"reading {name} of a checkpoint")
        result = torch.empty(tuple(shape), dtype=torch.float32)
        region = Region(tuple(offset), tuple(shape))
        num_found = 0
        for block in self._blocks.get(name, []):
            common = region.intersection(block.region)
            if common.numel:
                place = result[common.slices(region)]
                index = common.slices(block.region)
                self._files.read_into(place, block.path, block.key, index)
                num_found += common.numel
        # Blocks do not overlap (`check_partition`), so the count is exact.
        if num_found != region.numel:
            raise CheckpointError(
                f"{self._directory} has {num_found} of the {region.numel} values of {name} at"
                f" {list(offset)}, shape {list(shape)}; the checkpoint lacks the others"
            )
        return result


@contextmanager
def open_checkpoint(directory: Path) -> Iterator[CheckpointReader]:
    """Open a checkpoint that `sharded.save` wrote with any number of ranks.

    Raises CheckpointError if it is not a complete checkpoint.
    """
    manifest = _read_manifest(directory)
    try:
        blocks = read_headers(directory, manifest["files"])
        reader = CheckpointReader(directory, manifest, blocks)
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{directory / MANIFEST} is damaged: its entries are not the entries of a policy"
            " checkpoint"
        ) from error
    try:
        yield reader
    finally:
        reader.close()


def checkpoint_problem(directory: Path) -> str | None:
    """Return the reason why a policy checkpoint cannot be loaded, None if it can.

    Only the manifest and the files' headers are read.
    """
    try:
        with open_checkpoint(directory) as reader:
            reader.check_partition()
    except CheckpointError as error:
        return str(error)
    return None


def full_shapes(shapes: Mapping[str, Sequence[int]], states: States) -> dict[str, tuple[int, ...]]:
    """Return the full shape of every tensor in the checkpoint by block name, `<kind>/<weight>`."""
    result = {}
    for kind, names in {WEIGHT: shapes, **states}.items():
        for name in names:
            result[f"{kind}/{name}"] = tuple(shapes[name])
    return result


def check_partition(
    directory: Path, name: str, shape: tuple[int, ...], regions: list[Region]
) -> None:
    """Raise CheckpointError unless `regions` partition a tensor of `shape`.

    They do if they are inside the tensor, do not overlap and have as many elements as the tensor.
    """
    for region in regions:
        limits = zip(region.offset, region.shape, shape, strict=False)
        is_inside = all(start + length <= full for start, length, full in limits)
        num_dims = {len(region.offset), len(region.shape), len(shape)}
        if len(num_dims) > 1 or not is_inside:
            raise CheckpointError(
                f"a block of {name} in {directory} lies outside the tensor: {region}"
            )
    num_written = sum(region.numel for region in regions)
    if num_written != math.prod(shape):
        raise CheckpointError(
            f"the ranks wrote {num_written} of the {math.prod(shape)} values of {name} to"
            f" {directory}"
        )
    # [num_regions, num_dims]; reshape keeps the dims of an empty list.
    starts = np.array([region.offset for region in regions], dtype=np.int64)
    starts = starts.reshape(len(regions), len(shape))
    lengths = np.array([region.shape for region in regions], dtype=np.int64)
    ends = starts + lengths.reshape(starts.shape)
    # Two rectangles overlap if their intervals overlap in every dim.
    begins_before_end = starts[:, None] < ends
    ends_after_start = starts < ends[:, None]
    is_overlap = (begins_before_end & ends_after_start).all(axis=-1)
    # Each pair once, and no region with itself.
    pairs = np.argwhere(np.triu(is_overlap, k=1))
    if len(pairs):
        first, second = (regions[index] for index in pairs[0])
        raise CheckpointError(f"two blocks of {name} in {directory} overlap: {first} and {second}")


def read_headers(directory: Path, files: Mapping[str, int]) -> dict[str, list[StoredBlock]]:
    """Return the blocks in `files` (name -> bytes) by tensor name; reads headers only.

    Raises CheckpointError for a file that is missing, of another size, or damaged.
    """
    blocks: dict[str, list[StoredBlock]] = {}
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
            with safe_open(path, framework="pt") as file:
                for key, position in json.loads(file.metadata()["blocks"]).items():
                    shape = tuple(file.get_slice(key).get_shape())
                    block = StoredBlock(Region(tuple(position["offset"]), shape), path, key)
                    blocks.setdefault(position["name"], []).append(block)
        except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__}: {str(error)[:200]})"
            ) from error
    return blocks


def _read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest. Raises CheckpointError without one, and for one of another format."""
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist, so {directory} is not a complete policy checkpoint"
        )
    manifest = read_json(path)
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise CheckpointError(
            f"{path} has format {str(found)[:20]}; this version reads format {FORMAT}"
        )
    return manifest
