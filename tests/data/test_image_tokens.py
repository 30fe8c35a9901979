"""Image tokens: expansion, truncation, and positions as transformers computes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_like.config.errors import ConfigError
from nemo_like.data.image_tokens import (
    expand_images,
    image_mask,
    image_spans,
    rope_positions,
    truncated,
)
from nemo_like.data.jagged import EncodedRow
from tests.vision import IMAGE_TOKEN, tiny_vision_model


def row_of(ids: list[int], mask: list[int]) -> EncodedRow:
    return EncodedRow(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8))


def test_image_tokens_are_repeated_without_loss() -> None:
    row = row_of([7, IMAGE_TOKEN, 8, IMAGE_TOKEN, 9], [0, 1, 0, 0, 1])
    found = expand_images(row, [2, 3], IMAGE_TOKEN)
    assert found.input_ids.tolist() == [7, 5, 5, 8, 5, 5, 5, 9]
    assert found.token_mask.tolist() == [0, 0, 0, 0, 0, 0, 0, 1]
    assert (found.input_ids.dtype, found.token_mask.dtype) == (np.int32, np.uint8)
    assert expand_images(row_of([7, 9], [0, 1]), [], IMAGE_TOKEN).input_ids.tolist() == [7, 9]
    message = r"the row has 1 image, and its text has 2 image tokens \(id 5\)"
    with pytest.raises(ConfigError, match=message):
        expand_images(row, [2], IMAGE_TOKEN)


def test_a_row_with_three_images_cut_anywhere_has_complete_images() -> None:
    counts = [2, 1, 4]
    ids = np.array([1, 5, 5, 2, 5, 3, 3, 5, 5, 5, 5, 4])
    for limit in range(len(ids) + 2):
        cut = truncated(ids, counts, IMAGE_TOKEN, limit)
        kept = ids[: cut.num_tokens]
        assert cut.num_tokens <= limit
        assert np.count_nonzero(kept == IMAGE_TOKEN) == sum(counts[: cut.num_images])
        if limit >= len(ids):
            assert cut == (len(ids), 3)
    # Nothing but the cut image and what follows it is lost.
    assert truncated(ids, counts, IMAGE_TOKEN, 10) == (7, 2)
    assert truncated(ids, counts, IMAGE_TOKEN, 5) == (5, 2)


def test_a_sampled_image_token_is_a_token() -> None:
    ids = np.array([1, 5, 5, 2, 5, 3])
    assert image_mask(ids, 2, IMAGE_TOKEN).tolist() == [False, True, True, False, False, False]
    grids = np.array([[1, 2, 4]])
    positions = rope_positions(ids, grids, IMAGE_TOKEN, 2)
    assert positions.tolist() == [[0, 1, 1, 3, 4, 5], [0, 1, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    for counts in ([3], [4], [1, 2]):
        with pytest.raises(ValueError, match="are not consecutive runs of"):
            image_spans(
                np.array([1, 5, 5, 2, 5] if counts != [1, 2] else [5, 2, 5, 2, 5]), counts, 5
            )


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_transformers(model_type: str) -> None:
    """500 random rows of each family: 0 to 4 images, texts between them."""
    model = tiny_vision_model(model_type).model
    rng = np.random.default_rng(0)
    for _ in range(500):
        num_images = int(rng.integers(0, 5))
        grids = np.ones((num_images, 3), dtype=np.int64)
        grids[:, 1:] = 2 * rng.integers(1, 9, (num_images, 2))
        parts = [rng.integers(7, 60, rng.integers(0 if not num_images else 1, 9) + 1)]
        for grid in grids:
            parts.append(np.full(grid.prod() // 4, IMAGE_TOKEN))
            parts.append(rng.integers(7, 60, rng.integers(1, 9)))
        ids = np.concatenate(parts)
        types = torch.from_numpy((ids == IMAGE_TOKEN).astype(np.int32))
        expected, _ = model.get_rope_index(
            torch.from_numpy(ids)[None], types[None], image_grid_thw=torch.from_numpy(grids)
        )
        assert np.array_equal(rope_positions(ids, grids, IMAGE_TOKEN, 2), expected[:, 0].numpy())
