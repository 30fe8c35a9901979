"""`ModelSpec` against the models that transformers builds, and its refusal of unusable configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from nemo_like.config.errors import ConfigError
from nemo_like.models.spec import PRESETS, ModelSpec, load_spec

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


_FLOPS_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "apertus": {},
    "nanochat": {},
    "persimmon": {},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 24,
        "moe_layer_start_index": 1,
    },
    "granitemoeshared": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
    },
    "glm4_moe_lite": {
        **LATENT,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "num_nextn_predict_layers": 0,
    },
}


@pytest.mark.parametrize("is_file", [True, False])
@pytest.mark.parametrize("model_type", _FLOPS_CONFIGS)
def test_linear_flops_are_those_that_torch_counts(model_type: str, is_file: bool) -> None:
    sizes = {**SIZES, "num_key_value_heads": 4, "pad_token_id": 0, "bos_token_id": 1}
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = AutoConfig.for_model(
        model_type, **sizes, eos_token_id=2, **eager, **_FLOPS_CONFIGS[model_type]
    )
    model = AutoModelForCausalLM.from_config(config)
    num_tokens = 16
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(num_tokens)[None], use_cache=False)
    # Attention multiplies batches of matrices; what is linear in the tokens has a weight matrix.
    operators = counter.get_flop_counts()["Global"].items()
    linear = sum(flops for operator, flops in operators if "bmm" not in str(operator))
    spec = ModelSpec.from_config(config.to_dict() if is_file else config)
    assert 2 * num_tokens * spec.num_active_params == pytest.approx(linear, rel=1e-3)
