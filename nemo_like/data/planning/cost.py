"""What a row costs: its work `a * L + b * L^2`, with a and b from the model's own configuration,
and FLOPs for MFU.

Work is what ranks are balanced by; tokens, which are memory, are compared with the cap elsewhere.
The configuration is any mapping or object with the attribute names of Hugging Face, so nothing
heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Feed-forward blocks of two matrices (up, down); every other architecture has the gated three.
_UNGATED_MODEL_TYPES = frozenset(
    {
        "bloom",
        "codegen",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "mpt",
        "nemotron",
        "opt",
    }
    | {"phi", "stablelm_epoch", "starcoder2", "arcee"}
)
_REQUIRED = object()


@dataclass(frozen=True)
class CostModel:
    """Forward work of a row of L tokens: `linear * L + quadratic * L^2`, for causal attention.

    With a sliding `window`, the share `windowed_share` of the quadratic part (its layers) sees at
    most `window` tokens back, so beyond the window it grows by the line `window * (2 * L - window)`
    instead of `L^2`.

    The default is a dense 7B model in units of its attention: hidden size h = 4096 gives 24 h^2 L
    of matrices and 2 h L^2 of causal attention per layer, that is 12 h = 49152 to 1.

    Example: `CostModel(linear=10, quadratic=1, window=4).of([2, 6])` is `[24, 60 + 4 * 8] = [24,
    92]`.
    """

    linear: float = 49152.0
    quadratic: float = 1.0
    window: int | None = None
    windowed_share: float = 1.0

    def __post_init__(self) -> None:
        if self.linear < 0 or self.quadratic < 0 or self.linear + self.quadratic == 0:
            raise ValueError(
                f"a cost needs weights >= 0, not both 0; got linear={self.linear},"
                f" quadratic={self.quadratic}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is a number of tokens >= 1 or None; got {self.window}")
        if not 0.0 <= self.windowed_share <= 1.0:
            raise ValueError(f"windowed_share is between 0 and 1; got {self.windowed_share}")

    def of(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Work of each row, float64 of the shape of `lengths`."""
        tokens = np.asarray(lengths, dtype=np.float64)
        square = tokens * tokens
        if self.window is not None:
            seen = np.minimum(tokens, self.window)
            square = (1.0 - self.windowed_share) * square + self.windowed_share * seen * (
                2.0 * tokens - seen
            )
        return self.linear * tokens + self.quadratic * square

    @classmethod
    def from_model_config(cls, config: Mapping[str, Any] | object) -> CostModel:
        """The work of a model in forward FLOPs: `2 * P_active` per token and `2 * sum_layers H * d`
        per token squared.

        `config` has the names of a Hugging Face configuration (grouped-query and latent attention,
        active experts, sliding-window and linear-attention layers are understood); raises
        ValueError naming a key that is missing.
        """
        fields = _Fields(config)
        windowed, full = _attention_layers(fields)
        window = (
            fields.get("sliding_window", "attention_chunk_size", default=None) if windowed else None
        )
        return cls(
            linear=2.0 * num_active_params(config),
            quadratic=float((windowed + full) * _attention_width(fields)),
            window=window,
            windowed_share=windowed / (windowed + full) if window else 1.0,
        )


def forward_flops(config: Mapping[str, Any] | object, lengths: Sequence[int] | np.ndarray) -> float:
    """FLOPs of one forward over rows of these lengths; each row attends to itself only, packed or
    not.
    """
    return float(CostModel.from_model_config(config).of(lengths).sum())


def train_flops(config: Mapping[str, Any] | object, lengths: Sequence[int] | np.ndarray) -> float:
    """FLOPs of forward and backward: `6 * P_active * N + 6 * layers * H * d * sum(L^2)` for causal
    attention.

    N is the number of tokens. The embedding lookup is not counted, the output projection is,
    recomputation is not: divided by time, devices and peak this is MFU, not HFU.
    """
    return 3.0 * forward_flops(config, lengths)


def num_active_params(config: Mapping[str, Any] | object) -> int:
    """Parameters one token is multiplied with: attention, active experts, router and output
    projection.

    The embedding table (a lookup), norms and biases are left out; a tied output projection counts,
    since it is multiplied.
    """
    fields = _Fields(config)
    num_layers = fields.get("num_hidden_layers", "n_layer", "num_layers")
    hidden_size = fields.get("hidden_size", "n_embd", "d_model")
    num_sparse = _num_sparse_layers(fields, num_layers)
    feed_forward = (num_layers - num_sparse) * _dense_params(fields) + num_sparse * _sparse_params(
        fields
    )
    return (
        num_layers * _attention_params(fields)
        + feed_forward
        + hidden_size * fields.get("vocab_size")
    )


class _Fields:
    """Reads a configuration by any of the names architectures use for one thing."""

    def __init__(self, config: Mapping[str, Any] | object) -> None:
        self._config = _as_mapping_or_object(config)
        text_config = self._lookup("text_config")
        if text_config is not None:  # multimodal configurations nest the language model
            self._config = text_config

    def _lookup(self, name: str) -> Any:
        if isinstance(self._config, Mapping):
            return self._config.get(name)
        return getattr(self._config, name, None)

    def get(self, *names: str, default: Any = _REQUIRED) -> Any:
        """The first of `names` that is set; `default` if none is, or ValueError without a
        default.
        """
        for name in names:
            value = self._lookup(name)
            if value is not None:
                return value
        if default is _REQUIRED:
            raise ValueError(
                f"the model configuration has no {' / '.join(names)}: the cost of a row cannot be"
                f" derived"
            )
        return default


def _as_mapping_or_object(config: Mapping[str, Any] | object) -> Mapping[str, Any] | object:
    if config is None or isinstance(config, (str, bytes)):
        raise ValueError(
            f"a model configuration is a mapping or an object with its attributes; got {config!r}"
        )
    return config


def _heads(fields: _Fields) -> tuple[int, int, int]:
    """(query heads, key-value heads, head dim)."""
    num_heads = fields.get("num_attention_heads", "n_head")
    num_kv_heads = fields.get("num_key_value_heads", "num_kv_heads", default=num_heads)
    head_dim = (
        fields.get("head_dim", default=None)
        or fields.get("hidden_size", "n_embd", "d_model") // num_heads
    )
    return num_heads, num_kv_heads, head_dim


def _latent_dims(fields: _Fields) -> tuple[int, int] | None:
    """(query-key dim, value dim) of a head under latent attention (DeepSeek); None for ordinary
    heads.
    """
    if fields.get("kv_lora_rank", default=None) is None:
        return None
    return fields.get("qk_nope_head_dim") + fields.get("qk_rope_head_dim"), fields.get("v_head_dim")


def _attention_width(fields: _Fields) -> int:
    """Forward FLOPs per token squared of one causal layer: half of 2 * H * (query-key dim + value
    dim).
    """
    num_heads, _, head_dim = _heads(fields)
    qk_dim, v_dim = _latent_dims(fields) or (head_dim, head_dim)
    return num_heads * (qk_dim + v_dim)


def _attention_params(fields: _Fields) -> int:
    """Projection parameters of one attention layer."""
    num_heads, num_kv_heads, head_dim = _heads(fields)
    hidden_size = fields.get("hidden_size", "n_embd", "d_model")
    latent = _latent_dims(fields)
    if latent is None:
        return hidden_size * head_dim * 2 * (num_heads + num_kv_heads)
    qk_dim, v_dim = latent
    q_rank, kv_rank = fields.get("q_lora_rank", default=None), fields.get("kv_lora_rank")
    query = (
        hidden_size * q_rank + q_rank * num_heads * qk_dim
        if q_rank
        else hidden_size * num_heads * qk_dim
    )
    nope_dim = fields.get("qk_nope_head_dim")
    key_value = hidden_size * (kv_rank + qk_dim - nope_dim) + kv_rank * num_heads * (
        nope_dim + v_dim
    )
    return query + key_value + num_heads * v_dim * hidden_size


def _dense_params(fields: _Fields) -> int:
    hidden_size = fields.get("hidden_size", "n_embd", "d_model")
    width = fields.get("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden_size)
    return _num_matrices(fields) * hidden_size * width


def _sparse_params(fields: _Fields) -> int:
    """Active parameters of one layer of experts: router, chosen experts, shared expert."""
    num_experts = _num_experts(fields)
    if num_experts == 0:
        return 0
    hidden_size = fields.get("hidden_size", "n_embd", "d_model")
    width = fields.get("moe_intermediate_size", "intermediate_size")
    shared = fields.get("shared_expert_intermediate_size", default=0) or width * fields.get(
        "n_shared_experts", default=0
    )
    active = fields.get("num_experts_per_tok") * width + shared
    return hidden_size * num_experts + _num_matrices(fields) * hidden_size * active


def _num_matrices(fields: _Fields) -> int:
    return 2 if fields.get("model_type", default="") in _UNGATED_MODEL_TYPES else 3


def _num_experts(fields: _Fields) -> int:
    return fields.get("num_local_experts", "num_experts", "n_routed_experts", default=0)


def _num_sparse_layers(fields: _Fields, num_layers: int) -> int:
    """How many layers route tokens to experts."""
    if _num_experts(fields) == 0:
        return 0
    first = fields.get("first_k_dense_replace", default=0)
    period = fields.get("decoder_sparse_step", "moe_layer_freq", default=1)
    dense = set(fields.get("mlp_only_layers", default=()))
    # Qwen counts layers from 1 (`(layer + 1) % step == 0`), DeepSeek from 0; with a period of 1
    # both are every layer.
    shift = 1 if fields.get("decoder_sparse_step", default=None) is not None else 0
    return sum(
        (layer + shift) % period == 0 and layer >= first and layer not in dense
        for layer in range(num_layers)
    )


def _attention_layers(fields: _Fields) -> tuple[int, int]:
    """(layers with a window, layers that see everything); layers of linear attention are in
    neither.
    """
    num_layers = fields.get("num_hidden_layers", "n_layer", "num_layers")
    kinds = fields.get("layer_types", default=None)
    if kinds is not None:
        windowed = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
        return windowed, sum(kind == "full_attention" for kind in kinds)
    if fields.get("sliding_window", default=None) is None or not fields.get(
        "use_sliding_window", default=True
    ):
        return 0, num_layers
    period = fields.get("sliding_window_pattern", default=None)
    if period is not None:  # every period-th layer sees everything (Gemma)
        return num_layers - num_layers // period, num_layers // period
    first = fields.get("max_window_layers", default=0)
    return max(0, num_layers - first), min(num_layers, first)
