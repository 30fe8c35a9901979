"""Sizes against real models: parameters, gradients and optimizer state exactly, activations and
peaks as CPU has them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemo_like.config.schema import OptimizerConfig
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.spec import Microbatch, PlanSpec
from nemo_like.models.spec import PRESETS, ModelSpec, load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.inputs import attention
from nemo_like.policy.inputs.model_inputs import ModelInputs, build_inputs
from nemo_like.policy.optim import build_optimizer
from nemo_like.prediction.memory import GIB, MemoryModel, usable_bytes
from nemo_like.prediction.placement import Placement
from tests.prediction.live_memory import peak_bytes

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 96,
    "head_dim": 16,
}
ARCHITECTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama, tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama, biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen3, tied": (Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "mixtral": (MixtralConfig, {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
}


def config_of(name: str, **sizes: Any) -> Any:
    config_class, own = ARCHITECTURES[name]
    return config_class(**{**SIZES, **own, **sizes})


def shape_of(config: Any) -> ModelSpec:
    return ModelSpec.from_config(config.to_dict(), "a test")


def build(config: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    attention.register()
    return AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=attention.IMPLEMENTATION
    ).eval()


def inputs_of(num_tokens: int) -> ModelInputs:
    """Two packed rows of random tokens."""
    half = num_tokens // 2
    rows = [np.random.default_rng(i).integers(0, 96, half).astype(np.int32) for i in range(2)]
    shard = {
        "input_ids": Jagged.from_rows(rows, np.int32),
        "token_mask": Jagged.from_rows([r * 0 + 1 for r in rows], np.uint8),
    }
    return build_inputs(
        shard,
        Microbatch((0, 1), (half, half), (half, half), num_tokens),
        PlanSpec(max_tokens=num_tokens),
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_are_those_of_the_real_model(name: str):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name))
    assert shape_of(config_of(name)).num_params == sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_named_shapes_have_their_published_sizes():
    published = {
        "135m": 0.1345,
        "0.5b": 0.494,
        "1b": 1.236,
        "1.5b": 1.544,
        "3b": 3.213,
        "7b": 7.616,
        "8b": 8.030,
    }
    published |= {"14b": 14.77, "32b": 32.76, "70b": 70.55, "72b": 72.71}
    assert {
        size: pytest.approx(load_spec(size).num_params / 1e9, rel=1e-3) for size in PRESETS
    } == published


def test_weights_gradients_and_optimizer_are_the_bytes_of_a_real_step():
    model = build(config_of("qwen2"))
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig())
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    moments = [
        state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    ]
    gradients = [parameter.grad for parameter in model.parameters()]
    real: dict[str, list[Any]] = {
        "weights": list(model.parameters()),
        "gradients": gradients,
        "optimizer": moments,
    }
    parts = MemoryModel(shape_of(config_of("qwen2")), Placement(precision="float32")).parts(64)
    for name, tensors in real.items():
        assert parts[name] == sum(tensor.nbytes for tensor in tensors if tensor is not None)


@pytest.mark.parametrize(
    ("precision", "is_compiled"), [("float32", False), ("bfloat16", False), ("bfloat16", True)]
)
@pytest.mark.parametrize("name", ["llama", "qwen3, tied"])
def test_a_layer_saves_what_autograd_saves(name: str, precision: Any, is_compiled: bool):
    # As many key-value heads as query heads: the CPU's attention would copy them out.
    configs = [
        config_of(name, num_key_value_heads=4, num_hidden_layers=num_layers)
        for num_layers in (1, 3)
    ]
    saved = [saved_bytes(config, precision, is_compiled=is_compiled) for config in configs]
    placement = Placement(precision=precision, is_compiled=is_compiled)
    predicted = MemoryModel(shape_of(configs[0]), placement).activations.layer_bytes
    assert (saved[1] - saved[0]) / 2 / 256 == predicted


def saved_bytes(config: Any, precision: str, *, is_compiled: bool) -> int:
    """Return the bytes that autograd saves in a forward over 256 tokens.

    The compiled layers are divided into forward and backward as by inductor, and then run eagerly.
    """
    model = build(config, getattr(torch, precision))
    if is_compiled:
        torch.compiler.reset()
        for layer in model.model.layers:
            layer.compile(dynamic=True, backend="aot_eager_decomp_partition")
    own = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())
    }
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    inputs = inputs_of(256)
    rows: dict[str, Any] = {"cu_seqlens": inputs.cu_seqlens, "max_seqlen": inputs.max_seqlen}
    if is_compiled:
        # The attention of packed rows on a CPU cannot be traced.
        rows = {}
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(
            input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, **rows
        )
        return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_the_peak_of_a_step_grows_as_predicted(checkpointing: Any, precision: Any):
    config = config_of(
        "llama", hidden_size=96, num_attention_heads=6, intermediate_size=384, num_hidden_layers=2
    )
    peaks = [
        peak_bytes(
            build(config, getattr(torch, precision)),
            inputs_of(size),
            chunk_size=32,
            checkpointing=checkpointing,
        )
        for size in (
            2048,
            4096,
        )  # enough that a layer's gradients, which the model has apart, do not count
    ]
    memory = MemoryModel(
        shape_of(config),
        Placement(precision=precision, activation_checkpointing=checkpointing, chunk_size=32),
    )
    # On CPU attention also keeps the rows it has put together, and keys and values repeated for
    # every query head.
    size, layers = memory.placement.compute_bytes, 2 if checkpointing == "none" else 1
    copies = layers * size * (96 + 2 * (96 - 32))
    predicted = (memory.peak(4096) - memory.peak(2048)) / 2048 + copies
    assert predicted / ((peaks[1] - peaks[0]) / 2048) == pytest.approx(1.01, abs=0.035)


PLACEMENTS = st.builds(
    Placement,
    parallel_layout=st.builds(
        ParallelLayout,
        dp=st.sampled_from([1, 8, 64]),
        tp=st.sampled_from([1, 2]),
        cp=st.sampled_from([1, 4]),
        pp=st.just(1),
    ),
    precision=st.sampled_from(["bfloat16", "float32"]),
    activation_checkpointing=st.sampled_from(["none", "selective", "full"]),
    has_reference=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(PRESETS)),
    PLACEMENTS,
    st.sampled_from([24, 80, 141]),
    st.sampled_from([256, 768]),
)
def test_the_recommended_budget_fits_and_the_next_one_does_not(
    size: str, placement: Placement, gib: int, multiple: int
):
    memory = MemoryModel(load_spec(size), placement)
    usable = usable_bytes(gib)
    budget = memory.largest_budget(usable, multiple)
    assert budget % multiple == 0
    assert budget == 0 or memory.peak(budget) <= usable
    assert memory.peak(budget + multiple) > usable


@pytest.mark.parametrize("engine", ["dtensor", "megatron"])
def test_more_ranks_hold_less_each(engine: Any):
    def peak(**degrees: Any) -> float:
        parallel_layout = ParallelLayout(**degrees)
        return MemoryModel(
            load_spec("7b"), Placement(parallel_layout=parallel_layout, engine=engine)
        ).peak(8192)

    assert peak(dp=8) < peak() and peak(tp=2) < peak() and peak(cp=2) < peak()
    state = MemoryModel(load_spec("7b"), Placement(parallel_layout=ParallelLayout(dp=8))).parts(
        8192
    )
    assert state["optimizer"] == pytest.approx(load_spec("7b").num_params, rel=1e-3)
    assert state["weights"] + state["gradients"] == pytest.approx(
        load_spec("7b").num_params, rel=1e-3
    )


def test_a_pipelines_first_stage_keeps_a_microbatch_for_each_stage():
    def activations(pp: int) -> float:
        placement = Placement(parallel_layout=ParallelLayout(pp=pp), engine="megatron")
        return MemoryModel(load_spec("7b"), placement).parts(8192)["activations"]

    assert activations(4) == pytest.approx(
        activations(1)
    )  # a quarter of the layers, four microbatches
    assert usable_bytes(80) < 80 * GIB


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_copies_of_keys_and_values_are_saved_for_each_layer(checkpointing: Any):
    spec = load_spec("1.5b")
    placement = Placement(activation_checkpointing=checkpointing)
    separate = MemoryModel(spec, placement)
    shared = MemoryModel(spec, placement, keys_per_token=3.0)
    # Two more keys and two more values per token, in bfloat16; none is kept with recomputation.
    layers = spec.num_layers if checkpointing == "none" else 0
    expected = 1000 * layers * 2 * (2 + 2) * spec.num_kv_heads * spec.head_dim
    found = shared.parts(1000)["activations"] - separate.parts(1000)["activations"]
    assert found == pytest.approx(expected)
    # The peak of a small microbatch may be at the logits, which have no keys.
    assert shared.peak(1_000_000) > separate.peak(1_000_000)
