"""Patches of images as a vision tower takes them, made in a worker.

Patches stay 8-bit in memory: normalized, and with two equal frames, they are 8 times as large.
`normalize` does both on the device of the tower.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nemo_like.config.errors import ConfigError
from nemo_like.data.images import ImageRef, RowImage, image_grid, pixels
from nemo_like.models.vision import ImageSettings, VisionSpec

CHANNELS = 3
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
    cut = image.reshape(rows, merge_size, patch_size, columns, merge_size, patch_size, CHANNELS)
    ordered = cut.transpose(0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(ordered).reshape(-1, CHANNELS * patch_size**2)


def normalize(patches: Tensor, settings: ImageSettings, num_frames: int) -> Tensor:
    """Return uint8 patches [N, 3 * P] normalized per channel, float32 [N, 3 * num_frames * P].

    An image has `num_frames` equal frames.
    """
    values = patches.view(len(patches), CHANNELS, 1, -1).float()
    mean, std = (
        torch.tensor(each, device=patches.device).view(CHANNELS, 1, 1) * _WHITE
        for each in (settings.mean, settings.std)
    )
    return ((values - mean) / std).expand(-1, -1, num_frames, -1).flatten(1)


class UniqueImages(NamedTuple):
    """Images without repetition."""

    patches: list[np.ndarray]
    """uint8 [N, 3 * patch_size^2] of each."""
    numbers: list[int]
    """Which of them each of the given images is."""
    digests: list[str]
    """Hash of each of them, with the settings."""


class PatchCache:
    """Patches of recently used images by hash, decoded in threads.

    Images of several epochs, and of generation and training, are decoded once while they fit.
    """

    def __init__(
        self,
        spec: VisionSpec,
        settings: ImageSettings,
        max_bytes: int = _CACHE_BYTES,
        num_threads: int = _NUM_THREADS,
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
        numbers = [number_of[digest_of[image]] for image in images]
        return UniqueImages(patches, numbers, [*unique])

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


def check_unchanged(image: RowImage, patches: np.ndarray) -> None:
    """Raise ConfigError if an image has another number of patches [N] than its row."""
    if len(patches) != math.prod(image.grid):
        raise ConfigError(
            f"{image.image} has {len(patches)} patches, and had {math.prod(image.grid)} when its"
            " row was encoded: it has changed since then; start the run again"
        )
