"""`check parity` of models with a vision tower, on rows with images."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.commands.check_model_type import TypeCheck, check_type, opened_pool
from nemo_like.data.images import image_size
from nemo_like.models.vision import VISION_TYPES
from nemo_like.policy.dtensor import vision
from nemo_like.policy.inputs.images import VisionInputs
from nemo_like.training.parity import random_batch, transformers_loss
from tests.exhaustive import usually

COLUMNS = ("packed", "tp 2", "tp 2, sequence", "cp 2", "export", "LoRA", "padded")


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with opened_pool() as opened:
        yield opened


def test_rows_have_images_and_the_loss_depends_on_them(
    tmp_path: Path, pool: ProcessPoolExecutor
) -> None:
    check = TypeCheck("qwen3_vl", tmp_path, pool)
    model = check._model
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
    assert float(torch.stack([grad.abs().max() for grad in tower]).max()) > 1e-4


@pytest.mark.parametrize("model_type", usually(VISION_TYPES, "qwen2_5_vl"))
def test_layouts_are_equal_to_transformers(model_type: str, pool: ProcessPoolExecutor) -> None:
    columns = COLUMNS if model_type == "qwen3_vl" else ("packed",)
    results = check_type(model_type, pool, columns)
    padded = results.pop("padded", "no: padded rows")
    assert padded.startswith("no: ") and "padded rows" in padded
    assert set(results.values()) == {"yes"}, results


def test_a_wrong_place_of_features_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own_places = vision.hidden_states

    def reversed_features(
        model: Any, ids: Any, positions: Any, inputs: VisionInputs | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if inputs is not None:
            inputs = replace(inputs, features=inputs.features.flip(0))
        return own_places(model, ids, positions, inputs, *args, **kwargs)

    monkeypatch.setattr(vision, "hidden_states", reversed_features)
    # Forked, so that the rank has the changed function.
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as own:
        results = check_type("qwen2_5_vl", own, ("packed",))
    assert results["packed"].startswith("WRONG: difference of ")
