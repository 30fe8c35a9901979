"""Patches of images as transformers' image processor computes them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from nemo_like.config.errors import ConfigError
from nemo_like.data.image_patches import PatchCache, normalize
from nemo_like.data.images import ImageRef, image_grid
from nemo_like.models.vision import ImageSettings, VisionSpec
from tests.vision import FAMILIES, tiny_vision_model

SETTINGS = ImageSettings(min_pixels=64, max_pixels=4096, factor=8)


def random_image(rng: np.random.Generator, width: int, height: int) -> ImageRef:
    stream = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(stream, "PNG")
    return ImageRef(data=stream.getvalue())


def cache_of(model_type: str = "qwen2_5_vl", max_bytes: int = 10**6) -> PatchCache:
    spec = VisionSpec.from_config(tiny_vision_model(model_type).config)
    return PatchCache(spec, SETTINGS, max_bytes, 2)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_patches_are_those_of_the_image_processor(model_type: str) -> None:
    rng = np.random.default_rng(0)
    images = [random_image(rng, *size) for size in rng.integers(1, 100, (30, 2)).tolist()]
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 64, "longest_edge": 4096}
    )
    cache = cache_of(model_type)
    loaded = cache.load([*images, *images[::-1]])
    cache.close()
    assert loaded.numbers == [*range(30), *reversed(range(30))]
    for image, patches in zip(images, loaded.patches, strict=True):
        decoded = Image.open(io.BytesIO(image.read()))
        expected = processor(images=[decoded], return_tensors="pt")
        assert expected["image_grid_thw"].tolist() == [list(image_grid(image, SETTINGS, 4))]
        assert patches.dtype == np.uint8
        found = normalize(torch.from_numpy(patches), SETTINGS, 2)
        torch.testing.assert_close(found, expected["pixel_values"], atol=2e-6, rtol=0)


def test_images_are_decoded_once_while_they_fit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    # 64 x 64 pixels: 12,288 bytes of patches each.
    images = [random_image(rng, 64, 64) for _ in range(3)]
    path = tmp_path / "copy.png"
    path.write_bytes(images[0].read())
    cache = cache_of(max_bytes=2 * 12_288)
    loaded = cache.load([images[0], ImageRef(str(path))])
    assert loaded.numbers == [0, 0]
    (patches,) = loaded.patches

    def is_kept(number: int) -> bool:
        """Whether the first image was not decoded again after the use of another one."""
        cache.load([images[number]])
        return cache.load([images[0]]).patches[0] is patches

    assert is_kept(1) and is_kept(2) and is_kept(1)
    cache.load([images[1]])
    assert not is_kept(2)
    cache.close()


def test_an_image_that_cannot_be_decoded_is_named() -> None:
    cache = cache_of()
    image = random_image(np.random.default_rng(0), 1, 300)
    with pytest.raises(ConfigError, match=r"bytes.*: its size is 1x300, and one side"):
        cache.load([image])
    with pytest.raises(ConfigError, match=r"image 'missing\.png' does not exist"):
        cache.load([ImageRef(str(Path("missing.png").absolute()))])
    cache.close()
