"""Causal attention over rows packed end to end: one function on every device, and its place in
Hugging Face models.

A position attends only to earlier positions of its own segment. Segments never share a matrix
product, so changing a token of one row leaves every other row bit-equal. Right-padded rows ([B, S],
no `cu_seqlens`) need no mask at all: under causal attention a real token never sees the padding
behind it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

from nemo_like.config.errors import ConfigError
from nemo_like.policy.context_parallel import gather_keys_values, plan_exchange

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
    cp_group: ProcessGroup | None = None,
) -> Tensor:
    """[T, H, D] from `q` [T, H, D] and `k`, `v` [T, H_kv, D]; `cu_seqlens` int32 [R+1] covers all
    of T.

    `window` is how many positions a token sees, itself included; None means its whole past. In half
    precision on CUDA this is flash-attn where installed and `torch.nn.attention.varlen` otherwise;
    elsewhere SDPA segment by segment.

    With a `cp_group` of c > 1 ranks, `q`, `k`, `v` and the result are this rank's share of T/c
    positions, cut as `data/packing/layout.py` says, while `cu_seqlens` and `max_seqlen` are those
    of the whole. `cu_seqlens` must not change after a call: what follows from it is kept for as
    long as the tensor lives.
    """
    spans = _Spans(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    if cp_group is not None and cp_group.size() > 1:
        if not causal:
            raise ValueError("context parallelism cuts rows for causal attention; it has no other")
        exchange = plan_exchange(cu_seqlens, max_seqlen, cp_group, q.shape[0])
        k, v = gather_keys_values(k, v, exchange, cp_group)
        spans = _Spans(
            exchange.cu_seqlens_q,
            exchange.cu_seqlens_k,
            exchange.max_seqlen_q,
            exchange.max_seqlen_k,
        )
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        return _flash_varlen(q, k, v, spans, scale, window, causal)
    return _segmented(q, k, v, spans, scale, window, causal)


def padded_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None
) -> Tensor:
    """Causal [B, H, S, D] from `q` [B, H, S, D] and `k`, `v` [B, H_kv, S, D]; rows are padded on
    the right.
    """
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
    cp_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a Hugging Face attention layer calls: `query` [B, H, S, D] -> ([B, S, H, D], None).

    `cu_seqlens` (with B = 1) and `cp_group` are passed to the model's forward by the policy. Raises
    ValueError for attention this function does not compute, so that such a model is refused and not
    quietly trained with another one.
    """
    _refuse_unsupported(module, attention_mask, dropout, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if cu_seqlens is None:
        if cp_group is not None and cp_group.size() > 1:
            raise ValueError("context parallelism needs packed rows; pass cu_seqlens")
        out = padded_attention(query, key, value, scale=scale, window=sliding_window)
        return out.transpose(1, 2), None
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    out = varlen_attention(
        q, k, v, cu_seqlens, max_seqlen, scale=scale, window=sliding_window, cp_group=cp_group
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Make `attn_implementation="nemo_like"` known to transformers. Its mask is None: boundaries
    come with the call.
    """
    AttentionInterface.register(IMPLEMENTATION, attention_forward)  # type: ignore[arg-type]
    AttentionMaskInterface.register(IMPLEMENTATION, lambda *args, **kwargs: None)


def _refuse_unsupported(
    module: nn.Module, mask: Tensor | None, dropout: float, extras: dict[str, Any]
) -> None:
    found = [name for name in ("softcap", "s_aux", "position_bias") if extras.get(name) is not None]
    if not getattr(module, "is_causal", True):
        found.append("bidirectional attention")
    if mask is not None:
        found.append("an attention mask")
    if dropout:
        found.append(f"attention dropout {dropout}")
    if found:
        raise ConfigError(
            f"{type(module).__name__} asks for {', '.join(found)}, which packed causal attention"
            f" does not have; "
            "policy.model_name must name a plain causal model such as Llama, Qwen2 or Qwen3"
        )


@cache
def _flash_attn_func() -> Any | None:
    try:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return flash_attn_varlen_func


class _Spans(NamedTuple):
    """Query segment i attends to key segment i; their last positions are the same position."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def _flash_varlen(
    q: Tensor, k: Tensor, v: Tensor, spans: _Spans, scale: float, window: int | None, causal: bool
) -> Tensor:
    # Both kernels align the ends of queries and keys, and count the window as positions before the
    # token itself, -1 for all of them.
    left = -1 if window is None else window - 1
    window_size = (left, 0 if causal else left)
    flash_attn = _flash_attn_func()
    if flash_attn is not None:
        return flash_attn(
            q, k, v, *spans, softmax_scale=scale, causal=causal, window_size=window_size
        )
    out = varlen_attn(
        q, k, v, *spans, scale=scale, window_size=window_size, enable_gqa=q.shape[1] != k.shape[1]
    )
    assert isinstance(out, Tensor)  # a pair only when auxiliary outputs are asked for
    return out


class _Segment(NamedTuple):
    """Queries [start_q, start_q + length_q) see keys [start_k, start_k + length_k), both ending at
    one position.
    """

    start_q: int
    length_q: int
    start_k: int
    length_k: int

    @property
    def chunk(self) -> int:
        """Which of its row's chunks of `length_q` positions the queries are."""
        return self.length_k // self.length_q - 1


class _Slots(NamedTuple):
    """A rectangle of equally long segments; a shorter one repeats its last position."""

    positions: Tensor
    """int64 [num_segments * length]: source position of each slot."""
    kept: Tensor
    """int64: slots that are no such repetition."""


class _Group(NamedTuple):
    """Segments attended in one call. Example: lengths 8 and 7 -> length 8, 2 segments, 16 slots, 15
    kept.
    """

    segments: tuple[_Segment, ...]
    length_q: int
    length_k: int
    slots_q: _Slots | None
    """None where the group is one segment and so a plain slice."""
    slots_k: _Slots | None


class _Segments(NamedTuple):
    groups: tuple[_Group, ...]
    inverse: Tensor | None
    """int64 [T]: where each position's output lies in the concatenated groups; None if they are
    already in order.
    """


@lru_cache(maxsize=32)
def _group_segments(
    bounds_q: tuple[int, ...], bounds_k: tuple[int, ...], causal: bool
) -> _Segments:
    """Short segments of like length share a call, padded to the longest: a call costs as much as
    100 short tokens.

    The padding lies behind each segment's last token, where causal attention cannot reach, and its
    output is dropped.
    """
    pairs = zip(itertools.pairwise(bounds_q), itertools.pairwise(bounds_k), strict=True)
    segments = [
        _Segment(q, q_end - q, k, k_end - k) for (q, q_end), (k, k_end) in pairs if q_end > q
    ]
    segments.sort(key=lambda segment: (segment.chunk, segment.length_q, segment.start_q))
    groups: list[_Group] = []
    order: list[Tensor] = []
    while segments:
        longest = segments[-1]
        slack = (
            max(8, longest.length_q // 4)
            if causal and longest.length_k <= _MAX_GROUPED_LENGTH
            else 0
        )
        members = [segments.pop()]
        while (
            slack
            and segments
            and segments[-1].chunk == longest.chunk
            and segments[-1].length_q >= longest.length_q - slack
        ):
            members.append(segments.pop())
        group = _make_group(sorted(members))
        groups.append(group)
        order.append(_outputs(group))
    source = torch.cat(order) if order else torch.zeros(0, dtype=torch.int64)
    in_order = bool((source[1:] > source[:-1]).all())
    return _Segments(tuple(groups), None if in_order else torch.argsort(source))


def _make_group(members: list[_Segment]) -> _Group:
    length_q, length_k = (
        max(getattr(member, name) for member in members) for name in ("length_q", "length_k")
    )
    if len(members) == 1:
        return _Group(tuple(members), length_q, length_k, None, None)
    starts_q, lengths_q, starts_k, lengths_k = torch.tensor(members).unbind(1)
    slots_q, slots_k = _slots(starts_q, lengths_q, length_q), _slots(starts_k, lengths_k, length_k)
    return _Group(tuple(members), length_q, length_k, slots_q, slots_k)


def _slots(starts: Tensor, lengths: Tensor, length: int) -> _Slots:
    slots = torch.arange(length)
    positions = (starts[:, None] + torch.minimum(slots, lengths[:, None] - 1)).flatten()
    return _Slots(positions, (slots < lengths[:, None]).flatten().nonzero().squeeze(1))


def _outputs(group: _Group) -> Tensor:
    """Source positions of the group's output, in order."""
    if group.slots_q is None:
        start = group.segments[0].start_q
        return torch.arange(start, start + group.length_q)
    return group.slots_q.positions[group.slots_q.kept]


def _segmented(
    q: Tensor, k: Tensor, v: Tensor, spans: _Spans, scale: float, window: int | None, causal: bool
) -> Tensor:
    bounds_q, bounds_k = tuple(spans.cu_seqlens_q.tolist()), tuple(spans.cu_seqlens_k.tolist())
    if bounds_q[-1] != q.shape[0]:
        raise ValueError(f"cu_seqlens ends at {bounds_q[-1]} but there are {q.shape[0]} positions")
    groups, inverse = _group_segments(bounds_q, bounds_k, causal)
    if not groups:
        return torch.empty_like(q)
    k, v = _match_heads(q, k, dim=1), _match_heads(q, v, dim=1)
    outputs = [_attend_group(q, k, v, group, scale, window, causal) for group in groups]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if inverse is None else out.index_select(0, inverse.to(out.device))


def _attend_group(
    q: Tensor, k: Tensor, v: Tensor, group: _Group, scale: float, window: int | None, causal: bool
) -> Tensor:
    """[kept positions of the group, H, D]."""
    lags = [segment.length_k - segment.length_q for segment in group.segments]
    if group.slots_q is None or group.slots_k is None:
        (segment,) = group.segments
        q = q.narrow(0, segment.start_q, segment.length_q).transpose(0, 1)[None]
        k, v = (
            kv.narrow(0, segment.start_k, segment.length_k).transpose(0, 1)[None] for kv in (k, v)
        )
        return _sdpa(q, k, v, scale, window, causal, lags)[0].transpose(0, 1)
    num = len(group.segments)
    q = _rectangle(q, group.slots_q, num)
    k, v = (_rectangle(kv, group.slots_k, num) for kv in (k, v))
    out = _sdpa(q, k, v, scale, window, causal, lags).transpose(1, 2).flatten(0, 1)
    kept = group.slots_q.kept
    return out if len(kept) == len(out) else out.index_select(0, kept.to(out.device))


def _rectangle(tensor: Tensor, slots: _Slots, num_segments: int) -> Tensor:
    """[num_segments, H, length, D]"""
    rows = tensor.index_select(0, slots.positions.to(tensor.device))
    return rows.view(num_segments, -1, *tensor.shape[1:]).transpose(1, 2)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    causal: bool,
    lags: Sequence[int] = (0,),
) -> Tensor:
    """[B, H, S, D]; query i of row b stands at key i + lags[b]. A mask is built only where SDPA has
    no word for it.
    """
    if not q.is_cuda:
        # The CPU flash kernel wants equal heads; asked for grouped heads, SDPA builds the [S, S]
        # matrix instead.
        k, v = _match_heads(q, k, dim=1), _match_heads(q, v, dim=1)
    grouped = q.shape[1] != k.shape[1]
    if not any(lags) and (window is None or window >= q.shape[2]):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    mask = _mask(q.shape[2], k.shape[2], lags, window, causal, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _mask(
    length_q: int,
    length_k: int,
    lags: Sequence[int],
    window: int | None,
    causal: bool,
    device: torch.device,
) -> Tensor:
    """bool [B or 1, 1, length_q, length_k]: what each query sees; `window` is the causal one."""
    positions = torch.arange(length_q, device=device) + torch.tensor(lags, device=device)[:, None]
    distance = positions[:, None, :, None] - torch.arange(length_k, device=device)
    mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is None:
        return mask
    return mask & (distance < window) & (distance > -window)


def _match_heads(q: Tensor, kv: Tensor, dim: int) -> Tensor:
    repeats = q.shape[dim] // kv.shape[dim]
    return kv if repeats == 1 else kv.repeat_interleave(repeats, dim)
