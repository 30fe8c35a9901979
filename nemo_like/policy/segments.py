"""Positions of consecutive segments, and the share of them that a context-parallel rank has.

With context parallelism of c ranks each segment is split into 2c chunks. Rank r has chunks r and
2c-1-r in this order (zig-zag), which balances the work of causal attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def segment_starts(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the bounds of consecutive segments, int64 [n+1]."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def segment_positions(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return segment of each position and position within it, for consecutive segments.

    Both are int64 [sum(lengths)]. Example: lengths [2, 3] give segments [0, 0, 1, 1, 1] and
    positions [0, 1, 0, 1, 2].
    """
    segments = np.arange(len(lengths), dtype=np.int64)
    segment = np.repeat(segments, lengths)
    starts = segment_starts(lengths)
    position = np.arange(len(segment), dtype=np.int64)
    return segment, position - starts[segment]


def cp_shard_positions(
    padded_lengths: Sequence[int] | np.ndarray, cp_size: int, cp_rank: int
) -> np.ndarray:
    """Return the positions of the pack on `cp_rank`, int64 [sum(padded_lengths) / cp_size].

    Example: one row of 8 positions on 2 ranks has chunks 01|23|45|67; rank 0 gets [0, 1, 6, 7],
    rank 1 [2, 3, 4, 5]. Raises ValueError for a padded length that is not a multiple of 2 x cp_size
    or a rank outside the axis.
    """
    padded = np.asarray(padded_lengths, dtype=np.int64)
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank {cp_rank} is not in 0..{cp_size - 1}")
    if cp_size == 1:
        return np.arange(padded.sum(), dtype=np.int64)
    num_chunks = 2 * cp_size
    if (padded % num_chunks).any():
        raise ValueError(
            f"padded lengths {padded.tolist()} are not all multiples of 2 x cp_size = {num_chunks}"
        )
    chunk_lengths = padded // num_chunks
    row, position = segment_positions(2 * chunk_lengths)
    chunk_length = chunk_lengths[row]
    is_second = position >= chunk_length
    # A rank's first chunk is number r. Its second is number 2c-1-r, at the start of which
    # `position` has already advanced by one chunk.
    num_skipped_chunks = np.where(is_second, num_chunks - 2 - cp_rank, cp_rank)
    row_start = segment_starts(padded)[row]
    return row_start + position + num_skipped_chunks * chunk_length


def cp_gather_positions(padded_lengths: Sequence[int] | np.ndarray, cp_size: int) -> np.ndarray:
    """Return the inverse of `cp_shard_positions`, int64 [sum(padded_lengths)].

    `concat(shares of rank 0, 1, ...)[result]` is the pack in order.
    """
    shares = [cp_shard_positions(padded_lengths, cp_size, rank) for rank in range(cp_size)]
    gathered = np.concatenate(shares)
    inverse = np.empty_like(gathered)
    inverse[gathered] = np.arange(len(gathered), dtype=np.int64)
    return inverse


def segment_lengths(padded_lengths: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Return the padded length of every segment: the rows, then trailing padding if any."""
    trailing = num_tokens - sum(padded_lengths)
    if trailing == 0:
        return tuple(padded_lengths)
    return (*padded_lengths, trailing)
