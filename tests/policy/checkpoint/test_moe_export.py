"""An exported MoE model has the files that transformers writes; both forms of experts are
read.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.generation.requests import GenerationStart
from nemo_like.policy.checkpoint import hf_export as hf_directory
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from tests.policy.test_worker import PACKED
from tests.policy.tiny import MIXTURES, context


def _stored(directory: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for path in directory.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize("max_bytes", [1 << 30, 20_000])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_an_export_is_what_save_pretrained_writes(
    model_dir, tmp_path, monkeypatch, architecture, max_bytes
):
    monkeypatch.setattr(hf_directory, "MAX_FILE_BYTES", max_bytes)
    worker = DTensorPolicyWorker(
        context(), config=dataclasses.replace(PACKED, model_name=model_dir(architecture))
    )
    worker.export_hf(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(model_dir(architecture))
    model.save_pretrained(tmp_path / "by transformers")
    found, expected = _stored(tmp_path / "hf"), _stored(tmp_path / "by transformers")
    assert found.keys() == expected.keys()
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    up_proj = "mlp.experts.3.up_proj"
    if architecture == "mixtral":
        up_proj = "block_sparse_moe.experts.3.w3"
    if architecture == "gpt_oss":  # its experts are stacked in files too
        assert "model.layers.1.mlp.experts.gate_up_proj" in found
    else:
        assert f"model.layers.1.{up_proj}.weight" in found
        assert not any("gate_up_proj" in name for name in found)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert (len(files) > 1) == (max_bytes < 1 << 30)
    if len(files) > 1:
        index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())["weight_map"]
        assert index == {name: path.name for path in files for name in load_file(path)}
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for (name, parameter), original in zip(
        reloaded.named_parameters(), model.parameters(), strict=True
    ):
        assert torch.equal(parameter, original), name


def test_policy_and_generator_read_stacked_experts_too(model_dir, tmp_path):
    source = Path(model_dir("qwen3_moe"))
    weights = {
        name: value.detach()
        for name, value in AutoModelForCausalLM.from_pretrained(source).named_parameters()
    }
    assert "model.layers.1.mlp.experts.gate_up_proj" in weights
    stacked = tmp_path / "stacked"
    shutil.copytree(source, stacked)
    save_file(weights, stacked / "model.safetensors", metadata={"format": "pt"})
    worker = DTensorPolicyWorker(
        context(), config=dataclasses.replace(PACKED, model_name=str(stacked))
    )
    worker.export_hf(tmp_path / "hf")
    found, expected = _stored(tmp_path / "hf"), load_file(source / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    generator = HFGenerationWorker(context(), start=GenerationStart(model_name=str(stacked)))
    for name, value in generator.model.named_parameters():
        assert torch.equal(value, weights[name]), name
