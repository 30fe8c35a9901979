"""References to images, their sizes from headers, and their pixels."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from nemo_like.config.errors import ConfigError
from nemo_like.data.images import ImageRef, RowImage, image_grid, image_ref, image_size, pixels
from nemo_like.models.vision import ImageSettings

SETTINGS = ImageSettings(min_pixels=64, max_pixels=4096, factor=8)
UPRIGHT = np.random.default_rng(0).integers(0, 256, (6, 10, 3), dtype=np.uint8)
"""A picture of 10x6 pixels."""


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


PNG = encoded(Image.fromarray(UPRIGHT))


@pytest.mark.parametrize("form", ["path", "file", "data", "struct", "bytes", "image_url", "image"])
def test_all_forms_of_a_reference_give_the_file(form: str, tmp_path: Path) -> None:
    path = tmp_path / "a b.png"
    path.write_bytes(PNG)
    uri = "data:image/png;base64," + base64.b64encode(PNG).decode()
    forms: dict[str, Any] = {
        "path": "a b.png",
        "file": path.as_uri(),
        "data": uri,
        "struct": {"bytes": PNG, "path": "other.png"},
        "bytes": {"bytes": None, "path": "a b.png"},
        "image_url": {"url": uri, "detail": "high"},
        "image": {"type": "image", "image": "a b.png"},
    }
    ref = image_ref(forms[form], tmp_path)
    assert ref.read() == PNG
    assert image_size(ref) == (10, 6)
    assert np.array_equal(pixels(ref, 10, 6), UPRIGHT)
    assert ref.digest() == image_ref("a b.png", tmp_path).digest() != ref.digest("settings")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("https://example.org/cat.png", "is on the web: it is not downloaded, because a run could"),
        ("http://example.org/cat.png", "is on the web"),
        ({"url": "HTTPS://example.org/cat.png"}, "is on the web"),
        ("data:image/png;base64,iVBO!", "of 27 characters is no data: URI"),
        ("data:image/png;base64", "there is no comma before the data"),
        ("", "is not an image; give a path, a data: URI"),
        ({"bytes": None, "path": None}, "is not an image; give a path"),
        (7, r"7 \(int\) is not an image"),
    ],
)
def test_what_is_no_reference_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        image_ref(value, Path())
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_images_are_upright(kind: str, orientation: int) -> None:
    """How the stored array is made from the upright one is written out, by the EXIF standard."""
    turned = {
        1: UPRIGHT,
        2: UPRIGHT[:, ::-1],
        3: UPRIGHT[::-1, ::-1],
        4: UPRIGHT[::-1],
        5: UPRIGHT.swapaxes(0, 1),
        6: UPRIGHT.swapaxes(0, 1)[::-1],
        7: UPRIGHT.swapaxes(0, 1)[::-1, ::-1],
        8: UPRIGHT.swapaxes(0, 1)[:, ::-1],
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, dict[str, Any]] = {
        "WEBP": {"lossless": True},
        "JPEG": {"quality": 100, "subsampling": 0},
    }
    stored = Image.fromarray(turned[orientation].copy())
    ref = ImageRef(data=encoded(stored, kind, exif=exif, **options.get(kind, {})))
    assert image_size(ref) == (10, 6)
    difference = np.abs(pixels(ref, 10, 6).astype(int) - UPRIGHT).max()
    assert difference <= (6 if kind == "JPEG" else 0)


def test_modes_become_rgb_with_alpha_on_white() -> None:
    rgba = np.zeros((2, 2, 4), dtype=np.uint8)
    rgba[0, 0] = (255, 0, 0, 255)
    rgba[0, 1] = (255, 0, 0, 0)
    rgba[1, 0] = (0, 0, 0, 51)
    expected = np.full((2, 2, 3), 255, dtype=np.uint8)
    expected[0, 0] = (255, 0, 0)
    # One fifth of black over white.
    expected[1, 0] = 204
    assert np.array_equal(pixels(ImageRef(data=encoded(Image.fromarray(rgba))), 2, 2), expected)
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    found = pixels(ImageRef(data=encoded(palette, "GIF")), 2, 1)
    assert found.tolist() == [[[10, 20, 30], [40, 50, 60]]]
    found = pixels(ImageRef(data=encoded(palette, "PNG", transparency=0)), 2, 1)
    assert found.tolist() == [[[255, 255, 255], [40, 50, 60]]]
    grey = Image.fromarray(np.array([[7, 200]], dtype=np.uint8))
    for kind in ("L", "1", "CMYK"):
        found = pixels(ImageRef(data=encoded(grey.convert(kind), "TIFF")), 2, 1)
        assert found.tolist() == np.array(grey.convert(kind).convert("RGB")).tolist()
    deep = Image.fromarray(np.array([[256 * 9, 65535]], dtype=np.uint16))
    assert pixels(ImageRef(data=encoded(deep)), 2, 1).tolist() == [[[9] * 3, [255] * 3]]
    with pytest.raises(ConfigError, match="mode F; save it with 8 bits per channel"):
        pixels(ImageRef(data=encoded(Image.new("F", (2, 2)), "TIFF")), 2, 2)


def test_pixels_of_a_damaged_file_are_an_error_that_names_it(tmp_path: Path) -> None:
    photo = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = tmp_path / "photo.jpg"
    path.write_bytes(encoded(Image.fromarray(photo), "JPEG")[:-2000])
    ref = image_ref("photo.jpg", tmp_path)
    # The header is complete.
    assert image_size(ref) == (64, 64)
    with pytest.raises(ConfigError, match=r"image '.*photo\.jpg' cannot be read: .*truncated"):
        pixels(ref, 64, 64)
    with pytest.raises(ConfigError, match=r"of 40 bytes cannot be read.*on_bad_row=skip"):
        pixels(ImageRef(data=PNG[:40]), 10, 6)
    for data in (b"", b"not an image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=r"photo\.jpg' cannot be read: it is none of JPEG"):
            image_size(ref)
    with pytest.raises(ConfigError, match=r"does not exist \(did you mean .*photo\.jpg"):
        image_size(image_ref("picture.jpg", tmp_path))
    with pytest.raises(ConfigError, match="cannot be read: "):
        image_size(image_ref(".", tmp_path))


@pytest.mark.parametrize(
    ("size", "grid"),
    [((1, 1), (2, 2)), ((3, 3), (2, 2)), ((1, 200), (30, 2)), ((64, 64), (16, 16))],
)
def test_extreme_sizes(size: tuple[int, int], grid: tuple[int, int]) -> None:
    ref = ImageRef(data=encoded(Image.new("RGB", size)))
    assert image_grid(ref, SETTINGS, 4) == (1, *grid)


def test_too_long_images_name_file_and_size(tmp_path: Path) -> None:
    Image.new("RGB", (1, 500)).save(tmp_path / "line.png")
    message = r"line\.png': its size is 1x500, and one side may be 200 times the other, not 500"
    with pytest.raises(ConfigError, match=message):
        image_grid(image_ref("line.png", tmp_path), SETTINGS, 4)
    # A PNG header of 20,000 x 20,000 pixels, as a decompression bomb has.
    bomb = bytearray(PNG)
    bomb[16:24] = (20_000).to_bytes(4, "big") * 2
    bomb[29:33] = zlib.crc32(bytes(bomb[12:29])).to_bytes(4, "big")
    with pytest.raises(ConfigError, match=r"cannot be read: Image size \(400000000 pixels\)"):
        image_size(ImageRef(data=bytes(bomb)))


def test_sizes_of_many_images_need_headers_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 references to files of a megapixel."""

    def refuse(self: Any) -> None:
        raise AssertionError("pixels were decoded")

    Image.new("RGB", (1024, 1024)).save(tmp_path / "0.jpg")
    for number in range(1, 100):
        (tmp_path / f"{number}.jpg").hardlink_to(tmp_path / "0.jpg")
    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    Image.init()
    tracemalloc.start()
    refs = [image_ref(f"{number % 100}.jpg", tmp_path) for number in range(10_000)]
    grids = {ref: image_grid(ref, SETTINGS, 4) for ref in refs[:100]}
    rows = [(RowImage(ref, grids[ref], 5, 64),) for ref in refs]
    assert tracemalloc.get_traced_memory()[0] < 20e6
    tracemalloc.stop()
    assert {rows[0][0].grid} == set(grids.values()) == {(1, 16, 16)}
    assert {image_size(ref) for ref in refs} == {(1024, 1024)}


def test_pillow_is_imported_with_the_first_image_only() -> None:
    script = """
import sys
from nemo_like.data import image_rows, image_tokens, images
from nemo_like.models import vision
images.image_ref("a.png", images.Path("."))
assert "PIL" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
