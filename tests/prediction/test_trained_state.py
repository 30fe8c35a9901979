"""Predicted gradients, optimizer state and averages against those of a real engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.config.schema import EmaConfig, OptimizerConfig, PolicyConfig
from nemo_like.models.spec import load_spec
from nemo_like.models.weight_files import weight_sizes
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.prediction.memory import MemoryModel
from nemo_like.prediction.placement import Placement, frozen_share
from tests.policy.tiny import context, save_tiny_model
from tests.prediction.test_memory import ARCHITECTURES, config_of, shape_of


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_names_and_sizes_are_those_of_the_real_model(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name))
    sizes = {weight: parameter.numel() for weight, parameter in model.named_parameters()}
    is_known = name not in ("mixtral", "qwen3_moe")
    assert weight_sizes(shape_of(config_of(name))) == (sizes if is_known else None)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_is_the_bytes_of_a_real_engine(optimizer, tmp_path):
    model = save_tiny_model(tmp_path, "qwen2_tied")
    freeze = ("lm_head.*",) if optimizer == "adamw" else ()
    config = PolicyConfig(
        model_name=str(model),
        optimizer=OptimizerConfig(name=optimizer),
        freeze=freeze,
        ema=EmaConfig(enabled=True),
    )
    worker = DTensorPolicyWorker(context(), config=config)
    engine: Any = worker.engine
    trained = [each.parameter for each in engine.parameters if each.parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    engine.optimizer.step(1e-3)
    placement = Placement(precision="float32", optimizer=optimizer, freeze=freeze, has_ema=True)
    memory = MemoryModel(engine.spec, placement)
    parts = memory.parts(64)
    num_bytes = 4 * sum(parameter.numel() for parameter in trained)
    assert parts["gradients"] == pytest.approx(num_bytes)
    assert parts["ema"] == pytest.approx(num_bytes)
    assert sum(each.nbytes for each in engine.ema.shards.values()) == num_bytes
    found = sum(each.nbytes for each in engine.optimizer.moments())
    # Norms and biases of layers count as matrices in the prediction.
    assert parts["optimizer"] == pytest.approx(found, rel=1e-9 if optimizer == "adamw" else 0.05)


def test_shares_of_patterns():
    spec = load_spec("0.5b")
    assert frozen_share(spec, ()) == 0.0
    assert frozen_share(spec, ("*",)) == 1.0
    embedding = spec.embedding_params / spec.num_params
    assert frozen_share(spec, ("lm_head.*",)) == pytest.approx(embedding)
    assert frozen_share(spec, ("model.layers.*", "model.norm.*")) == pytest.approx(1 - embedding)
