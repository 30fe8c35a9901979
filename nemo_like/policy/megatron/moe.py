"""Mixture-of-experts (MoE) layers: routers, and experts with one grouped matrix product.

Modules, parameters and their names are as in Megatron-Core's SequentialMLP, so weights,
gradients, optimizer and checkpoints are as with it. It would run three small products per expert
and layer, and read the number of tokens of each expert on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nemo_like.device_transfer import tensor_to_device
from nemo_like.models.routers import replayed
from nemo_like.models.spec import MoeSpec
from nemo_like.policy.megatron.layers import mlp_submodules, untyped

_ALIGNMENT_BYTES = 16
"""The kernels on CUDA load rows that begin at multiples of this."""


class GroupedExperts(SequentialMLP):
    """SwiGLU experts without biases; a single expert runs as a plain feed-forward block."""

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Return ([T, D], None) for hidden states [T, D], sorted by expert, and their router
        weights [T]; `tokens_per_expert` is int64 [experts], on the host or the device.
        """
        hidden = permuted_local_hidden_states
        if self.num_local_experts == 1 or len(hidden) == 0:
            output, _ = super().forward(hidden, tokens_per_expert, permuted_probs)
            return output, None
        ends = tokens_per_expert.cumsum(0).to(torch.int32)
        ends = tensor_to_device(ends, hidden.device)
        experts: Any = self.local_experts
        up = grouped_linear(hidden, ends, [expert.linear_fc1.weight for expert in experts])
        activated = self._activate(up, permuted_probs)
        down = grouped_linear(activated, ends, [expert.linear_fc2.weight for expert in experts])
        return down, None

    def _activate(self, up: Tensor, probs: Tensor) -> Tensor:
        """Return silu(gate) * up, times the router weights [T]; [T, width] from [T, 2 width]."""
        if self.config.bias_activation_fusion:
            return weighted_bias_swiglu_impl(up, None, probs.unsqueeze(-1))
        gate, linear = up.chunk(2, dim=-1)
        activated = F.silu(gate) * linear
        return (activated * probs.unsqueeze(-1)).to(up.dtype)


class ClampedExperts(MegatronModule):
    """Experts with biases and a clamped SwiGLU. Weights are stacked, [experts, inputs, outputs];
    the columns of gate and up projection alternate.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *, moe: MoeSpec, pg_collection: Any
    ) -> None:
        super().__init__(config=config)
        self._moe = moe
        width = moe.expert_size
        hidden = config.hidden_size

        def stacked(*shape: int) -> nn.Parameter:
            """Return uninitialized values [experts, *shape]."""
            values = torch.empty(num_local_experts, *shape, dtype=config.params_dtype)
            return nn.Parameter(values)

        self.gate_up_proj = stacked(hidden, 2 * width)
        self.gate_up_proj_bias = stacked(2 * width)
        self.down_proj = stacked(width, hidden)
        self.down_proj_bias = stacked(hidden)

    def forward(
        self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, None]:
        """See `GroupedExperts.forward`."""
        counts = tensor_to_device(tokens_per_expert, hidden.device)
        ends = counts.cumsum(0).to(torch.int32)
        indices = torch.arange(len(counts), device=hidden.device)
        # int64 [T]: the expert of each token.
        experts = indices.repeat_interleave(counts, output_size=len(hidden))
        gate_up = grouped_linear(hidden, ends, self.gate_up_proj.transpose(1, 2).unbind())
        gate_up = gate_up + self.gate_up_proj_bias[experts]
        limit = self._moe.swiglu_limit
        gate = gate_up[..., ::2].clamp(max=limit)
        up = gate_up[..., 1::2].clamp(-limit, limit)
        activated = (up + 1) * gate * torch.sigmoid(gate * self._moe.swiglu_alpha)
        down = grouped_linear(activated, ends, self.down_proj.transpose(1, 2).unbind())
        down = down + self.down_proj_bias[experts]
        return (down * probs.unsqueeze(-1)).to(hidden.dtype), None


def grouped_linear(tokens: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Multiply consecutive groups of `tokens` [T, K] by the transpose of one weight [N, K] each.

    `ends`, int32 [groups], are the ends of the groups; the last one is T. Returns [T, N].
    """
    return _GroupedLinear.apply(tokens, ends, *weights)  # type: ignore[return-value]


class _GroupedLinear(torch.autograd.Function):
    """Saves the separate weights and stacks them again in the backward pass.

    A stack that autograd saved would be a second copy of all experts of all layers.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        """Return [T, N]; see `grouped_linear`."""
        ctx.save_for_backward(tokens, ends, *weights)
        stacked = torch.stack(weights)
        return _grouped_product(tokens, stacked.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    # torch declares `*grad_outputs`; a fixed signature checks their number.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tokens [T, K] and of each weight [N, K]."""
        tokens, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_tokens = None
        if ctx.needs_input_grad[0]:
            grad_tokens = _grouped_product(grad, torch.stack(weights), ends)
        grad_weights: Sequence[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[2:]):
            gradients = _grouped_product(grad.t(), tokens, ends)
            # Some kernels leave the result of an empty group uninitialized (pytorch#172439).
            sizes = ends.diff(prepend=ends.new_zeros(1))
            gradients.masked_fill_((sizes == 0)[:, None, None], 0.0)
            grad_weights = gradients.unbind()
        return grad_tokens, None, *grad_weights


def _grouped_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return the product of each group.

    With `right` [groups, K, N] the groups are rows of `left` [T, K], and the result is [T, N]. With
    `right` [T, N] they are columns of `left` [K, T], and the result is [groups, K, N].
    """
    if _has_kernel(left, right):
        return F.grouped_mm(left, right, offs=ends)
    # Without a kernel the host reads the ends of the groups.
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    if right.dim() == 3:
        parts = left.split(sizes)
        return torch.cat([torch.mm(part, each) for part, each in zip(parts, right, strict=True)])
    columns = left.split(sizes, dim=1)
    rows = right.split(sizes)
    return torch.stack([torch.mm(a, b) for a, b in zip(columns, rows, strict=True)])


def _has_kernel(left: Tensor, right: Tensor) -> bool:
    """Return True if `torch.nn.functional.grouped_mm` takes these operands as they are."""
    if not hasattr(F, "grouped_mm") or left.numel() == 0:
        return False
    if not left.is_cuda:
        return True
    if left.dtype != torch.bfloat16:
        return False
    # The dim that the groups share out is never the contiguous one and needs no alignment.
    widths = (left.shape[0], right.shape[1]) if right.dim() == 2 else right.shape[1:]
    return all(width * left.element_size() % _ALIGNMENT_BYTES == 0 for width in widths)


class Router(TopKRouter):
    """MoE router whose logits are float32 whatever the precision of the weights is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._experts: Tensor | None = None

    def choose(self, experts: Tensor | None) -> None:
        """Choose this layer's part of `experts`, see `Segments`, until the next call."""
        # Megatron-Core calls `get_replay_topk` of this attribute if it is set.
        self.router_replay: Any = None
        if experts is None:
            return
        frequency: Any = self.config.moe_layer_freq
        assert self.layer_number is not None
        index = sum(frequency[: self.layer_number - 1])
        self._experts = experts[:, index]
        self.router_replay = self

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices, [tokens, topk] each, of the given experts."""
        _, own = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        assert self._experts is not None, "set together with `router_replay`"
        return replayed(scores, own, self._experts)

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits [..., experts] of `input` [..., D]."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)


class SigmoidRouter(Router):
    """Scores are sigmoids. A bias changes which experts are chosen, and not their weights.

    The experts are chosen from the groups whose two best experts have the largest sums.
    """

    correction_bias: Tensor

    def __init__(self, *args: Any, moe: MoeSpec, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._moe = moe
        # Part of the model's files and not trained.
        self.register_buffer("correction_bias", torch.zeros(moe.num_experts))

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return weights and bool map, [tokens, experts] each, for `logits` [..., experts]."""
        moe = self._moe
        scores = logits.view(-1, moe.num_experts).sigmoid()
        chosen = self._choice(scores.detach() + self.correction_bias)
        if self.router_replay is not None:
            _, chosen = replayed(scores, chosen, untyped(self._experts))
        weights = scores.gather(1, chosen)
        if moe.normalizes_weights:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        all_weights = torch.zeros_like(scores).scatter(1, chosen, weights * moe.weight_factor)
        is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        return all_weights, is_chosen

    def _choice(self, scores: Tensor) -> Tensor:
        """Return the best experts of the best groups, int64 [tokens, top-k], by `scores`."""
        moe = self._moe
        grouped = scores.unflatten(1, (moe.num_groups, -1))
        group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
        groups = group_scores.topk(moe.num_active_groups, dim=-1).indices
        is_left_out = torch.ones_like(group_scores).scatter(1, groups, 0.0).bool()
        grouped = grouped.masked_fill(is_left_out[..., None], float("-inf"))
        return grouped.flatten(1).topk(moe.num_active_experts, dim=-1).indices


def moe_mlp(*, router: Any = None, experts: Any = None, moe: MoeSpec | None = None) -> ModuleSpec:
    """Return an MoE layer; by default `GroupedExperts`, weighted by a softmax.

    Another `router`, other `experts` and shared experts are as `moe` describes.
    """
    grouped = ModuleSpec(module=GroupedExperts, submodules=mlp_submodules())
    shared = ModuleSpec(module=SharedExpertMLP, submodules=mlp_submodules())
    submodules = MoESubmodules(
        experts=ModuleSpec(module=experts, params={"moe": moe}) if experts else grouped,
        router=partial(router, moe=moe) if router else Router,
        shared_experts=untyped(shared if moe is not None and moe.shared_size else None),
    )
    return ModuleSpec(module=MoELayer, submodules=submodules)
