"""`ModelSpec` against the models that transformers builds, and its refusal of unusable configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import ParallelConfig
from nemo_like.data.planning.spec import CostModel
from nemo_like.models.family_traits import COUNTED_TYPES
from nemo_like.models.spec import PRESETS, ModelSpec, load_spec
from nemo_like.models.tiny import tiny_config, type_config

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 500,
}
MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
                          "qk_rope_head_dim": 16, "v_head_dim": 8}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": AutoConfig.for_model("llama", **SIZES),
    "llama, tied, biases": AutoConfig.for_model(
        "llama", **SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "qwen2": AutoConfig.for_model("qwen2", **SIZES, use_sliding_window=True, sliding_window=8,
                                  max_window_layers=1),
    "qwen3, tied": AutoConfig.for_model("qwen3", **SIZES, head_dim=32, tie_word_embeddings=True),
    "qwen3_moe": AutoConfig.for_model(
        "qwen3_moe", **SIZES, **MOE, decoder_sparse_step=2, mlp_only_layers=[3]
    ),
    "qwen3_moe, window": AutoConfig.for_model(
        "qwen3_moe", **SIZES, **MOE, use_sliding_window=True, sliding_window=8
    ),
    "mixtral": AutoConfig.for_model("mixtral", **SIZES, num_local_experts=8),
}  # fmt: skip


OTHER_CONFIGS: dict[str, PretrainedConfig] = {
    "deepseek_v3": AutoConfig.for_model(
        "deepseek_v3", **SIZES, **LATENT, n_routed_experts=8, moe_intermediate_size=32
    )
}


def model_of(config: PretrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", [*CONFIGS, *OTHER_CONFIGS])
def test_parameters_are_those_of_the_model(name: str) -> None:
    config = (CONFIGS | OTHER_CONFIGS)[name]
    model = model_of(config)
    spec = ModelSpec.from_config(config)
    assert spec.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert spec.embedding_params == model.get_input_embeddings().weight.numel()
    assert spec == ModelSpec.from_config(config.to_dict(), spec.name)


def test_the_scale_of_scores_is_that_of_the_layers() -> None:
    """Also of files with the names of older releases of transformers."""
    scaling = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.7}
    config: dict[str, Any] = {**SIZES, **LATENT, "num_hidden_layers": 1, "first_k_dense_replace": 1}
    for rope in ({"rope_scaling": scaling}, {}):
        layers = model_of(AutoConfig.for_model("deepseek_v3", **config, **rope)).model.layers
        spec = ModelSpec.from_config({**config, **rope, "model_type": "deepseek_v3"})
        assert spec.rope_type == ("yarn" if rope else "default")
        assert spec.latent is not None
        assert layers[0].self_attn.scaling == pytest.approx(24**-0.5 * spec.latent.score_factor)


@pytest.mark.parametrize("name", CONFIGS)
def test_properties_are_those_of_the_layers(name: str) -> None:
    spec = ModelSpec.from_config(CONFIGS[name])
    layers = model_of(CONFIGS[name]).model.layers
    assert spec.num_layers == len(layers)
    for index, layer in enumerate(layers):
        attention = layer.self_attn
        assert spec.has_qkv_bias == (attention.q_proj.bias is not None)
        assert spec.has_output_bias == (attention.o_proj.bias is not None)
        assert spec.has_qk_norm == hasattr(attention, "q_norm")
        assert spec.head_dim == attention.head_dim
        assert spec.windows[index] == getattr(attention, "sliding_window", None)
        is_sparse = hasattr(layer.mlp, "experts")
        assert (spec.moe is not None and index in spec.moe.layers) == is_sparse


def test_windows_of_configurations_without_layer_types() -> None:
    base = {**SIZES, "model_type": "gemma3_text", "sliding_window": 8}
    assert ModelSpec.from_config({**base, "sliding_window_pattern": 2}).windows == (
        8,
        None,
        8,
        None,
    )
    assert ModelSpec.from_config({**base, "use_sliding_window": False}).windows == (None,) * 4
    mixed = {**base, "layer_types": ["linear_attention", "full_attention", "sliding_attention"]}
    spec = ModelSpec.from_config(mixed)
    assert (spec.windows, spec.linear_attention_layers) == ((None, None, 8), {0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": -1}, "gives num_hidden_layers -1 .* must be a positive integer"),
        ({"vocab_size": "many"}, "gives vocab_size 'many'"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"num_key_value_heads": True}, "gives num_key_value_heads True"),
        ({"head_dim": 0}, "gives head_dim 0"),
        ({"num_experts": [1]}, r"gives num_local_experts \[1\]"),
        ({"rope_parameters": 5}, "has a value of the wrong type"),
        ({"layer_types": 7}, "has a value of the wrong type"),
        ({"attention_dropout": {}}, "has a value of the wrong type"),
    ],
)
def test_an_unusable_value_is_named(changes: dict[str, Any], message: str) -> None:
    config = {**SIZES, "model_type": "llama", **changes}
    with pytest.raises(ConfigError, match=f"the model some/model {message}"):
        ModelSpec.from_config(config, "some/model")


def test_a_name_instead_of_a_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="mapping or an object"):
        ModelSpec.from_config("meta-llama/Llama-3.2-1B")


def test_presets_have_their_size(tmp_path: Any) -> None:
    assert {size: round(load_spec(size).num_params / 1e9, 2) for size in PRESETS} == {
        "135m": 0.13,
        "0.5b": 0.49,
        "1b": 1.24,
        "1.5b": 1.54,
        "3b": 3.21,
        "7b": 7.62,
        "8b": 8.03,
        "14b": 14.77,
        "32b": 32.76,
        "70b": 70.55,
        "72b": 72.71,
    }
    with pytest.raises(ConfigError, match=r"unknown model '9b'.*the presets are 135m"):
        load_spec("9b")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="contains list, not a model configuration"):
        load_spec(str(tmp_path))


_NUM_TOKENS = 16
_COUNTED_HERE = (
    *("deepseek_v3", "diffllama", "ernie4_5_moe", "hunyuan_v1_moe", "jamba", "llama", "qwen3_next"),
)
"""Types of every form of layer; the others take too long for each run of the tests."""


def tiny_type(model_type: str, head_dim: int) -> PretrainedConfig:
    config = tiny_config(type_config(model_type), ParallelConfig(), head_dim)
    if model_type == "jamba":
        # One layer of attention and one of Mamba.
        config.update({"attn_layer_period": 2, "attn_layer_offset": 1})
    return config


def check_counts(model_type: str) -> None:
    """Compare with the products that torch counts, and the parameters of the model."""
    config = tiny_type(model_type, 8)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(_NUM_TOKENS)[None], use_cache=False)
    operators = counter.get_flop_counts()["Global"].items()
    # Attention multiplies batches of matrices; what is linear in the tokens has a weight matrix.
    batched = sum(flops for operator, flops in operators if "bmm" in str(operator))
    linear = sum(flops for operator, flops in operators) - batched
    for source in (config, config.to_dict()):
        spec = ModelSpec.from_config(source)
        cost = CostModel.from_spec(spec)
        assert _NUM_TOKENS * cost.linear == pytest.approx(linear, rel=4e-3)
        # Linear attention has batches of matrices too, and eager attention masks the future.
        if not spec.linear_attention_layers:
            assert 2 * _NUM_TOKENS**2 * cost.quadratic == pytest.approx(batched, rel=1e-6)
        assert spec.estimate_warnings == ()
    # With wider layers, in which vectors are a small part.
    config = tiny_type(model_type, 64)
    num_params = sum(parameter.numel() for parameter in model_of(config).parameters())
    assert ModelSpec.from_config(config).num_params == pytest.approx(num_params, rel=0.01)


@pytest.mark.parametrize("model_type", _COUNTED_HERE)
def test_counts_are_those_of_torch(model_type: str) -> None:
    check_counts(model_type)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", sorted(COUNTED_TYPES.difference(_COUNTED_HERE)))
def test_counts_of_every_type_are_those_of_torch(model_type: str) -> None:
    check_counts(model_type)


def test_every_type_that_trains_is_counted() -> None:
    types = json.loads((Path(__file__).parents[2] / "docs" / "models.json").read_text())["types"]
    for model_type, cells in types.items():
        if any(cells[column].startswith("yes") for column in ("packed", "padded")):
            assert type_config(model_type).model_type in COUNTED_TYPES, model_type


def test_other_types_have_a_warning() -> None:
    spec = ModelSpec.from_config({**SIZES, "model_type": "new_type"})
    (warning,) = spec.estimate_warnings
    assert "FLOPs and parameters of model type new_type are estimated" in warning
    # A list of one value for every layer, as in the files of Hunyuan.
    experts = {"num_experts": 8, "moe_topk": [2] * 4, "moe_intermediate_size": [32] * 4}
    spec = ModelSpec.from_config({**SIZES, **experts, "model_type": "hunyuan_v1_moe"})
    assert spec.moe is not None
    assert (spec.moe.num_active_experts, spec.moe.expert_size, spec.moe.shared_size) == (2, 32, 96)
