"""Work of rows: the formula, the window, and a and b against the parameters of real models."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_like.data.planning.spec import CostModel
from nemo_like.models.spec import ModelSpec

QWEN2_5_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "max_window_layers": 28,
}

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 500,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {
    **EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
MODELS = [
    ("llama", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 32}),
    ("gemma3_text", {"head_dim": 16}),
    (
        "gpt2",
        {
            "n_embd": 64,
            "n_layer": 4,
            "n_head": 4,
            "vocab_size": 500,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    ("qwen3_moe", {**EXPERTS, "num_experts": 8, "decoder_sparse_step": 2}),
    ("deepseek_v3", DEEPSEEK),
]


def cost_of(config) -> CostModel:
    return CostModel.from_spec(ModelSpec.from_config(config))


def multiplied_params(config) -> int:
    """Matrix parameters one token meets in the real model: of stacked experts the chosen share, the
    lookup not.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    count = head.numel() if head is embedding else 0
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:
            count += parameter.numel() * config.num_experts_per_tok // parameter.shape[0]
        elif parameter.ndim == 2 and parameter is not embedding and "wpe" not in name:
            count += parameter.numel()
    return count


@pytest.mark.parametrize(("model_type", "overrides"), MODELS)
def test_active_params_are_those_of_the_real_model(model_type, overrides):
    config = AutoConfig.for_model(
        model_type, **(overrides if model_type == "gpt2" else {**SMALL, **overrides})
    )
    assert ModelSpec.from_config(config).num_active_params == multiplied_params(config)
    assert cost_of(config) == cost_of(config.to_dict())


def test_a_and_b_of_a_7b_model():
    cost = cost_of(QWEN2_5_7B)
    assert (
        ModelSpec.from_config(QWEN2_5_7B).num_active_params == 7_070_285_824
    )  # 7.62e9 less the 0.545e9 of the embedding table, norms and biases
    head = 2.0 * 152064 * 3584
    assert cost == CostModel(linear=2.0 * 7_070_285_824, quadratic=2.0 * 28 * 28 * 128, head=head)


def test_a_reward_model_has_no_output_projection():
    spec = ModelSpec.from_config(QWEN2_5_7B)
    scores = CostModel.from_spec(spec.with_output_head("scores"))
    assert scores.head == 0
    assert scores.of([700])[0] == CostModel.from_spec(spec).of([700], [0])[0]


def test_work_is_the_mfu_formula():
    lengths = np.array([1, 100, 4096])
    params, num_tokens = ModelSpec.from_config(QWEN2_5_7B).num_active_params, lengths.sum()
    expected = 2 * params * num_tokens + 2 * 28 * 28 * 128 * (lengths.astype(float) ** 2).sum()
    work = CostModel.from_spec(ModelSpec.from_config(QWEN2_5_7B)).of(lengths).sum()
    assert work == pytest.approx(expected, rel=1e-12)


def test_beyond_the_window_work_grows_in_a_line():
    cost = CostModel(linear=0, quadratic=2, window=100, windowed_share=0.75)
    assert cost.of([50])[0] == 2 * 50**2
    assert cost.of([300])[0] == 2 * (0.25 * 300**2 + 0.75 * 100 * (600 - 100))
    pairs = sum(
        min(position + 1, 100) for position in range(3000)
    )  # what each token sees, itself included
    assert CostModel(linear=0, quadratic=2, window=100).of([3000])[0] == pytest.approx(
        4 * pairs, rel=0.02
    )


@pytest.mark.parametrize(
    ("extra", "window", "share"),
    [
        ({"sliding_window": 128}, 128, 1.0),
        ({"sliding_window": 128, "use_sliding_window": False}, None, 1.0),
        ({"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 3}, 128, 0.25),
        ({"sliding_window": 128, "sliding_window_pattern": 2}, 128, 0.5),
        (
            {"sliding_window": 128, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
            128,
            0.75,
        ),
        ({"sliding_window": None}, None, 1.0),
    ],
)
def test_windowed_layers_are_read_from_the_config(extra, window, share):
    cost = cost_of({**SMALL, **extra})
    assert (cost.window, cost.windowed_share) == (window, share)
    assert cost.quadratic == 2 * 4 * 64


def test_layers_of_linear_attention_add_no_quadratic_work():
    mixed = {**SMALL, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    assert cost_of(mixed).quadratic == cost_of(SMALL).quadratic / 4


def test_a_nested_text_config_is_used():
    assert cost_of({"text_config": SMALL, "hidden_size": 7}) == cost_of(SMALL)


def test_a_config_without_the_needed_keys_is_refused_by_name():
    with pytest.raises(ValueError, match="vocab_size"):
        cost_of({key: value for key, value in SMALL.items() if key != "vocab_size"})
    with pytest.raises(ValueError, match="mapping or an object"):
        cost_of("meta-llama/Llama-3.2-1B")


@pytest.mark.parametrize(
    "values",
    [
        {"linear": -1},
        {"linear": 0, "quadratic": 0},
        {"window": 0},
        {"windowed_share": 1.5, "window": 4},
        {"linear": 3, "head": 4},
        {"head": -1},
    ],
)
def test_senseless_weights_are_refused(values):
    with pytest.raises(ValueError):
        CostModel(**values)
