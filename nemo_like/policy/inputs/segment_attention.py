"""SDPA over packed rows, segment by segment: used where no varlen kernel is available.

Short segments of similar length share one call. Segments never share a matrix product otherwise, so
changing a token of one row leaves every other row bit-equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_GROUPED_LENGTH = 256
"""Longer segments run alone, without a copy: their own work far exceeds the cost of a call."""


class AttentionOptions(NamedTuple):
    """How attention scores are computed and which of them are seen; one value for a layer."""

    scale: float
    """Scores are scale * q @ k."""
    window: int | None = None
    """Number of positions that a token attends to, itself included; None is its entire past."""
    causal: bool = True
    softcap: float | None = None
    """Scores x become softcap * tanh(x / softcap)."""
    sinks: Tensor | None = None
    """[H]: a score per head of one more key, whose value is zero."""

    @property
    def is_plain(self) -> bool:
        """True if scores are only scaled, which every kernel can do."""
        return self.softcap is None and self.sinks is None


class Spans(NamedTuple):
    """Query segment i attends to key segment i; both end at the same position."""

    cu_seqlens_q: Tensor
    """int32 [segments + 1]"""
    cu_seqlens_k: Tensor
    """int32 [segments + 1]"""
    max_seqlen_q: int
    max_seqlen_k: int


@torch.compiler.disable(reason="the bounds of the rows are read on the host")
def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans, options: AttentionOptions
) -> Tensor:
    """Return [T_q, H, E] from `q` [T_q, H, D], `k` [T_k, H_kv, D] and `v` [T_k, H_kv, E].

    Raises ValueError if `spans` do not cover all of `q`.
    """
    bounds_q = tuple(spans.cu_seqlens_q.tolist())
    bounds_k = tuple(spans.cu_seqlens_k.tolist())
    if bounds_q[-1] != q.shape[0]:
        end = bounds_q[-1]
        raise ValueError(f"cu_seqlens ends at {end} but there are {len(q)} positions")
    plan = _plan_calls(bounds_q, bounds_k, options.causal)
    if not plan.groups:
        return q.new_empty(*q.shape[:-1], v.shape[-1])
    k = _match_heads(q, k, dim=1)
    v = _match_heads(q, v, dim=1)
    outputs = []
    for group in plan.groups:
        output = _attend_group(q, k, v, group, options)
        outputs.append(output)
    # A single group is not copied.
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if plan.inverse is None:
        return out
    inverse = plan.inverse.to(out.device)
    return out.index_select(0, inverse)


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, lags: Sequence[int] = (0,)
) -> Tensor:
    """Return [B, H, S_q, E] from `q` [B, H, S_q, D], `k` [B, H_kv, S_k, D], `v` [B, H_kv, S_k, E].

    Query i of row b is at the position of key i + lags[b]. A mask is built only where SDPA has no
    option for it.
    """
    if not q.is_cuda:
        # The CPU flash kernel needs equal numbers of heads. With `enable_gqa` SDPA would use a
        # kernel that materialises the [S, S] matrix.
        k = _match_heads(q, k, dim=1)
        v = _match_heads(q, v, dim=1)
    num_heads, length_q = q.shape[1:3]
    num_kv_heads, length_k = k.shape[1:3]
    enable_gqa = shares_kv_heads(num_heads, num_kv_heads)
    # A window as long as the queries removes nothing.
    has_window = options.window is not None and options.window < length_q
    if not options.is_plain:
        k = _match_heads(q, k, dim=1)
        v = _match_heads(q, v, dim=1)
        mask = _mask(length_q, length_k, lags, options, q.device)
        return _written_out(q, k, v, mask, options)
    if not any(lags) and not has_window:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=options.causal, scale=options.scale, enable_gqa=enable_gqa
        )
    mask = _mask(length_q, length_k, lags, options, q.device)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=options.scale, enable_gqa=enable_gqa
    )


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: AttentionOptions
) -> Tensor:
    """Return [B, H, S_q, E]; `mask` is bool [B or 1, 1, S_q, S_k]. All scores are in memory."""
    scores = (q @ k.transpose(-1, -2)).float() * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if options.sinks is None:
        return scores.softmax(-1).to(v.dtype) @ v
    sinks = options.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sinks), dim=-1).softmax(-1)
    return weights[..., :-1].to(v.dtype) @ v


def shares_kv_heads(num_heads: int, num_kv_heads: int) -> bool:
    """Return True if several query heads share a key-value head.

    Compiled code may have symbolic numbers. Operators take a plain bool, which the branch gives.
    """
    if num_heads != num_kv_heads:  # noqa: SIM103
        return True
    return False


class _Segment(NamedTuple):
    """Queries [start_q, start_q + length_q) attend to keys [start_k, start_k + length_k).

    Both ranges end at the same position.
    """

    start_q: int
    length_q: int
    start_k: int
    length_k: int

    @property
    def kind(self) -> tuple[int, int]:
        """Segments of one kind have key lengths as similar as their query lengths.

        With context parallelism it is the index of the queries' chunk in its row, in chunks of
        `length_q` positions; behind a shared prefix it is the length of the prefix.
        """
        chunk, rest = divmod(self.length_k, self.length_q)
        return (chunk - 1, 0) if rest == 0 else (-1, self.length_k - self.length_q)


class _Slots(NamedTuple):
    """A rectangle of segments padded to one length; padding repeats the last position."""

    positions: Tensor
    """int64 [num_segments * length]: source position of each slot."""
    kept: Tensor
    """int64: slots that are not padding."""


class _Group(NamedTuple):
    """Segments attended in one call.

    Example: lengths 8 and 7 give length 8, 2 segments, 16 slots, 15 of them kept.
    """

    segments: tuple[_Segment, ...]
    length_q: int
    length_k: int
    slots_q: _Slots | None
    """None for a group of one segment, which is a plain slice."""
    slots_k: _Slots | None


class _CallPlan(NamedTuple):
    groups: tuple[_Group, ...]
    inverse: Tensor | None
    """int64 [T]: index of each position's output in the concatenated groups; None if the outputs
    are in order.
    """


# All layers of a forward, and its backward, have the same bounds.
@lru_cache(maxsize=32)
def _plan_calls(bounds_q: tuple[int, ...], bounds_k: tuple[int, ...], causal: bool) -> _CallPlan:
    """Group short segments of similar length, padded to the longest of their group.

    A call costs about as much as 100 short tokens. Padding follows each segment's last token, where
    causal attention does not see it, and its output is dropped.
    """
    segments = []
    ranges_q = itertools.pairwise(bounds_q)
    ranges_k = itertools.pairwise(bounds_k)
    for (start_q, end_q), (start_k, end_k) in zip(ranges_q, ranges_k, strict=True):
        length_q = end_q - start_q
        length_k = end_k - start_k
        if length_q > 0:
            segments.append(_Segment(start_q, length_q, start_k, length_k))
    # Sorted, so that segments of one group are neighbours. They have one `kind`, so that similar
    # query lengths imply similar key lengths.
    segments.sort(key=_group_order)
    groups: list[_Group] = []
    order: list[Tensor] = []
    while segments:
        longest = segments.pop()
        members = [longest]
        if causal and longest.length_k <= _MAX_GROUPED_LENGTH:
            # At most a quarter of a group is padding; very short segments differ by 8 at most.
            max_padding = max(8, longest.length_q // 4)
            min_length = longest.length_q - max_padding
            while segments and _fits_group(segments[-1], longest, min_length):
                members.append(segments.pop())
        group = _make_group(sorted(members))
        groups.append(group)
        order.append(_output_positions(group))
    if not order:
        return _CallPlan((), None)
    source = torch.cat(order)
    is_ascending = source[1:] > source[:-1]
    inverse = None if is_ascending.all() else torch.argsort(source)
    return _CallPlan(tuple(groups), inverse)


def _group_order(segment: _Segment) -> tuple[tuple[int, int], int, int]:
    return segment.kind, segment.length_q, segment.start_q


def _fits_group(segment: _Segment, longest: _Segment, min_length: int) -> bool:
    if segment.kind != longest.kind:
        return False
    return segment.length_q >= min_length


def _make_group(members: list[_Segment]) -> _Group:
    length_q = max(member.length_q for member in members)
    length_k = max(member.length_k for member in members)
    if len(members) == 1:
        return _Group(tuple(members), length_q, length_k, None, None)
    starts_q, lengths_q, starts_k, lengths_k = torch.tensor(members).unbind(1)
    slots_q = _slots(starts_q, lengths_q, length_q)
    slots_k = _slots(starts_k, lengths_k, length_k)
    return _Group(tuple(members), length_q, length_k, slots_q, slots_k)


def _slots(starts: Tensor, lengths: Tensor, length: int) -> _Slots:
    """Slots of segments at `starts` int64 [n] with `lengths` int64 [n], padded to `length`."""
    index = torch.arange(length)
    last = lengths[:, None] - 1
    index_in_segment = torch.minimum(index, last)
    positions = starts[:, None] + index_in_segment
    is_kept = (index <= last).flatten()
    kept = is_kept.nonzero().squeeze(1)
    return _Slots(positions.flatten(), kept)


def _output_positions(group: _Group) -> Tensor:
    """Source positions of the group's output in its order, int64 [kept slots]."""
    if group.slots_q is None:
        start = group.segments[0].start_q
        return torch.arange(start, start + group.length_q)
    return group.slots_q.positions[group.slots_q.kept]


def _attend_group(
    q: Tensor, k: Tensor, v: Tensor, group: _Group, options: AttentionOptions
) -> Tensor:
    """Return [kept positions of the group, H, E]; `q`, `k` and `v` are of all segments."""
    # A query chunk at the end of its keys is `lag` positions behind their start.
    lags = [segment.length_k - segment.length_q for segment in group.segments]
    if group.slots_q is None or group.slots_k is None:
        (segment,) = group.segments
        q = _slice(q, segment.start_q, segment.length_q)
        k = _slice(k, segment.start_k, segment.length_k)
        v = _slice(v, segment.start_k, segment.length_k)
        out = sdpa(q, k, v, options, lags)
        # [1, H, length, E] to [length, H, E].
        return out[0].transpose(0, 1)
    num_segments = len(group.segments)
    q = _rectangle(q, group.slots_q, num_segments)
    k = _rectangle(k, group.slots_k, num_segments)
    v = _rectangle(v, group.slots_k, num_segments)
    out = sdpa(q, k, v, options, lags)
    # [segments, H, length, E] to [slots, H, E].
    out = out.transpose(1, 2).flatten(0, 1)
    kept = group.slots_q.kept
    if len(kept) == len(out):
        return out
    return out.index_select(0, kept.to(out.device))


def _slice(tensor: Tensor, start: int, length: int) -> Tensor:
    """Return a view [1, H, length, D] of `tensor` [T, H, D]."""
    rows = tensor.narrow(0, start, length)
    return rows.transpose(0, 1)[None]


def _rectangle(tensor: Tensor, slots: _Slots, num_segments: int) -> Tensor:
    """Copy `tensor` [T, H, D] to [num_segments, H, length, D]."""
    positions = slots.positions.to(tensor.device)
    rows = tensor.index_select(0, positions)
    # [slots, H, D] to [num_segments, length, H, D].
    rows = rows.unflatten(0, (num_segments, -1))
    return rows.transpose(1, 2)


def _mask(
    length_q: int,
    length_k: int,
    lags: Sequence[int],
    options: AttentionOptions,
    device: torch.device,
) -> Tensor:
    """Return bool [B or 1, 1, length_q, length_k]: True where a query attends to a key."""
    lag = torch.tensor(lags, device=device)[:, None]
    positions_q = torch.arange(length_q, device=device) + lag
    positions_k = torch.arange(length_k, device=device)
    # int64 [B or 1, 1, length_q, length_k]
    distance = positions_q[:, None, :, None] - positions_k
    mask = distance >= 0 if options.causal else torch.ones_like(distance, dtype=torch.bool)
    if options.window is None:
        return mask
    # Without causality the window is symmetric.
    is_near = (distance < options.window) & (distance > -options.window)
    return mask & is_near


def _match_heads(q: Tensor, kv: Tensor, dim: int) -> Tensor:
    """Repeat the H_kv heads of `kv` along `dim` to the H heads of `q`; other dims may differ.

    `kv` [T_k, H_kv, D] becomes [T_k, H, D], and [B, H_kv, S_k, D] becomes [B, H, S_k, D].
    """
    num_heads = q.shape[dim]
    num_kv_heads = kv.shape[dim]
    if num_heads == num_kv_heads:
        return kv
    return kv.repeat_interleave(num_heads // num_kv_heads, dim)
