"""The settings of a configuration that the memory of a policy worker depends on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nemo_like.config.lora import LoraConfig
from nemo_like.config.schema import CUDA_CHUNK_TOKENS, ActivationCheckpointing, PolicyConfig
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import EngineName, ParallelLayout


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
    """A frozen copy of the initial model is kept beside the policy. With adapters there is none."""
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
