"""Images in the rows of the comparison with transformers, of models with a vision tower."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_like.data.images import ImageRef, RowImage
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.models.vision import ImageSettings, VisionSpec
from nemo_like.policy.inputs.images import PatchCache, normalize

_GRIDS = ((4, 6), (2, 2), (6, 4))
"""Rows and columns of the patches of the pictures."""
_IMAGES = ((0,), (), (1, 2, 1), (2,))
"""Pictures of the first rows with enough tokens, and so on; a row has none, one or three."""


def with_images(batch: BatchedDataDict, spec: VisionSpec) -> BatchedDataDict:
    """Return rows [B] of `batch` with images in the place of tokens, without loss on them."""
    rng = np.random.default_rng(0)
    files = [_picture(rng, rows, columns, spec.patch_size) for rows, columns in _GRIDS]
    ids, mask = batch["input_ids"], batch["token_mask"]
    # Other image tokens would be sampled ones.
    values = np.where(ids.values == spec.image_token_id, 0, ids.values).astype(ids.dtype)
    trained = mask.values.copy()
    images: list[tuple[RowImage, ...]] = []
    num_images = 0
    for start, length in zip(ids.offsets, ids.lengths, strict=False):
        own: list[RowImage] = []
        # One token before, between and after the images.
        end = 1
        for picture in _IMAGES[num_images % len(_IMAGES)]:
            rows, columns = _GRIDS[picture]
            size = rows * columns // spec.merge_size**2
            if end + size < length:
                own.append(RowImage(files[picture], (1, rows, columns), end, size))
                values[start + end : start + end + size] = spec.image_token_id
                trained[start + end : start + end + size] = 0
                end += size + 1
        num_images += length > 2
        images.append(tuple(own))
    columns = {"input_ids": Jagged(values, ids.offsets), "token_mask": Jagged(trained, ids.offsets)}
    return BatchedDataDict({**batch, **columns, "images": images})


def _picture(rng: np.random.Generator, rows: int, columns: int, patch_size: int) -> ImageRef:
    """Return random pixels as a BMP file, which is a header before them."""
    height, width = rows * patch_size, columns * patch_size
    # A row of pixels has a multiple of 4 bytes.
    pixels = rng.bytes(height * (-(-3 * width // 4) * 4))
    sizes = (40, width, height, 1, 24, 0, len(pixels), 0, 0, 0, 0)
    header = struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 54 + len(pixels), 0, 0, 54, *sizes)
    return ImageRef(data=header + pixels)


def transformers_images(
    model_config: Any, input_ids: Tensor, images: Sequence[RowImage]
) -> dict[str, Tensor]:
    """Return the arguments of transformers for the images of one row [1, L]; none without any."""
    if not images:
        return {}
    spec = VisionSpec.from_config(model_config)
    settings = ImageSettings.of_sizes(spec)
    cache = PatchCache(spec, settings, 2**20, 1)
    loaded = cache.load([image.image for image in images])
    cache.close()
    patches = np.concatenate([loaded.patches[number] for number in loaded.numbers])
    return {
        "pixel_values": normalize(torch.from_numpy(patches), settings, spec.temporal_patch_size),
        "image_grid_thw": torch.tensor([image.grid for image in images]),
        "mm_token_type_ids": (input_ids == spec.image_token_id).int(),
    }
