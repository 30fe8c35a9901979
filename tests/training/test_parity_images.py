"""`check parity` of models with a vision tower, on rows with images."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.commands.check_model_type import check_type, opened_pool
from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.data.images import image_size
from nemo_like.models.tiny import save_tiny_copy, type_config
from nemo_like.models.vision import VISION_TYPES
from nemo_like.policy.inputs import images
from nemo_like.training.parity import random_batch, transformers_loss
from tests.training.test_parity_check import PACKED, compare, nothing
from tests.vision import tiny_vision_model

EXTRA = pytest.mark.exhaustive
COLUMNS = ("packed", "tp 2", "tp 2, sequence", "cp 2", "export", "LoRA", "padded")


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with opened_pool() as opened:
        yield opened


def test_rows_have_images_and_the_loss_depends_on_them(tmp_path: Path) -> None:
    model = save_tiny_copy(type_config("qwen3_vl"), ParallelConfig(), tmp_path)
    batch = random_batch(model.config)
    assert {len(own) for own in batch["images"]} == {0, 1, 3}
    for ids, mask, own in zip(
        batch["input_ids"], batch["token_mask"], batch["images"], strict=True
    ):
        places = [np.arange(image.start, image.end) for image in own]
        expected = np.concatenate([np.empty(0, np.int64), *places])
        assert np.flatnonzero(ids == model.config.image_token_id).tolist() == expected.tolist()
        assert not mask[expected].any()
        for image in own:
            _, rows, columns = image.grid
            assert image_size(image.image) == (4 * columns, 4 * rows)
    transformers_loss(model, batch).backward()
    tower = [p.grad for name, p in model.named_parameters() if "visual." in name]
    assert all(grad is not None and grad.isfinite().all() for grad in tower)
    largest = max(float(grad.abs().max()) for grad in tower if grad is not None)
    assert largest > 1e-4


def one_dimensional_positions() -> None:
    """Give image tokens the positions of texts."""

    def wrong(ids: np.ndarray, grids: np.ndarray, image_token: int, merge_size: int) -> np.ndarray:
        return np.broadcast_to(np.arange(len(ids)), (3, len(ids)))

    images.rope_positions = wrong


@pytest.mark.parametrize("fault", [nothing, pytest.param(one_dimensional_positions, marks=EXTRA)])
def test_the_check_at_the_start_of_a_run_has_rows_with_images(tmp_path: Path, fault: Any) -> None:
    tiny_vision_model("qwen3_vl").config.save_pretrained(tmp_path / "model")
    policy = PolicyConfig(model_name=str(tmp_path / "model"), sequence_packing=PACKED)
    kind, text = compare(tmp_path, policy, ParallelConfig(), fault)
    if fault is nothing:
        assert (kind, text) == ("equal", "equal to transformers")
    else:
        assert kind == "different" and "model type qwen3_vl), trained for one step" in text


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", VISION_TYPES)
def test_layouts_are_equal_to_transformers(model_type: str, pool: ProcessPoolExecutor) -> None:
    columns = COLUMNS if model_type == "qwen3_vl" else ("packed",)
    results = check_type(model_type, pool, columns)
    padded = results.pop("padded", "no: padded rows")
    assert padded.startswith("no: ") and "padded rows" in padded
    assert set(results.values()) == {"yes"}, results
