"""AdamW, also with 8-bit moments, and Muon on FSDP2's shards: every rank updates its own shards."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_like.config.schema import OptimizerConfig
from nemo_like.policy.checkpoint.sharded_reader import MOMENTS, States
from nemo_like.policy.collectives import sum_floats
from nemo_like.policy.dtensor.adamw_8bit import ShardedAdamW8bit
from nemo_like.policy.dtensor.muon import MOMENTUM, ShardedMuon
from nemo_like.policy.dtensor.parallel import Groups
from nemo_like.policy.dtensor.parameters import ShardedParameter, local_shard
from nemo_like.policy.optim import build_optimizer


class ShardedOptimizer:
    """Gradients and optimizer state of one trainable model."""

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        groups: Groups,
        device: torch.device,
        config: OptimizerConfig,
        hidden: Collection[nn.Parameter],
    ) -> None:
        """`hidden` are the parameters that Muon updates if `config` selects it."""
        self._muon: ShardedMuon | None = None
        self._adamw: torch.optim.Optimizer | None = None
        self._muon_lr_ratio = 1.0
        others = list(parameters)
        if config.name == "muon":
            matrices = [each for each in parameters if each.parameter in hidden]
            others = [each for each in parameters if each.parameter not in hidden]
            self._muon = ShardedMuon(matrices, groups, config)
            if config.muon_lr is not None:
                self._muon_lr_ratio = config.muon_lr / config.lr
        self._eight_bit: ShardedAdamW8bit | None = None
        if config.name == "adamw_8bit":
            self._eight_bit = ShardedAdamW8bit(parameters, config)
        elif others:
            self._adamw = build_optimizer((sharded.parameter for sharded in others), config)
        self._hidden = hidden if self._muon is not None else ()
        self._parameters = parameters
        self._groups = groups
        self._device = device
        self.has_moments = False
        """True after the first step."""

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
        # One message: norms, biases and LoRA matrices are too small for a collective each.
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
        if self._muon is not None:
            self._muon.step(lr * self._muon_lr_ratio)
        if self._eight_bit is not None:
            self._eight_bit.step(lr)
        if self._adamw is not None:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self.has_moments = True
        self.zero_grad()

    def zero_grad(self) -> None:
        """Free the gradients."""
        # Freed and not set to 0: the next forward needs the memory for activations.
        for sharded in self._parameters:
            sharded.parameter.grad = None

    def kinds(self, sharded: ShardedParameter) -> tuple[str, ...]:
        """Return the kinds of state of a parameter; a frozen one has none."""
        if not sharded.parameter.requires_grad:
            return ()
        return (MOMENTUM,) if sharded.parameter in self._hidden else MOMENTS

    def states(self) -> States:
        """Return kind -> names of the trained parameters that have this state."""
        states: dict[str, list[str]] = {}
        for sharded in self._parameters:
            for kind in self.kinds(sharded):
                states.setdefault(kind, []).append(sharded.name)
        return states

    def state(self, sharded: ShardedParameter) -> dict[str, Tensor]:
        """Return the state of a parameter by kind, sharded like it; none before the first step.

        8-bit moments are dequantized, plain tensors with the shape of the shard.
        """
        parameter = sharded.parameter
        if not self.has_moments or not parameter.requires_grad:
            return {}
        if self._muon is not None and parameter in self._hidden:
            return {MOMENTUM: self._muon.state[parameter]}
        if self._eight_bit is not None:
            return self._eight_bit.state(sharded)
        assert self._adamw is not None
        state = self._adamw.state[parameter]
        return {kind: state[kind] for kind in MOMENTS}

    def reset(self) -> None:
        """Remove the state of all parameters."""
        self.has_moments = False
        if self._muon is not None:
            self._muon.state.clear()
        if self._eight_bit is not None:
            self._eight_bit.reset()
        if self._adamw is not None:
            self._adamw.state.clear()

    def restore(self, sharded: ShardedParameter, state: dict[str, Tensor], num_steps: int) -> None:
        """Set the state of a parameter after `num_steps` steps.

        The tensors, one of each of its kinds, have the same shape and sharding as the parameter.
        """
        self.has_moments = True
        if self._muon is not None and sharded.parameter in self._hidden:
            self._muon.state[sharded.parameter] = state[MOMENTUM]
            return
        if self._eight_bit is not None:
            self._eight_bit.restore(sharded, state, num_steps)
            return
        assert self._adamw is not None
        # One step counter per parameter: a shared tensor would be advanced once per parameter.
        step = torch.tensor(float(num_steps), device=sharded.parameter.device)
        self._adamw.state[sharded.parameter] = {"step": step, **state}

    def moments(self) -> Iterator[Tensor]:
        """Yield the tensors [...] of the optimizer state of this rank's shards, as they are stored.

        Empty before the first step.
        """
        if self._eight_bit is not None:
            yield from self._eight_bit.stored()
            return
        for sharded in self._parameters:
            for moment in self.state(sharded).values():
                yield local_shard(moment)

    def _local_gradients(self) -> Iterator[tuple[ShardedParameter, Tensor]]:
        """Yield each parameter that has a gradient, with this rank's shard of the gradient.

        It has the same shape as the shard of the parameter.
        """
        for sharded in self._parameters:
            if sharded.parameter.grad is not None:
                yield sharded, local_shard(sharded.parameter.grad)
