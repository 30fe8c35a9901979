"""The share of a model on a rank: layers, trained parameters, optimizer state, teachers.

The sizes of adapters are computed for a Llama-like model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from nemo_like.config.schema import (
    CUDA_CHUNK_TOKENS,
    ActivationCheckpointing,
    AdapterConfig,
    PolicyConfig,
)
from nemo_like.models.adapters import can_have_adapter
from nemo_like.models.spec import ModelSpec
from nemo_like.models.weight_files import LinearLayer, linear_layers_of, weight_sizes
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.training_engines import ENGINES, EngineName


def num_adapter_params(spec: ModelSpec, adapter: AdapterConfig) -> int:
    """Return the number of parameters of all adapters.

    It is 0 for a model whose layers are not named as in Llama.
    """
    return round(spec.num_layers * Placement(adapter=adapter).adapter_params(spec))


def matrix_sizes(spec: ModelSpec) -> list[int]:
    """Return the values of each matrix of a layer that can have 4 bits per value."""
    return [layer.num_inputs * layer.num_outputs for layer in linear_layers_of(spec).values()]


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


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Parallel layout, engine and memory-related settings of a model."""

    parallel_layout: ParallelLayout = field(default_factory=ParallelLayout)
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    activation_checkpointing: ActivationCheckpointing = "none"
    engine: EngineName = "dtensor"
    is_compiled: bool = False
    """Decoder layers are compiled (`policy.compile`), if they have no experts."""
    chunk_size: int = CUDA_CHUNK_TOKENS
    """Tokens per chunk in which logits are computed."""
    has_reference: bool = False
    """A frozen copy of the initial model is kept beside the policy. Adapters need no copy."""
    adapter: AdapterConfig | None = None
    """The adapters that are trained instead of the weights."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    freeze: tuple[str, ...] = ()
    """Patterns of the names of weights that are not trained."""
    has_ema: bool = False
    trained_vision: Literal["frozen", "projector", "all"] = "frozen"
    """What is trained of a vision tower (`policy.vision.train`)."""
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

    def gathered_layer_params(self, spec: ModelSpec) -> float:
        """Return the parameters of one layer that FSDP gathers on a rank, on average.

        The experts of other expert-parallel ranks are not included.
        """
        layout = self.parallel_layout
        others = 0.0
        if spec.moe is not None:
            width = spec.moe.num_experts * spec.moe.expert_size
            experts = width * spec.num_mlp_matrices * spec.hidden_size * (1 - 1 / layout.ep)
            others = experts * spec.num_sparse_layers / spec.num_layers
        return (spec.layer_params - others) / layout.tp

    @property
    def has_compute_copy(self) -> bool:
        """True if forward and backward use another copy than the shard of the master weights."""
        return self.num_shards > 1 or self.precision == "bfloat16"

    @property
    def has_adapters(self) -> bool:
        return self.adapter is not None

    @property
    def has_quantized_weights(self) -> bool:
        """True if the frozen matrices of layers have 4 bits per value."""
        has_weights = ENGINES[self.engine].has_4bit_weights
        return self.adapter is not None and self.adapter.is_quantized and has_weights

    def adapter_params(self, spec: ModelSpec) -> float:
        """Return the adapter parameters of one layer on one tensor-parallel rank.

        The matrix on the side that is not sharded is replicated. It is 0 without adapters.
        """
        tp = self.parallel_layout.tp
        total = 0.0
        for layer in self._targets(spec):
            sharded = layer.num_inputs if layer.is_row_parallel else layer.num_outputs
            replicated = layer.num_outputs if layer.is_row_parallel else layer.num_inputs
            total += sharded / tp + replicated
        return self._rank * total

    def adapter_activations(self, spec: ModelSpec) -> int:
        """Return the values per token that autograd saves for the adapters of a layer: A x of each.

        The inputs of the layers are counted with the model.
        """
        return self._rank * len(self._targets(spec))

    def adapter_outputs(self, spec: ModelSpec) -> float:
        """Return the outputs B A x of all adapters of one layer, values per token and tp rank.

        Selective activation checkpointing saves them, like the results of all matrix products.
        """
        tp = self.parallel_layout.tp
        return sum(
            layer.num_outputs / (1 if layer.is_row_parallel else tp)
            for layer in self._targets(spec)
        )

    @property
    def _rank(self) -> int:
        return 0 if self.adapter is None else self.adapter.rank

    def _targets(self, spec: ModelSpec) -> list[LinearLayer]:
        """Return the layers that have an adapter."""
        adapter = self.adapter
        if adapter is None:
            return []
        targets = []
        for name, layer in linear_layers_of(spec).items():
            if can_have_adapter(f".{name}", spec) and adapter.is_target(name):
                targets.append(layer)
        return targets


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
        activation_checkpointing=policy.checkpointing,
        engine=policy.engine,
        is_compiled=policy.compiles_layers(device_type, is_dense=True),
        chunk_size=policy.chunk_size(device_type),
        has_reference=needs_reference and policy.adapter is None,
        adapter=policy.adapter,
        optimizer=policy.optimizer.name,
        freeze=policy.freeze,
        has_ema=policy.ema.enabled,
        trained_vision=policy.vision.train,
        teachers=teachers,
        keeps_teacher_embeddings=bool(teachers) and keeps_teacher_embeddings,
    )
