"""Images of packed rows: the inputs of a vision tower, and the places of its features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_like.data.image_patches import CHANNELS, PatchCache, check_unchanged, normalize
from nemo_like.data.image_tokens import rope_positions
from nemo_like.data.images import RowImage
from nemo_like.data.jagged import Jagged
from nemo_like.models.vision import ImageSettings, VisionSpec
from nemo_like.policy.inputs.grid import Grid


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
            check_unchanged(image, unique.patches[number])
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
            size = CHANNELS * self._spec.patch_size**2
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
        return cls(spec, settings, PatchCache(spec, settings))

    def rows(self, input_ids: Jagged, images: Sequence[Sequence[RowImage]]) -> RowImages:
        """Return the images of the rows of a shard, whose tokens are `input_ids` [T]."""
        return RowImages(input_ids, images, self.spec, self.settings, self.cache)
