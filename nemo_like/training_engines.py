"""The training engines of `policy.engine`: what other packages must know without importing them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EngineName = Literal["dtensor", "megatron"]


@dataclass(frozen=True, kw_only=True)
class TrainingEngine:
    """Properties of an engine that layouts, checks and predictions depend on."""

    shards_weights: bool
    """FSDP2 shards weights and gradients over the data-parallel ranks. Megatron-Core has them
    complete on each of these ranks and shards the state of the optimizer only.
    """
    has_pipeline: bool
    has_master_copy: bool
    """A bfloat16 model has float32 weights besides, where FSDP2 stores float32 shards only."""
    pads_vocabulary: bool
    """A tensor-parallel rank may have no token of the vocabulary."""
    replicates_kv_heads: bool
    """Tensor-parallel ranks may outnumber the key-value heads."""
    experts_span_tensor: bool
    """Expert-parallel groups have the ranks of the tensor-parallel axis as members. Otherwise the
    experts are divided over the tensor-parallel ranks first.
    """
    compiles_layers: bool
    """`torch.compile` of decoder layers. Megatron-Core has fused functions of its own."""
    has_4bit_weights: bool
    has_adamw_only: bool


ENGINES: dict[EngineName, TrainingEngine] = {
    "dtensor": TrainingEngine(
        shards_weights=True,
        has_pipeline=False,
        has_master_copy=False,
        pads_vocabulary=False,
        replicates_kv_heads=False,
        experts_span_tensor=False,
        compiles_layers=True,
        has_4bit_weights=True,
        has_adamw_only=False,
    ),
    "megatron": TrainingEngine(
        shards_weights=False,
        has_pipeline=True,
        has_master_copy=True,
        pads_vocabulary=True,
        replicates_kv_heads=True,
        experts_span_tensor=True,
        compiles_layers=False,
        has_4bit_weights=False,
        has_adamw_only=True,
    ),
}
