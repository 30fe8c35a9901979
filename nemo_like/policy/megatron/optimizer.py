"""AdamW on Megatron-Core's distributed optimizer: every rank updates a flat ZeRO-1 shard.

The ranks that replicate a parameter shard its optimizer state among them. Gradients are reduced in
float32, and the shards of the weights (the masters) are float32 whatever the precision of the
weights is. Only the sharding is Megatron-Core's: parameter groups, clipping and checkpoints are the
project's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nemo_like.config.schema import OptimizerConfig
from nemo_like.integer_math import ceil_div
from nemo_like.policy.checkpoint.sharded import Block
from nemo_like.policy.checkpoint.sharded_reader import EMA, MOMENTS, WEIGHT
from nemo_like.policy.megatron.groups import Groups, cuda_type_names
from nemo_like.policy.megatron.model import PackedModel
from nemo_like.policy.megatron.param_map import ParamMap, Shape
from nemo_like.policy.megatron.parameters import ReadBlock, assemble_rows
from nemo_like.policy.optim import WeightEma, build_optimizer


class FlatShard(NamedTuple):
    """Elements [start, stop) of one flattened parameter, which this rank updates."""

    start: int
    stop: int
    main: Tensor
    """float32 [stop - start] master weights; `.grad` is the gradient once it is reduced."""


class _SubOptimizer(NamedTuple):
    """The distributed optimizer of the experts, or of all other parameters.

    Two are needed because experts are replicated over other ranks than the rest of the model.
    """

    optimizer: DistributedOptimizer
    adamw: torch.optim.AdamW
    group: ProcessGroup
    """Ranks that replicate these parameters; each updates a shard of every parameter."""


class ShardedAdamW:
    """Gradients and optimizer state of one trainable model."""

    def __init__(
        self,
        chunks: Sequence[PackedModel],
        parameters: dict[str, nn.Parameter],
        param_map: ParamMap,
        groups: Groups,
        config: OptimizerConfig,
    ) -> None:
        """`parameters` are of all `chunks` of the rank, by their names in `param_map`."""
        for name, parameter in parameters.items():
            # Without this Megatron-Core would sum the gradients of unsharded experts over dp and cp
            # only, although the tokens of all tp ranks reach them.
            parameter.allreduce = not param_map[name].is_expert  # type: ignore[attr-defined]
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True
        )
        self.chunks: list[Any] = [
            DistributedDataParallel(chunk.config, ddp_config, chunk) for chunk in chunks
        ]
        self.has_moments = False
        self._param_map = param_map
        self._parameters = parameters
        self._is_reduced = False
        self._device = next(iter(parameters.values())).device
        self._dtype = chunks[0].config.params_dtype
        self._dense: _SubOptimizer | None = None
        self._experts: _SubOptimizer | None = None
        # A kind of parameter without buffers does not exist on this rank, or is frozen.
        dense = [chunk.buffers for chunk in self.chunks]
        if any(dense):
            assert groups.dp_cp is not None, "Megatron-Core always has process groups"
            self._dense = self._sub_optimizer(config, dense, groups.dp_cp, is_expert=False)
        experts = [chunk.expert_parallel_buffers for chunk in self.chunks]
        if any(experts):
            self._experts = self._sub_optimizer(config, experts, groups.expert_dp, is_expert=True)
        self.sub_optimizers = [each for each in (self._dense, self._experts) if each is not None]
        self.zero_grad()

    def _sub_optimizer(
        self, config: OptimizerConfig, buffers: list[Any], group: ProcessGroup, *, is_expert: bool
    ) -> _SubOptimizer:
        parameters = [
            (name, parameter)
            for name, parameter in self._parameters.items()
            if self._param_map[name].is_expert == is_expert
        ]
        # The project's own parameter groups: they set a weight decay of 0 for norms and biases.
        # Megatron-Core leaves that to its scheduler, which is not used here.
        adamw = build_optimizer(parameters, config)
        # On the CPU the constructor checks tensor type names, which must look like CUDA's.
        patch = cuda_type_names() if self._device.type == "cpu" else nullcontext()
        with patch:
            optimizer = DistributedOptimizer(
                adamw,
                MegatronOptimizerConfig(
                    bf16=self._dtype == torch.bfloat16,
                    params_dtype=self._dtype,
                    use_distributed_optimizer=True,
                ),
                grad_scaler=None,  # pyright: ignore[reportArgumentType]  (none for bfloat16 and float32)
                init_state_fn=None,
                model_chunks=self.chunks,
                per_model_buffers=dict(enumerate(buffers)),
                data_parallel_group=group,
                data_parallel_group_gloo=None,
                data_parallel_group_idx=0,
                distributed_optimizer_instance_id=0,
            )
        # With model chunks each step would all-gather the weights of both sub-optimizers; `step`
        # does that once for all.
        optimizer.model_chunks = []
        return _SubOptimizer(optimizer, adamw, group)

    def _sub_optimizer_of(self, name: str) -> _SubOptimizer:
        """Return the optimizer of a trained parameter."""
        sub = self._experts if self._param_map[name].is_expert else self._dense
        assert sub is not None, f"{name} has no optimizer"
        return sub

    def zero_grad(self) -> None:
        """Set all gradients to 0."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        for sub in self.sub_optimizers:
            sub.optimizer.zero_grad()
        self._is_reduced = False

    def check_not_reduced(self) -> None:
        """Assert that a backward may still accumulate into the gradients."""
        assert not self._is_reduced, (
            "gradients were already reduced over the ranks; take the optimizer step first"
        )

    def reduce_gradients(self) -> None:
        """Sum gradients over all ranks that contribute to them; does nothing the second time."""
        if self._is_reduced:
            return
        finalize_model_grads(self.chunks)
        for sub in self.sub_optimizers:
            sub.optimizer.prepare_grads()
        self._is_reduced = True

    def gradient_norm(self, *, is_loss_finite: bool = True) -> float:
        """Global L2 norm of the gradient; NaN if any rank passes `is_loss_finite=False`."""
        self.reduce_gradients()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for name, shard in self.shards():
            # Each element counts once: on the rank that updates it, if its replica is the owner.
            if self._param_map[name].is_owner and shard.main.grad is not None:
                total += torch.linalg.vector_norm(shard.main.grad, dtype=torch.float64) ** 2
        if not is_loss_finite:
            total.fill_(math.nan)
        dist.all_reduce(total)
        return math.sqrt(total.item())

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by `factor`."""
        for _, shard in self.shards():
            if shard.main.grad is not None:
                shard.main.grad.mul_(factor)

    def step(self, lr: float) -> None:
        """Update the shards, all-gather the weights, and clear the gradients."""
        self.reduce_gradients()
        for sub in self.sub_optimizers:
            for group in sub.adamw.param_groups:
                group["lr"] = lr
            sub.optimizer.step_with_ready_grads()
        self._gather_weights()
        self.has_moments = True
        self.zero_grad()

    def shards(self) -> Iterator[tuple[str, FlatShard]]:
        """Yield (parameter name, shard) for each parameter of which this rank updates a shard."""
        for name in self._parameters:
            shard = self.shard(name)
            if shard is not None:
                yield name, shard

    def shard(self, name: str) -> FlatShard | None:
        """Return this rank's shard of a parameter; None where it has none."""
        parameter = self._parameters[name]
        if not parameter.requires_grad:
            return None
        sub = self._sub_optimizer_of(name)
        if parameter not in sub.optimizer.model_param_group_index_map:
            return None
        span = sub.optimizer._get_model_param_range_map(parameter)["param"]
        group, index = sub.optimizer.model_param_group_index_map[parameter]
        return FlatShard(span.start, span.end, sub.adamw.param_groups[group]["params"][index])

    def moments(self) -> list[Tensor]:
        """Both Adam moments of this rank's shards, float32 [numel] each; empty before a step."""
        moments = []
        for sub in self.sub_optimizers:
            for state in sub.adamw.state.values():
                moments += [state[kind] for kind in MOMENTS if kind in state]
        return moments

    def gather_state(self, name: str, kind: str, writer: int) -> Tensor | None:
        """Gather a parameter's `weight` or one of MOMENTS on one rank, float32 [*shape].

        All ranks that replicate the parameter call. The one with group rank `writer` modulo the
        group's size gets the tensor, the others None.
        """
        shard = self.shard(name)
        values = None
        if shard is not None:
            state = self._sub_optimizer_of(name).adamw.state
            values = shard.main if kind == WEIGHT else state[shard.main][kind]
        return self.gather_values(name, values, writer)

    def gather_values(self, name: str, values: Tensor | None, writer: int) -> Tensor | None:
        """Gather the ranks' `values`, [numel] of their shard or None, as `gather_state` does."""
        group = self._sub_optimizer_of(name).group
        writer %= group.size()
        full = self.gather_full(name, values, writer)
        return full if group.rank() == writer else None

    def publish_masters(self) -> None:
        """Copy the master weights to the parameters and all-gather these."""
        for sub in self.sub_optimizers:
            sub.optimizer._copy_main_params_to_model_params()
        self._gather_weights()

    def set_weight(self, name: str, full: Tensor) -> None:
        """Copy this rank's shard of the parameter from `full`, float32 [*shape]."""
        shard = self.shard(name)
        if shard is not None:
            values = full.flatten()[shard.start : shard.stop]
            shard.main.detach().copy_(values)

    def read_shard(self, name: str, read: ReadBlock) -> Tensor | None:
        """Read this rank's shard of a parameter, float32 [numel]; None where it has none."""
        shard = self.shard(name)
        return None if shard is None else self._read_shard(name, shard, read)

    def restore(self, num_steps: int | None, read: ReadBlock) -> None:
        """Read Adam's state from blocks `exp_avg/<weight>` and `exp_avg_sq/<weight>`.

        With `num_steps` None the state is reset: the checkpoint has no moments.
        """
        for sub in self.sub_optimizers:
            sub.adamw.state.clear()
        self.has_moments = num_steps is not None
        if num_steps is None:
            return
        for name, shard in self.shards():
            state = {
                kind: self._read_shard(name, shard, partial(read_kind, read, kind))
                for kind in MOMENTS
            }
            # One step counter per shard: a shared tensor would be advanced once per parameter.
            state["step"] = torch.tensor(float(num_steps), device=shard.main.device)
            self._sub_optimizer_of(name).adamw.state[shard.main] = state

    def free_gradients(self) -> None:
        """Free the memory of all gradients."""
        for buffer in self._buffers():
            buffer.offload_to_cpu(move_params=False, move_grads=True)

    def allocate_gradients(self) -> None:
        """Undo `free_gradients`; the gradients are 0."""
        for buffer in self._buffers():
            buffer.reload_from_cpu(move_params=False, move_grads=True)

    def _buffers(self) -> list[Any]:
        """Return Megatron-Core's flat buffers of weights and gradients."""
        return [
            buffer
            for chunk in self.chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]

    def _gather_weights(self) -> None:
        """All-gather the weights from the shards of the ranks that replicate them."""
        for chunk in self.chunks:
            chunk.start_param_sync()

    def gather_full(self, name: str, values: Tensor | None, writer: int) -> Tensor:
        """Sum all ranks' zero-padded shards to [*shape]; valid on group rank `writer` only."""
        shape = self._param_map[name].shape
        full = torch.zeros(math.prod(shape), device=self._device)
        shard = self.shard(name)
        if shard is not None and values is not None:
            full[shard.start : shard.stop] = values.detach()
        group = self._sub_optimizer_of(name).group
        if group.size() > 1:
            dist.reduce(full, group=group, group_dst=writer)
        return full.view(shape)

    def _read_shard(self, name: str, shard: FlatShard, read: ReadBlock) -> Tensor:
        """Read elements [start, stop) of a parameter: float32 [stop - start].

        Only the rows that contain them are read.
        """
        spec = self._param_map[name]
        row_size = math.prod(spec.shape[1:])
        first_row = shard.start // row_size
        end_row = ceil_div(shard.stop, row_size)
        values = assemble_rows(spec, read, first_row, end_row).flatten()
        first = first_row * row_size
        elements = values[shard.start - first : shard.stop - first]
        # A copy, so that the rows around the shard are freed.
        return elements.to(self._device, copy=True)


def read_kind(read: ReadBlock, kind: str, name: str, offset: Shape, shape: Shape) -> Tensor:
    """Read a block [*shape] of the moment `kind` of the weight `name`, float32 on the CPU."""
    return read(f"{kind}/{name}", offset, shape)


@torch.no_grad()
def fill_weights(
    parameters: Mapping[str, nn.Parameter],
    param_map: ParamMap,
    read: ReadBlock,
    optimizer: ShardedAdamW | None,
) -> None:
    """Fill this rank's weights of `param_map`, and their float32 masters, from blocks of `read`."""
    for name, spec in param_map.items():
        full = assemble_rows(spec, read)
        parameters[name].copy_(full.view(parameters[name].shape))
        if optimizer is not None:
            # From the float32 values, not from the parameter, which may be bfloat16.
            optimizer.set_weight(name, full)


def trained_blocks(
    param_map: ParamMap, optimizer: ShardedAdamW, shapes: Mapping[str, Shape], ema: WeightEma | None
) -> Iterator[Block]:
    """Yield this rank's blocks of weights and moments; see
    `parameters.frozen_blocks`. Every rank iterates.
    """
    kinds = [WEIGHT, *MOMENTS] if optimizer.has_moments else [WEIGHT]
    if ema is not None:
        kinds.append(EMA)
    for index, (name, spec) in enumerate(param_map.items()):
        if not spec.is_owner:
            # Another tp rank or pipeline stage has the same values and writes them.
            continue
        for kind in kinds:
            # The replicas write in turn, so that each of them writes about the same share.
            if kind == EMA and ema is not None:
                full = optimizer.gather_values(name, ema.shards.get(name), writer=index)
            else:
                full = optimizer.gather_state(name, kind, writer=index)
            if full is None:
                continue
            for hf_slice in spec.slices:
                yield Block(
                    f"{kind}/{hf_slice.name}",
                    shapes[hf_slice.name],
                    hf_slice.offset,
                    full[hf_slice.local_index],
                )
