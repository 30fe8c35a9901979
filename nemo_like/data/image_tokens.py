"""Image tokens in token ids: expansion, truncation, and positions in three dimensions.

A chat template writes one image token per image, which is repeated once per feature of the tower.
The first image tokens of a row are those of its images; later ones were sampled, and are tokens
like any other. Grids are int64 [n, 3], see `models.vision`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nemo_like.config.errors import ConfigError, counted
from nemo_like.data.jagged import EncodedRow


def expand_images(row: EncodedRow, counts: Sequence[int], image_token: int) -> EncodedRow:
    """Repeat the i-th image token of a row `counts[i]` times, without loss on any of them.

    Raises ConfigError unless the row has one image token per image. Example: ids [5, 9, 6] with
    image token 9 and one image of 3 features become [5, 9, 9, 9, 6].
    """
    is_image = row.input_ids == image_token
    num_tokens = np.count_nonzero(is_image)
    if num_tokens != len(counts):
        raise ConfigError(
            f"the row has {counted(len(counts), 'image')}, and its text has"
            f" {counted(int(num_tokens), 'image token')} (id {image_token}); use a chat template"
            " that writes one for each image part"
        )
    repeats = np.ones(len(row.input_ids), dtype=np.int64)
    repeats[is_image] = counts
    mask = np.where(is_image, 0, row.token_mask).astype(row.token_mask.dtype)
    return EncodedRow(np.repeat(row.input_ids, repeats), np.repeat(mask, repeats))


def image_mask(ids: np.ndarray, num_features: int, image_token: int) -> np.ndarray:
    """Return the tokens of ids [L] that stand for the features of a row's images, bool [L]."""
    is_image = ids == image_token
    return is_image & (np.cumsum(is_image) <= num_features)


class CutRow(NamedTuple):
    """What remains of a truncated row."""

    num_tokens: int
    num_images: int


def truncated(ids: np.ndarray, counts: Sequence[int], image_token: int, max_tokens: int) -> CutRow:
    """Return how much of a row of expanded ids [L] to keep so that no image is cut.

    A row ends before the first image that `max_tokens` would cut. `counts` has the image tokens of
    each image.
    """
    starts, stops = image_spans(ids, counts, image_token)
    num_images = int(np.count_nonzero(stops <= max_tokens))
    end = min(len(ids), max_tokens)
    if num_images < len(stops):
        end = min(end, int(starts[num_images]))
    return CutRow(end, num_images)


def image_spans(
    ids: np.ndarray, counts: Sequence[int] | np.ndarray, image_token: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return first and end position of the tokens of each image in ids [L], int64 [n] each.

    Raises ValueError unless the tokens of each image are consecutive.
    """
    sizes = np.asarray(counts, dtype=np.int64)
    ends = np.cumsum(sizes)
    positions = np.flatnonzero(image_mask(ids, int(sizes.sum()), image_token))
    if len(positions) == sizes.sum():
        starts = positions[ends - sizes]
        if np.array_equal(positions[ends - 1], starts + sizes - 1):
            return starts, starts + sizes
    raise ValueError(
        f"{len(positions)} image tokens (id {image_token}) of the row are not consecutive runs of"
        f" {sizes.tolist()} tokens, those of its images"
    )


def rope_positions(
    ids: np.ndarray, grids: np.ndarray, image_token: int, merge_size: int
) -> np.ndarray:
    """Return positions in time, height and width of the tokens of a row, int64 [3, L].

    A text token has the next position in all three. An image has the position after the text
    before it in time, and counts rows and columns from there; the text after it continues behind
    the larger side (multimodal rotary embedding, arXiv:2409.12191, section 2.1).
    """
    sides = grids // [1, merge_size, merge_size]
    starts, stops = image_spans(ids, sides.prod(axis=1), image_token)
    steps = np.ones(len(ids) + 1, dtype=np.int64)
    for start, stop in zip(starts, stops, strict=True):
        steps[start:stop] = 0
    # The first token behind an image.
    advance = np.zeros_like(steps)
    advance[stops] = sides[:, 1:].max(axis=1, initial=0)
    first = np.concatenate([[0], np.cumsum(steps)[:-1]]) + np.cumsum(advance)
    result = np.tile(first[:-1], (3, 1))
    for start, stop, side in zip(starts, stops, sides, strict=True):
        result[:, start:stop] += np.indices(tuple(side)).reshape(3, -1)
    return result
