"""A pack of rows with images equals the same rows one by one in plain transformers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_like.data.image_tokens import image_mask, rope_positions
from nemo_like.policy.dtensor.vision import VisionInputs, hidden_states, image_features, prepare
from tests.vision import FAMILIES, IMAGE_TOKEN, tiny_vision_model, true_float64

GRIDS = torch.tensor([[1, 6, 10], [1, 2, 2], [1, 4, 12], [1, 8, 4]])
"""Of the unique images."""
IMAGES = [[], [0], [1, 2, 3], [3], [0, 1]]
"""The images of each row; two rows have one in common with another."""
COUNTS = (GRIDS.prod(1) // 4).tolist()


class Rows(NamedTuple):
    ids: list[np.ndarray]
    patches: list[Tensor]
    """float64 [N, 96] of each unique image."""

    @property
    def num_trained(self) -> int:
        return sum(len(ids) - 1 for ids in self.ids)


def random_rows() -> Rows:
    rng = np.random.default_rng(0)
    ids = []
    for images in IMAGES:
        parts = [rng.integers(7, 60, rng.integers(2, 6))]
        for image in images:
            parts += [np.full(COUNTS[image], IMAGE_TOKEN), rng.integers(7, 60, 3)]
        ids.append(np.concatenate(parts))
    patches = [torch.from_numpy(rng.normal(size=(int(grid.prod()), 96))) for grid in GRIDS]
    return Rows(ids, patches)


def plain_loss(model: Any, rows: Rows, row: int, dtype: torch.dtype) -> Tensor:
    """The loss of one row with nothing but the forward of transformers."""
    ids = torch.from_numpy(rows.ids[row])[None]
    options: dict[str, Any] = {}
    if IMAGES[row]:
        options["pixel_values"] = torch.cat([rows.patches[n] for n in IMAGES[row]]).to(dtype)
        options["image_grid_thw"] = GRIDS[IMAGES[row]]
        options["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    logits = model(input_ids=ids, **options, use_cache=False).logits[0]
    return F.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum") / rows.num_trained


def place_features(
    rows: Sequence[np.ndarray],
    images: Sequence[Sequence[int]],
    image_tokens: np.ndarray,
    image_token: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return positions of image tokens in packed rows and the feature of each, int64 [F] each.

    Features are counted over the unique images, which have `image_tokens`, int64 [n].
    """
    ends = np.cumsum(image_tokens)
    positions = [np.empty(0, np.int64)]
    features = [np.empty(0, np.int64)]
    start = 0
    for ids, used in zip(rows, images, strict=True):
        own = [np.arange(ends[image] - image_tokens[image], ends[image]) for image in used]
        numbers = np.concatenate([np.empty(0, np.int64), *own])
        found = np.flatnonzero(image_mask(ids, len(numbers), image_token))
        assert len(found) == len(numbers)
        positions.append(start + found)
        features.append(numbers)
        start += len(ids)
    return np.concatenate(positions), np.concatenate(features)


def packed_loss(
    model: Any, rows: Rows, dtype: torch.dtype, *, has_text_positions: bool = False
) -> Tensor:
    """The loss of all rows in one pack, with each unique image once.

    `has_text_positions` is the mistake of giving images the positions of texts.
    """
    lengths = np.array([len(ids) for ids in rows.ids])
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    places, features = place_features(rows.ids, IMAGES, np.array(COUNTS), IMAGE_TOKEN)
    vision = VisionInputs(
        torch.cat(rows.patches).to(dtype),
        GRIDS,
        torch.from_numpy(places),
        torch.from_numpy(features),
    )
    positions = [
        rope_positions(ids, GRIDS[images].numpy().reshape(-1, 3), IMAGE_TOKEN, 2)
        for ids, images in zip(rows.ids, IMAGES, strict=True)
    ]
    if has_text_positions:
        positions = [np.broadcast_to(np.arange(length), (3, length)) for length in lengths]
    ids = torch.from_numpy(np.concatenate(rows.ids))
    hidden = hidden_states(
        model,
        ids[None],
        torch.from_numpy(np.concatenate(positions, axis=1))[:, None],
        vision,
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=int(lengths.max()),
    )
    logits = model.lm_head(hidden[0])
    has_next = np.ones(len(ids), dtype=bool)
    has_next[bounds[1:] - 1] = False
    loss = F.cross_entropy(logits[has_next], ids.roll(-1)[has_next], reduction="sum")
    return loss / rows.num_trained


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {name: grad for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_pack_equals_its_rows_in_transformers(
    model_type: str, dtype: torch.dtype, limit: float
) -> None:
    rows = random_rows()
    with true_float64() if dtype == torch.float64 else nullcontext():
        model = tiny_vision_model(model_type).to(dtype)
        losses = []
        for row in range(len(IMAGES)):
            loss = plain_loss(model, rows, row, dtype)
            loss.backward()
            losses.append(float(loss.detach()))
        expected = gradients(model)
        prepare(model)
        loss = packed_loss(model, rows, dtype)
        loss.backward()
        found = gradients(model)
    assert float(loss.detach()) == pytest.approx(sum(losses), rel=limit)
    assert found.keys() == expected.keys()
    assert any(name.startswith("model.visual.patch_embed.proj") for name in found)
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for name, grad in expected.items():
        scale = max(float(grad.abs().max()), 1e-3 * largest)
        assert float((found[name] - grad).abs().max()) <= limit * scale, name


@pytest.mark.parametrize("model_type", FAMILIES)
def test_positions_of_texts_would_be_noticed(model_type: str) -> None:
    rows = random_rows()
    model = tiny_vision_model(model_type)
    prepare(model)
    packed_loss(model, rows, torch.float32).backward()
    expected = gradients(model)
    packed_loss(model, rows, torch.float32, has_text_positions=True).backward()
    found = gradients(model)
    name = "model.language_model.layers.0.self_attn.q_proj.weight"
    assert (found[name] - expected[name]).norm() > 0.01 * expected[name].norm()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_frozen_tower_keeps_nothing_and_others_learn_the_same(model_type: str) -> None:
    rows = random_rows()
    model = tiny_vision_model(model_type)
    prepare(model)
    packed_loss(model, rows, torch.float32).backward()
    expected = gradients(model)
    model.model.visual.requires_grad_(False)
    features = image_features(model, torch.cat(rows.patches).float(), GRIDS)
    assert not features.last.requires_grad
    assert len(features.deep) == (2 if model_type == "qwen3_vl" else 0)
    packed_loss(model, rows, torch.float32).backward()
    found = gradients(model)
    assert found.keys() == {name for name in expected if ".visual." not in name}
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name])
    # The projector alone is trained through its own layers.
    model.model.visual.merger.requires_grad_(True)
    packed_loss(model, rows, torch.float32).backward()
    towers = {name for name in gradients(model) if ".visual." in name}
    assert towers == {name for name in expected if ".visual.merger." in name}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_rows_without_images_do_not_use_the_tower(model_type: str) -> None:
    model = tiny_vision_model(model_type)
    ids = torch.randint(7, 60, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = [
            model.model(each[None]).last_hidden_state[0] for each in (ids[0, :8], ids[0, 8:])
        ]
        prepare(model)
        positions = torch.cat([torch.arange(8), torch.arange(12)]).expand(3, 1, -1)
        bounds = torch.tensor([0, 8, 20], dtype=torch.int32)
        del model.model.visual
        found = hidden_states(model, ids, positions, None, cu_seqlens=bounds, max_seqlen=12)
    torch.testing.assert_close(found[0], torch.cat(expected), atol=1e-5, rtol=1e-5)
