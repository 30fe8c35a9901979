"""Images of a model's rows in token ids: their texts before the chat template, their tokens after.

Rows are stored with a text in the place of each image, so that templates, loss masks and checks
need not know about images. The tokenizer makes one image token of it, which is repeated then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.chat_template import ChatTemplate
from nemo_like.data.image_rows import COLUMNS, IMAGE_PART, IMAGE_TEXT, column_images, place_images
from nemo_like.data.image_tokens import expand_images
from nemo_like.data.images import ImageRef, RowImage, image_grid, image_ref, image_size
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.messages import Message
from nemo_like.data.row_files import Row
from nemo_like.models.vision import ImageSettings, VisionSpec

_PROMPTS = ("messages", "prompt", "question")
"""Columns that may have images."""
_PAIR = ("chosen", "rejected")
"""Columns with the prompt of a preference pair, in rows without one of the others."""


@dataclass(frozen=True)
class ImageEncoder:
    """Places the images of rows, and encodes them."""

    spec: VisionSpec
    settings: ImageSettings
    root: Path | None
    """`data.image_root`."""

    def placed(self, row: Row, folder: Path) -> Row:
        """Return a row with texts for images and their references in `images`.

        Paths are relative to `data.image_root`, or to `folder`. A row without images is returned
        itself. Raises ConfigError for bad images, and for images outside of a conversation.
        """
        values = column_images(row)
        contents = _conversations(row)
        is_plain = values is None and not any(map(_has_image_part, contents.values()))
        # The format refuses a column that is no list of messages.
        if is_plain or not all(map(_are_messages, contents.values())):
            return row
        if not contents:
            raise ConfigError(
                "the row has images, and no conversation that they are part of; write it in a"
                " column messages, or in prompt and completion"
            )
        placed = {
            column: place_images(content, values, self.root or folder, column)
            for column, content in contents.items()
        }
        images, *more = [each.images for each in placed.values()]
        if any(other != images for other in more):
            raise ConfigError(
                f"{' and '.join(placed)} have different images, but a pair compares completions of"
                " one prompt; give both the same images"
            )
        row = {name: value for name, value in row.items() if name not in COLUMNS}
        for column, each in placed.items():
            row[column] = [_with_texts(message) for message in each.messages]
        return {**row, "images": [each.stored() for each in images]}

    def check_template(self, template: ChatTemplate) -> None:
        """Raise ConfigError if a chat template does not write `IMAGE_TEXT` for an image."""
        parts: list[Any] = [IMAGE_PART, {"type": "text", "text": "?"}]
        texts = []
        for content in (parts, f"{IMAGE_TEXT}?"):
            messages = [{"role": "user", "content": content}]
            texts.append(template.render(messages) if template.exists else "")
        if not texts[0] or texts[0] != texts[1]:
            raise ConfigError(
                f"the chat template does not write {IMAGE_TEXT} for an image part of a user's"
                " message, so the images of rows would be lost: use the chat template of the"
                " original model"
            )

    def expand(self, encoded: EncodedRow, row: Row) -> EncodedRow:
        """Return the tokens of a row of `placed` with all tokens of its images.

        Raises ConfigError for an image that cannot be read, and for image tokens in its texts.
        """
        images = stored_images(row)
        if not images:
            return encoded
        positions = np.flatnonzero(encoded.input_ids == self.spec.image_token_id)
        if len(positions) == _num_images_before_last_answer(row):
            # The turns behind the last answer are not encoded.
            images = images[: len(positions)]
        grids = [image_grid(each, self.settings, self.spec.patch_size) for each in images]
        counts = self.spec.image_tokens(np.array(grids, dtype=np.int64).reshape(-1, 3))
        expanded = expand_images(encoded, counts.tolist(), self.spec.image_token_id)
        starts = positions + np.cumsum(counts - 1) - (counts - 1)
        values = zip(images, grids, starts.tolist(), counts.tolist(), strict=True)
        return expanded._replace(images=tuple(RowImage(*each) for each in values))

    def without_images(self, message: Mapping[str, Any]) -> Message:
        """Return a message of a row of `placed` without the texts of its images."""
        return {**message, "content": str(message.get("content") or "").replace(IMAGE_TEXT, "")}

    def shown(self, image: RowImage) -> str:
        """Describe an image. Example: `[image 640x480 = 391 tokens]`."""
        width, height = image_size(image.image)
        return f"[image {width}x{height} = {image.num_tokens} tokens]"


def stored_images(row: Mapping[str, Any]) -> list[ImageRef]:
    """Return the references of a row of `ImageEncoder.placed`."""
    return [image_ref(each, Path("/")) for each in row.get("images") or ()]


def _with_texts(message: Message) -> Message:
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    texts = [IMAGE_TEXT if part == IMAGE_PART else part["text"] for part in parts]
    return {**message, "content": "".join(texts)}


def _num_images_before_last_answer(row: Mapping[str, Any]) -> int:
    """Return the number of images of a row of `ImageEncoder.placed` that an answer follows."""
    column = next(iter(_conversations(row)))
    roles = [message["role"] for message in row[column]]
    last = len(roles)
    if column == "messages" and "assistant" in roles:
        last -= roles[::-1].index("assistant")
    texts = [str(message.get("content")) for message in row[column][:last]]
    return sum(text.count(IMAGE_TEXT) for text in texts)


def _conversations(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that may have images, a text as a turn of the user."""
    columns = [name for name in _PROMPTS if row.get(name) is not None][:1]
    if not columns:
        columns = [name for name in _PAIR if isinstance(row.get(name), list)]
    return {
        name: [{"role": "user", "content": row[name]}] if isinstance(row[name], str) else row[name]
        for name in columns
    }


def _has_image_part(content: Any) -> bool:
    """Return True for messages of which one has another part than texts."""
    parts: list[Any] = []
    for message in content if isinstance(content, list) else ():
        own = message.get("content") if isinstance(message, dict) else None
        parts += own if isinstance(own, list) else []
    return any("image" in str(part.get("type")) for part in parts if isinstance(part, dict))


def _are_messages(content: Any) -> bool:
    is_list = isinstance(content, list)
    return is_list and all(isinstance(each, dict) and "role" in each for each in content)
