"""Keys and values of all context-parallel ranks, and which of them each of this rank's query chunks
attends to.

Every segment is cut in 2c chunks for c ranks, and rank r holds chunks r and 2c-1-r of each
(`data/packing/layout.py`). So that causal attention needs no exchange of partial results, all
ranks' keys and values are gathered once, and each of the two query chunks becomes a segment of its
own whose keys are chunk 0 up to the chunk itself: their ends coincide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nemo_like.policy.collectives import gather_rows


@dataclass(frozen=True)
class Exchange:
    """Where in the gathered keys each of a rank's query segments finds its own.

    Example: one segment of 8 positions on 2 ranks is cut in chunks of 2. Rank 0 holds chunks 0 and
    3, rank 1 chunks 1 and 2, so gathered keys lie in the order 0 3 1 2. For rank 0 `kv_index` takes
    chunk 0 and then 0 1 2 3: [0, 1, 0, 1, 4, 5, 6, 7, 2, 3]; `cu_seqlens_q` is [0, 2, 4] and
    `cu_seqlens_k` [0, 2, 10].
    """

    kv_index: Tensor
    """int64 [T_k]: rows of the gathered keys and values."""
    cu_seqlens_q: Tensor
    """int32 [2R + 1]"""
    cu_seqlens_k: Tensor
    """int32 [2R + 1]"""
    max_seqlen_q: int
    max_seqlen_k: int


def gather_keys_values(
    k: Tensor, v: Tensor, exchange: Exchange, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """`k` and `v` [T_k, H_kv, D] of `exchange`'s segments from this rank's [T/c, H_kv, D]. One
    collective each way.
    """
    gathered = gather_rows(group, torch.stack((k, v), dim=1))
    k, v = gathered.index_select(0, exchange.kv_index).unbind(1)
    return k, v


def plan_exchange(
    cu_seqlens: Tensor, max_seqlen: int, group: dist.ProcessGroup, num_positions: int
) -> Exchange:
    """The exchange of this rank of `group`, which holds `num_positions`; made once per `cu_seqlens`
    tensor.

    All layers of a forward are given the same tensor. It is on the device, and nothing here waits
    for the device.
    """
    key = (group.size(), group.rank(), num_positions, max_seqlen)
    plans = _plans.setdefault(cu_seqlens, {})
    if key not in plans:
        plans[key] = _make_exchange(
            cu_seqlens, max_seqlen, group.size(), group.rank(), num_positions
        )
    return plans[key]


_plans: Any = WeakTensorKeyDictionary()


def _make_exchange(
    cu_seqlens: Tensor, max_seqlen: int, size: int, rank: int, num_positions: int
) -> Exchange:
    if cu_seqlens.device.type == "cpu":
        _check(cu_seqlens.tolist(), size, num_positions)
    device = cu_seqlens.device
    starts = cu_seqlens.long()
    chunks = starts.diff() // (2 * size)
    lengths_q = chunks[:, None].expand(-1, 2).flatten()
    lengths_k = (
        chunks[:, None] * torch.tensor([rank + 1, 2 * size - rank], device=device)
    ).flatten()
    bounds_k = _bounds(lengths_k)
    # Known without asking the device: of its 2c chunks each segment gives r+1 and 2c-r.
    num_keys = (2 * size + 1) * (num_positions // 2)
    query = torch.repeat_interleave(
        torch.arange(len(lengths_k), device=device), lengths_k, output_size=num_keys
    )
    position = torch.arange(num_keys, device=device) - bounds_k[query]
    length = chunks[query // 2]
    chunk = position // length
    is_first = chunk < size
    owner = torch.where(is_first, chunk, 2 * size - 1 - chunk)
    within_share = starts[query // 2] // size + position % length + torch.where(is_first, 0, length)
    return Exchange(
        kv_index=owner * num_positions + within_share,
        cu_seqlens_q=_bounds(lengths_q).int(),
        cu_seqlens_k=bounds_k.int(),
        max_seqlen_q=max_seqlen // (2 * size),
        max_seqlen_k=max_seqlen // (2 * size) * (2 * size - rank),
    )


def _bounds(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


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
