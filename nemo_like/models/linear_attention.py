"""Layers of a model that are linear in the length of a row: which ones, and their parameters."""

from __future__ import annotations

import math

from nemo_like.models.config_fields import ConfigFields

_SOFTMAX_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
"""Values of `layer_types` with softmax attention; any other is linear in the length."""


def linear_attention_layers(fields: ConfigFields, num_layers: int) -> frozenset[int]:
    """Return the layers whose attention is linear in the length, Mamba layers among them."""
    period = fields.get("attn_layer_period", default=None)
    if period is not None:
        # Jamba: all other layers are state space models (Mamba).
        offset = fields.get("attn_layer_offset", default=0)
        return frozenset(layer for layer in range(num_layers) if layer % period != offset)
    kinds = fields.get("layer_types", default=None) or ()
    return frozenset(layer for layer, kind in enumerate(kinds) if kind not in _SOFTMAX_KINDS)


def linear_attention_params(fields: ConfigFields, hidden_size: int) -> int:
    """Return the parameters of a gated delta net (Qwen3-Next) or a Mamba layer (Jamba), else 0."""
    if fields.get("linear_key_head_dim", default=None) is not None:
        num_value_heads = fields.size("linear_num_value_heads")
        key = fields.size("linear_num_key_heads") * fields.size("linear_key_head_dim")
        value = num_value_heads * fields.size("linear_value_head_dim")
        # Queries, keys, values, their gate, two numbers per head, the output; a convolution.
        projected = 2 * key + 2 * value + 2 * num_value_heads + value
        return hidden_size * projected + (2 * key + value) * fields.size("linear_conv_kernel_dim")
    rank = fields.get("mamba_dt_rank", default=None)
    if rank is None:
        return 0
    rank = math.ceil(hidden_size / 16) if rank == "auto" else rank
    inner = fields.size("mamba_expand") * hidden_size
    # Input with its gate and output; the step size, B and C; the step size again; a convolution.
    projected = 3 * hidden_size + (rank + 2 * fields.size("mamba_d_state")) + rank
    return inner * (projected + fields.size("mamba_d_conv"))
