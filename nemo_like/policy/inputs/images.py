"""Patches of images as a vision tower takes them, made in a worker.

Patches stay 8-bit in memory: normalized, and with two equal frames, they are 8 times as large.
`normalize` does both on the device of the tower.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nemo_like.config.errors import ConfigError
from nemo_like.data.image_tokens import rope_positions
from nemo_like.data.images import ImageRef, RowImage, image_grid, pixels
from nemo_like.data.jagged import Jagged
from nemo_like.models.vision import ImageSettings, VisionSpec
from nemo_like.policy.inputs.grid import Grid

_CHANNELS = 3
_WHITE = 255
_CACHE_BYTES = 2**30
_NUM_THREADS = 4


def to_patches(image: np.ndarray, patch_size: int, merge_size: int) -> np.ndarray:
    """Cut an image, uint8 [H, W, 3], into patches, uint8 [N, 3 * patch_size^2].

    The patches of one image token follow one another, and so do the channels of a patch, as in
    transformers' image processor of Qwen2-VL.
    """
    side = patch_size * merge_size
    rows, columns = image.shape[0] // side, image.shape[1] // side
    cut = image.reshape(rows, merge_size, patch_size, columns, merge_size, patch_size, _CHANNELS)
    ordered = cut.transpose(0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(ordered).reshape(-1, _CHANNELS * patch_size**2)


def normalize(patches: Tensor, settings: ImageSettings, num_frames: int) -> Tensor:
    """Return uint8 patches [N, 3 * P] normalized per channel, float32 [N, 3 * num_frames * P].

    An image has `num_frames` equal frames.
    """
    values = patches.view(len(patches), _CHANNELS, 1, -1).float()
    mean, std = (
        torch.tensor(each, device=patches.device).view(_CHANNELS, 1, 1) * _WHITE
        for each in (settings.mean, settings.std)
    )
    return ((values - mean) / std).expand(-1, -1, num_frames, -1).flatten(1)


@dataclass(frozen=True, eq=False)
class VisionInputs:
    """Unique images of a microbatch, and the places of their features."""

    patches: Tensor
    """float [N, patch size], normalized."""
    grids: Tensor
    """int64 [n, 3] on the CPU."""
    positions: Tensor
    """int64 [F], ascending: positions of image tokens in the packed rows."""
    features: Tensor
    """int64 [F]: the feature of each, counted over all images."""
    host_positions: np.ndarray | None = None
    """`positions` in host memory, which sequence parallelism needs."""


class UniqueImages(NamedTuple):
    """Images without repetition."""

    patches: list[np.ndarray]
    """uint8 [N, 3 * patch_size^2] of each."""
    numbers: list[int]
    """Which of them each of the given images is."""


class PatchCache:
    """Patches of recently used images by hash, decoded in threads.

    Images of several epochs, and of generation and training, are decoded once while they fit.
    """

    def __init__(
        self, spec: VisionSpec, settings: ImageSettings, max_bytes: int, num_threads: int
    ) -> None:
        self._spec = spec
        self._settings = settings
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._patches: OrderedDict[str, np.ndarray] = OrderedDict()
        """By hash of file and settings, the most recently used at the end."""
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="images")

    def load(self, images: Sequence[ImageRef]) -> UniqueImages:
        """Return the unique images among `images`, in the order of their first use.

        Raises ConfigError that names an image which cannot be read.
        """
        refs = list(dict.fromkeys(images))
        digests = self._threads.map(lambda ref: ref.digest(self._settings), refs)
        digest_of = dict(zip(refs, digests, strict=True))
        unique = {digest: ref for ref, digest in digest_of.items()}
        patches = list(self._threads.map(lambda item: self._load(*item), unique.items()))
        number_of = {digest: number for number, digest in enumerate(unique)}
        return UniqueImages(patches, [number_of[digest_of[image]] for image in images])

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _load(self, digest: str, image: ImageRef) -> np.ndarray:
        with self._lock:
            found = self._patches.get(digest)
            if found is not None:
                self._patches.move_to_end(digest)
                return found
        side = self._spec.patch_size
        _, rows, columns = image_grid(image, self._settings, side)
        decoded = pixels(image, columns * side, rows * side)
        patches = to_patches(decoded, side, self._spec.merge_size)
        with self._lock:
            # Two calls may decode one image at a time.
            self._num_bytes += 0 if digest in self._patches else patches.nbytes
            self._patches[digest] = patches
            while self._num_bytes > self._max_bytes:
                _, oldest = self._patches.popitem(last=False)
                self._num_bytes -= oldest.nbytes
        return patches


class RowImages:
    """The images of the rows of a shard: positions in three dimensions, and places of features."""

    def __init__(
        self,
        input_ids: Jagged,
        images: Sequence[Sequence[RowImage]],
        spec: VisionSpec,
        settings: ImageSettings,
        cache: PatchCache,
    ) -> None:
        """`images` are those of each row, `input_ids` [T] its tokens."""
        self._images = images
        self._spec = spec
        self._settings = settings
        self._cache = cache
        positions = np.empty((len(input_ids.values), 3), dtype=np.int32)
        features = np.full(len(input_ids.values), -1, dtype=np.int32)
        for row, (ids, own) in enumerate(zip(input_ids, images, strict=True)):
            start = input_ids.offsets[row]
            grids = np.array([image.grid for image in own], dtype=np.int64).reshape(-1, 3)
            merge_size = spec.merge_size
            positions[start : start + len(ids)] = rope_positions(
                ids, grids, spec.image_token_id, merge_size
            ).T
            number = 0
            for image in own:
                numbers = np.arange(number, number + image.num_tokens)
                features[start + image.start : start + image.end] = numbers
                number += image.num_tokens
        self._positions = Jagged(positions, input_ids.offsets)
        self._features = Jagged(features, input_ids.offsets)
        """Of each token, the feature counted over the images of its row; -1 for other tokens."""

    def arrays(self, grid: Grid) -> dict[str, np.ndarray]:
        """Return the arrays of a microbatch by the names of `MICROBATCH_ARRAYS`.

        `position_ids` are int64 [3, *shape], `image_positions` and `image_features` int64 [F],
        `image_patches` uint8 [N, ...] and `image_grids` int64 [n, 3]. Without an image they are
        those of an empty one, whose features have no place. Raises ConfigError for an image that
        cannot be read, or is another than the one that was encoded.
        """
        is_real = grid.position < grid.length
        positions = grid.gather("images", self._positions, 0, is_real, 0)
        features = grid.gather("images", self._features, 0, is_real, -1)
        places = np.flatnonzero(features >= 0)
        images = [image for row in grid.rows.tolist() for image in self._images[row]]
        unique = self._cache.load([image.image for image in images])
        grids = np.zeros((len(unique.patches), 3), dtype=np.int64)
        for image, number in zip(images, unique.numbers, strict=True):
            grids[number] = image.grid
            _check_unchanged(image, unique.patches[number])
        ends = np.cumsum(self._spec.image_tokens(grids))
        starts = ends - self._spec.image_tokens(grids)
        # The feature, counted over the unique images, of each feature of the rows.
        tables = [np.arange(starts[number], ends[number]) for number in unique.numbers]
        table = np.concatenate([np.empty(0, np.int64), *tables])
        row_sizes = [sum(each.num_tokens for each in self._images[row]) for row in grid.rows]
        row_starts = np.concatenate([[0], np.cumsum(row_sizes)]).astype(np.int64)
        patches = unique.patches
        if not patches:
            merge_size = self._spec.merge_size
            grids = np.array([[1, merge_size, merge_size]])
            size = _CHANNELS * self._spec.patch_size**2
            patches = [np.zeros((merge_size**2, size), dtype=np.uint8)]
        return {
            "position_ids": positions.T.astype(np.int64).reshape(3, *grid.shape),
            "image_positions": places,
            "image_features": table[row_starts[grid.segment[places]] + features[places]],
            "image_patches": np.concatenate(patches),
            "image_grids": grids,
        }

    def inputs(self, tensors: Mapping[str, Tensor], arrays: Mapping[str, Any]) -> VisionInputs:
        """Return the inputs of the tower from `arrays` and from their tensors."""
        num_frames = self._spec.temporal_patch_size
        return VisionInputs(
            normalize(tensors["image_patches"], self._settings, num_frames),
            torch.from_numpy(arrays["image_grids"]),
            tensors["image_positions"],
            tensors["image_features"],
            arrays["image_positions"],
        )


def _check_unchanged(image: RowImage, patches: np.ndarray) -> None:
    if len(patches) != math.prod(image.grid):
        raise ConfigError(
            f"{image.image} has {len(patches)} patches, and had {math.prod(image.grid)} when its"
            " row was encoded: it has changed since then; start the run again"
        )


@dataclass(frozen=True)
class ImageFiles:
    """Reads the images of rows in a worker."""

    spec: VisionSpec
    settings: ImageSettings
    cache: PatchCache

    @classmethod
    def open(
        cls, model_config: object, directory: Path, min_pixels: int | None, max_pixels: int | None
    ) -> ImageFiles:
        """Read the image processor of a model directory; see `ImageSettings.load`."""
        spec = VisionSpec.from_config(model_config)
        settings = ImageSettings.load(directory, spec, min_pixels=min_pixels, max_pixels=max_pixels)
        return cls(spec, settings, PatchCache(spec, settings, _CACHE_BYTES, _NUM_THREADS))

    def rows(self, input_ids: Jagged, images: Sequence[Sequence[RowImage]]) -> RowImages:
        """Return the images of the rows of a shard, whose tokens are `input_ids` [T]."""
        return RowImages(input_ids, images, self.spec, self.settings, self.cache)
