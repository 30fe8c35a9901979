"""Process groups, and tensor and sequence parallelism for a Hugging Face model.

Each rank has its shards as plain local weights, so FSDP2, the optimizer and every forward see
ordinary tensors, and no operation goes through DTensor's dispatch. FSDP may shard dim 0 of such a
shard again: the result is still a rectangle of the full weight.

    weight             shard                    collectives
    q, k, v, gate, up  rows (output features)   input: identity / backward all-reduce
    o, down            columns (input features) output: all-reduce, then the bias is added once
    embedding          rows (vocabulary)        output: all-reduce
    output embedding   rows (vocabulary)        in `token_logprobs`

With sequence parallelism the output is reduce-scattered over the tokens and the input is
all-gathered, so that norms and residuals are computed once and not on every tp rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from nemo_like.config.errors import ConfigError
from nemo_like.distributed.process_groups import (
    build_device_mesh,
    build_replica_mesh,
    share_timeout,
)
from nemo_like.models.layout_check import model_problems
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import LayoutError, ParallelLayout, engine_problems
from nemo_like.policy.collectives import copy_to, gather_rows, scatter_sum, sum_over

# Styles of transformers' `base_model_tp_plan` that this module supports.
_COLUMN = "colwise"
_ROW = "rowwise"
_PARTIAL_GRAD = "replicated_with_grad_allreduce"


class ShardSpec(NamedTuple):
    """Part of a weight that a tensor-parallel rank has: [start, stop) of one dim, or all of it.

    Example: rows 33 to 67 of an embedding are
    `ShardSpec((67, 32), dim=0, start=33, stop=67, has_partial_grad=False)`.
    """

    full_shape: tuple[int, ...]
    dim: int | None = None
    """The sharded dim; None for a weight that every rank replicates."""
    start: int = 0
    stop: int = 0
    has_partial_grad: bool = False
    """True for a replicated weight whose gradient covers this rank's heads or tokens only; it is
    all-reduced over the tp ranks.
    """

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's part of `full` [*full_shape].

        It is a copy of [start, stop) of `dim` where the weight is sharded, else `full` itself.
        """
        if self.dim is None:
            return full
        # A copy, so that the memory of the full tensor can be freed.
        return full.narrow(self.dim, self.start, self.stop - self.start).clone()


@dataclass(frozen=True)
class TensorParallel:
    """The tensor-parallel group of one rank."""

    group: dist.ProcessGroup
    rank: int
    size: int
    sequence: bool
    """Sequence parallelism: norms and residuals are sharded too, by tokens."""

    def parallelize(self, causal_lm: PreTrainedModel, model_name: str) -> dict[str, ShardSpec]:
        """Shard the weights of a model on the meta device and add the collectives.

        Returns the spec of each parameter by name, tied names included. Raises ConfigError or
        LayoutError, the same on every rank, for a model that cannot be sharded this way.
        """
        self._check_sizes(causal_lm, model_name)
        specs: dict[nn.Parameter, ShardSpec] = {}
        block_styles: dict[nn.Module, set[str]] = {}
        for parent, module, style in _planned_modules(causal_lm, model_name):
            if style == _PARTIAL_GRAD:
                for weight in module.parameters():
                    specs[weight] = ShardSpec(tuple(weight.shape), has_partial_grad=True)
                continue
            block_styles.setdefault(parent, set()).add(style)
            if style == _COLUMN:
                specs |= self._shard(module, "weight", 0)
                specs |= self._shard(module, "bias", 0)
            else:
                specs |= self._shard(module, "weight", 1)
                module.forward = partial(_row_parallel_linear, self.reduce_output, module)
        for block, styles in block_styles.items():
            _check_block(block, styles, specs, model_name)
            # The hook of the block, so that its column-parallel layers share one collective.
            hook = partial(_gather_block_input, self.gather_input)
            block.register_forward_pre_hook(hook, with_kwargs=True)
        specs |= self._shard_vocabulary(causal_lm, model_name)
        for weight in causal_lm.parameters():
            if weight not in specs:
                # With sequence parallelism a norm sees this rank's tokens only.
                specs[weight] = ShardSpec(tuple(weight.shape), has_partial_grad=self.sequence)
        return {
            name: specs[weight]
            for name, weight in causal_lm.named_parameters(remove_duplicate=False)
        }

    def gather_input(self, hidden: Tensor) -> Tensor:
        """Return the input [..., D] of a sharded computation, `hidden` itself.

        With sequence parallelism `hidden` is this rank's [1, T / tp, D] and is all-gathered to
        [1, T, D].
        """
        if self.sequence:
            return gather_rows(self.group, hidden[0])[None]
        return copy_to(self.group, hidden)

    def reduce_output(self, partial_sums: Tensor) -> Tensor:
        """Sum the ranks' outputs [..., D] of a sharded computation.

        With sequence parallelism the result is this rank's tokens [1, T / tp, D].
        """
        if self.sequence:
            return scatter_sum(self.group, partial_sums[0])[None]
        return sum_over(self.group, partial_sums)

    def shard_range(self, size: int, rank: int | None = None) -> tuple[int, int]:
        """[start, stop) of a dim of `size` on this tp rank, or on tp rank `rank`.

        Example: a dim of 67 over 2 ranks gives (0, 33) and (33, 67).
        """
        if rank is None:
            rank = self.rank
        return rank * size // self.size, (rank + 1) * size // self.size

    def _shard(self, module: nn.Module, key: str, dim: int) -> dict[nn.Parameter, ShardSpec]:
        """Replace a meta parameter by its shard; does nothing if the module has no such one."""
        weight = module._parameters.get(key)
        if weight is None:
            return {}
        start, stop = self.shard_range(weight.shape[dim])
        shape = (*weight.shape[:dim], stop - start, *weight.shape[dim + 1 :])
        shard = nn.Parameter(weight.new_empty(shape), requires_grad=weight.requires_grad)
        module._parameters[key] = shard
        return {shard: ShardSpec(tuple(weight.shape), dim, start, stop)}

    def _shard_vocabulary(
        self, causal_lm: PreTrainedModel, model_name: str
    ) -> dict[nn.Parameter, ShardSpec]:
        embedding = causal_lm.get_input_embeddings()
        head = causal_lm.get_output_embeddings()
        if type(embedding) is not nn.Embedding:
            # A subclass may do more than look up rows, for example scale them.
            raise _unsupported(
                model_name,
                f"its input embedding is a {type(embedding).__name__}, not a plain table",
            )
        is_tied = head is not None and head.weight is embedding.weight
        start, stop = self.shard_range(embedding.num_embeddings)
        embedding.forward = partial(
            _vocab_parallel_embedding, self.reduce_output, embedding, range(start, stop)
        )
        specs = self._shard(embedding, "weight", 0)
        if head is None:
            # A score head is one row, which every rank has.
            return specs
        assert isinstance(head, nn.Linear)
        if is_tied:
            head.weight = embedding.weight
        else:
            specs |= self._shard(head, "weight", 0)
        return specs | self._shard(head, "bias", 0)

    def _check_sizes(self, causal_lm: PreTrainedModel, model_name: str) -> None:
        """Raise LayoutError for sizes of the model that the ranks cannot share evenly."""
        layout = ParallelLayout(tp=self.size, sequence_parallel=self.sequence)
        spec = ModelSpec.from_config(causal_lm.config, model_name)
        problems = model_problems(layout, "dtensor", spec)
        if problems:
            raise LayoutError(problems)


def _planned_modules(
    causal_lm: PreTrainedModel, model_name: str
) -> Iterator[tuple[nn.Module, Any, str]]:
    """Yield (parent module, module, style) for each module in the model's plan.

    The module is a linear layer unless the style is `_PARTIAL_GRAD`. The input embedding is left
    out: `_shard_vocabulary` shards it with the output head, whether or not the plan lists it.
    """
    backbone = causal_lm.base_model
    plan = getattr(backbone.config, "base_model_tp_plan", None)
    if not plan:
        raise _unsupported(model_name, "transformers has no tensor-parallel plan for it")
    embedding = causal_lm.get_input_embeddings()
    modules = dict(backbone.named_modules())
    for name, module in modules.items():
        if module is embedding:
            # Some releases of transformers add it to the plan of a model with a tied head.
            continue
        # The plan names layers with a wildcard: layers.*.self_attn.q_proj.
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None:
            continue
        is_known = style in (_COLUMN, _ROW, _PARTIAL_GRAD)
        needs_linear = style != _PARTIAL_GRAD
        if not is_known or (needs_linear and not isinstance(module, nn.Linear)):
            raise _unsupported(
                model_name, f"its plan requires {name}, a {type(module).__name__}, to be {style}"
            )
        yield modules[name.rpartition(".")[0]], module, style


def _check_block(
    block: nn.Module, styles: set[str], specs: dict[nn.Parameter, ShardSpec], model_name: str
) -> None:
    """Raise ConfigError unless the plan covers all parameters of a tensor-parallel block.

    Inside the block each rank has its own heads or channels, so the gradient of an unlisted
    parameter would be silently wrong.
    """
    if styles != {_COLUMN, _ROW}:
        raise _unsupported(
            model_name,
            f"its plan shards {type(block).__name__} only {' and '.join(sorted(styles))}",
        )
    # A row-parallel bias is added after the reduction, so it is replicated.
    biases = {module.bias for module in block.modules() if isinstance(module, nn.Linear)}
    for name, weight in block.named_parameters():
        if weight not in specs and weight not in biases:
            raise _unsupported(
                model_name, f"its plan does not list the parameter {name} of {type(block).__name__}"
            )


def _unsupported(model_name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"policy.model_name={model_name} cannot be sharded by tensor parallelism: {reason}; set"
        " parallel.tensor to 1, or use a dense Llama-, Qwen2- or Qwen3-like model"
    )


def _gather_block_input(
    gather_input: Callable[[Tensor], Tensor],
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the hidden states, positional (MLP) or by keyword (attention): a forward pre-hook.

    They are [B, S, D]; with sequence parallelism [1, T / tp, D] is replaced by [1, T, D].
    """
    if args:
        return (gather_input(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": gather_input(kwargs["hidden_states"])}


def _row_parallel_linear(
    reduce_output: Callable[[Tensor], Tensor], module: nn.Linear, hidden: Tensor
) -> Tensor:
    """Compute a row-parallel layer; the bias is added once, after the reduction.

    `hidden` [B, S, F] has this rank's F input features. The result is [B, S, D], with sequence
    parallelism [1, T / tp, D].
    """
    out = reduce_output(F.linear(hidden, module.weight))
    return out if module.bias is None else out + module.bias


def _vocab_parallel_embedding(
    reduce_output: Callable[[Tensor], Tensor], module: nn.Embedding, rows: range, input: Tensor
) -> Tensor:
    """Look up `input` int64 [B, S] where this rank has the row and sum over the ranks.

    The result is [B, S, D], with sequence parallelism this rank's tokens [1, T / tp, D].
    """
    padding_idx = None
    if module.padding_idx is not None and module.padding_idx in rows:
        # As in the full table, the row of the padding token gets no gradient from look-ups.
        padding_idx = module.padding_idx - rows.start
    local_ids = input - rows.start
    is_local = (local_ids >= 0) & (local_ids < len(rows))
    # Row 0 stands in for tokens of other ranks; its result is multiplied by 0.
    local_ids = torch.where(is_local, local_ids, 0)
    embedded = F.embedding(local_ids, module.weight, padding_idx=padding_idx)
    return reduce_output(embedded * is_local.unsqueeze(-1))


@dataclass(frozen=True)
class Groups:
    """Process groups of this rank; None where this rank would be the only member."""

    world: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None
    """Ranks with the other chunks of the same rows."""
    dp_cp: dist.ProcessGroup | None = None
    tensor: TensorParallel | None = None
    fsdp_mesh: DeviceMesh | None = None
    """The ranks of `dp_cp`, over which weights, gradients and optimizer state are sharded; with
    several replicas [replicas, ranks of `shard`]. None without FSDP.
    """
    shard: dist.ProcessGroup | None = None
    """The ranks over which this rank's copy of the weights is sharded."""
    replica: int = 0
    """Index of this rank's copy of the weights. Copy 0 writes checkpoints and exports."""

    @classmethod
    def join(
        cls,
        parallel_layout: ParallelLayout,
        rank: int,
        device: torch.device,
        *,
        mixed_precision: bool,
    ) -> Groups:
        """Create the groups of `rank` in the default process group; every rank calls.

        Raises LayoutError for a pipeline or expert parallelism.
        """
        problems = engine_problems("dtensor", pp=parallel_layout.pp, ep=parallel_layout.ep)
        if problems:
            raise LayoutError(problems)
        if parallel_layout.world_size == 1 and not mixed_precision:
            # No process group exists then, and none is needed.
            return cls()
        mesh = build_device_mesh(parallel_layout, device.type)
        # Dp and cp ranks with the same tp rank have equal weights: FSDP shards over both axes.
        if parallel_layout.dp > 1 and parallel_layout.cp > 1:
            dp_cp = mesh["dp", "cp"]._flatten("dp_cp")
        else:
            dp_cp = mesh["cp" if parallel_layout.cp > 1 else "dp"]
        has_replicas = parallel_layout.dp * parallel_layout.cp > 1
        # FSDP implements mixed precision, so one process in mixed precision has a mesh of one rank.
        needs_fsdp = has_replicas or mixed_precision
        tensor = None
        if parallel_layout.tp > 1:
            tp_rank = parallel_layout.coordinates(rank).tp
            tensor = TensorParallel(
                mesh.get_group("tp"), tp_rank, parallel_layout.tp, parallel_layout.sequence_parallel
            )
        shard = dp_cp
        fsdp_mesh = dp_cp
        if parallel_layout.num_replicas > 1:
            replica_mesh = build_replica_mesh(parallel_layout, device.type)
            fsdp_mesh = replica_mesh["replica", "shard"]
            shard = replica_mesh["shard"]
        share_timeout()
        return cls(
            world=dist.group.WORLD if parallel_layout.world_size > 1 else None,
            dp=mesh.get_group("dp") if parallel_layout.dp > 1 else None,
            cp=mesh.get_group("cp") if parallel_layout.cp > 1 else None,
            dp_cp=dp_cp.get_group() if has_replicas else None,
            tensor=tensor,
            fsdp_mesh=fsdp_mesh if needs_fsdp else None,
            shard=shard.get_group() if parallel_layout.num_shards > 1 else None,
            replica=parallel_layout.replica(rank),
        )
