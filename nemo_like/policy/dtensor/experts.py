"""The experts of mixture-of-experts layers: their place on tensor- and expert-parallel ranks.

transformers marks the classes of experts (`use_experts_implementation`). Such a module has stacked
weights [E, ...] and computes [T, D] from hidden states [T, D], int64 indices [T, K] and router
weights [T, K]. A rank has complete experts; it computes them with the forward of the module.

Tensor-parallel ranks have the same tokens: each computes its experts, and the results are summed.
Expert-parallel ranks have different tokens. A token is sent to the rank of each of its experts
(all-to-all) and the results are sent back, weighted and summed by the rank of the token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from nemo_like.config.errors import ConfigError
from nemo_like.metrics import Max, Metrics
from nemo_like.policy.collectives import exchange_rows
from nemo_like.policy.dtensor.parallel import (
    ExpertParallel,
    Groups,
    ShardSpec,
    Specs,
    TensorParallel,
)


def expert_modules(model: nn.Module) -> dict[str, Any]:
    """Return the modules with the experts of a layer, by name in the order of the layers."""
    # The decorator of their classes sets the attribute.
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel")
    }


class ExpertLoads:
    """Counts the tokens of each expert in the forward passes with gradients of a step."""

    def __init__(self, modules: Collection[Any], device: torch.device) -> None:
        """`modules` have all experts: `distribute` has not been called."""
        self._num_experts = max((module.num_experts for module in modules), default=0)
        # Some routers have a last index without an expert.
        self._counts = torch.zeros(len(modules), self._num_experts + 1, device=device)
        for layer, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self._count, layer))

    def reset(self) -> None:
        """Begin a step."""
        self._counts.zero_()

    def metrics(self, groups: Groups) -> Metrics:
        """Return the load of the busiest expert and rank; empty without modules."""
        if not self._counts.numel():
            return {}
        # Tensor-parallel ranks count the same tokens, which does not change the quotients.
        total = self._counts.clone()
        if groups.world is not None:
            dist.all_reduce(total, group=groups.world)
        counts = total[:, : self._num_experts]
        metrics: Metrics = {"policy/expert_load_max": Max(_max_over_mean(counts))}
        if groups.expert is not None:
            num_ranks = groups.expert.size * (1 if groups.tensor is None else groups.tensor.size)
            by_rank = counts.unflatten(1, (num_ranks, -1)).sum(2)
            metrics["policy/expert_rank_load_max"] = Max(_max_over_mean(by_rank))
        return metrics

    def _count(self, layer: int, module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> None:
        """Count the indices [T, K] of one call: a forward pre-hook."""
        if torch.is_grad_enabled():
            index = args[1].flatten()
            self._counts[layer].index_add_(0, index, torch.ones_like(index, dtype=torch.float32))


def _max_over_mean(counts: Tensor) -> float:
    """Return the largest quotient of a count of `counts` [L, N] and the mean of its layer."""
    return float((counts.amax(1) / counts.mean(1).clamp(min=1e-9)).max())


def distribute_all(
    expert: ExpertParallel, causal_lm: PreTrainedModel, model_name: str, done: Specs
) -> Specs:
    """Distribute the experts of all layers over the expert-parallel ranks; return their specs.

    `done` are the specs of tensor parallelism, which distributes the experts of its plan over both
    kinds of ranks. Raises ConfigError for a model whose experts are of another form.
    """
    modules = expert_modules(causal_lm)
    if not modules:
        raise _unsupported(model_name, "its classes in transformers have no stacked experts")
    specs: Specs = {}
    for name, experts in modules.items():
        weights = list(experts.parameters())
        if done and weights[0] not in done:
            raise _unsupported(model_name, f"its tensor-parallel plan does not list {name}")
        if not done:
            specs |= distribute(None, expert, experts)
    return specs


def _unsupported(model_name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"policy.model_name={model_name} cannot be trained with expert parallelism: {reason}; set"
        " parallel.expert to 1"
    )


def distribute(tensor: TensorParallel | None, expert: ExpertParallel | None, experts: Any) -> Specs:
    """Give this rank some of the experts of a layer on the meta device; return their specs.

    Tensor-parallel ranks have consecutive experts, which are divided over the expert-parallel
    ranks.
    """
    num_experts = experts.num_experts
    start, stop = (0, num_experts) if tensor is None else tensor.shard_range(num_experts)
    dim = None if tensor is None else 0
    ep = 1 if expert is None else expert.size
    # transformers' kernels then expect slots without an expert.
    experts._is_expert_parallel = expert is None
    experts.num_experts = (stop - start) // ep
    forward: Callable[..., Tensor] = experts.forward
    if expert is not None:
        # The host waits inside.
        exchange: Any = torch.compiler.disable(_exchange_tokens)
        forward = partial(exchange, expert, experts, forward)
    if tensor is not None:
        forward = partial(_own_experts, tensor, experts, forward, start, stop)
    experts.forward = forward
    specs: Specs = {}
    for key, weight in list(experts._parameters.items()):
        shard = weight.new_empty(experts.num_experts, *weight.shape[1:])
        parameter = nn.Parameter(shard, requires_grad=weight.requires_grad)
        experts._parameters[key] = parameter
        specs[parameter] = ShardSpec(tuple(weight.shape), dim, start, stop, ep=ep)
    return specs


def _own_experts(
    tensor: TensorParallel,
    experts: Any,
    forward: Callable[..., Tensor],
    start: int,
    stop: int,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
) -> Tensor:
    """Compute experts [start, stop), this tp rank's, for all tokens and sum over the ranks.

    `hidden` is [T, D]; `index`, int64, and `weights` are [T, K], the chosen experts of a token. The
    result is [T, D]; with sequence parallelism all have T / tp tokens.
    """
    hidden = tensor.gather_input(hidden)
    weights = tensor.gather_input(weights)
    if tensor.sequence:
        index = tensor.gather_input(index)
    is_own = (index >= start) & (index < stop)
    # The first index above stands for experts of other ranks.
    out = forward(
        hidden, torch.where(is_own, index - start, stop - start), torch.where(is_own, weights, 0.0)
    )
    if experts._is_expert_parallel and not is_own.any():
        # FSDP and the optimizer need a gradient of every weight.
        for weight in experts.parameters():
            out = out + weight.flatten()[0] * 0.0
    return tensor.reduce_output(out)


def _exchange_tokens(
    expert: ExpertParallel,
    experts: Any,
    forward: Callable[..., Tensor],
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
) -> Tensor:
    """Compute the experts of this rank's tokens on the ranks that have them.

    The arguments are those of `_own_experts`; an index of no rank has no result. Every rank of the
    group calls, also without tokens.
    """
    num_tokens, top_k = index.shape
    num_experts = experts.num_experts
    # Sorted by expert and thereby by rank, those of no rank last.
    chosen, order = index.flatten().sort(stable=True)
    bounds = torch.arange(num_experts * expert.size + 1, device=index.device)
    counts = torch.searchsorted(chosen, bounds).diff().view(expert.size, num_experts)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=expert.group)
    # The host waits here, once per layer.
    num_sent, num_received = torch.stack([counts.sum(1), received.sum(1)]).tolist()
    order = order[: sum(num_sent)]
    rows = exchange_rows(expert.group, hidden[order // top_k], num_sent, num_received)
    local_index = torch.arange(num_experts, device=index.device).repeat(expert.size)
    local_index = local_index.repeat_interleave(received.flatten(), output_size=len(rows))
    if not len(rows):
        # A row of zeros, whose result is dropped: FSDP and the optimizer need a gradient of every
        # weight, and the other ranks need this rank's backward.
        out = forward(F.pad(rows, (0, 0, 0, 1)), index.new_zeros(1, 1), weights.new_zeros(1, 1))[:0]
    else:
        ones = weights.new_ones(len(rows), 1)
        out = forward(rows, local_index[:, None], ones)
    out = exchange_rows(expert.group, out, num_received, num_sent)
    weighted = out * weights.flatten()[order, None]
    total = weighted.new_zeros(num_tokens * top_k, hidden.shape[1])
    total = total.index_copy(0, order, weighted).view(num_tokens, top_k, -1).sum(1)
    return total.to(hidden.dtype)
