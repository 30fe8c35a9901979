"""Places of images in the messages of a row, in the forms that data sets have.

* Parts, as in OpenAI's format: `{"type": "image_url", "image_url": {"url": ...}}`, or
  `{"type": "image", "image": ...}`.
* `<image>` in texts, and the images in a column `images` or `image` (ShareGPT, LLaVA,
  LLaMA-Factory). A part `{"type": "image"}` without a source takes the next one as well.
* The column alone (TRL): the images stand before the text of the first user turn.

Only in these forms a text means an image: `<image>` in a row without such a column is a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nemo_like.config.errors import ConfigError, counted
from nemo_like.data.images import ImageRef, image_ref
from nemo_like.data.messages import Message, parsed_items
from nemo_like.data.row_files import Row, shown_json

COLUMNS = ("images", "image")
PLACEHOLDER = "<image>"
IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
"""What the chat templates of the supported models write for an image; stands for it in a row."""
IMAGE_PART: dict[str, str] = {"type": "image"}
"""A part for the chat template."""


class ImageMessages(NamedTuple):
    """The messages of a row with its images.

    A content with images is a list of parts, `IMAGE_PART` or a text; another content is a text.
    Example: `[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]`
    and one reference.
    """

    messages: list[Message]
    images: tuple[ImageRef, ...]
    """In the order of the parts."""


def column_images(row: Row) -> list[Any] | None:
    """Return the images of the row's column, as in the file; None without a column.

    Raises ConfigError for two columns.
    """
    found = [name for name in COLUMNS if row.get(name) is not None]
    if len(found) > 1:
        raise ConfigError(f"the row has both {found[0]!r} and {found[1]!r}; remove one of them")
    if not found:
        return None
    value = row[found[0]]
    return parsed_items(value) if isinstance(value, list) else [value]


def place_images(
    messages: Sequence[Message], values: Sequence[Any] | None, root: Path, column: str = "messages"
) -> ImageMessages:
    """Return the messages of a column with image parts, and the references of the images.

    `values` are those of `column_images`; paths are relative to `root`. Raises ConfigError that
    names message and part, without the location of the row, for a bad part or reference and for
    numbers that differ.
    """
    contents = [
        _parts(message, f"{column}[{index}].content", cuts=values is not None, root=root)
        for index, message in enumerate(messages)
    ]
    values = values or []
    num_places = sum(part is None for parts in contents for part in parts)
    has_sources = any(isinstance(part, ImageRef) for parts in contents for part in parts)
    roles = [message["role"] for message in messages]
    if values and "user" in roles and num_places == 0 and not has_sources:
        contents[roles.index("user")][:0] = [None] * len(values)
        num_places = len(values)
    if num_places != len(values):
        raise ConfigError(
            f"the row has {counted(len(values), 'image')} in its column and"
            f" {counted(num_places, 'place')} for them"
            f" ({PLACEHOLDER} in texts of the system, the user and tools, and parts of type image"
            " without a source); correct one of them"
        )
    references = iter(
        [_reference(value, f"images[{number}]", root) for number, value in enumerate(values)]
    )
    images: list[ImageRef] = []
    result: list[Message] = []
    for message, parts in zip(messages, contents, strict=True):
        images += [part or next(references) for part in parts if not isinstance(part, str)]
        content: Any = "".join(part for part in parts if isinstance(part, str))
        if not all(isinstance(part, str) for part in parts):
            content = [
                {"type": "text", "text": part} if isinstance(part, str) else dict(IMAGE_PART)
                for part in parts
            ]
        result.append({**message, "content": content} if "content" in message else {**message})
    return ImageMessages(result, tuple(images))


def with_placeholders(messages: Sequence[Message]) -> list[Message]:
    """Return messages of a row of `ImageEncoder.placed` with `<image>` for each image."""
    return [_with_placeholders(message) for message in messages]


def _with_placeholders(message: Message) -> Message:
    text = message.get("content")
    if not isinstance(text, str) or IMAGE_TEXT not in text:
        return message
    return {**message, "content": text.replace(IMAGE_TEXT, PLACEHOLDER)}


def _parts(
    message: Mapping[str, Any], where: str, *, cuts: bool, root: Path
) -> list[str | ImageRef | None]:
    """Return the texts, images, and places of images (None) of a content.

    With `cuts` placeholders in texts are places. In an answer they are texts about the format.
    """
    content = message.get("content") or ""
    is_answer = message["role"] == "assistant"
    parts: list[str | ImageRef | None] = []
    for index, part in enumerate(parsed_items(content) if isinstance(content, list) else [content]):
        place = f"{where}[{index}]" if isinstance(content, list) else where
        text = part if isinstance(part, str) else _text(part, place)
        if text is None and is_answer:
            raise ConfigError(f"{place} is an image, which an assistant does not write; remove it")
        if text is None:
            parts.append(_source(part, place, root))
            continue
        pieces = text.split(PLACEHOLDER) if cuts and not is_answer else [text]
        for number, piece in enumerate(pieces):
            parts += [None] * (number > 0)
            # A text beside an image is not empty.
            parts += [piece] * (bool(piece) or len(pieces) == 1)
    return parts


def _text(part: Any, place: str) -> str | None:
    """Return the text of a part, None for an image. Raises ConfigError for another part."""
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind not in ("image", "image_url"):
        raise ConfigError(
            f"{place} is {shown_json(part)}, not a part of type text, image or image_url; remove"
            " the row or the part"
        )
    return None


def _source(part: Any, place: str, root: Path) -> ImageRef | None:
    """Return the image of a part, None without a source."""
    for name in ("image_url", "image"):
        if part.get(name) is not None:
            return _reference(part[name], place, root)
    # The keys of a struct may be those of the part.
    has_source = any(part.get(name) is not None for name in ("url", "path", "bytes"))
    return _reference(part, place, root) if has_source else None


def _reference(value: Any, place: str, root: Path) -> ImageRef:
    try:
        return image_ref(value, root)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
