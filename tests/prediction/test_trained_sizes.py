"""Predicted sizes of adapters and of a frozen model against those of a real engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.config.schema import AdapterConfig, PolicyConfig
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.prediction.memory import MemoryModel
from nemo_like.prediction.placement import Placement
from tests.policy.tiny import context, save_tiny_model

TARGETS = AdapterConfig().target_modules


@pytest.mark.parametrize(
    ("architecture", "targets", "quantization"),
    [
        ("llama_tied", ("q_proj", "v_proj", "down_proj"), "none"),
        ("qwen3", ("all-linear",), "none"),
        ("qwen3_moe", ("all-linear",), "none"),
        ("qwen2_blocks", ("v_proj",), "nf4"),
    ],
)
def test_state_is_the_bytes_of_a_real_engine(architecture, targets, quantization, tmp_path):
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed")
    model = save_tiny_model(tmp_path, architecture)
    lora = AdapterConfig(enabled=True, rank=3, target_modules=targets, quantization=quantization)
    config = PolicyConfig(model_name=str(model), lora=lora)
    worker = DTensorPolicyWorker(context(), config=config, start=PolicyStart(needs_reference=True))
    engine: Any = worker.engine
    parts = MemoryModel(engine.spec, Placement(precision="float32", adapter=lora)).parts(64)
    weights = [each.parameter for each in engine.parameters]
    trained = [weight for weight in weights if weight.requires_grad]
    num_trained = sum(weight.numel() for weight in trained)
    assert parts["weights"] == sum(weight.nbytes for weight in engine.local_weights())
    assert parts["gradients"] == 4 * num_trained
    assert parts["optimizer"] == 8 * num_trained
    assert "reference" not in parts


@given(
    rank=st.integers(1, 256),
    targets=st.lists(st.sampled_from(TARGETS), min_size=1, unique=True),
    tp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 8]),
)
def test_adapters_take_less_than_all_weights(rank, targets, tp, dp):
    spec = load_spec("7b")
    layout = ParallelLayout(dp=dp, tp=tp)
    full = Placement(parallel_layout=layout, has_reference=True)
    lora = AdapterConfig(enabled=True, rank=rank, target_modules=tuple(targets))
    adapters = dataclasses.replace(full, has_reference=False, adapter=lora)
    assert MemoryModel(spec, adapters).peak(1024) < MemoryModel(spec, full).peak(1024)
