"""The settings of a configuration that the memory of a policy worker depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from nemo_like.config.lora import LoraConfig
from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import (
    CUDA_CHUNK_TOKENS,
    ActivationCheckpointing,
    PolicyConfig,
    RunConfig,
)
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import EngineName, ParallelLayout
from nemo_like.prediction.trained_state import TrainedState

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Parallel layout, engine and memory-related settings of a model."""

    parallel_layout: ParallelLayout = field(default_factory=ParallelLayout)
    precision: Precision = "bfloat16"
    activation_checkpointing: ActivationCheckpointing = "none"
    engine: EngineName = "dtensor"
    chunk_size: int = CUDA_CHUNK_TOKENS
    """Tokens per chunk in which logits are computed."""
    has_reference: bool = False
    """A frozen copy of the initial model is kept beside the policy. With adapters there is none."""
    lora: LoraConfig | None = None
    """The adapters that are trained instead of the weights."""
    trained: TrainedState = field(default_factory=TrainedState)
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


def placement_of(config: RunConfig, teachers: Sequence[ModelSpec] = ()) -> Placement:
    """Return the parallel layout and the memory-related settings of a config.

    `teachers` are the models of `config.teacher_names`.
    """
    placement = policy_placement(
        config.policy, policy_layout(config), needs_reference=config.needs_reference
    )
    return replace(
        placement,
        teachers=tuple(teachers),
        keeps_teacher_embeddings=bool(teachers) and config.keeps_teacher_embeddings,
    )


def policy_placement(
    policy: PolicyConfig,
    parallel_layout: ParallelLayout,
    *,
    needs_reference: bool,
    device_type: str = "cuda",
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
        trained=TrainedState(
            optimizer=policy.optimizer.name, freeze=policy.freeze, has_ema=policy.ema.enabled
        ),
    )
