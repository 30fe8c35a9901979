"""Which files of a directory are a model's, and whether its output embedding is its own."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemo_like.models.adapters import stored_layers
from nemo_like.models.spec import load_spec
from nemo_like.models.weight_files import has_own_head, weight_paths, weights_digest
from tests.policy.tiny import save_tiny_model


def test_files_outside_the_index_are_not_of_the_model(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    spec = load_spec(str(model))
    expected = stored_layers(model, spec), weights_digest(weight_paths(model))
    extra = {"layers.0.attention.wq.weight": torch.ones(4, 4)}
    for name in ("consolidated", "adapter_model", "model-00001-of-00001"):
        save_file(extra, model / f"{name}.safetensors")
        assert (stored_layers(model, spec), weights_digest(weight_paths(model))) == expected
    (model / "model.safetensors").rename(model / "a.safetensors")
    assert weight_paths(model) == []
    weight_map = {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert weight_paths(model) == [model / "a.safetensors", model / "b.safetensors"]
    index.write_text("[]")
    with pytest.raises(ValueError, match="is not an index of weight files"):
        weight_paths(model)


@pytest.mark.parametrize("prefix", ["", "model.language_"])
@pytest.mark.parametrize("position", [None, 0, 2047])
def test_one_other_value_makes_a_head_of_its_own(
    position: int | None, prefix: str, tmp_path: Path
) -> None:
    embedding = torch.rand(64, 32)
    head = embedding.clone()
    if position is not None:
        head.view(-1)[position] += 1
    tensors = {"model.embed_tokens.weight": embedding, f"{prefix}lm_head.weight": head}
    # The copy in a layer for multi-token prediction is not the embedding.
    tensors["model.layers.2.embed_tokens.weight"] = torch.rand(64, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert has_own_head(tmp_path) == (position is not None)
    del tensors[f"{prefix}lm_head.weight"]
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    assert not has_own_head(tmp_path)
