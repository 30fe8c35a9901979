"""Attention with sinks by a kernel without them, from its log-sum-exp.

A sink s is the score of one more key per head, whose value is zero. With the output u of the kernel
and the log-sum-exp l of its scores the output is

    out = u * sigmoid(l - s),        l' = log(exp(l) + exp(s))

The backward of FlashAttention computes the probabilities exp(score - l) and, of the output, only
its product with the gradient, summed over a head. With `out` and l' in place of u and l it returns
the gradients of attention with the sink.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from nemo_like.policy.inputs.segment_attention import Spans


class SinkCall(NamedTuple):
    """Arguments of `SinkAttention` besides the tensors with a gradient."""

    spans: Spans
    scale: float
    window_size: tuple[int, int]
    """Positions before and after a token that it attends to; -1 is no limit."""
    keywords: dict[str, Any]
    """Further arguments of the installed release."""


class SinkAttention(torch.autograd.Function):
    """Attention of packed segments with the kernel of `torch.nn.attention.varlen`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, call: SinkCall) -> Tensor:
        """Return [T_q, H, D] from `q` [T_q, H, D], `k`, `v` [T_k, H_kv, D] and `sinks` [H]."""
        result = varlen_attn(
            q,
            k,
            v,
            *call.spans,
            return_aux=AuxRequest(lse=True),
            scale=call.scale,
            window_size=call.window_size,
            **call.keywords,
        )
        # [T_q, H, D] and float32 [H, T_q].
        unscaled, lse = result
        sink = sinks.float()[:, None]
        share = torch.sigmoid(lse - sink)
        out = (unscaled * share.t()[..., None]).to(q.dtype)
        lse = torch.logaddexp(lse, sink)
        spans = call.spans
        ctx.save_for_backward(q, k, v, sinks, out, lse, spans.cu_seqlens_q, spans.cu_seqlens_k)
        ctx.arguments = (spans.max_seqlen_q, spans.max_seqlen_k, call.scale, call.window_size)
        return out

    @staticmethod
    @once_differentiable
    # torch declares `*grad_outputs`; a fixed signature checks their number.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of `q`, `k`, `v` and `sinks` for `grad` [T_q, H, D]."""
        q, k, v, sinks, out, lse, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        max_seqlen_q, max_seqlen_k, scale, window_size = ctx.arguments
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = torch.ops.torch_attn._varlen_attn_backward(
            grad,
            q,
            k,
            v,
            out,
            lse,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            window_size == (-1, 0),
            # The state of dropout, which is off.
            torch.zeros(2, dtype=torch.uint64, device=q.device),
            scale,
            list(window_size),
        )
        # float32 [H, T_q]: probability of the sink, whose value is zero.
        probability = torch.exp(sinks.float()[:, None] - lse)
        product = (grad.float() * out.float()).sum(-1).t()
        grad_sinks = -(probability * product).sum(1).to(sinks.dtype)
        return grad_q, grad_k, grad_v, grad_sinks, None
