"""`ModelSpec`: sizes and properties of a decoder; the only reader of a model's `config.json`.

Cost, memory, parallel layout checks, the Megatron model and its parameter map, the isolation check
and the prediction of `nemo-like plan` use a spec. A new spelling of a key, or a model family with
other properties, is added here and nowhere else. No weights and no library are needed. `PRESETS`
has the configurations of well-known models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.paths import model_directory
from nemo_like.config.schema import OutputHead
from nemo_like.models.config_fields import ConfigFields
from nemo_like.models.family_traits import COUNTED_TYPES, SAME_LAYERS, TRAITS, FamilyTraits
from nemo_like.models.linear_attention import linear_attention_layers, linear_attention_params
from nemo_like.models.vision import VisionSpec

SCORE_WEIGHT = "score.weight"
"""Name of the score head of a reward model, [1, hidden size]."""
_ROPE = ("rope_parameters", "rope_scaling")
"""transformers 5 has the first, older files the second, which may be null."""

_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
_TIED = {"tie_word_embeddings": True}
_QWEN2: dict[str, Any] = {"model_type": "qwen2", "use_sliding_window": False}


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Dimensions of multi-head latent attention (DeepSeek), per head where not stated otherwise."""

    query_rank: int | None
    """Rank of the query compression; None where queries are not compressed."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    is_interleaved: bool
    """The rotary embedding rotates pairs of neighbours, and not the two halves of a head."""
    score_factor: float
    """Factor of attention scores besides that for the size of a head."""


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """The mixture-of-experts (MoE) layers of a model."""

    num_experts: int
    num_active_experts: int
    """Experts that each token is routed to."""
    expert_size: int
    """Intermediate size of one expert."""
    shared_size: int
    """Intermediate size of all shared experts together; 0 without."""
    layers: frozenset[int]
    """Layers with experts; the others have a dense feed-forward block."""
    normalizes_weights: bool
    """The router weights of the active experts are normalized to a sum of 1."""
    num_groups: int = 1
    """Groups of experts."""
    num_active_groups: int = 1
    """Groups that the experts of a token are chosen from."""
    weight_factor: float = 1.0
    """Factor of the router weights."""
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    """Of experts with a clamped SwiGLU."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes and properties of a decoder, with the names of Hugging Face's configurations."""

    name: str
    """The model's path or hub name, for messages."""
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width of the dense feed-forward block."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None
    num_mlp_matrices: int
    """3 for a gated feed-forward block (gate, up, down), else 2."""
    is_tied: bool
    """The input embedding is the output projection."""
    has_qkv_bias: bool
    has_output_bias: bool
    """The output projection of attention has a bias."""
    has_mlp_bias: bool
    has_qk_norm: bool
    """Queries and keys are normalized per head."""
    windows: tuple[int | None, ...]
    """For each layer the number of positions a token attends to, itself included; None for all."""
    linear_attention_layers: frozenset[int]
    """Layers whose attention is linear in the length; their entry of `windows` is None."""
    linear_attention_params: int
    """Parameters of such a layer, without its feed-forward block; 0 if they are not known."""
    num_attentions: int
    has_query_gate: bool
    """See `FamilyTraits`, as for the line before."""
    rope_type: str
    activation: str
    attention_dropout: float
    norm_eps: float
    moe: MoeSpec | None
    latent: LatentAttention | None
    logit_scale: float = 1.0
    """Factor of the logits."""
    logit_softcap: float | None = None
    """Logits x, after `logit_scale`, become logit_softcap * tanh(x / logit_softcap)."""
    rope_threshold: int | None = None
    """Rows of more tokens have other rotary frequencies (LongRoPE, dynamic NTK); None: no row."""
    head: OutputHead = "vocabulary"
    """`scores` for a reward model, whose input embedding is not tied to anything."""
    vision: VisionSpec | None = None
    """The tower of a model that is trained with images."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | object, name: str = "") -> ModelSpec:
        """Read a Hugging Face configuration: a mapping, or an object with its attributes.

        Raises ConfigError for a size that is missing or not a positive integer.
        """
        fields = ConfigFields(config, name)
        try:
            spec = cls._from_fields(fields)
            vision = VisionSpec.of_composite(config, name)
            return spec if vision is None else replace(spec, vision=vision, is_tied=vision.is_tied)
        except ConfigError:
            raise
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ConfigError(
                f"{fields.model} has a value of the wrong type in its config.json: {error}"
            ) from error

    @classmethod
    def _from_fields(cls, fields: ConfigFields) -> ModelSpec:
        model_type = str(fields.get("model_type", default=""))
        model_type = SAME_LAYERS.get(model_type, model_type)
        hidden_size = fields.size("hidden_size", "n_embd", "d_model")
        num_layers = fields.size("num_hidden_layers", "n_layer", "num_layers")
        num_heads = fields.size("num_attention_heads", "n_head")
        attention_bias = bool(fields.get("attention_bias", default=False))
        head = _output_head(fields)
        traits = TRAITS.get(model_type, FamilyTraits())
        rope = fields.get(*_ROPE, default=None) or {}
        # Without a value of their own, heads divide the hidden size.
        default_head_dim = max(hidden_size // num_heads, 1)
        return cls(
            name=fields.name,
            model_type=model_type,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=fields.size(
                "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden_size
            ),
            num_heads=num_heads,
            num_kv_heads=fields.size("num_key_value_heads", "num_kv_heads", default=num_heads),
            head_dim=fields.size("head_dim", default=default_head_dim),
            vocab_size=fields.size("vocab_size"),
            max_positions=fields.get("max_position_embeddings", "n_positions", default=None),
            num_mlp_matrices=traits.num_mlp_matrices,
            is_tied=head == "vocabulary" and bool(fields.get("tie_word_embeddings", default=False)),
            has_qkv_bias=attention_bias or traits.has_qkv_bias,
            has_output_bias=attention_bias and not traits.has_qkv_bias,
            has_mlp_bias=bool(fields.get("mlp_bias", default=False)),
            has_qk_norm=traits.has_qk_norm,
            windows=_windows(fields, traits, num_layers),
            linear_attention_layers=linear_attention_layers(fields, num_layers),
            linear_attention_params=linear_attention_params(fields, hidden_size),
            num_attentions=traits.num_attentions,
            has_query_gate=traits.has_query_gate,
            rope_type=str(rope.get("rope_type") or rope.get("type", "default")),
            activation=str(fields.get("hidden_act", "activation_function", default="silu")),
            attention_dropout=float(fields.get("attention_dropout", default=0.0)),
            norm_eps=float(fields.get("rms_norm_eps", "layer_norm_epsilon", default=1e-6)),
            moe=_moe(fields, traits, num_layers),
            latent=_latent(fields),
            logit_scale=_logit_scale(fields),
            logit_softcap=fields.get("final_logit_softcapping", "logits_soft_cap", default=None),
            rope_threshold=_rope_threshold(fields),
            head=head,
        )

    def with_output_head(self, head: OutputHead) -> ModelSpec:
        """Return the spec of this model with the output head that a run needs.

        Raises ConfigError for a vocabulary on a reward model, which has no output embedding.
        """
        if head == self.head:
            return self
        if head == "vocabulary":
            raise ConfigError(
                f"policy.model_name is {self.name!r}, a reward model, which has a score head and no"
                " output embedding: only `nemo-like rm` trains it; give the directory of a causal"
                " language model"
            )
        return replace(self, head=head, is_tied=False)

    @property
    def estimate_warnings(self) -> tuple[str, ...]:
        """Text about a model type whose FLOPs and parameters no test compares; empty for others."""
        text = (
            f"FLOPs and parameters of model type {self.model_type} are estimated as for a"
            " Llama of the same sizes: MFU, predicted memory and the balance of ranks may be"
            " inaccurate"
        )
        return () if self.model_type in COUNTED_TYPES else (text,)

    @property
    def num_sparse_layers(self) -> int:
        """Layers with experts."""
        if self.moe is None:
            return 0
        return len(self.moe.layers)

    @property
    def num_active_params(self) -> int:
        """Parameters that one token is multiplied with.

        These are attention, the active experts, the router and the output projection. The
        embedding table (a lookup), norms and biases are left out; a tied output projection counts,
        since it is multiplied.
        """
        num_dense_layers = self.num_layers - self.num_sparse_layers
        num_linear = len(self.linear_attention_layers) if self.linear_attention_params else 0
        attention = (self.num_layers - num_linear) * self._attention_params
        attention += num_linear * self.linear_attention_params
        dense = num_dense_layers * self._dense_params
        sparse = self.num_sparse_layers * self._moe_params
        return attention + dense + sparse + self.head_params

    @property
    def num_params(self) -> int:
        """All parameters, tied embeddings once."""
        input_embedding = 0 if self.is_tied else self.embedding_params
        idle_experts = 0
        if self.moe is not None:
            num_idle = self.moe.num_experts - self.moe.num_active_experts
            expert_params = self._mlp_params(self.moe.expert_size)
            idle_experts = self.num_sparse_layers * num_idle * expert_params
        used = self.num_active_params + input_embedding + self.vision_params
        return used + self._vector_params + idle_experts

    @property
    def embedding_params(self) -> int:
        """Parameters of one embedding table."""
        return self.vocab_size * self.hidden_size

    @property
    def head_params(self) -> int:
        """Parameters of the output projection, tied or not, or of the score head."""
        return self.hidden_size if self.head == "scores" else self.embedding_params

    @property
    def layer_params(self) -> int:
        """Parameters of one layer, on average."""
        input_embedding = 0 if self.is_tied else self.embedding_params
        outside_layers = input_embedding + self.head_params + self.hidden_size + self.vision_params
        return (self.num_params - outside_layers) // self.num_layers

    @property
    def vision_params(self) -> int:
        """Parameters of the vision tower."""
        return 0 if self.vision is None else self.vision.num_params

    @property
    def attention_width(self) -> int:
        """Forward FLOPs per token squared of one causal layer.

        Half of 2 * heads * (query-key dim + value dim), because a token attends to half of the
        positions on average.
        """
        if self.latent is None:
            return self.num_heads * 2 * self.head_dim * self.num_attentions
        query_key_dim = self.latent.nope_dim + self.latent.rope_dim
        return self.num_heads * (query_key_dim + self.latent.value_dim)

    @property
    def active_mlp_size(self) -> int:
        """Intermediate size that one token passes: all its experts together in an MoE layer."""
        if self.moe is None:
            return self.intermediate_size
        routed_size = self.moe.num_active_experts * self.moe.expert_size
        return routed_size + self.moe.shared_size

    @property
    def _attention_params(self) -> int:
        """Parameters of the projections of one layer."""
        latent = self.latent
        if latent is None:
            # Query and output projections have all heads, key and value projections the kv heads.
            num_query_heads = (3 if self.has_query_gate else 2) * self.num_heads
            num_projected_heads = num_query_heads + 2 * self.num_kv_heads
            return self.hidden_size * self.head_dim * num_projected_heads
        query_key_dim = latent.nope_dim + latent.rope_dim
        query_width = self.num_heads * query_key_dim
        if latent.query_rank:
            query = latent.query_rank * (self.hidden_size + query_width)
        else:
            query = self.hidden_size * query_width
        # Rotary keys bypass the compression: one vector of `rope_dim` per token for all heads.
        compress = self.hidden_size * (latent.kv_rank + latent.rope_dim)
        expanded_width = self.num_heads * (latent.nope_dim + latent.value_dim)
        expand = latent.kv_rank * expanded_width
        output_width = self.num_heads * latent.value_dim
        output = output_width * self.hidden_size
        return query + compress + expand + output

    @property
    def _dense_params(self) -> int:
        """Parameters of one dense feed-forward block."""
        return self._mlp_params(self.intermediate_size)

    def _mlp_params(self, size: int) -> int:
        """Parameters of a feed-forward block of intermediate size `size`."""
        return self.num_mlp_matrices * self.hidden_size * size

    @property
    def _moe_params(self) -> int:
        """Active parameters of one MoE layer: router, active experts, shared experts."""
        if self.moe is None:
            return 0
        router = self.hidden_size * self.moe.num_experts
        return router + self._mlp_params(self.active_mlp_size)

    @property
    def _vector_params(self) -> int:
        """Norms and biases."""
        # The norms before attention and before the feed-forward block.
        per_layer = 2 * self.hidden_size
        if self.has_qkv_bias:
            num_biased_heads = self.num_heads + 2 * self.num_kv_heads
            per_layer += num_biased_heads * self.head_dim
        if self.has_output_bias:
            per_layer += self.hidden_size
        if self.has_qk_norm:
            # One weight for all query heads, one for all key heads.
            per_layer += 2 * self.head_dim
        if self.latent is not None:
            # A norm of each latent vector.
            per_layer += self.latent.kv_rank + (self.latent.query_rank or 0)
        if self.has_mlp_bias:
            per_layer += 2 * self.intermediate_size + self.hidden_size
        final_norm = self.hidden_size
        return self.num_layers * per_layer + final_norm


def _windows(fields: ConfigFields, traits: FamilyTraits, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer, None for attention to all positions."""
    kinds = fields.get("layer_types", default=None)
    window = fields.get("sliding_window", default=None)
    # Newer configurations name the kind of every layer; older ones have a rule.
    if kinds is not None:
        chunk = fields.get("attention_chunk_size", default=None)
        by_kind = {"sliding_attention": window, "chunked_attention": window or chunk}
        return tuple(by_kind.get(kind) for kind in kinds)
    is_used = fields.get("use_sliding_window", default=True)
    if window is None or not is_used:
        return (None,) * num_layers
    if traits.has_window_in_every_layer:
        return (window,) * num_layers
    period = fields.get("sliding_window_pattern", default=None)
    windows: list[int | None] = [window] * num_layers
    if period is not None:
        # Every period-th layer attends to all positions (Gemma).
        for layer in range(period - 1, num_layers, period):
            windows[layer] = None
        return tuple(windows)
    # Layers below `max_window_layers` attend to all positions (Qwen2, Qwen3).
    first = fields.get("max_window_layers", default=0)
    for layer in range(min(first, num_layers)):
        windows[layer] = None
    return tuple(windows)


def _output_head(fields: ConfigFields) -> OutputHead:
    """Return the head of the architecture that the configuration names."""
    architectures = fields.get("architectures", default=None) or ("",)
    return "scores" if str(architectures[0]).endswith("ForSequenceClassification") else "vocabulary"


def _logit_scale(fields: ConfigFields) -> float:
    """Cohere multiplies the logits, Granite divides them."""
    factor = fields.get("logit_scale", "lm_head_multiplier", default=1.0)
    return float(factor) / float(fields.get("logits_scaling", default=1.0))


def _rope_threshold(fields: ConfigFields) -> int | None:
    """Return the shortest original length of the rotary embeddings that depend on the length."""
    rope = fields.get(*_ROPE, default=None) or {}
    # Layers may have different ones, by their kind.
    by_kind = [value for value in rope.values() if isinstance(value, Mapping)]
    thresholds = []
    for each in by_kind or [rope]:
        kind = str(each.get("rope_type") or each.get("type", "default"))
        original = each.get("original_max_position_embeddings")
        if "dynamic" in kind:
            thresholds.append(fields.size("max_position_embeddings"))
        elif kind in ("longrope", "su"):
            key = "original_max_position_embeddings"
            thresholds.append(original or fields.get(key, "max_position_embeddings"))
    return min(thresholds, default=None)


def _latent(fields: ConfigFields) -> LatentAttention | None:
    if fields.get("kv_lora_rank", default=None) is None:
        return None
    return LatentAttention(
        query_rank=fields.get("q_lora_rank", default=None),
        kv_rank=fields.size("kv_lora_rank"),
        nope_dim=fields.size("qk_nope_head_dim"),
        rope_dim=fields.size("qk_rope_head_dim"),
        value_dim=fields.size("v_head_dim"),
        is_interleaved=bool(fields.get("rope_interleave", default=True)),
        score_factor=_score_factor(fields.get(*_ROPE, default=None) or {}),
    )


def _score_factor(rope: Mapping[str, Any]) -> float:
    """Return the factor with which DeepSeek extends the positions by YaRN."""
    factor = rope.get("factor", 1.0)
    mscale = rope.get("mscale_all_dim", 0)
    if not mscale or factor <= 1:
        return 1.0
    return (0.1 * mscale * math.log(factor) + 1.0) ** 2


def _moe(fields: ConfigFields, traits: FamilyTraits, num_layers: int) -> MoeSpec | None:
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    # 0 experts mean a dense model.
    if not fields.get(*names, default=0):
        return None
    expert_size = fields.size("moe_intermediate_size", "intermediate_size")
    # Qwen and Granite give the size of the shared expert, DeepSeek and ERNIE the number of them.
    sizes = ("shared_expert_intermediate_size", "shared_intermediate_size")
    shared_size = fields.get(*sizes, default=0)
    if not shared_size:
        num_shared = fields.get("n_shared_experts", "moe_num_shared_experts", default=0)
        shared_size = expert_size * num_shared
    if traits.has_shared_mlp:
        shared_size = fields.size("intermediate_size")
    return MoeSpec(
        num_experts=fields.size(*names),
        num_active_experts=fields.size("num_experts_per_tok", "moe_k", "moe_topk"),
        expert_size=expert_size,
        shared_size=shared_size,
        layers=_moe_layers(fields, num_layers),
        normalizes_weights=bool(fields.get("norm_topk_prob", default=traits.normalizes_weights)),
        num_groups=fields.get("n_group", default=1),
        num_active_groups=fields.get("topk_group", default=1),
        weight_factor=float(fields.get("routed_scaling_factor", default=1.0)),
        swiglu_alpha=float(fields.get("swiglu_alpha", default=1.702)),
        swiglu_limit=float(fields.get("swiglu_limit", default=7.0)),
    )


def _moe_layers(fields: ConfigFields, num_layers: int) -> frozenset[int]:
    kinds = fields.get("mlp_layer_types", default=None)
    if kinds is not None:
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    if fields.get("expert_layer_period", default=None) is not None:
        first = fields.get("expert_layer_offset", default=0)
        return frozenset(range(first, num_layers, fields.size("expert_layer_period")))
    first = fields.get("first_k_dense_replace", "moe_layer_start_index", default=0)
    period = fields.get("decoder_sparse_step", "moe_layer_freq", default=1)
    dense = set(fields.get("mlp_only_layers", default=()))
    # Qwen counts layers from 1 (`(layer + 1) % step == 0`), DeepSeek from 0. With a period of 1
    # both are every layer.
    counts_from_one = fields.get("decoder_sparse_step", default=None) is not None
    layers = set()
    for layer in range(max(first, 0), num_layers):
        number = layer + 1 if counts_from_one else layer
        if number % period == 0 and layer not in dense:
            layers.add(layer)
    return frozenset(layers)


def _llama(*sizes: int, **more: Any) -> dict[str, Any]:
    """Return the keys of a config.json; `sizes` are in the order of `_SIZES`."""
    named = dict(zip(_SIZES, sizes, strict=True))
    return {"model_type": "llama", **named, "tie_word_embeddings": False, **more}


PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
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
"""Size on the command line -> (the model with these published sizes, its configuration)."""


def load_spec(model: str, key: str = "--model") -> ModelSpec:
    """Return the spec of a model directory, a `config.json`, a hub name, or a size of `PRESETS`.

    Raises ConfigError for anything else and for files that cannot be used; `key` names a model that
    cannot be downloaded.
    """
    path = Path(model).expanduser()
    if "/" in model and not path.exists():
        path = Path(model_directory(key, model, weights=False))
    # A path has priority: a directory may have the name of a preset.
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        # A file of weights, given by mistake, is not text.
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{shown_path(path)} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError(
                f"{shown_path(path)} contains {type(config).__name__}, not a model configuration"
            )
        return ModelSpec.from_config(config, model)
    preset = PRESETS.get(model.lower())
    if preset is None:
        choices = [f"{size} ({name})" for size, (name, _) in PRESETS.items()]
        sizes = ", ".join(choices)
        raise ConfigError(
            f"unknown model {model!r}: there is no such directory or config.json, and the presets"
            f" are {sizes}"
        )
    name, config = preset
    return ModelSpec.from_config(config, name)
