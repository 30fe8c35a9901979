"""Experts of an MoE layer with one grouped matrix product for all experts of a rank.

Modules, parameters and their names are those of Megatron-Core's SequentialMLP, so weights,
gradients, optimizer and checkpoints are as with it. It would run three small products per expert
and layer, and read the number of tokens of each expert on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_like.device_transfer import tensor_to_device

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
    if not hasattr(F, "grouped_mm"):
        return False
    if not left.is_cuda:
        return True
    if left.dtype != torch.bfloat16:
        return False
    # The dim that the groups share out is never the contiguous one and needs no alignment.
    widths = (left.shape[0], right.shape[1]) if right.dim() == 2 else right.shape[1:]
    return all(width * left.element_size() % _ALIGNMENT_BYTES == 0 for width in widths)
