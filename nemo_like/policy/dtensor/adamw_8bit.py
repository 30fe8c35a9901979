"""AdamW with 8-bit moments by torchao, on FSDP2's shards.

AdamW with 8-bit moments by torchao, for the plain tensors of one rank.

Blocks of 256 values share a float32 scale (Dettmers et al. 2022, arXiv 2110.02861). torchao keeps
float32 moments for tensors of fewer than 4096 values, and where 256 does not divide their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.config.errors import ConfigError
from nemo_like.config.optimization import OptimizerConfig
from nemo_like.policy.checkpoint.sharded_reader import MOMENTS
from nemo_like.policy.dtensor.parameters import ShardedParameter, local_shard

_SMALLEST_SCALE = 1e-12
"""As in torchao, so that a block of zeros has a scale."""


class AdamW8bit:
    """AdamW of the shards of one rank, in the order in which they are passed."""

    def __init__(self, shards: Sequence[Tensor], config: OptimizerConfig) -> None:
        """Update `shards`, float32 [...] each, in place; only matrices are decayed.

        Raises ConfigError if torchao is not installed.
        """
        try:
            from torchao.optim import AdamW8bit as TorchaoAdamW  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                "policy.optimizer.name is adamw_8bit, which needs torchao: pip install"
                " 'nemo-like[optim]', or set policy.optimizer.name to adamw"
            ) from error
        # Parameters of their own, which share the memory of the shards.
        self._parameters = [nn.Parameter(shard) for shard in shards]
        matrices = [each for each in self._parameters if each.ndim >= 2]
        vectors = [each for each in self._parameters if each.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._optimizer: Any = TorchaoAdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
        )

    def step(self, gradients: Sequence[Tensor | None], lr: float) -> None:
        """Update the shards that have gradients, [...] each with the shape of the shard."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"].fill_(lr)
        with self._kernels():
            self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def state(self, index: int) -> dict[str, Tensor]:
        """Return both moments of a shard, dequantized: float32 [...]; none before a step."""
        state = self._optimizer.state.get(self._parameters[index])
        if not state:
            return {}
        return {kind: _dequantized(state[kind]) for kind in MOMENTS}

    def restore(self, index: int, state: dict[str, Tensor], num_steps: int) -> None:
        """Set the moments of a shard, float32 [...], after `num_steps` steps.

        Moments that `state` returned for the same shard become the same again.
        """
        parameter = self._parameters[index]
        restored: dict[str, Tensor] = {"step": torch.tensor(float(num_steps))}
        for kind, is_signed in zip(MOMENTS, (True, False), strict=True):
            restored[kind] = self._optimizer._new_buffer(parameter.detach(), is_signed)
            _quantize(restored[kind], state[kind])
        self._optimizer.state[parameter] = restored

    def reset(self) -> None:
        """Remove all moments."""
        self._optimizer.state.clear()

    def stored(self) -> Iterator[Tensor]:
        """Yield the tensors of the moments as they are in memory: codes uint8, scales float32."""
        for state in self._optimizer.state.values():
            for kind in MOMENTS:
                moment = state[kind]
                if _is_quantized(moment):
                    yield moment.codes
                    yield moment.scale
                else:
                    yield moment

    def _kernels(self) -> AbstractContextManager[None]:
        """Return a context that runs torchao's step: compiled, on the CPU as it is."""
        is_cpu = all(parameter.device.type == "cpu" for parameter in self._parameters)
        # The CPU would need a C++ compiler on every node.
        return torch.compiler.set_stance("force_eager") if is_cpu else nullcontext()


def _is_quantized(moment: Any) -> bool:
    return hasattr(moment, "codes")


def _dequantized(moment: Any) -> Tensor:
    """Return a moment as a plain tensor, float32 [...] of the same shape."""
    return moment.dequantize() if _is_quantized(moment) else moment


@torch.no_grad()
def _quantize(moment: Any, values: Tensor) -> None:
    """Set `moment` [...] to `values`, float32 [...], without loss where they were quantized before.

    torchao takes the largest magnitude of a block as its scale. No code stands for exactly -1, so
    that this is not the former scale of a block whose largest magnitude was negative. It follows
    from the smallest value, up to the rounding of a product and a quotient.
    """
    moment.copy_(values)
    if not _is_quantized(moment) or not moment.signed:
        return
    from torchao.optim.quant_utils import quantize_8bit_with_qmap  # pyright: ignore[reportMissingImports]

    blocks = values.reshape(-1, moment.block_size)
    codes = moment.codes.view(blocks.shape)
    exact = (moment.dequantize().view(blocks.shape) == blocks).all(-1)
    former = (blocks.amin(-1) / moment.qmap[0]).clip(_SMALLEST_SCALE)
    infinity = torch.full_like(former, math.inf)
    scales = [former]
    for direction in (infinity, -infinity):
        scale = former
        for _ in range(2):
            scale = torch.nextafter(scale, direction)
            scales.append(scale)
    for scale in scales:
        found = quantize_8bit_with_qmap(blocks / scale[:, None], moment.qmap)
        again = moment.qmap[found.int()] * scale[:, None]
        chosen = (again == blocks).all(-1) & ~exact
        codes[chosen] = found[chosen]
        moment.scale[chosen] = scale[chosen]
        exact |= chosen


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
