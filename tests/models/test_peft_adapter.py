"""Adapters that a run cannot start from are refused with the reason and the fix."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import AdapterConfig
from nemo_like.models.adapters import check_adapter
from nemo_like.policy.lora import open_initial, stored_head

NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")
LAYERS: dict[str, tuple[int, ...]] = dict.fromkeys(NAMES, (6, 8))
"""(outputs, inputs) by name."""
SETTINGS: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj", "down_proj"],
    "lora_dropout": 0.05,
    "modules_to_save": None,
    "rank_pattern": {},
}


def write(directory: Path, layers: Iterable[str], **settings: Any) -> AdapterConfig:
    """An adapter of these layers, and the config that fits it."""
    directory.mkdir()
    tensors = {}
    for layer in layers:
        tensors[f"base_model.model.{layer}.lora_A.weight"] = torch.randn(2, 8)
        tensors[f"base_model.model.{layer}.lora_B.weight"] = torch.randn(6, 2)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))
    return AdapterConfig(
        enabled=True,
        rank=2,
        alpha=4.0,
        target_modules=("q_proj", "down_proj"),
        adapter_path=str(directory),
    )


def test_an_adapter_with_the_settings_of_the_config_is_accepted_and_read(tmp_path: Path):
    lora = write(tmp_path / "adapter", LAYERS)
    check_adapter(lora, {}, "vocabulary")
    check_adapter(lora, LAYERS | {"model.layers.0.self_attn.k_proj": (4, 8)}, "vocabulary")
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in LAYERS:
        shapes[f"{layer}.lora_A.weight"] = (2, 8)
        shapes[f"{layer}.lora_B.weight"] = (6, 2)
    name = f"{NAMES[0]}.lora_B.weight"
    with open_initial(lora, shapes, seed=0) as read:
        full = read(name, (0, 0), (6, 2))
        assert full.any()
        assert torch.equal(read(name, (2, 1), (3, 1)), full[2:5, 1:])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[f"base_model.model.{name}"][5, 1] = float("nan")
    save_file(tensors, path)
    with (
        open_initial(lora, shapes, seed=0) as read,
        pytest.raises(ConfigError, match=rf"{name} has values that are NaN"),
    ):
        read(name, (0, 0), (6, 2))
    needed = r"lora_B\.weight as \(6, 2\), and the model needs \(7, 2\)"
    with pytest.raises(ConfigError, match=needed), open_initial(lora, shapes | {name: (7, 2)}, 0):
        pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "of the type IA3; only LORA"),
        ({"use_dora": True}, "use_dora True, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"modules_to_save": ["classifier", "score"]}, "the adapter of a reward model"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"bias": "all"}, "bias 'all'"),
        ({"layers_to_transform": [1]}, r"layers_to_transform \[1\], which is not supported"),
        ({"layers_pattern": "h"}, "layers_pattern 'h', which is not supported"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        (
            {"r": 8, "lora_alpha": 32},
            r"set policy.lora.rank to 8 \(now 2\), policy.lora.alpha to 32 \(now 4.0\)",
        ),
        ({"use_rslora": True}, r"policy.lora.use_rslora to true \(now false\)"),
    ],
)
def test_settings_without_a_counterpart_and_other_settings_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
):
    lora = write(tmp_path / "adapter", LAYERS, **settings)
    with pytest.raises(ConfigError, match=message):
        check_adapter(lora, {}, "vocabulary")


def test_the_score_head_of_an_adapter_is_read(tmp_path: Path):
    lora = write(tmp_path / "adapter", LAYERS, modules_to_save=["classifier", "score"])
    assert stored_head(lora, 8) == {}
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    head = torch.randn(1, 8)
    save_file(load_file(path) | {"base_model.model.score.weight": head}, path)
    check_adapter(lora, LAYERS, "scores")
    assert torch.equal(stored_head(lora, 8)["score.weight"], head)
    with pytest.raises(ConfigError, match=r"as \(1, 8\), and a reward model needs \(1, 16\)"):
        stored_head(lora, 16)
    other = write(tmp_path / "other", LAYERS, modules_to_save=["lm_head"])
    with pytest.raises(ConfigError, match=r"modules_to_save .*is not supported"):
        check_adapter(other, LAYERS, "scores")


def test_missing_files_and_other_layers_are_refused(tmp_path: Path):
    lora = write(tmp_path / "adapter", LAYERS)
    with pytest.raises(ConfigError, match="there is no directory"):
        check_adapter(
            AdapterConfig(enabled=True, adapter_path=str(tmp_path / "none")), {}, "vocabulary"
        )
    other = LAYERS | {"model.layers.1.self_attn.q_proj": (6, 8)}
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.q_proj\.lora_A\.weight as None"):
        check_adapter(lora, other, "vocabulary")
    needed = r"lora_A.* needs None; its layers are down_proj, q_proj: set policy.lora.target_m"
    with pytest.raises(ConfigError, match=needed):
        check_adapter(lora, {NAMES[0]: (6, 8)}, "vocabulary")
    (tmp_path / "model").mkdir()
    (tmp_path / "adapter").rename(tmp_path / "model" / "adapter")
    model = AdapterConfig(enabled=True, adapter_path=str(tmp_path / "model"))
    with pytest.raises(ConfigError, match="the adapter of this model is in"):
        check_adapter(model, {}, "vocabulary")
    directory = tmp_path / "model" / "adapter"
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    moved = AdapterConfig(enabled=True, adapter_path=str(directory))
    with pytest.raises(ConfigError, match="save the adapter as safetensors"):
        check_adapter(moved, {}, "vocabulary")
    (directory / "adapter_model.bin").rename(directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text("[")
    with pytest.raises(ConfigError, match="is not a JSON object"):
        check_adapter(moved, {}, "vocabulary")
