"""The kernels of packed and padded rows equal the formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_like.policy.inputs.attention import padded_attention, varlen_attention
from nemo_like.policy.inputs.exchange import make_exchange
from nemo_like.policy.inputs.segment_attention import AttentionOptions, Spans, segment_attention
from nemo_like.policy.inputs.varlen_kernels import varlen_kernel
from tests.policy.test_attention import boundaries, random_qkv

Attend = Callable[..., Tensor]


def assert_close(
    parts: tuple[Tensor, ...], on_cuda: Attend, exact: Attend, tolerance: float = 1e-2
) -> None:
    """Output and gradients in bfloat16 on CUDA equal those in float64 on the CPU, relative to the
    largest value.
    """
    upstream = torch.randn_like(exact(*(part.double() for part in parts)))

    def run(attend: Attend, device: str, dtype: torch.dtype) -> list[Tensor]:
        # The same rounded inputs for both.
        leaves = [part.detach().bfloat16().to(device, dtype).requires_grad_() for part in parts]
        out = attend(*leaves)
        gradients = torch.autograd.grad(out, leaves, upstream.to(device, dtype))
        return [tensor.detach().double().cpu() for tensor in (out, *gradients)]

    found = run(on_cuda, "cuda", torch.bfloat16)
    expected = run(exact, "cpu", torch.float64)
    for tensor, right in zip(found, expected, strict=True):
        # A query that sees one key has no gradient but rounding: its scale is that of the inputs.
        largest = max(float(right.abs().max()), 1e-2)
        torch.testing.assert_close(tensor, right, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("window", [None, 1, 64])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_packed_rows(kv_heads: int, dim: int, window: int | None) -> None:
    lengths = [100, 1, 37, 1, 400, 64]
    options: Any = {"max_seqlen": max(lengths), "scale": dim**-0.5, "window": window}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, boundaries(lengths).to(q.device), **options)

    assert_close(random_qkv(sum(lengths), heads=8, kv_heads=kv_heads, dim=dim), attend, attend)


@pytest.mark.parametrize("window", [None, 64])
def test_attention_sinks(window: int | None) -> None:
    lengths = [100, 1, 37, 1, 400, 64]
    sinks = torch.tensor([-20.0, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0])
    q, k, v = random_qkv(sum(lengths), heads=8, kv_heads=2, dim=64)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        bounds = boundaries(lengths).to(q.device)
        return varlen_attention(
            q, k, v, bounds, max(lengths), scale=0.125, window=window, sinks=sinks
        )

    assert_close((q, k, v, sinks), attend, attend)


@pytest.mark.parametrize("window", [None, 24])
def test_padded_rows_use_the_same_kernel(window: int | None) -> None:
    parts = tuple(
        part.detach().view(4, 96, -1, 64).transpose(1, 2)
        for part in random_qkv(4 * 96, heads=8, kv_heads=2, dim=64)
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return padded_attention(q, k, v, AttentionOptions(0.125, window))

    assert_close(parts, attend, attend)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (4, 0), (4, 3), (8, 5)])
def test_query_chunks_of_a_shared_row_see_what_is_before_them(
    size: int, rank: int, window: int | None
) -> None:
    """The kernel aligns fewer queries with the end of more keys, forward and backward, as context
    parallelism needs.
    """
    lengths = [128, 32, 512, 16, 64]
    share = sum(lengths) // size
    exchange = make_exchange(boundaries(lengths), max(lengths), size, rank, share)
    q, k, v = random_qkv(len(exchange.kv_index), heads=8, kv_heads=2, dim=64)

    def spans(device: torch.device) -> Spans:
        return Spans(
            exchange.spans.cu_seqlens_q.to(device),
            exchange.spans.cu_seqlens_k.to(device),
            exchange.spans.max_seqlen_q,
            exchange.spans.max_seqlen_k,
        )

    def on_cuda(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_kernel()(q, k, v, spans(q.device), AttentionOptions(0.125, window))

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return segment_attention(q, k, v, spans(q.device), AttentionOptions(0.125, window))

    assert_close((q[:share], k, v), on_cuda, exact)


def test_the_exchange_is_the_same_on_both_devices() -> None:
    lengths = [128, 32, 512, 16, 64]
    for rank in range(4):
        share = sum(lengths) // 4
        on_host = make_exchange(boundaries(lengths), max(lengths), 4, rank, share)
        on_device = make_exchange(boundaries(lengths).cuda(), max(lengths), 4, rank, share)
        assert torch.equal(on_device.kv_index.cpu(), on_host.kv_index)
        assert torch.equal(on_device.spans.cu_seqlens_k.cpu(), on_host.spans.cu_seqlens_k)
        keys = torch.randn(
            sum(lengths), 2, 64, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        upstream = torch.randn(len(on_host.kv_index), 2, 64, device="cuda", dtype=torch.bfloat16)
        first, second = (
            torch.autograd.grad(on_device.select(keys), keys, upstream)[0] for _ in range(2)
        )
        assert torch.equal(first, second)
        exact = torch.zeros_like(keys, dtype=torch.float32, requires_grad=False)
        exact.index_add_(0, on_device.kv_index, upstream.float())
        # Rounded once, and not after each addition.
        torch.testing.assert_close(first, exact.bfloat16(), rtol=2**-8, atol=1e-4)


@pytest.mark.usefixtures("deterministic")
def test_a_row_does_not_depend_on_the_others() -> None:
    """Bit-equal alone and in a pack, also where the kernel would split long rows."""
    lengths = [33, 2048, 7]
    q, k, v = (
        part.detach().bfloat16().cuda()
        for part in random_qkv(sum(lengths), heads=8, kv_heads=2, dim=64)
    )
    packed = varlen_attention(q, k, v, boundaries(lengths).cuda(), max(lengths), scale=0.125)
    start = 0
    for length in lengths:
        row = slice(start, start + length)
        bounds = boundaries([length]).cuda()
        alone = varlen_attention(q[row], k[row], v[row], bounds, length, scale=0.125)
        assert torch.equal(alone, packed[row])
        start += length
