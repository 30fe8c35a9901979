"""AdamW on Megatron-Core's distributed optimizer: each dp and cp rank updates a flat piece of every parameter.

Gradients are reduced into float32 and the pieces are float32 whatever the weights' precision is. Of Megatron-Core's own
optimizer wrapping this uses the sharding only: groups, clipping and state are the project's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from nemo_like.config.schema import OptimizerConfig
from nemo_like.policy import megatron_groups
from nemo_like.policy.megatron_cpu import cuda_type_names
from nemo_like.policy.megatron_model import PackedModel
from nemo_like.policy.megatron_table import Shape, Table
from nemo_like.policy.megatron_weights import Read, assemble
from nemo_like.policy.optim import build_optimizer
from nemo_like.policy.sharded_checkpoint import MOMENTS, WEIGHT


class Shard(NamedTuple):
    """The flat piece of one parameter that this rank updates: elements [start, stop)."""

    start: int
    stop: int
    main: Tensor
    """float32, with the reduced gradient in `.grad` once gradients are reduced."""


class ShardedAdamW:
    """Gradients and optimizer of the policy."""

    def __init__(self, model: PackedModel, table: Table, config: OptimizerConfig) -> None:
        self.ddp: Any = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            model,
        )
        self.has_moments = False
        self._table = table
        self._parameters = dict(model.named_parameters())
        self._is_reduced = False
        self._group = megatron_groups.joined().dp_cp
        self._device = next(model.parameters()).device
        dtype = model.config.params_dtype
        self._has_copies = dtype != torch.float32
        # These groups say themselves that norms and biases do not decay; Megatron-Core's leave it to its scheduler.
        self._inner = build_optimizer(model.parameters(), config)
        with cuda_type_names() if self._device.type == "cpu" else nullcontext():
            self._optimizer = DistributedOptimizer(
                self._inner,
                MegatronOptimizerConfig(bf16=dtype == torch.bfloat16, params_dtype=dtype, use_distributed_optimizer=True),
                grad_scaler=None,  # pyright: ignore[reportArgumentType]  (none for bfloat16 and float32)
                init_state_fn=None,
                model_chunks=[self.ddp],
                per_model_buffers={0: self.ddp.buffers},
                data_parallel_group=self._group,
                data_parallel_group_gloo=None,
                data_parallel_group_idx=0,
                distributed_optimizer_instance_id=0,
            )
        self.clear()

    def clear(self) -> None:
        """Gradients are 0."""
        self.ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._is_reduced = False

    def check_may_accumulate(self) -> None:
        assert not self._is_reduced, "gradients were already added up over the ranks; take the optimizer step first"

    def reduce(self) -> None:
        """Add gradients up over dp, cp and whoever else shares a parameter; does nothing the second time."""
        if not self._is_reduced:
            finalize_model_grads([self.ddp])
            self._optimizer.prepare_grads()
            self._is_reduced = True

    def norm(self) -> float:
        """Of the whole model's gradient. Each element is counted by the one rank that updates and owns it."""
        self.reduce()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for name, shard in self.shards():
            if self._table[name].is_owner and shard.main.grad is not None:
                total += torch.linalg.vector_norm(shard.main.grad, dtype=torch.float64) ** 2
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
        for group in self._inner.param_groups:
            group["lr"] = lr
        self._optimizer.step_with_ready_grads()
        self.has_moments = True
        self.clear()

    def shards(self) -> Iterator[tuple[str, Shard]]:
        """By parameter name, those this rank has a piece of."""
        for name in self._parameters:
            shard = self.shard(name)
            if shard is not None:
                yield name, shard

    def shard(self, name: str) -> Shard | None:
        """This rank's piece of a parameter; None where it has none."""
        parameter = self._parameters[name]
        if parameter not in self._optimizer.model_param_group_index_map:
            return None
        span = self._optimizer._get_model_param_range_map(parameter)["param"]
        group, index = self._optimizer.model_param_group_index_map[parameter]
        return Shard(span.start, span.end, self._inner.param_groups[group]["params"][index])

    def gradient(self, name: str) -> Tensor:
        """float32, the shape of the parameter: the reduced gradient, on the first of the dp and cp ranks, which all call."""
        self.reduce()
        shard = self.shard(name)
        return self._whole(name, None if shard is None else shard.main.grad, writer=0)

    def collect(self, name: str, kind: str, writer: int) -> Tensor | None:
        """float32, the shape of the parameter: its `weight` or one of MOMENTS, on one of the dp and cp ranks, which all call.

        `writer` is any number; it says whose turn it is, and None is what the others get.
        """
        writer %= self._group.size()
        shard = self.shard(name)
        piece = None
        if shard is not None:
            piece = shard.main if kind == WEIGHT else self._inner.state[shard.main][kind]
        whole = self._whole(name, piece, writer)
        return whole if self._group.rank() == writer else None

    def set_weight(self, name: str, whole: Tensor) -> None:
        """This rank's float32 piece of a parameter, from all of it."""
        shard = self.shard(name)
        if shard is not None:
            shard.main.detach().copy_(whole.flatten()[shard.start : shard.stop])

    def restore(self, num_steps: int | None, read: Read) -> None:
        """Adam's state, from blocks named `exp_avg/<weight>` and `exp_avg_sq/<weight>`; anew where `num_steps` is None.

        Each piece counts its own steps: a counter in common would advance once for every parameter.
        """
        self._inner.state.clear()
        self.has_moments = num_steps is not None
        if num_steps is None:
            return
        for name, shard in self.shards():
            state = {kind: self._read_piece(name, shard, partial(_read_kind, read, kind)) for kind in MOMENTS}
            state["step"] = torch.tensor(float(num_steps), device=shard.main.device)
            self._inner.state[shard.main] = state

    def move(self, device: torch.device) -> None:
        """Weights and state to the host's memory, or back to the accelerator they were made on; gradients are dropped."""
        for buffer in self.ddp.buffers:
            if device.type == "cpu":
                buffer.offload_to_cpu()
            else:
                buffer.reload_from_cpu()
        for state in self._inner.state.values():
            for kind in MOMENTS:
                state[kind] = state[kind].to(device)
        if self._has_copies:
            for _, shard in self.shards():
                shard.main.data = shard.main.data.to(device)

    def _whole(self, name: str, piece: Tensor | None, writer: int) -> Tensor:
        """From all dp and cp ranks' flat pieces; right on rank `writer` of them."""
        full = torch.zeros(math.prod(self._table[name].shape), device=self._device)
        shard = self.shard(name)
        if shard is not None and piece is not None:
            full[shard.start : shard.stop] = piece.detach()
        if self._group.size() > 1:
            dist.reduce(full, group=self._group, group_dst=writer)
        return full.view(self._table[name].shape)

    def _read_piece(self, name: str, shard: Shard, read: Read) -> Tensor:
        """The flat piece [start, stop) of a parameter; only the rows it lies in are read."""
        entry = self._table[name]
        width = math.prod(entry.shape[1:])
        first = shard.start // width
        rows = assemble(entry, read, first, -(-shard.stop // width)).flatten()
        return rows[shard.start - first * width : shard.stop - first * width].to(self._device, copy=True)


def _read_kind(read: Read, kind: str, name: str, offset: Shape, shape: Shape) -> Tensor:
    return read(f"{kind}/{name}", offset, shape)
