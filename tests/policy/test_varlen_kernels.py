"""Kernels of packed rows on CUDA: keywords of every release of torch and flash-attn, and the shapes
of a forward on fake CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

from nemo_like.config.errors import ConfigError
from nemo_like.policy.collectives import first_available, keyword_names
from nemo_like.policy.inputs import attention
from nemo_like.policy.inputs.attention import attention_forward, padded_attention, varlen_attention
from nemo_like.policy.inputs.segment_attention import (
    AttentionOptions,
    Spans,
    sdpa,
    segment_attention,
)
from nemo_like.policy.inputs.varlen_kernels import VarlenKernel, choose_kernel, varlen_kernel
from tests.policy.test_attention import boundaries, random_qkv

LENGTHS = [7, 1, 12, 5]


def attend(q: Tensor, k: Tensor, v: Tensor, spans: tuple[Any, ...], scale: float, window: Any):
    """The result of every stub: (left, 0) is the number of earlier positions, -1 for all."""
    left, right = window
    assert right == 0, "causal"
    return segment_attention(
        q, k, v, Spans(*spans), AttentionOptions(scale, None if left < 0 else left + 1)
    )


def torch_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    assert scale is not None
    return attend(query, key, value, (cu_seq_q, cu_seq_k, max_q, max_k), scale, window_size)


def torch_2_13(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    assert enable_gqa or query.shape[1] == key.shape[1], "torch refuses this"
    assert scale is not None
    assert num_splits == (1 if torch_2_13.is_fa3 else None)  # type: ignore[attr-defined]
    return attend(query, key, value, (cu_seq_q, cu_seq_k, max_q, max_k), scale, window_size)


def flash_attn_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    assert causal and softmax_scale is not None
    assert softcap in (0.0, 2.0), "only where the model has one"
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    spans = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend(q, k, v, spans, softmax_scale, window_size)


KERNELS: dict[str, Callable[[], VarlenKernel]] = {
    "torch 2.11": lambda: VarlenKernel.of_torch(torch_2_11),
    "torch 2.13": lambda: VarlenKernel.of_torch(torch_2_13),
    "torch 2.13, FA3": lambda: VarlenKernel.of_torch(torch_2_13, "FA3"),
    "flash-attn 2": lambda: VarlenKernel.of_flash_attn(flash_attn_2),
}


INSTALLED: dict[str, Callable[[], VarlenKernel]] = {
    "installed torch": lambda: VarlenKernel.of_torch(varlen_attn)
}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> VarlenKernel:
    """A kernel that runs on the CPU, in the place of that of CUDA."""
    kernel = (KERNELS | INSTALLED)[request.param]()
    torch_2_13.is_fa3 = kernel.implementation is not None  # type: ignore[attr-defined]
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda q: True)
    monkeypatch.setattr(attention, "varlen_kernel", lambda: kernel)
    return kernel


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_release_is_called_with_what_it_has(
    kernel: VarlenKernel, kv_heads: int, window: int | None
) -> None:
    q, k, v = (part.detach() for part in random_qkv(sum(LENGTHS), kv_heads=kv_heads))
    cu_seqlens = boundaries(LENGTHS)
    out = varlen_attention(q, k, v, cu_seqlens, max(LENGTHS), scale=0.3, window=window)
    spans = Spans(cu_seqlens, cu_seqlens, max(LENGTHS), max(LENGTHS))
    assert torch.equal(out, segment_attention(q, k, v, spans, AttentionOptions(0.3, window)))


@pytest.mark.parametrize(
    ("capability", "requested"), [((8, 0), None), ((9, 0), "FA3"), ((10, 0), "FA4")]
)
@pytest.mark.parametrize("is_installed", [True, False])
def test_the_fastest_implementation_of_a_device_is_activated(
    capability: tuple[int, int],
    requested: str | None,
    is_installed: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    activated = []

    def activate(name: str) -> None:
        activated.append(name)
        if not is_installed:
            raise ModuleNotFoundError("no such package")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    kernel = choose_kernel()
    assert activated == ([] if requested is None else [requested])
    assert kernel.implementation == (requested if is_installed else None)
    assert ("slower kernel" in caplog.text) == (requested is not None and not is_installed)


def test_deterministic_algorithms_reach_flash_attn() -> None:
    q, k, v = (part.detach() for part in random_qkv(4))
    spans = Spans(boundaries([4]), boundaries([4]), 4, 4)
    torch.use_deterministic_algorithms(True)
    try:
        KERNELS["flash-attn 2"]()(q, k, v, spans, AttentionOptions(0.3))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("window", [None, 3])
def test_padded_rows_are_segments_of_the_kernel(kernel: VarlenKernel, window: int | None) -> None:
    shape = (3, 10)
    q, k, v = (
        part.detach().view(*shape, -1, 8).transpose(1, 2).requires_grad_()
        for part in random_qkv(shape[0] * shape[1])
    )
    upstream = torch.randn(3, 4, 10, 8)
    out = padded_attention(q, k, v, AttentionOptions(0.3, window))
    grads = torch.autograd.grad(out, (q, k, v), upstream)
    expected = sdpa(q, k, v, AttentionOptions(0.3, window))
    expected_grads = torch.autograd.grad(expected, (q, k, v), upstream)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-5)


def segments(
    bounds_q: Tensor, bounds_k: Tensor, is_causal: bool, left: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries, keys and bool mask [T_q, T_k] of each segment, whose ends are aligned."""
    for row in range(len(bounds_q) - 1):
        queries = slice(int(bounds_q[row]), int(bounds_q[row + 1]))
        keys = slice(int(bounds_k[row]), int(bounds_k[row + 1]))
        num_keys = keys.stop - keys.start
        position = torch.arange(queries.stop - queries.start)[:, None]
        position = position + num_keys - (queries.stop - queries.start)
        key = torch.arange(num_keys)[None]
        mask = key <= position
        yield queries, keys, mask if left < 0 else mask & (key >= position - left)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, ...]:
    """Definition of `aten._flash_attention_forward` for packed rows."""
    *_, is_causal = args
    groups = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[1], len(q), dtype=torch.float32)
    left = options["window_size_left"]
    for queries, keys, mask in segments(bounds_q, bounds_k, is_causal, left):
        scores = torch.einsum("qhd,khd->hqk", q[queries], k[keys]) * options["scale"]
        scores = scores.masked_fill(~mask, -torch.inf)
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[keys])
        lse[:, queries] = scores.logsumexp(-1).float()
    unused = torch.empty(0)
    return out, lse, torch.zeros(2, dtype=torch.uint64), unused, unused


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    *args: Any,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Definition of `aten._flash_attention_backward`: probabilities from the log-sum-exp."""
    is_causal = args[3]
    groups = q.shape[1] // k.shape[1]
    all_k, all_v = (part.repeat_interleave(groups, 1) for part in (k, v))
    grads = [torch.zeros_like(part) for part in (q, all_k, all_v)]
    left = options["window_size_left"]
    for queries, keys, mask in segments(bounds_q, bounds_k, is_causal, left):
        scores = torch.einsum("qhd,khd->hqk", q[queries], all_k[keys]) * options["scale"]
        p = (scores - lse[:, queries, None]).exp().masked_fill(~mask, 0.0).to(q.dtype)
        grad_p = torch.einsum("qhd,khd->hqk", grad[queries], all_v[keys])
        sums = (grad[queries] * out[queries]).sum(-1).t()
        grad_scores = p * (grad_p - sums[..., None]) * options["scale"]
        grads[0][queries] = torch.einsum("hqk,khd->qhd", grad_scores, all_k[keys])
        grads[1][keys] = torch.einsum("hqk,qhd->khd", grad_scores, q[queries])
        grads[2][keys] = torch.einsum("hqk,qhd->khd", p, grad[queries])
    grad_k, grad_v = (each.unflatten(1, (-1, groups)).sum(2) for each in grads[1:])
    return grads[0], grad_k, grad_v


@pytest.fixture
def flash_on_cpu() -> Iterator[torch.library.Library]:
    """Torch's flash attention on the CPU, by its definition."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    # They are registered as long as the library exists.
    yield library
    del library


@pytest.mark.usefixtures("flash_on_cpu")
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kernel", ["installed torch", "flash-attn 2"], indirect=True)
def test_sinks_of_a_kernel_without_them(kernel: VarlenKernel, window: int | None) -> None:
    leaves = [part.detach() for part in random_qkv(sum(LENGTHS), kv_heads=2)]
    leaves.append(torch.tensor([-20.0, 0.0, 0.7, 3.0]))
    upstream = torch.randn_like(leaves[0])

    def results(is_kernel: bool, dtype: torch.dtype) -> list[Tensor]:
        q, k, v, sinks = (leaf.to(dtype).requires_grad_() for leaf in leaves)
        bounds = boundaries(LENGTHS)
        if is_kernel:
            out = varlen_attention(
                q, k, v, bounds, max(LENGTHS), scale=0.3, window=window, sinks=sinks
            )
        else:
            spans = Spans(bounds, bounds, max(LENGTHS), max(LENGTHS))
            out = segment_attention(q, k, v, spans, AttentionOptions(0.3, window, sinks=sinks))
        return [out, *torch.autograd.grad(out, (q, k, v, sinks), upstream.to(dtype))]

    found = results(True, torch.float32)
    expected = results(False, torch.float64)
    for tensor, right in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor.double(), right, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_a_forward_on_cuda_passes_the_checks_of_torch(
    dtype: torch.dtype, window: int | None, kv_heads: int
) -> None:
    """Fake tensors run the Python code and the shape functions of the real operators."""
    with FakeTensorMode():
        layer = nn.Linear(1, 1)

        def heads(num: int, rows: int, length: int) -> Tensor:
            return torch.empty(rows, num, length, 64, dtype=dtype, device="cuda")

        packed = (heads(8, 1, 30), heads(kv_heads, 1, 30), heads(kv_heads, 1, 30))
        cu_seqlens = torch.empty(5, dtype=torch.int32, device="cuda")
        out, _ = attention_forward(
            layer, *packed, None, cu_seqlens=cu_seqlens, max_seqlen=20, sliding_window=window
        )
        assert (out.shape, out.dtype, out.device.type) == ((1, 30, 8, 64), dtype, "cuda")
        padded = (heads(8, 3, 10), heads(kv_heads, 3, 10), heads(kv_heads, 3, 10))
        out, _ = attention_forward(layer, *padded, None, sliding_window=window)
        assert (out.shape, out.dtype, out.device.type) == ((3, 10, 8, 64), dtype, "cuda")


def test_the_installed_torch_has_a_kernel() -> None:
    kernel = varlen_kernel()
    assert {"window_size"} <= kernel.keywords
    assert varlen_kernel() is kernel, "chosen and logged once"


def test_names_of_earlier_releases_are_found() -> None:
    torch_2_11 = SimpleNamespace(__name__="torch.distributed", all_gather_into_tensor=1)
    torch_2_13 = SimpleNamespace(
        __name__="torch.distributed", all_gather_into_tensor=1, all_gather_single=2
    )
    names = ("all_gather_single", "all_gather_into_tensor")
    assert first_available(torch_2_11, *names) == 1
    assert first_available(torch_2_13, *names) == 2
    with pytest.raises(AttributeError, match=r"torch.distributed .*has none of all_gather_single"):
        first_available(SimpleNamespace(__name__="torch.distributed"), *names)
    assert first_available(dist, "all_gather_into_tensor") is dist.all_gather_into_tensor


def test_keywords_are_those_that_can_be_named() -> None:
    def function(a: int, /, b: int, *rest: int, c: int, **others: int) -> None: ...

    assert keyword_names(function) == {"b", "c"}


def test_a_kernel_without_a_feature_of_the_model_is_named():
    q, k, v = random_qkv(sum(LENGTHS), 4, 2)
    bounds = boundaries(LENGTHS)
    spans = Spans(bounds, bounds, max(LENGTHS), max(LENGTHS))
    options = AttentionOptions(0.3, softcap=2.0)
    kernel = VarlenKernel.of_torch(torch_2_13)
    with pytest.raises(ConfigError, match=r"soft cap .*torch\.nn\.attention\.varlen"):
        kernel(q, k, v, spans, options)
    kernel = VarlenKernel.of_flash_attn(flash_attn_2)
    # A value head of another size is padded for the kernel.
    expected = segment_attention(q, k, v[..., :4], spans, AttentionOptions(0.3))
    out = kernel(q, k, v[..., :4], spans, options)
    torch.testing.assert_close(out, expected)
