"""The settings of a configuration that the memory of a policy worker depends on."""

from __future__ import annotations

from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import PolicyConfig, RunConfig
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.prediction.memory import Placement
from nemo_like.prediction.trained_state import TrainedState


def placement_of(config: RunConfig) -> Placement:
    """Return the parallel layout and the memory-related settings of a config."""
    return policy_placement(
        config.policy, policy_layout(config), needs_reference=config.needs_reference
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
            optimizer=policy.optimizer.name,
            freeze=policy.freeze,
            has_ema=policy.ema.enabled,
        ),
    )
