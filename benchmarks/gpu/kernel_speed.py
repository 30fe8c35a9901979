"""Speed of the attention kernel and of the output head alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.attention.varlen import varlen_attn

from benchmarks.gpu.cells import SkipCell
from benchmarks.gpu.training_steps import median_seconds
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.heads.logprobs import token_logprobs
from nemo_like.policy.inputs.attention import varlen_attention
from nemo_like.policy.inputs.segment_attention import AttentionOptions, Spans
from nemo_like.policy.inputs.varlen_kernels import VarlenKernel, varlen_kernel
from nemo_like.policy.outputs import LogitOptions, OutputEmbedding, TokenDistribution


def time_attention(
    spec: ModelSpec,
    lengths: np.ndarray,
    device: str,
    *,
    kernel: Literal["engine", "FlashAttention 2"],
) -> Mapping[str, Any]:
    """Time one layer's attention, forward and backward, on rows of `lengths` int64 [B].

    `FlashAttention 2` is measured where the engine uses FlashAttention 3, for comparison.
    """
    num_tokens = int(lengths.sum())
    shapes = (
        (num_tokens, spec.num_heads, spec.head_dim),
        (num_tokens, spec.num_kv_heads, spec.head_dim),
        (num_tokens, spec.num_kv_heads, spec.head_dim),
    )
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for shape in shapes
    )
    longest = int(lengths.max())
    cu_seqlens = torch.tensor([0, *accumulate(lengths.tolist())], dtype=torch.int32, device=device)
    scale = spec.head_dim**-0.5
    with _chosen_kernel(kernel, device) as (name, chosen):

        def forward() -> Tensor:
            if chosen is None:
                return varlen_attention(q, k, v, cu_seqlens, longest, scale=scale)
            spans = Spans(cu_seqlens, cu_seqlens, longest, longest)
            return chosen(q, k, v, spans, AttentionOptions(scale))

        upstream = torch.randn_like(forward())
        with torch.no_grad():
            forward_s = median_seconds(forward, device)

        def both() -> None:
            torch.autograd.grad(forward(), (q, k, v), upstream)

        both_s = median_seconds(both, device)
    # Two products of L^2 / 2 x width multiplications and additions, causal.
    width = spec.num_heads * spec.head_dim
    flops = 2.0 * float((lengths.astype(np.float64) ** 2).sum()) * width
    return {
        "kernel": name,
        "num_tokens": num_tokens,
        "longest_row": longest,
        "forward_ms": forward_s * 1e3,
        "backward_ms": (both_s - forward_s) * 1e3,
        "forward_tflops": flops / forward_s / 1e12,
        "both_tflops": 3.5 * flops / both_s / 1e12,
    }


@contextmanager
def _chosen_kernel(kernel: str, device: str) -> Iterator[tuple[str, VarlenKernel | None]]:
    """Yield name and kernel; None is `varlen_attention` as the engine calls it."""
    if not device.startswith("cuda"):
        if kernel != "engine":
            raise SkipCell(f"{kernel} needs a CUDA device")
        yield "scaled dot product attention", None
        return
    own = varlen_kernel()
    if kernel == "engine":
        yield own.name, None
        return
    if own.implementation is None:
        raise SkipCell(f"the kernel of the engine is {own.name}, which is measured")
    attention.restore_flash_attention_impl()
    try:
        yield kernel, VarlenKernel.of_torch(varlen_attn)
    finally:
        attention.activate_flash_attention_impl(own.implementation)


def time_head(
    spec: ModelSpec, num_tokens: int, chunk_size: int, device: str, *, with_entropy: bool
) -> Mapping[str, Any]:
    """Time log-probs of `num_tokens` tokens, forward and backward."""
    hidden = torch.randn(num_tokens, spec.hidden_size, device=device, dtype=torch.bfloat16)
    weight = 0.02 * torch.randn(
        spec.vocab_size, spec.hidden_size, device=device, dtype=torch.bfloat16
    )
    labels = torch.randint(spec.vocab_size, (num_tokens,), device=device)
    leaves = (hidden.requires_grad_(), weight.requires_grad_())

    def both() -> None:
        embedding = OutputEmbedding(
            hidden=leaves[0], weight=leaves[1], options=LogitOptions(chunk_size=chunk_size)
        )
        distribution = TokenDistribution(with_entropy=with_entropy)
        outputs = token_logprobs(embedding, labels, distribution)
        loss = outputs.logprobs.sum()
        if outputs.entropy is not None:
            loss = loss + 0.01 * outputs.entropy.sum()
        torch.autograd.grad(loss, leaves)

    seconds = median_seconds(both, device)
    # Logits twice (the backward recomputes them), and both gradients.
    flops = 4 * 2.0 * num_tokens * spec.vocab_size * spec.hidden_size
    return {"ms": seconds * 1e3, "tflops": flops / seconds / 1e12}
