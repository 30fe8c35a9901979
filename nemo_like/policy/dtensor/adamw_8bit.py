"""AdamW with 8-bit moments on FSDP2's shards; see `nemo_like.policy.adamw_8bit`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from nemo_like.config.optimization import OptimizerConfig
from nemo_like.policy.adamw_8bit import AdamW8bit
from nemo_like.policy.dtensor.parameters import ShardedParameter, local_shard


class ShardedAdamW8bit:
    """Optimizer of this rank's shards as plain tensors, without those that are empty."""

    def __init__(self, parameters: Sequence[ShardedParameter], config: OptimizerConfig) -> None:
        """Update `parameters`. Raises ConfigError if torchao is not installed."""
        self._parameters = [each for each in parameters if local_shard(each.parameter).numel() > 0]
        self._index_of = {each.name: index for index, each in enumerate(self._parameters)}
        shards = [local_shard(each.parameter) for each in self._parameters]
        self._adamw = AdamW8bit(shards, config)

    def step(self, lr: float) -> None:
        """Update the shards that have gradients."""
        gradients: list[Tensor | None] = []
        for sharded in self._parameters:
            gradient = sharded.parameter.grad
            gradients.append(None if gradient is None else local_shard(gradient))
        self._adamw.step(gradients, lr)

    def state(self, sharded: ShardedParameter) -> dict[str, Tensor]:
        """Return both moments of a shard, float32 [m, ...] with the shape of the shard."""
        index = self._index_of.get(sharded.name)
        return {} if index is None else self._adamw.state(index)

    def restore(self, sharded: ShardedParameter, state: dict[str, Tensor], num_steps: int) -> None:
        """Set the moments of a shard, tensors sharded like the parameter, after some steps."""
        index = self._index_of.get(sharded.name)
        if index is not None:
            shards = {kind: local_shard(moment) for kind, moment in state.items()}
            self._adamw.restore(index, shards, num_steps)

    def reset(self) -> None:
        """Remove all moments."""
        self._adamw.reset()

    def stored(self) -> Iterator[Tensor]:
        """Yield the tensors of the moments as they are in memory."""
        return self._adamw.stored()
