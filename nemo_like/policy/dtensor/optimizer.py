"""AdamW, also with 8-bit moments, and Muon on FSDP2's shards: every rank updates its own shards."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import OptimizerConfig
from nemo_like.integer_math import ceil_div
from nemo_like.policy.checkpoint.sharded_reader import MOMENTS, States
from nemo_like.policy.collectives import gather_rows
from nemo_like.policy.dtensor.experts import expert_modules
from nemo_like.policy.dtensor.parallel import Groups
from nemo_like.policy.dtensor.parameters import ShardedParameter, local_shard
from nemo_like.policy.optim import adamw_options, build_optimizer

_SMALLEST_SCALE = 1e-12
"""As in torchao, so that a block of zeros has a scale."""

DECAY = 0.95
"""Decay of Muon's Nesterov momentum."""

LR_ADJUST = "match_rms_adamw"
"""Factor 0.2 sqrt(max(m, n)) of the learning rate of a matrix [m, n] (Moonlight, arXiv
2502.16982)."""

MOMENTUM = "momentum_buffer"
"""State of Muon of one parameter."""


class ShardedOptimizer:
    """Gradients and optimizer state of one trainable model."""

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        groups: Groups,
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
            self._adamw = build_optimizer(((each.name, each.parameter) for each in others), config)
        self._hidden = hidden if self._muon is not None else ()
        self._parameters = parameters
        self._groups = groups
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
        # One message: norms, biases and adapters are too small for a collective each.
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
        (square,) = self._groups.sum_over_world([norm**2])
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


class ShardedAdamW8bit:
    """AdamW with 8-bit moments by torchao, of this rank's shards as plain tensors.

    Blocks of 256 values share a float32 scale (Dettmers et al. 2022, arXiv 2110.02861). torchao
    keeps float32 moments for tensors of fewer than 4096 values, and where 256 does not divide their
    number.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], config: OptimizerConfig) -> None:
        """Update `parameters`. Raises ConfigError if torchao is not installed."""
        try:
            from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                "policy.optimizer.name is adamw_8bit, which needs torchao: pip install"
                " 'nemo-like[optim]', or set policy.optimizer.name to adamw"
            ) from error
        # An empty shard has no state.
        self._parameters = [each for each in parameters if local_shard(each.parameter).numel() > 0]
        # Parameters of their own, which share the memory of the shards.
        self._shards = {
            each.name: nn.Parameter(local_shard(each.parameter)) for each in self._parameters
        }
        self._optimizer: Any = AdamW8bit(**adamw_options(self._shards.items(), config))

    def step(self, lr: float) -> None:
        """Update the shards that have gradients."""
        for sharded in self._parameters:
            gradient = sharded.parameter.grad
            shard = self._shards[sharded.name]
            shard.grad = None if gradient is None else local_shard(gradient)
        for group in self._optimizer.param_groups:
            group["lr"].fill_(lr)
        with self._kernels():
            self._optimizer.step()
        for shard in self._shards.values():
            shard.grad = None

    def state(self, sharded: ShardedParameter) -> dict[str, Tensor]:
        """Return both moments of a shard, dequantized: float32 [m, ...]; none before a step."""
        state = self._optimizer.state.get(self._shards.get(sharded.name))
        if not state:
            return {}
        return {kind: _dequantized(state[kind]) for kind in MOMENTS}

    def restore(self, sharded: ShardedParameter, state: dict[str, Tensor], num_steps: int) -> None:
        """Set the moments of a shard, tensors sharded like the parameter, after some steps.

        Moments that `state` returned for the same shard become the same again.
        """
        shard = self._shards.get(sharded.name)
        if shard is None:
            return
        restored: dict[str, Tensor] = {"step": torch.tensor(float(num_steps))}
        for kind, is_signed in zip(MOMENTS, (True, False), strict=True):
            restored[kind] = self._optimizer._new_buffer(shard.detach(), is_signed)
            _quantize(restored[kind], local_shard(state[kind]))
        self._optimizer.state[shard] = restored

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
        is_cpu = all(parameter.device.type == "cpu" for parameter in self._shards.values())
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


def hidden_matrices(layers: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Return the matrices of decoder layers, which Muon updates; AdamW updates all other weights.

    These are the weights of attention and feed-forward blocks, and not embeddings and norms.
    Weights and biases of stacked experts are no matrices.
    """
    matrices = set()
    for layer in layers:
        matrices |= {parameter for parameter in layer.parameters() if parameter.ndim == 2}
        for experts in expert_modules(layer).values():
            matrices -= set(experts.parameters())
    return matrices


def orthogonal_update(momentum: Tensor, lr: float) -> Tensor:
    """Return the change, float32 [m, n], that torch.optim.Muon applies for `momentum`, the same.

    Weight decay is not included.
    """
    # From 0, without momentum and decay, one step of torch's optimizer is its update.
    update = nn.Parameter(torch.zeros_like(momentum))
    update.grad = momentum
    torch.optim.Muon(
        [update], lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=LR_ADJUST
    ).step()
    return update.detach()


class ShardedMuon:
    """Muon of the hidden matrices of one trainable model."""

    def __init__(
        self, parameters: Sequence[ShardedParameter], groups: Groups, config: OptimizerConfig
    ) -> None:
        self.state: dict[nn.Parameter, Tensor] = {}
        """Momentum, sharded like the parameter; empty before the first step."""
        self._groups = groups
        self._config = config
        self._num_ranks = 1 if groups.shard is None else groups.shard.size()
        self._rank = 0 if groups.shard is None else groups.shard.rank()
        by_shape: dict[object, list[ShardedParameter]] = {}
        for sharded in parameters:
            key = (tuple(sharded.parameter.shape), sharded.spec.dim, sharded.spec.full_shape)
            by_shape.setdefault(key, []).append(sharded)
        self._same_shapes = list(by_shape.values())

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the shards of all matrices that have gradients; every rank calls."""
        for batch in self._batches():
            momenta = [self._momentum(sharded) for sharded in batch]
            momentum = self._exchange_rows(momenta, batch[0])
            update = None
            if momentum is not None:
                own = batch[self._rank]
                complete = self._complete(momentum, own)
                update = self._own_part(orthogonal_update(complete, lr), own)
            updates = self._return_rows(update, batch)
            for sharded, rows in zip(batch, updates, strict=True):
                shard = local_shard(sharded.parameter)
                shard.mul_(1 - lr * self._config.weight_decay)
                shard.add_(rows)

    def _batches(self) -> Iterator[list[ShardedParameter]]:
        """Yield lists of at most one matrix per FSDP rank; all have one shape."""
        for parameters in self._same_shapes:
            trained = [each for each in parameters if each.parameter.grad is not None]
            for start in range(0, len(trained), self._num_ranks):
                yield trained[start : start + self._num_ranks]

    def _momentum(self, sharded: ShardedParameter) -> Tensor:
        """Update the momentum; return this rank's rows [m, ...] of Nesterov's momentum."""
        assert sharded.parameter.grad is not None
        gradient = local_shard(sharded.parameter.grad)
        if sharded.parameter not in self.state:
            zeros = torch.zeros_like(sharded.parameter, requires_grad=False)
            self.state[sharded.parameter] = zeros
        buffer = local_shard(self.state[sharded.parameter])
        buffer.lerp_(gradient, 1 - DECAY)
        return gradient.lerp(buffer, DECAY)

    def _exchange_rows(self, rows: Sequence[Tensor], like: ShardedParameter) -> Tensor | None:
        """Send rows [m, k] of matrix i to rank i; return matrix `rank`, [n, k], None without one.

        n and k are the sizes of the tensor-parallel shard `like`.
        """
        if self._groups.shard is None:
            return rows[0]
        num_rows, num_columns = like.parameter.shape
        rows_per_rank = ceil_div(num_rows, self._num_ranks)
        sent = rows[0].new_zeros(self._num_ranks, rows_per_rank, num_columns)
        for index, part in enumerate(rows):
            sent[index, : len(part)] = part
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._groups.shard)
        if self._rank >= len(rows):
            return None
        return received.flatten(0, 1)[:num_rows]

    def _return_rows(self, full: Tensor | None, batch: Sequence[ShardedParameter]) -> list[Tensor]:
        """Undo `_exchange_rows` for `full`, [n, k] or None; return rows [m, k] of each matrix."""
        if self._groups.shard is None:
            assert full is not None, "a single rank has every matrix"
            return [full]
        num_rows, num_columns = batch[0].parameter.shape
        rows_per_rank = ceil_div(num_rows, self._num_ranks)
        device = local_shard(batch[0].parameter).device
        sent = torch.zeros(self._num_ranks * rows_per_rank, num_columns, device=device)
        if full is not None:
            sent[:num_rows] = full
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._groups.shard)
        parts = received.unflatten(0, (self._num_ranks, rows_per_rank))
        num_own = len(local_shard(batch[0].parameter))
        return [parts[index, :num_own] for index in range(len(batch))]

    def _complete(self, shard: Tensor, sharded: ShardedParameter) -> Tensor:
        """All-gather the complete matrix from the tensor-parallel ranks' `shard`, [n, k] each."""
        tensor = self._groups.tensor
        if tensor is None or sharded.spec.dim is None:
            return shard
        if sharded.spec.dim == 0:
            return gather_rows(tensor.group, shard)
        return gather_rows(tensor.group, shard.T).T.contiguous()

    def _own_part(self, full: Tensor, sharded: ShardedParameter) -> Tensor:
        """Return the part [n, k] of `full`, [*full_shape], that this tensor-parallel rank has."""
        if self._groups.tensor is None or sharded.spec.dim is None:
            return full
        start = sharded.spec.start
        return full.narrow(sharded.spec.dim, start, sharded.parameter.shape[sharded.spec.dim])
