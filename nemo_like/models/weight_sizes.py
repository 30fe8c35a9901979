"""Names and sizes of the weights of a Llama-like model, without the model."""

from __future__ import annotations

from nemo_like.models.spec import SCORE_WEIGHT, ModelSpec


def weight_sizes(spec: ModelSpec) -> dict[str, int] | None:
    """Return Hugging Face name -> number of values of each distinct weight.

    None for a model of another shape: experts, latent or linear attention, two-matrix feed-forward.
    """
    hidden = spec.hidden_size
    sizes = {"model.embed_tokens.weight": spec.embedding_params}
    for layer in range(spec.num_layers):
        for name, size in _layer_sizes(spec).items():
            sizes[f"model.layers.{layer}.{name}"] = size
    sizes["model.norm.weight"] = hidden
    if spec.head == "scores":
        sizes[SCORE_WEIGHT] = spec.head_params
    elif not spec.is_tied:
        sizes["lm_head.weight"] = spec.embedding_params
    # The count of the configuration is checked against transformers for every supported shape.
    return sizes if sum(sizes.values()) == spec.num_params else None


def _layer_sizes(spec: ModelSpec) -> dict[str, int]:
    hidden = spec.hidden_size
    query = spec.num_heads * spec.head_dim
    key = spec.num_kv_heads * spec.head_dim
    width = spec.intermediate_size
    sizes = {
        "input_layernorm.weight": hidden,
        "post_attention_layernorm.weight": hidden,
        "self_attn.q_proj.weight": hidden * query,
        "self_attn.k_proj.weight": hidden * key,
        "self_attn.v_proj.weight": hidden * key,
        "self_attn.o_proj.weight": query * hidden,
        "mlp.gate_proj.weight": hidden * width,
        "mlp.up_proj.weight": hidden * width,
        "mlp.down_proj.weight": width * hidden,
    }
    if spec.has_qkv_bias:
        sizes["self_attn.q_proj.bias"] = query
        sizes["self_attn.k_proj.bias"] = key
        sizes["self_attn.v_proj.bias"] = key
    if spec.has_output_bias:
        sizes["self_attn.o_proj.bias"] = hidden
    if spec.has_qk_norm:
        sizes["self_attn.q_norm.weight"] = spec.head_dim
        sizes["self_attn.k_norm.weight"] = spec.head_dim
    if spec.has_mlp_bias:
        sizes["mlp.gate_proj.bias"] = width
        sizes["mlp.up_proj.bias"] = width
        sizes["mlp.down_proj.bias"] = hidden
    return sizes
