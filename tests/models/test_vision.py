"""Sizes of images and the work of vision towers, compared with transformers and torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from nemo_like.config.errors import ConfigError
from nemo_like.models.spec import ModelSpec
from nemo_like.models.vision import ImageSettings, VisionSpec, planner_sizes
from tests.vision import FAMILIES, tiny_vision_model

LIMITS = {"qwen2_5_vl": (14, 56 * 56, 28 * 28 * 1280), "qwen3_vl": (16, 65536, 16777216)}
"""Model type -> patch size and limits of its image processor."""


def spec_of(model_type: str, patch_size: int = 4) -> VisionSpec:
    config = tiny_vision_model(model_type).config.to_dict()
    config["vision_config"]["patch_size"] = patch_size
    return VisionSpec.from_config(config)


@pytest.mark.parametrize("model_type", LIMITS)
def test_patches_are_those_of_the_image_processor(model_type: str) -> None:
    patch_size, min_pixels, max_pixels = LIMITS[model_type]
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch_size, size={"shortest_edge": min_pixels, "longest_edge": max_pixels}
    )
    settings = ImageSettings(min_pixels=min_pixels, max_pixels=max_pixels, factor=patch_size * 2)
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(0, np.log(8000), (3000, 2))).astype(int)
    num_extreme = 0
    for width, height in sizes.tolist():
        try:
            expected = smart_resize(height, width, 2 * patch_size, min_pixels, max_pixels)
        except ValueError:
            num_extreme += 1
            with pytest.raises(ConfigError, match=f"{width}x{height}, and one side may be 200"):
                settings.resized(width, height)
            continue
        assert settings.resized(width, height) == expected[::-1]
        frames, rows, columns = settings.grid(width, height, patch_size)
        number = processor.get_number_of_image_patches(height, width)
        assert frames == 1 and rows * columns == number
    assert 0 < num_extreme < 1500


@pytest.mark.parametrize("model_type", FAMILIES)
def test_parameters_are_those_of_transformers(model_type: str) -> None:
    model = tiny_vision_model(model_type)
    spec = ModelSpec.from_config(model.config)
    assert spec.num_params == sum(each.numel() for each in model.parameters())
    assert spec.vision_params == sum(each.numel() for each in model.model.visual.parameters())
    layer = model.model.language_model.layers[0]
    assert spec.layer_params == sum(each.numel() for each in layer.parameters())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_work_of_an_image_is_that_which_torch_counts(model_type: str) -> None:
    model = tiny_vision_model(model_type, attention="eager")
    spec = VisionSpec.from_config(model.config)
    # Windows of 4 patches: one image has parts of windows at its edges, one has none.
    grids = np.array([[1, 6, 10], [1, 8, 4], [1, 2, 2]])
    for grid in grids:
        patches = torch.zeros(int(grid.prod()), 3 * 2 * 4**2)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.model.visual(patches, grid_thw=torch.from_numpy(grid)[None])
        assert spec.flops(grid[None])[0] == counter.get_total_flops()
    assert spec.flops(grids).shape == (3,)
    assert spec.image_tokens(grids).tolist() == [15, 8, 1]


def test_real_towers_have_published_sizes() -> None:
    """Of Qwen2.5-VL-7B and Qwen3-VL-8B: forward work per image token at 1024x1024, by hand."""
    sizes: dict[str, dict[str, Any]] = {
        "qwen2_5_vl": {"hidden_size": 1280, "intermediate_size": 3420, "window_size": 112},
        "qwen3_vl": {"hidden_size": 1152, "intermediate_size": 4304, "depth": 27},
    }
    more = {"fullatt_block_indexes": [7, 15, 23, 31], "depth": 32, "patch_size": 14}
    sizes["qwen2_5_vl"] |= {"out_hidden_size": 3584} | more
    sizes["qwen3_vl"] |= {"out_hidden_size": 4096, "patch_size": 16}
    sizes["qwen3_vl"]["deepstack_visual_indexes"] = [8, 16, 24]
    # Products per patch in MFLOP, and attention of 4,096 patches in all layers.
    expected = {"qwen2_5_vl": 1285, "qwen3_vl": 906}
    for model_type, vision in sizes.items():
        common = {"num_heads": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
        config = {"model_type": model_type, "image_token_id": 1, "vision_config": vision | common}
        spec = VisionSpec.from_config(config)
        grid = np.array([[1, 64, 64]])
        layers = 27 if model_type == "qwen3_vl" else 4
        pairs = layers * 4096**2 + (spec.depth - layers) * 64 * 64**2
        attention = 4 * spec.hidden_size * pairs
        products = (spec.flops(grid)[0] - attention) / 4096 / 1e6
        assert products == pytest.approx(expected[model_type], rel=1e-3)
        assert spec.saved_bytes(recomputed=True) == 4 * spec.depth * 2 * spec.hidden_size


@pytest.mark.parametrize("model_type", FAMILIES)
def test_memory_of_the_backward_pass_is_that_of_autograd(model_type: str) -> None:
    model = tiny_vision_model(model_type, attention="sdpa", depth=12, hidden_size=128)
    spec = VisionSpec.from_config(model.config)
    grid = torch.tensor([[1, 16, 16]])
    patches = torch.randn(256, 3 * 2 * 4**2)
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return tensor

    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model.visual(patches, grid_thw=grid)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = sum(size for pointer, size in storages.items() if pointer not in weights)
    predicted = spec.saved_bytes(itemsize=4) * 64
    # The merger and small tensors of rotary embeddings are not counted.
    assert 0.8 < predicted / saved < 1.0


def test_sizes_of_rows_for_the_planner() -> None:
    sizes = planner_sizes(np.array([100, 40, 7]), np.array([60, 0, 3]), 1.5)
    assert sizes.tolist() == [190, 40, 12]
    assert planner_sizes(np.array([100]), np.array([60]), 0.0).tolist() == [100]


def test_settings_of_an_image_processor(tmp_path: Path) -> None:
    spec = spec_of("qwen2_5_vl", 14)
    Qwen2VLImageProcessorPil().save_pretrained(tmp_path)
    settings = ImageSettings.load(tmp_path, spec)
    assert settings == ImageSettings(min_pixels=3136, max_pixels=1003520, factor=28)
    limited = ImageSettings.load(tmp_path, spec, max_pixels=2000)
    assert (limited.min_pixels, limited.max_pixels) == (2000, 2000)
    path = tmp_path / "preprocessor_config.json"
    values = json.loads(path.read_text())
    # As older files have the limits.
    old = {name: value for name, value in values.items() if name != "size"}
    path.write_text(json.dumps(old | {"min_pixels": 4000, "max_pixels": 5000}))
    limits = ImageSettings.load(tmp_path, spec)
    assert (limits.min_pixels, limits.max_pixels) == (4000, 5000)
    for name, value in {"patch_size": 16, "resample": 2, "do_normalize": False}.items():
        path.write_text(json.dumps(values | {name: value}))
        with pytest.raises(ConfigError, match=f"preprocessor_config.json .*{name} is {value}"):
            ImageSettings.load(tmp_path, spec)
    path.unlink()
    with pytest.raises(ConfigError, match="copy the file from the original model"):
        ImageSettings.load(tmp_path, spec)
    with pytest.raises(ConfigError, match="at least 784, the pixels of one image token"):
        ImageSettings(min_pixels=1, max_pixels=700, factor=28)


def test_other_types_have_no_such_tower() -> None:
    config = {"model_type": "gemma3", "vision_config": {}}
    with pytest.raises(ConfigError, match="type gemma3, which cannot be trained with images"):
        VisionSpec.from_config(config)
