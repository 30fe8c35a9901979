"""AdamW on FSDP2's shards: every rank updates its own shard of each parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.config.schema import OptimizerConfig
from nemo_like.policy.checkpoint.sharded_reader import MOMENTS
from nemo_like.policy.collectives import sum_floats
from nemo_like.policy.dtensor.groups import Groups
from nemo_like.policy.dtensor.parameters import ShardedParameter, local_shard
from nemo_like.policy.optim import build_optimizer


class ShardedAdamW:
    """Gradients and optimizer state of one trainable model."""

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        groups: Groups,
        device: torch.device,
        config: OptimizerConfig,
    ) -> None:
        self.adamw = build_optimizer((sharded.parameter for sharded in parameters), config)
        self._parameters = parameters
        self._groups = groups
        self._device = device

    def reduce_gradients(self) -> None:
        """All-reduce partial gradients over the tp ranks; FSDP has reduced over dp and cp."""
        tensor = self._groups.tensor
        gradients = [
            gradient
            for sharded, gradient in self._local_gradients()
            if sharded.spec.has_partial_grad
        ]
        if tensor is None or not gradients:
            return
        # One message: these are norms and biases, too small for a collective each.
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=tensor.group)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, total in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(total.view_as(gradient))

    def gradient_norm(self, *, is_loss_finite: bool = True) -> float:
        """Global L2 norm of the gradient; NaN if any rank passes `is_loss_finite=False`."""
        # Each element counts once: shards are disjoint, and replicas over tp have one owner.
        gradients = [gradient for sharded, gradient in self._local_gradients() if sharded.is_owner]
        norm = math.nan
        if is_loss_finite:
            norm = float(torch.nn.utils.get_total_norm(gradients, foreach=True))
        (square,) = sum_floats([norm**2], self._groups.world, self._device)
        return math.sqrt(square)

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by `factor`."""
        for _, gradient in self._local_gradients():
            gradient.mul_(factor)

    def step(self, lr: float) -> None:
        """Update the shards and clear the gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Free the gradients."""
        # Freed and not set to 0: the next forward needs the memory for activations.
        self.adamw.zero_grad(set_to_none=True)

    def moments(self) -> Iterator[Tensor]:
        """Yield both Adam moments of this rank's shards, in the shape of the shard.

        There are none before the first step.
        """
        for state in self.adamw.state.values():
            for moment in MOMENTS:
                yield local_shard(state[moment])

    def _local_gradients(self) -> Iterator[tuple[ShardedParameter, Tensor]]:
        """Yield each parameter that has a gradient, with this rank's shard of the gradient.

        It has the same shape as the shard of the parameter.
        """
        for sharded in self._parameters:
            if sharded.parameter.grad is not None:
                yield sharded, local_shard(sharded.parameter.grad)
