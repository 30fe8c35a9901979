"""The settings of a configuration that the memory of a policy worker depends on."""

from __future__ import annotations

from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import RunConfig
from nemo_like.prediction.memory import Placement
from nemo_like.prediction.trained_state import TrainedState


def placement_of(config: RunConfig) -> Placement:
    """Return the parallel layout and the memory-related settings of a config."""
    policy = config.policy
    return Placement(
        parallel_layout=policy_layout(config),
        precision=policy.precision,
        activation_checkpointing=policy.activation_checkpointing,
        engine=policy.engine,
        chunk_size=policy.chunk_size("cuda"),
        has_reference=config.needs_reference and not policy.lora.enabled,
        lora=policy.lora if policy.lora.enabled else None,
        trained=TrainedState(
            optimizer=policy.optimizer.name,
            freeze=policy.freeze,
            has_ema=policy.ema.enabled,
        ),
    )
