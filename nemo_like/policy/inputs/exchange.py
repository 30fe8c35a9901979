"""Keys and values of context parallelism: one all-gather, and the keys that each query sees.

Every segment is split into 2c chunks for c ranks, and rank r has chunks r and 2c-1-r of each
(zig-zag order, see `model_inputs`), which balances the causal work. All ranks' keys and values are
gathered once, so attention needs no exchange of partial results. Each of a rank's two query chunks
becomes a segment of its own; it attends to the prefix that ends at its own last position.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nemo_like.policy.collectives import gather_rows
from nemo_like.policy.inputs.segment_attention import Spans

_plans: Any = WeakTensorKeyDictionary()
"""Exchanges by `cu_seqlens` tensor; an entry lives as long as its tensor."""


class Exchange(NamedTuple):
    """Keys that each query segment attends to, where they are not its own positions.

    With context parallelism they are on other ranks too, with shared prefixes partly in earlier
    segments. Query segment i attends to the keys `kv_index[spans.cu_seqlens_k[i] :
    spans.cu_seqlens_k[i + 1]]` of this rank's keys, or of those gathered from all ranks of the
    context-parallel group.

    Example: one segment of 8 positions on 2 ranks is split into chunks of 2. Rank 0 has chunks 0
    and 3, rank 1 chunks 1 and 2, so gathered keys are in chunk order 0 3 1 2. For rank 0 `kv_index`
    takes chunk 0 and then 0 1 2 3: [0, 1, 0, 1, 4, 5, 6, 7, 2, 3]; `cu_seqlens_q` is [0, 2, 4] and
    `cu_seqlens_k` [0, 2, 10].
    """

    kv_index: Tensor
    """int64 [T_k]: rows of the keys and values."""
    spans: Spans
    """Two query segments per segment with context parallelism, else one."""
    order: Tensor
    """int64 [T_k]: the places of `kv_index`, sorted by the row that they name."""
    bounds: Tensor
    """int64 [rows]: where the places of each row begin in `order`."""

    @classmethod
    def of(cls, kv_index: Tensor, spans: Spans, num_rows: int) -> Exchange:
        """Build from `kv_index` [T_k] into `num_rows` rows, without waiting for the device."""
        rows, order = kv_index.sort(stable=True)
        each_row = torch.arange(num_rows, device=rows.device)
        return cls(kv_index, spans, order, torch.searchsorted(rows, each_row))

    def select(self, rows: Tensor) -> Tensor:
        """Return the rows [T_k, ...] of `kv_index` from `rows` [rows, ...].

        Each row is selected by several segments. The gradient is the sum in the order of the
        segments; that of `index_select` on CUDA rounds after each of its atomic additions, whose
        order differs from call to call.
        """
        return _SelectRows.apply(rows, self.kv_index, self.order, self.bounds)  # type: ignore[return-value]


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
        ctx.save_for_backward(order, bounds)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        order, bounds = ctx.saved_tensors
        (grad,) = grads
        sums = torch.nn.functional.embedding_bag(order, grad.flatten(1), bounds, mode="sum")
        return sums.unflatten(1, grad.shape[1:]), None, None, None


def select_keys_values(
    k: Tensor, v: Tensor, exchange: Exchange, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Select `k` [T_k, H_kv, D] and `v` [T_k, H_kv, E] of an exchange from this rank's [T/c, ...].

    With a `group` they are gathered from its c ranks first.
    """
    if group is None:
        return exchange.select(k), exchange.select(v)
    # Joined, so that there is one collective in the forward and one in the backward.
    local = torch.cat((k, v), dim=-1)
    selected = exchange.select(gather_rows(group, local))
    k, v = selected.split((k.shape[-1], v.shape[-1]), dim=-1)
    return k, v


def plan_exchange(
    cu_seqlens: Tensor, max_seqlen: int, group: dist.ProcessGroup, num_positions: int
) -> Exchange:
    """Return the exchange of this rank of `group`, which has `num_positions` = T/c positions.

    `cu_seqlens` int32 [R + 1] are the segment bounds over all ranks of the group.
    It is computed once per `cu_seqlens` tensor, as all layers of a forward pass the same one.
    """
    key = (group.size(), group.rank(), num_positions, max_seqlen)
    plans = _plans.setdefault(cu_seqlens, {})
    if key not in plans:
        plans[key] = make_exchange(
            cu_seqlens, max_seqlen, group.size(), group.rank(), num_positions
        )
    return plans[key]


def make_exchange(
    cu_seqlens: Tensor, max_seqlen: int, size: int, rank: int, num_positions: int
) -> Exchange:
    """Build the exchange on the device of `cu_seqlens` [R + 1], without waiting for the device."""
    if cu_seqlens.device.type == "cpu":
        # On CUDA the check would wait for the device.
        _check(cu_seqlens.tolist(), size, num_positions)
    device = cu_seqlens.device
    num_chunks = 2 * size
    starts = cu_seqlens.long()
    # int64 [R]: length of one chunk of each segment.
    chunk_lengths = starts.diff() // num_chunks
    # int64 [2R]: two queries per segment, each as long as a chunk.
    lengths_q = chunk_lengths[:, None].expand(-1, 2).flatten()
    # Query chunk r sees r + 1 chunks, query chunk 2c-1-r sees 2c-r. Factors from the host are
    # arguments of kernels, where a tensor of them would be a copy that waits for the device.
    lengths_of_first = chunk_lengths * (rank + 1)
    lengths_of_second = chunk_lengths * (num_chunks - rank)
    lengths_k = torch.stack((lengths_of_first, lengths_of_second), dim=1).flatten()
    bounds_k = _bounds(lengths_k)
    # The sum of `lengths_k`, computed on the host so as not to wait for the device: each segment
    # contributes 2c + 1 of its chunks.
    num_keys = (num_chunks + 1) * (num_positions // 2)
    # int64 [T_k] from here on: for each key its query, and its place in the segment.
    queries = torch.arange(len(lengths_k), device=device)
    query = torch.repeat_interleave(queries, lengths_k, output_size=num_keys)
    segment = query // 2
    position = torch.arange(num_keys, device=device) - bounds_k[query]
    chunk_length = chunk_lengths[segment]
    chunk = position // chunk_length
    is_first = chunk < size
    owner = torch.where(is_first, chunk, num_chunks - 1 - chunk)
    # A rank's share of a segment is its first chunk, then its second.
    share_start = starts[segment] // size
    offset_of_chunk = torch.where(is_first, 0, chunk_length)
    within_share = share_start + position % chunk_length + offset_of_chunk
    max_chunk_length = max_seqlen // num_chunks
    spans = Spans(
        cu_seqlens_q=_bounds(lengths_q).int(),
        cu_seqlens_k=bounds_k.int(),
        max_seqlen_q=max_chunk_length,
        max_seqlen_k=max_chunk_length * (num_chunks - rank),
    )
    return Exchange.of(owner * num_positions + within_share, spans, size * num_positions)


def _bounds(lengths: Tensor) -> Tensor:
    """Return segment bounds int64 [n + 1] from lengths int64 [n]."""
    ends = lengths.cumsum(0)
    return torch.nn.functional.pad(ends, (1, 0))


def _check(bounds: list[int], size: int, num_positions: int) -> None:
    if bounds[-1] != num_positions * size:
        raise ValueError(
            f"cu_seqlens ends at {bounds[-1]} but there are {size} x {num_positions} positions"
        )
    if any(bound % (2 * size) for bound in bounds):
        raise ValueError(
            f"cu_seqlens {bounds} are not all multiples of 2 x {size}, as {size} context-parallel"
            f" ranks need"
        )
