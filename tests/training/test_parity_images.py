"""`check parity` of models with a vision tower, on rows with images."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from nemo_like.commands.check_model_type import check_type, opened_pool
from nemo_like.config.schema import ParallelConfig
from nemo_like.data.images import image_size
from nemo_like.models.tiny import save_tiny_copy, type_config
from nemo_like.models.vision import VISION_TYPES
from nemo_like.training.parity import random_batch, transformers_loss

COLUMNS = ("packed", "tp 2", "tp 2, sequence", "cp 2", "export", "LoRA", "padded")


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with opened_pool() as opened:
        yield opened


def test_rows_have_images_and_the_loss_depends_on_them(tmp_path: Path) -> None:
    model = save_tiny_copy(type_config("qwen3_vl"), ParallelConfig(), tmp_path)
    batch = random_batch(model.config)
    assert {len(images) for images in batch["images"]} == {0, 1, 3}
    for ids, mask, images in zip(
        batch["input_ids"], batch["token_mask"], batch["images"], strict=True
    ):
        places = [np.arange(image.start, image.end) for image in images]
        expected = np.concatenate([np.empty(0, np.int64), *places])
        assert np.flatnonzero(ids == model.config.image_token_id).tolist() == expected.tolist()
        assert not mask[expected].any()
        for image in images:
            _, rows, columns = image.grid
            assert image_size(image.image) == (4 * columns, 4 * rows)
    transformers_loss(model, batch).backward()
    tower = [p.grad for name, p in model.named_parameters() if "visual." in name]
    assert all(grad is not None and grad.isfinite().all() for grad in tower)
    largest = max(float(grad.abs().max()) for grad in tower if grad is not None)
    assert largest > 1e-4


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", VISION_TYPES)
def test_layouts_are_equal_to_transformers(model_type: str, pool: ProcessPoolExecutor) -> None:
    columns = COLUMNS if model_type == "qwen3_vl" else ("packed",)
    results = check_type(model_type, pool, columns)
    padded = results.pop("padded", "no: padded rows")
    assert padded.startswith("no: ") and "padded rows" in padded
    assert set(results.values()) == {"yes"}, results
