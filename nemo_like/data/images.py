"""Images of rows: references to files and bytes, their sizes without decoding, their pixels.

The driver has references only. `image_size` reads the header of a file, and `pixels` decodes it in
a worker. Pillow is imported on the first use. Images of the web are refused: a run could not be
repeated once they change.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import numpy as np

from nemo_like.config.errors import ConfigError, shortened, shown_path, similar_path_text
from nemo_like.data.row_files import shown_json
from nemo_like.models.vision import ImageSettings

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats of Pillow that are read. Others would start programs or read fonts."""
_ORIENTATION = 0x0112
_TRANSPOSED = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Orientation in EXIF -> how to turn the stored image; from 5 on its sides are exchanged."""
_MAX_SHOWN = 80
_MAX_SHOWN_PATH = 400


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image of a row: a file, or the bytes of one."""

    path: str = ""
    """Absolute path of the file; of bytes, its name in the data set."""
    data: bytes | None = None

    def __str__(self) -> str:
        name = f" {shortened(shown_path(Path(self.path)), _MAX_SHOWN_PATH)!r}" if self.path else ""
        size = "" if self.data is None else f" of {len(self.data):,} bytes"
        return f"image{name}{size}"

    def read(self) -> bytes:
        """Return the bytes of the file. Raises ConfigError if it cannot be read."""
        if self.data is not None:
            return self.data
        with _naming(self):
            return Path(self.path).read_bytes()

    def digest(self, settings: object = "") -> str:
        """Return a hash of the bytes and of the text of `settings`, for caches."""
        return hashlib.sha256(str(settings).encode() + b"\0" + self.read()).hexdigest()

    def stored(self) -> str:
        """Return a text of which `image_ref` makes an equal reference."""
        if self.data is None:
            return self.path
        return f"data:;base64,{base64.b64encode(self.data).decode()}"


class RowImage(NamedTuple):
    """An image in an encoded row."""

    image: ImageRef
    grid: tuple[int, int, int]
    """Frames, rows and columns of its patches."""
    start: int
    """Position of its first token in the row."""
    num_tokens: int

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + self.num_tokens


def image_ref(value: Any, root: Path) -> ImageRef:
    """Return the reference that a row has: a path, a `data:` or `file:` URI, or a struct.

    A struct is parquet's `{"bytes": ..., "path": ...}`, of which one may be null, or has one of
    `url`, `image` and `path`. Paths are relative to `root`. Files are not opened. Raises
    ConfigError without a location for other values, and for images of the web.
    """
    if isinstance(value, Mapping):
        name = value.get("path") or ""
        data = _struct_bytes(value.get("bytes"))
        if data is not None:
            return ImageRef(str(name), data)
        inner = name or value.get("url") or value.get("image")
        return image_ref(inner, root) if isinstance(inner, str) else _no_reference(value)
    if isinstance(value, bytes):
        return ImageRef(data=value)
    if not isinstance(value, str) or not value:
        return _no_reference(value)
    scheme = value.partition(":")[0].lower()
    if scheme == "data":
        return ImageRef(data=_decoded_uri(value))
    if scheme in ("http", "https", "ftp", "s3", "gs", "hf"):
        raise ConfigError(
            f"the image {shortened(value, _MAX_SHOWN)!r} is on the web: it is not downloaded,"
            " because a run could not be repeated once it changes; download the images and give"
            " their paths"
        )
    path = unquote(urlsplit(value).path) if scheme == "file" else value
    return ImageRef(str((root / Path(path).expanduser()).absolute()))


def _struct_bytes(value: Any) -> bytes | None:
    """Return the bytes of a struct, which a row of a parquet file has in hexadecimal digits."""
    if isinstance(value, Mapping):
        value = value.get("bytes")
    if isinstance(value, str):
        with suppress(ValueError):
            return bytes.fromhex(value)
    return value if isinstance(value, bytes) else None


def _no_reference(value: Any) -> ImageRef:
    raise ConfigError(
        f"{shown_json(value)} is not an image; give a path, a data: URI, or bytes in a parquet"
        ' file: {"bytes": ..., "path": ...}'
    )


def _decoded_uri(uri: str) -> bytes:
    """Return the bytes of a `data:` URI. Raises ConfigError."""
    head, separator, payload = uri.partition(",")
    try:
        if not separator:
            raise ValueError("there is no comma before the data")
        if not head.endswith(";base64"):
            return unquote_to_bytes(payload)
        return base64.b64decode(unquote_to_bytes(payload), validate=True)
    except (ValueError, binascii.Error) as error:
        shown = shortened(uri, _MAX_SHOWN)
        raise ConfigError(
            f"the image {shown!r} of {len(uri):,} characters is no data: URI ({error}); write"
            " data:image/png;base64,... with all of the file"
        ) from error


def image_size(ref: ImageRef) -> tuple[int, int]:
    """Return width and height as the image is shown, from the header of the file.

    No pixels are decoded. Raises ConfigError that names the file if it is missing or no image.
    """
    with _opened(ref) as image:
        width, height = image.size
        return (height, width) if _orientation(image) >= 5 else (width, height)


def image_grid(ref: ImageRef, settings: ImageSettings, patch_size: int) -> tuple[int, int, int]:
    """Return frames, rows and columns of an image's patches, from the header of the file.

    Raises ConfigError that names the file as `image_size`, and for an extreme size.
    """
    size = image_size(ref)
    try:
        return settings.grid(*size, patch_size)
    except ConfigError as error:
        raise ConfigError(f"{ref}: {error}") from error


def pixels(ref: ImageRef, width: int, height: int) -> np.ndarray:
    """Decode an image and resize it; uint8 [height, width, 3].

    It is rotated as EXIF requires, its alpha is composed with white, and other modes become RGB;
    of an animation it is the first frame. The resampling is bicubic, as in transformers' image
    processors. Raises ConfigError that names the file if it is missing, damaged or truncated.
    """
    from PIL import Image

    with _opened(ref) as image:
        orientation = _orientation(image)
        # Decodes; a truncated file fails here.
        image.load()
        shown = _as_rgb(image)
        if orientation in _TRANSPOSED:
            shown = shown.transpose(Image.Transpose[_TRANSPOSED[orientation]])
        if shown.size != (width, height):
            shown = shown.resize((width, height), Image.Resampling.BICUBIC)
        return np.asarray(shown)


def _as_rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode in ("I", "F"):
        raise ValueError(f"it has pixels of mode {image.mode}; save it with 8 bits per channel")
    if image.mode.startswith("I;16"):
        # A conversion by Pillow would clip all values above 255.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    """Return the orientation in the EXIF data before the pixels, 1 without.

    Pillow rotates TIFF itself. It would decode a PNG to find EXIF data behind the pixels.
    """
    from PIL import Image

    exif = Image.Exif()
    exif.load(image.info.get("exif", b""))
    found = exif.get(_ORIENTATION)
    return found if found in _TRANSPOSED else 1


@contextmanager
def _opened(ref: ImageRef) -> Iterator[Image.Image]:
    """Open an image; its header is read. Raises ConfigError."""
    from PIL import Image

    source = ref.path if ref.data is None else io.BytesIO(ref.data)
    with _naming(ref), Image.open(source, formats=FORMATS) as image:
        yield image


@contextmanager
def _naming(ref: ImageRef) -> Iterator[None]:
    """Raise ConfigError that names the image for what reading and decoding it raises."""
    try:
        yield
    except ConfigError:
        raise
    except FileNotFoundError as error:
        similar = similar_path_text(Path(ref.path))
        raise ConfigError(
            f"{ref} does not exist{similar}; correct its path, or set data.image_root to the"
            " directory that paths are relative to"
        ) from error
    # Damaged files raise errors of many kinds, of which Pillow documents few.
    except Exception as error:
        text = str(error) or type(error).__name__
        if type(error).__name__ == "UnidentifiedImageError":
            text = f"it is none of {', '.join(FORMATS)}"
        raise ConfigError(
            f"{ref} cannot be read: {shortened(text, 3 * _MAX_SHOWN)}; replace the file, or remove"
            " the row (data.on_bad_row=skip leaves it out)"
        ) from error
