"""AdamW on Megatron-Core's distributed optimizer: of those that hold a parameter each rank updates
a flat piece.

Gradients are reduced into float32 and the pieces are float32 whatever the weights' precision is. Of
Megatron-Core's own optimizer wrapping this uses the sharding only: groups, clipping and state are
the project's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_like.config.schema import OptimizerConfig
from nemo_like.policy.checkpoint.sharded import MOMENTS, WEIGHT
from nemo_like.policy.megatron import groups as megatron_groups
from nemo_like.policy.megatron.cpu import cuda_type_names
from nemo_like.policy.megatron.model import PackedModel
from nemo_like.policy.megatron.param_map import Shape, Table
from nemo_like.policy.megatron.parameters import Read, assemble
from nemo_like.policy.optim import build_optimizer


class Shard(NamedTuple):
    """The flat piece of one parameter that this rank updates: elements [start, stop)."""

    start: int
    stop: int
    main: Tensor
    """float32, with the reduced gradient in `.grad` once gradients are reduced."""


class _Part(NamedTuple):
    """Parameters that the same ranks hold: the experts of a mixture, or everything else."""

    optimizer: DistributedOptimizer
    inner: torch.optim.AdamW
    group: ProcessGroup
    """Those ranks, each of which updates a piece of every parameter."""


class ShardedAdamW:
    """Gradients and optimizer of the policy."""

    def __init__(self, model: PackedModel, table: Table, config: OptimizerConfig) -> None:
        for name, parameter in model.named_parameters():
            # Megatron-Core would add up gradients of whole experts over dp and cp only, where
            # tokens of all tp ranks meet.
            parameter.allreduce = not table[name].is_expert  # type: ignore[attr-defined]
        self.ddp: Any = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            model,
        )
        self.has_moments = False
        self._table = table
        self._parameters = dict(model.named_parameters())
        self._is_reduced = False
        self._device = next(model.parameters()).device
        self._dtype = model.config.params_dtype
        groups = megatron_groups.joined()
        self._dense = self._part(config, self.ddp.buffers, groups.dp_cp, is_expert=False)
        self._parts = [self._dense]
        if self.ddp.expert_parallel_buffers:
            self._parts.append(
                self._part(
                    config, self.ddp.expert_parallel_buffers, groups.expert_dp, is_expert=True
                )
            )
        self.clear()

    def _part(
        self, config: OptimizerConfig, buffers: Any, group: ProcessGroup, *, is_expert: bool
    ) -> _Part:
        # These groups say themselves that norms and biases do not decay; Megatron-Core's leave it
        # to its scheduler.
        inner = build_optimizer(
            (
                parameter
                for name, parameter in self._parameters.items()
                if self._table[name].is_expert == is_expert
            ),
            config,
        )
        with cuda_type_names() if self._device.type == "cpu" else nullcontext():
            optimizer = DistributedOptimizer(
                inner,
                MegatronOptimizerConfig(
                    bf16=self._dtype == torch.bfloat16,
                    params_dtype=self._dtype,
                    use_distributed_optimizer=True,
                ),
                grad_scaler=None,  # pyright: ignore[reportArgumentType]  (none for bfloat16 and float32)
                init_state_fn=None,
                model_chunks=[self.ddp],
                per_model_buffers={0: buffers},
                data_parallel_group=group,
                data_parallel_group_gloo=None,
                data_parallel_group_idx=0,
                distributed_optimizer_instance_id=0,
            )
        optimizer.model_chunks = []  # a step would gather the weights of both parts; that is done once for all
        return _Part(optimizer, inner, group)

    def _part_of(self, name: str) -> _Part:
        return self._parts[-1] if self._table[name].is_expert else self._dense

    def clear(self) -> None:
        """Gradients are 0."""
        self.ddp.zero_grad_buffer()
        for part in self._parts:
            part.optimizer.zero_grad()
        self._is_reduced = False

    def check_may_accumulate(self) -> None:
        assert not self._is_reduced, (
            "gradients were already added up over the ranks; take the optimizer step first"
        )

    def reduce(self) -> None:
        """Add gradients up over dp, cp and whoever else shares a parameter; does nothing the second
        time.
        """
        if not self._is_reduced:
            finalize_model_grads([self.ddp])
            for part in self._parts:
                part.optimizer.prepare_grads()
            self._is_reduced = True

    def norm(self, is_loss_finite: bool = True) -> float:
        """Norm of the whole model's gradient; NaN if any rank passes `is_loss_finite=False`.

        Each element is counted by the one rank that updates and owns it.
        """
        self.reduce()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for name, shard in self.shards():
            if self._table[name].is_owner and shard.main.grad is not None:
                total += torch.linalg.vector_norm(shard.main.grad, dtype=torch.float64) ** 2
        if not is_loss_finite:
            total.fill_(math.nan)
        dist.all_reduce(total)
        return math.sqrt(total.item())

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for _, shard in self.shards():
            if shard.main.grad is not None:
                shard.main.grad.mul_(factor)

    def step(self, lr: float) -> None:
        """Update with the gradients as they are, and clear them."""
        self.reduce()
        for part in self._parts:
            for group in part.inner.param_groups:
                group["lr"] = lr
            part.optimizer.step_with_ready_grads()
        self.ddp.start_param_sync()
        self.has_moments = True
        self.clear()

    def shards(self) -> Iterator[tuple[str, Shard]]:
        """By parameter name, those this rank has a piece of."""
        for name in self._parameters:
            shard = self.shard(name)
            if shard is not None:
                yield name, shard

    def moments(self) -> list[Tensor]:
        """Both moments of Adam of the pieces that this rank updates; empty before the first
        step.
        """
        states = [state for part in self._parts for state in part.inner.state.values()]
        return [state[kind] for state in states for kind in MOMENTS if kind in state]

    def shard(self, name: str) -> Shard | None:
        """This rank's piece of a parameter; None where it has none."""
        parameter, part = self._parameters[name], self._part_of(name)
        if parameter not in part.optimizer.model_param_group_index_map:
            return None
        span = part.optimizer._get_model_param_range_map(parameter)["param"]
        group, index = part.optimizer.model_param_group_index_map[parameter]
        return Shard(span.start, span.end, part.inner.param_groups[group]["params"][index])

    def gradient(self, name: str) -> Tensor:
        """float32, the shape of the parameter: the reduced gradient, on the first of the ranks that
        hold it, which all call.
        """
        self.reduce()
        shard = self.shard(name)
        return self._whole(name, None if shard is None else shard.main.grad, writer=0)

    def collect(self, name: str, kind: str, writer: int) -> Tensor | None:
        """float32, the shape of the parameter: its `weight` or one of MOMENTS, on one of the ranks
        that hold it, which all call.

        `writer` is any number; it says whose turn it is, and None is what the others get.
        """
        part = self._part_of(name)
        writer %= part.group.size()
        shard = self.shard(name)
        piece = None
        if shard is not None:
            piece = shard.main if kind == WEIGHT else part.inner.state[shard.main][kind]
        whole = self._whole(name, piece, writer)
        return whole if part.group.rank() == writer else None

    def set_weight(self, name: str, whole: Tensor) -> None:
        """This rank's float32 piece of a parameter, from all of it."""
        shard = self.shard(name)
        if shard is not None:
            shard.main.detach().copy_(whole.flatten()[shard.start : shard.stop])

    def restore(self, num_steps: int | None, read: Read) -> None:
        """Adam's state, from blocks named `exp_avg/<weight>` and `exp_avg_sq/<weight>`; anew where
        `num_steps` is None.

        Each piece counts its own steps: a counter in common would advance once for every parameter.
        """
        for part in self._parts:
            part.inner.state.clear()
        self.has_moments = num_steps is not None
        if num_steps is None:
            return
        for name, shard in self.shards():
            state = {
                kind: self._read_piece(name, shard, partial(_read_kind, read, kind))
                for kind in MOMENTS
            }
            state["step"] = torch.tensor(float(num_steps), device=shard.main.device)
            self._part_of(name).inner.state[shard.main] = state

    def move(self, device: torch.device) -> None:
        """Weights and state to the host's memory, or back to the accelerator they were made on;
        gradients are dropped.
        """
        for buffer in [*self.ddp.buffers, *self.ddp.expert_parallel_buffers]:
            if device.type == "cpu":
                buffer.offload_to_cpu()
            else:
                buffer.reload_from_cpu()
        for state in (state for part in self._parts for state in part.inner.state.values()):
            for kind in MOMENTS:
                state[kind] = state[kind].to(device)
        if self._dtype != torch.float32:
            for _, shard in self.shards():
                shard.main.data = shard.main.data.to(device)

    def _whole(self, name: str, piece: Tensor | None, writer: int) -> Tensor:
        """From the flat pieces of all ranks that hold the parameter; right on rank `writer` of
        them.
        """
        full = torch.zeros(math.prod(self._table[name].shape), device=self._device)
        shard = self.shard(name)
        if shard is not None and piece is not None:
            full[shard.start : shard.stop] = piece.detach()
        group = self._part_of(name).group
        if group.size() > 1:
            dist.reduce(full, group=group, group_dst=writer)
        return full.view(self._table[name].shape)

    def _read_piece(self, name: str, shard: Shard, read: Read) -> Tensor:
        """The flat piece [start, stop) of a parameter; only the rows it lies in are read."""
        entry = self._table[name]
        width = math.prod(entry.shape[1:])
        first = shard.start // width
        rows = assemble(entry, read, first, -(-shard.stop // width)).flatten()
        return rows[shard.start - first * width : shard.stop - first * width].to(
            self._device, copy=True
        )


def _read_kind(read: Read, kind: str, name: str, offset: Shape, shape: Shape) -> Tensor:
    return read(f"{kind}/{name}", offset, shape)
