"""Causal attention over rows packed end to end: one function on every device, and its place in Hugging Face models.

A position attends only to earlier positions of its own segment. Segments never share a matrix product, so changing a
token of one row leaves every other row bit-equal. Right-padded rows ([B, S], no `cu_seqlens`) need no mask at all:
under causal attention a real token never sees the padding behind it.
"""

from __future__ import annotations

import itertools
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

IMPLEMENTATION = "nemo_like"
"""The `attn_implementation` under which Hugging Face models find `attention_forward`."""

_MAX_GROUPED_LENGTH = 256
"""Above this a segment's own work dwarfs the cost of a call, so it runs alone and is not copied."""


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = True,
) -> Tensor:
    """[T, H, D] from `q` [T, H, D] and `k`, `v` [T, H_kv, D]; `cu_seqlens` int32 [R+1] covers all of T.

    `window` is how many positions a token sees, itself included; None means its whole past. In half precision on CUDA
    this is flash-attn where installed and `torch.nn.attention.varlen` otherwise; elsewhere SDPA segment by segment.
    """
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        return _flash_varlen(q, k, v, cu_seqlens, max_seqlen, scale, window, causal)
    return _segmented(q, k, v, tuple(cu_seqlens.tolist()), scale, window, causal)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None) -> Tensor:
    """Causal [B, H, S, D] from `q` [B, H, S, D] and `k`, `v` [B, H_kv, S, D]; rows are padded on the right."""
    return _sdpa(q, k, v, scale, window, causal=True)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a Hugging Face attention layer calls: `query` [B, H, S, D] -> ([B, S, H, D], None).

    `cu_seqlens` (with B = 1) is passed to the model's forward by the policy. Raises ValueError for attention this
    function does not compute, so that such a model is refused and not quietly trained with another one.
    """
    _refuse_unsupported(module, attention_mask, dropout, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if cu_seqlens is None:
        out = padded_attention(query, key, value, scale=scale, window=sliding_window)
        return out.transpose(1, 2), None
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    out = varlen_attention(q, k, v, cu_seqlens, max_seqlen, scale=scale, window=sliding_window)
    return out.unsqueeze(0), None


def register() -> None:
    """Make `attn_implementation="nemo_like"` known to transformers. Its mask is None: boundaries come with the call."""
    AttentionInterface.register(IMPLEMENTATION, attention_forward)  # type: ignore[arg-type]
    AttentionMaskInterface.register(IMPLEMENTATION, lambda *args, **kwargs: None)


def _refuse_unsupported(module: nn.Module, mask: Tensor | None, dropout: float, extras: dict[str, Any]) -> None:
    found = [name for name in ("softcap", "s_aux", "position_bias") if extras.get(name) is not None]
    if not getattr(module, "is_causal", True):
        found.append("bidirectional attention")
    if mask is not None:
        found.append("an attention mask")
    if dropout:
        found.append(f"attention dropout {dropout}")
    if found:
        raise ValueError(
            f"{type(module).__name__} asks for {', '.join(found)}, which packed causal attention does not have; "
            "policy.model_name must name a plain causal model such as Llama, Qwen2 or Qwen3"
        )


@cache
def _flash_attn_func() -> Any | None:
    try:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return flash_attn_varlen_func


def _flash_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None, causal: bool
) -> Tensor:
    # Both kernels count the window as positions before the token itself, -1 for all of them.
    left = -1 if window is None else window - 1
    flash_attn = _flash_attn_func()
    if flash_attn is not None:
        span = (left, 0 if causal else left)
        return flash_attn(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            softmax_scale=scale,
            causal=causal,
            window_size=span,
        )
    out = varlen_attn(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=scale,
        window_size=(left, 0 if causal else left),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)  # a pair only when auxiliary outputs are asked for
    return out


class _Group(NamedTuple):
    """Segments attended in one call. Example: lengths 8 and 7 -> length 8, 2 segments, 16 slots, 15 kept."""

    start: int
    """First position, where the group is one segment and so a plain slice."""
    length: int
    num_segments: int
    positions: Tensor | None
    """int64 [num_segments * length]: source position of each slot; a shorter segment repeats its last position."""
    kept: Tensor | None
    """int64: slots that are not such a repetition."""


class _Segments(NamedTuple):
    groups: tuple[_Group, ...]
    inverse: Tensor | None
    """int64 [T]: where each position's output lies in the concatenated groups; None if they are already in order."""


@lru_cache(maxsize=32)
def _group_segments(boundaries: tuple[int, ...]) -> _Segments:
    """Short segments of like length share a call, padded to the longest: a call costs as much as 100 short tokens.

    The padding lies behind each segment's last token, where causal attention cannot reach, and its output is dropped.
    """
    segments = sorted((end - start, start) for start, end in itertools.pairwise(boundaries) if end > start)
    groups: list[_Group] = []
    order: list[Tensor] = []
    while segments:
        length, _ = segments[-1]
        slack = max(8, length // 4) if length <= _MAX_GROUPED_LENGTH else 0
        members = [segments.pop()]
        while slack and segments and segments[-1][0] >= length - slack:
            members.append(segments.pop())
        members.sort(key=lambda segment: segment[1])
        group, positions = _make_group(length, members)
        groups.append(group)
        order.append(positions)
    source = torch.cat(order) if order else torch.zeros(0, dtype=torch.int64)
    in_order = bool((source[1:] > source[:-1]).all())
    return _Segments(tuple(groups), None if in_order else torch.argsort(source))


def _make_group(length: int, members: list[tuple[int, int]]) -> tuple[_Group, Tensor]:
    """The group of `members` (length, start) and the source positions of its output, in order."""
    if len(members) == 1:
        start = members[0][1]
        return _Group(start, length, 1, None, None), torch.arange(start, start + length)
    lengths, starts = torch.tensor(members).unbind(1)
    slots = torch.arange(length)
    positions = (starts[:, None] + torch.minimum(slots, lengths[:, None] - 1)).flatten()
    kept = (slots < lengths[:, None]).flatten().nonzero().squeeze(1)
    return _Group(members[0][1], length, len(members), positions, kept), positions[kept]


def _segmented(
    q: Tensor, k: Tensor, v: Tensor, boundaries: tuple[int, ...], scale: float, window: int | None, causal: bool
) -> Tensor:
    if boundaries[-1] != q.shape[0]:
        raise ValueError(f"cu_seqlens ends at {boundaries[-1]} but there are {q.shape[0]} positions")
    groups, inverse = _group_segments(boundaries) if causal else _one_by_one(boundaries)
    if not groups:
        return torch.empty_like(q)
    k, v = _match_heads(q, k, dim=1), _match_heads(q, v, dim=1)
    outputs = [_attend_group(q, k, v, group, scale, window, causal) for group in groups]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if inverse is None else out.index_select(0, inverse.to(out.device))


def _one_by_one(boundaries: tuple[int, ...]) -> _Segments:
    spans = [(start, end) for start, end in itertools.pairwise(boundaries) if end > start]
    return _Segments(tuple(_Group(start, end - start, 1, None, None) for start, end in spans), None)


def _attend_group(q: Tensor, k: Tensor, v: Tensor, group: _Group, scale: float, window: int | None, causal: bool) -> Tensor:
    """[kept positions of the group, H, D]."""
    if group.positions is None or group.kept is None:
        q, k, v = (tensor.narrow(0, group.start, group.length).transpose(0, 1)[None] for tensor in (q, k, v))
        return _sdpa(q, k, v, scale, window, causal)[0].transpose(0, 1)
    positions, kept = group.positions.to(q.device), group.kept.to(q.device)
    shape = (group.num_segments, group.length, *q.shape[1:])
    q, k, v = (tensor.index_select(0, positions).view(shape).transpose(1, 2) for tensor in (q, k, v))
    out = _sdpa(q, k, v, scale, window, causal).transpose(1, 2).flatten(0, 1)
    return out if len(kept) == len(positions) else out.index_select(0, kept)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, causal: bool) -> Tensor:
    """[B, H, S, D]; a mask is built only where the window is shorter than the row."""
    if not q.is_cuda:
        # The CPU flash kernel wants equal heads; asked for grouped heads, SDPA builds the [S, S] matrix instead.
        k, v = _match_heads(q, k, dim=1), _match_heads(q, v, dim=1)
    grouped = q.shape[1] != k.shape[1]
    length = q.shape[2]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    distance = torch.arange(length, device=q.device)
    distance = distance[:, None] - distance
    mask = (distance < window) & (distance >= 0 if causal else distance > -window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _match_heads(q: Tensor, kv: Tensor, dim: int) -> Tensor:
    repeats = q.shape[dim] // kv.shape[dim]
    return kv if repeats == 1 else kv.repeat_interleave(repeats, dim)
