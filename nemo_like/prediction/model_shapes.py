"""The size of a dense or sparse decoder from its configuration: parameters counted exactly, and
some shapes by name.

A configuration is a mapping with the key names of a Hugging Face `config.json`; no weights and no
library are needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.data.planning.cost import CostModel, num_active_params


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, width: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **more,
    }


_HEAD_NORMS = ("qwen3", "qwen3_moe")
_TIED = {"tie_word_embeddings": True}
_QWEN2: dict[str, Any] = {"model_type": "qwen2", "use_sliding_window": False}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "135m": ("SmolLM2-135M", _llama(576, 30, 9, 3, 1536, 49152, **_TIED)),
    "0.5b": ("Qwen2.5-0.5B", _llama(896, 24, 14, 2, 4864, 151936, **_QWEN2, **_TIED)),
    "1b": ("Llama-3.2-1B", _llama(2048, 16, 32, 8, 8192, 128256, **_TIED)),
    "1.5b": ("Qwen2.5-1.5B", _llama(1536, 28, 12, 2, 8960, 151936, **_QWEN2, **_TIED)),
    "3b": ("Llama-3.2-3B", _llama(3072, 28, 24, 8, 8192, 128256, **_TIED)),
    "7b": ("Qwen2.5-7B", _llama(3584, 28, 28, 4, 18944, 152064, **_QWEN2)),
    "8b": ("Llama-3.1-8B", _llama(4096, 32, 32, 8, 14336, 128256)),
    "14b": ("Qwen2.5-14B", _llama(5120, 48, 40, 8, 13824, 152064, **_QWEN2)),
    "32b": ("Qwen2.5-32B", _llama(5120, 64, 40, 8, 27648, 152064, **_QWEN2)),
    "70b": ("Llama-3.1-70B", _llama(8192, 80, 64, 8, 28672, 128256)),
    "72b": ("Qwen2.5-72B", _llama(8192, 80, 64, 8, 29568, 152064, **_QWEN2)),
}
"""Size on the command line -> (whose published shape it is, its configuration)."""


@dataclass(frozen=True)
class ModelShape:
    """What memory and work are computed from."""

    name: str
    config: Mapping[str, Any]
    """The language model's part of the configuration."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    """Of the feed-forward inner activations of one token: all its active experts together in a
    sparse model.
    """
    num_active_experts: int
    """0 in a dense model."""
    has_head_norms: bool
    """Queries and keys are normalised per head."""
    vocab_size: int
    is_tied: bool
    num_params: int
    """Every parameter, tied embeddings once."""
    embedding_params: int
    """Of one embedding table."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> ModelShape:
        """Raises ConfigError for a key that is missing."""
        config = config.get("text_config") or config
        try:
            return cls(name=name, config=config, **_sizes(config))
        except KeyError as error:
            raise ConfigError(f"{name}: the model configuration has no {error.args[0]}") from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name}: the model configuration cannot be used: {error}") from error

    @property
    def cost(self) -> CostModel:
        """Forward FLOPs of a row."""
        return CostModel.from_model_config(self.config)

    @property
    def layer_params(self) -> int:
        """Parameters of one layer, on average."""
        outside = self.embedding_params * (1 if self.is_tied else 2) + self.hidden_size
        return (self.num_params - outside) // self.num_layers

    @property
    def token_flops(self) -> float:
        """Training FLOPs of a token without attention: 6 x active parameters."""
        return 3.0 * self.cost.linear


def load_shape(model: str) -> ModelShape:
    """A model directory, a `config.json`, or a size of `SHAPES`. Raises ConfigError."""
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{shown_path(path)} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError(
                f"{shown_path(path)} holds {type(config).__name__}, not a model configuration"
            )
        return ModelShape.from_config(config, model)
    known = SHAPES.get(model.lower())
    if known is None:
        raise ConfigError(
            f"unknown model {model!r}: there is no such directory or config.json, and the sizes"
            f" known by name are "
            + ", ".join(f"{size} ({name})" for size, (name, _) in SHAPES.items())
        )
    return ModelShape.from_config(known[1], known[0])


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden_size, num_layers, vocab_size = (
        config[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")
    )
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or hidden_size // num_heads
    is_tied = bool(config.get("tie_word_embeddings", False))
    embedding = vocab_size * hidden_size
    num_params = (
        num_active_params(config)
        + (0 if is_tied else embedding)
        + _vector_params(config, hidden_size, head_dim)
    )
    num_params += _idle_expert_params(config, hidden_size)
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "mlp_width": _mlp_width(config),
        "num_active_experts": config["num_experts_per_tok"] if _num_experts(config) else 0,
        "has_head_norms": config.get("model_type") in _HEAD_NORMS,
        "vocab_size": vocab_size,
        "is_tied": is_tied,
        "num_params": num_params,
        "embedding_params": embedding,
    }


def _vector_params(config: Mapping[str, Any], hidden_size: int, head_dim: int) -> int:
    """Norms and biases."""
    num_heads = config["num_attention_heads"]
    kv_width = (config.get("num_key_value_heads") or num_heads) * head_dim
    per_layer = 2 * hidden_size
    if config.get("attention_bias", False) or config.get("model_type") == "qwen2":
        per_layer += num_heads * head_dim + 2 * kv_width
        per_layer += (
            hidden_size
            if config.get("attention_bias", False) and config.get("model_type") != "qwen2"
            else 0
        )
    if config.get("model_type") in _HEAD_NORMS:
        per_layer += 2 * head_dim
    if config.get("mlp_bias", False):
        per_layer += 2 * config["intermediate_size"] + hidden_size
    return config["num_hidden_layers"] * per_layer + hidden_size


def _num_experts(config: Mapping[str, Any]) -> int:
    return next(
        (
            config[key]
            for key in ("num_local_experts", "num_experts", "n_routed_experts")
            if config.get(key)
        ),
        0,
    )


def _mlp_width(config: Mapping[str, Any]) -> int:
    if not _num_experts(config):
        return config.get("intermediate_size") or 4 * config["hidden_size"]
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    return config["num_experts_per_tok"] * width + width * (config.get("n_shared_experts") or 0)


def _idle_expert_params(config: Mapping[str, Any], hidden_size: int) -> int:
    """Experts a token does not visit: stored, but not multiplied with."""
    num_experts = _num_experts(config)
    if not num_experts:
        return 0
    fewer: dict[str, Any] = {**config, "num_experts_per_tok": 0}
    chosen = (num_active_params(config) - num_active_params(fewer)) // config["num_experts_per_tok"]
    return (num_experts - config["num_experts_per_tok"]) * chosen
