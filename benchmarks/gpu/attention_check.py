"""Attention kernels against a float64 reference that is computed here, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cells import Cell
from nemo_like.policy.inputs import attention
from nemo_like.policy.inputs.segment_attention import AttentionOptions, Spans, segment_attention
from nemo_like.policy.inputs.varlen_kernels import varlen_kernel

LENGTHS = (100, 1, 37, 400, 64, 1)
"""Rows of the check; a row of one token is its own context."""
CP_LENGTHS = (128, 32, 512, 16, 64)
"""Rows divided by context parallelism: multiples of 16, that is of 2 x 8 chunks."""
_LIMITS = {"bfloat16": 2e-2, "float32": 5e-5}
"""Largest |found - expected| / |expected| in the 2-norm, for outputs and gradients."""


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One shape of the kernel."""

    head_dim: int
    num_heads: int
    num_kv_heads: int
    window: int | None
    precision: str
    cp_size: int = 1
    cp_rank: int = 0


def attention_cells(device: str, *, is_tiny: bool) -> Iterator[Cell]:
    """Yield a cell per head dimension, number of key heads, window and context-parallel share."""
    head_dims = (16,) if is_tiny else (64, 128, 256)
    for head_dim in head_dims:
        for group in (1, 4, 8):
            for window in (None, 64):
                case = AttentionCase(
                    head_dim=head_dim,
                    num_heads=8,
                    num_kv_heads=8 // group,
                    window=window,
                    precision="bfloat16",
                )
                name = f"attention d={head_dim} GQA {group} window {window or 'none'}"
                yield _cell(name, case, device)
    yield _cell(
        "attention float32 window 24",
        AttentionCase(
            head_dim=head_dims[0], num_heads=8, num_kv_heads=2, window=24, precision="float32"
        ),
        device,
    )
    for cp_size in (2, 4, 8):
        for cp_rank in (0, cp_size - 1):
            for window in (None, 24):
                case = AttentionCase(
                    head_dim=head_dims[0],
                    num_heads=8,
                    num_kv_heads=2,
                    window=window,
                    precision="bfloat16",
                    cp_size=cp_size,
                    cp_rank=cp_rank,
                )
                name = f"attention cp {cp_size} rank {cp_rank} window {window or 'none'}"
                yield _cell(name, case, device)


def _cell(name: str, case: AttentionCase, device: str) -> Cell:
    return Cell(
        name=name,
        measure=partial(check_attention, case, device),
        settings={key: value for key, value in vars(case).items() if value is not None},
        expected_s=2.0,
    )


def check_attention(case: AttentionCase, device: str) -> Mapping[str, Any]:
    """Compare output and gradients of the engine's attention with the float64 reference."""
    lengths = LENGTHS if case.cp_size == 1 else CP_LENGTHS
    queries, keys = chunk_spans(lengths, case.cp_size, case.cp_rank)
    num_queries = sum(length for _, length in queries)
    num_keys = sum(length for _, length in keys)
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.precision)
    shapes = (
        (num_queries, case.num_heads, case.head_dim),
        (num_keys, case.num_kv_heads, case.head_dim),
        (num_keys, case.num_kv_heads, case.head_dim),
        (num_queries, case.num_heads, case.head_dim),
    )
    # Rounded first, so that both sides have the same inputs.
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    exact = [tensor.to(device, torch.float64) for tensor in drawn]
    parts = [tensor.to(device) for tensor in drawn]
    found = _with_gradients(partial(_engine_attention, case, queries, keys), parts)
    expected = _with_gradients(partial(_exact_attention, case, queries, keys), exact)
    values: dict[str, Any] = {}
    names = ("output", "query gradient", "key gradient", "value gradient")
    for name, tensor, reference in zip(names, found, expected, strict=True):
        error = (tensor.double() - reference).norm() / reference.norm()
        values[name] = float(error)
    limit = _LIMITS[case.precision]
    # A comparison with NaN is False.
    values["passed"] = all(values[name] <= limit for name in names)
    return values | {"limit": limit}


def chunk_spans(
    lengths: Sequence[int], cp_size: int, cp_rank: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (first position in the row, length) of each query segment, and of its keys.

    Without context parallelism a segment is a row. With c ranks a row is divided into 2c chunks;
    rank r has chunks r and 2c - 1 - r, and a chunk attends to the row up to its own end.
    """
    queries: list[tuple[int, int]] = []
    keys: list[tuple[int, int]] = []
    for length in lengths:
        if cp_size == 1:
            queries.append((0, length))
            keys.append((0, length))
            continue
        chunk = length // (2 * cp_size)
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            queries.append((index * chunk, chunk))
            keys.append((0, (index + 1) * chunk))
    return queries, keys


def _with_gradients(function: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return output and gradients of `function(q, k, v)`; the last tensor is the upstream one."""
    *parts, upstream = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in parts]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def _engine_attention(
    case: AttentionCase,
    queries: Sequence[tuple[int, int]],
    keys: Sequence[tuple[int, int]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Return [T_q, H, D] of the engine's attention."""
    scale = case.head_dim**-0.5
    lengths_q = [length for _, length in queries]
    lengths_k = [length for _, length in keys]
    cu_seqlens = _bounds(lengths_q, q.device)
    if case.cp_size == 1:
        return attention.varlen_attention(
            q, k, v, cu_seqlens, max(lengths_q), scale=scale, window=case.window
        )
    spans = Spans(cu_seqlens, _bounds(lengths_k, q.device), max(lengths_q), max(lengths_k))
    # Not `varlen_attention`, which would gather the keys of real ranks.
    if q.is_cuda:
        return varlen_kernel()(q, k, v, spans, AttentionOptions(scale, case.window))
    return segment_attention(q, k, v, spans, AttentionOptions(scale, case.window))


def _exact_attention(
    case: AttentionCase,
    queries: Sequence[tuple[int, int]],
    keys: Sequence[tuple[int, int]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Return [T_q, H, D] by the formula, one segment at a time."""
    outputs = []
    start_q = 0
    start_k = 0
    repeats = case.num_heads // case.num_kv_heads
    for (first, length_q), (_, length_k) in zip(queries, keys, strict=True):
        rows = q[start_q : start_q + length_q]
        keys_of_row = k[start_k : start_k + length_k].repeat_interleave(repeats, dim=1)
        values_of_row = v[start_k : start_k + length_k].repeat_interleave(repeats, dim=1)
        scores = torch.einsum("qhd,khd->hqk", rows, keys_of_row) * case.head_dim**-0.5
        position_q = first + torch.arange(length_q, device=q.device)
        distance = position_q[:, None] - torch.arange(length_k, device=q.device)
        is_visible = distance >= 0
        if case.window is not None:
            is_visible &= distance < case.window
        weights = scores.masked_fill(~is_visible, float("-inf")).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values_of_row))
        start_q += length_q
        start_k += length_k
    return torch.cat(outputs)


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return int32 [n + 1]: the bounds of consecutive segments."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
