"""The share of a model on a rank: layers, trained parameters, optimizer state, teachers.

The sizes of adapters are computed for a Llama-like model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from nemo_like.config.optimization import LoraConfig
from nemo_like.config.schema import CUDA_CHUNK_TOKENS, ActivationCheckpointing, PolicyConfig
from nemo_like.models.spec import ModelSpec
from nemo_like.models.weight_files import weight_sizes
from nemo_like.parallel_layout import EngineName, ParallelLayout


class _Layer(NamedTuple):
    """A linear layer that can have an adapter."""

    num_inputs: int
    num_outputs: int
    is_row_parallel: bool = False
    """Tensor parallelism shards the inputs and not the outputs."""


def num_adapter_params(spec: ModelSpec, lora: LoraConfig) -> int:
    """Return the number of parameters of all adapters.

    It is 0 for a model whose layers are not named as in Llama.
    """
    return round(spec.num_layers * adapter_params(spec, lora, tp=1))


def trained_head_params(spec: ModelSpec) -> int:
    """Return the parameters that are trained besides the adapters: the head of a reward model."""
    return spec.head_params if spec.head == "scores" else 0


def adapter_params(spec: ModelSpec, lora: LoraConfig, tp: int) -> float:
    """Return the adapter parameters of one layer on one of `tp` tensor-parallel ranks.

    The matrix on the side that is not sharded is replicated.
    """
    total = 0.0
    for layer in _targets(spec, lora):
        sharded = layer.num_inputs if layer.is_row_parallel else layer.num_outputs
        replicated = layer.num_outputs if layer.is_row_parallel else layer.num_inputs
        total += lora.rank * (sharded / tp + replicated)
    return total


def adapter_activations(spec: ModelSpec, lora: LoraConfig) -> int:
    """Return the values per token that autograd saves for the adapters of one layer: A x of each.

    The inputs of the layers are counted with the model.
    """
    return lora.rank * len(_targets(spec, lora))


def adapter_outputs(spec: ModelSpec, lora: LoraConfig, tp: int) -> float:
    """Return the outputs B A x of all adapters of one layer, values per token and tp rank.

    Selective activation checkpointing saves them, like the results of all matrix products.
    """
    total = 0.0
    for layer in _targets(spec, lora):
        total += layer.num_outputs / (1 if layer.is_row_parallel else tp)
    return total


def matrix_sizes(spec: ModelSpec) -> list[int]:
    """Return the values of each matrix of a layer; `policy.lora.quantization` applies to them."""
    return [layer.num_inputs * layer.num_outputs for layer in _layers(spec).values()]


def frozen_share(spec: ModelSpec, patterns: Sequence[str]) -> float:
    """Return the share of the parameters whose name matches a pattern of `policy.freeze`.

    0 for a model whose names are not known, so that the prediction is not too small.
    """
    sizes = weight_sizes(spec) if patterns else None
    if sizes is None:
        return 0.0
    if spec.is_tied:
        # Either name freezes a tied embedding.
        patterns = [pattern.replace("lm_head.", "model.embed_tokens.") for pattern in patterns]
    frozen = 0
    for name, size in sizes.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            frozen += size
    return frozen / sum(sizes.values())


def _targets(spec: ModelSpec, lora: LoraConfig) -> list[_Layer]:
    return [layer for name, layer in _layers(spec).items() if lora.is_target(name)]


def _layers(spec: ModelSpec) -> dict[str, _Layer]:
    """Return the linear layers of a decoder layer that can have an adapter."""
    hidden = spec.hidden_size
    query = spec.num_heads * spec.head_dim
    key = spec.num_kv_heads * spec.head_dim
    width = spec.intermediate_size
    layers = {
        "self_attn.q_proj": _Layer(hidden, query),
        "self_attn.k_proj": _Layer(hidden, key),
        "self_attn.v_proj": _Layer(hidden, key),
        "self_attn.o_proj": _Layer(query, hidden, is_row_parallel=True),
    }
    if spec.moe is None:
        # In MoE models only attention has adapters.
        layers["mlp.gate_proj"] = _Layer(hidden, width)
        layers["mlp.up_proj"] = _Layer(hidden, width)
        layers["mlp.down_proj"] = _Layer(width, hidden, is_row_parallel=True)
    return layers


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Parallel layout, engine and memory-related settings of a model."""

    parallel_layout: ParallelLayout = field(default_factory=ParallelLayout)
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    activation_checkpointing: ActivationCheckpointing = "none"
    engine: EngineName = "dtensor"
    chunk_size: int = CUDA_CHUNK_TOKENS
    """Tokens per chunk in which logits are computed."""
    has_reference: bool = False
    """A frozen copy of the initial model is kept beside the policy. Adapters need no copy."""
    lora: LoraConfig | None = None
    """The adapters that are trained instead of the weights."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    freeze: tuple[str, ...] = ()
    """Patterns of the names of weights that are not trained."""
    has_ema: bool = False
    teachers: tuple[ModelSpec, ...] = ()
    """The teachers of distillation."""
    keeps_teacher_embeddings: bool = False
    """Copies of the output embeddings of the teachers stay on the device during training."""

    @property
    def compute_bytes(self) -> int:
        """Bytes per value of the compute precision."""
        return 2 if self.precision == "bfloat16" else 4

    @property
    def num_shards(self) -> int:
        """Ranks over which weights, gradients and optimizer state are sharded (FSDP, ZeRO)."""
        return self.parallel_layout.num_shards

    @property
    def has_compute_copy(self) -> bool:
        """True if forward and backward use another copy than the shard of the master weights."""
        return self.num_shards > 1 or self.precision == "bfloat16"


def policy_placement(
    policy: PolicyConfig,
    parallel_layout: ParallelLayout,
    *,
    needs_reference: bool,
    device_type: str = "cuda",
    teachers: tuple[ModelSpec, ...] = (),
    keeps_teacher_embeddings: bool = False,
) -> Placement:
    """Return the memory-related settings of a policy in a layout, on a device type of torch."""
    return Placement(
        parallel_layout=parallel_layout,
        precision=policy.precision,
        activation_checkpointing=policy.activation_checkpointing,
        engine=policy.engine,
        chunk_size=policy.chunk_size(device_type),
        has_reference=needs_reference and not policy.lora.enabled,
        lora=policy.lora if policy.lora.enabled else None,
        optimizer=policy.optimizer.name,
        freeze=policy.freeze,
        has_ema=policy.ema.enabled,
        teachers=teachers,
        keeps_teacher_embeddings=bool(teachers) and keeps_teacher_embeddings,
    )
