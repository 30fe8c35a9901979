"""Index arrays of the positions of one microbatch on one rank, in NumPy.

A microbatch is a sequence of segments: its rows, each with its own padding, and trailing padding.
With shared prefixes the segment of a row has only its tokens after those that it shares with the
row before it. The positions that the model computes are then fewer than the tokens of the rows:
`SharedGrid` has both, and where each token of a row is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import Microbatch, PlanSpec


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
    """Return the padded length of every segment: the rows, then trailing padding if any.

    Padding is divided into segments of at most the longest row: its attention then costs less than
    that of rows, and its position ids are not above theirs. A dummy is one segment.
    """
    trailing = num_tokens - sum(padded_lengths)
    longest = max(padded_lengths, default=num_tokens)
    num_full, rest = divmod(trailing, longest)
    return (*padded_lengths, *[longest] * num_full, *[rest] * (rest > 0))


@dataclass(frozen=True)
class Grid:
    """Index arrays of the T positions on this rank, built once per microbatch."""

    rows: np.ndarray
    """int64 [R]: rows of the shard."""
    num_rows: int
    is_packed: bool
    """True for one sequence of segments, False for a rectangle of rows."""
    shape: tuple[int, int]
    """Shape of `input_ids`."""
    bounds: np.ndarray
    """int64 [segments + 1]: segment bounds over all cp ranks."""
    segment: np.ndarray
    """int64 [T]: segment of each position; segment r is row r of the microbatch."""
    position: np.ndarray
    """int64 [T]: position within the row, for trailing padding within the segment."""
    length: np.ndarray
    """int64 [T]: real tokens of the position's row, 0 for trailing padding."""

    @property
    def row_ids(self) -> np.ndarray:
        """int64 [T]: row of each position, 0 on padding."""
        return np.where(self.position < self.length, self.segment, 0)

    @classmethod
    def of(cls, microbatch: Microbatch, spec: PlanSpec, cp_rank: int) -> Grid:
        segments = segment_lengths(microbatch.padded_lengths, microbatch.num_tokens)
        bounds = segment_starts(segments)
        positions = cp_shard_positions(segments, spec.cp_size, cp_rank)
        # Every context-parallel rank has an equal share of every segment.
        share_lengths = np.array(segments) // spec.cp_size
        segment, _ = segment_positions(share_lengths)
        num_rows = len(microbatch.rows)
        # Segments of trailing padding have no real tokens.
        lengths = np.zeros(len(segments), dtype=np.int64)
        lengths[:num_rows] = microbatch.lengths
        # The first position of each segment in its row.
        first = np.zeros(len(segments), dtype=np.int64)
        first[: len(microbatch.shared)] = microbatch.shared
        is_packed = spec.layout == "packed" or spec.cp_size > 1
        width = len(positions)
        if not is_packed:
            width //= max(num_rows, 1)
        return cls(
            rows=np.array(microbatch.rows, dtype=np.int64),
            num_rows=num_rows,
            is_packed=is_packed,
            shape=(len(positions) // width, width),
            bounds=bounds,
            segment=segment,
            position=positions - bounds[segment] + first[segment],
            length=lengths[segment],
        )

    def gather(
        self, name: str, column: Jagged, shift: int, where: np.ndarray, fill: int
    ) -> np.ndarray:
        """Return [T, ...]: token `position + shift` of each row where `where`, else `fill`."""
        shape = (len(where), *column.values.shape[1:])
        gathered = np.full(shape, fill, dtype=column.dtype)
        if self.num_rows == 0:
            return gathered
        segment = self.segment[where]
        starts = column.offsets[self.rows]
        ends = column.offsets[self.rows + 1]
        source = starts[segment] + self.position[where] + shift
        is_beyond = source >= ends[segment]
        # A column that is too short would otherwise give tokens of the next row.
        if is_beyond.any():
            first = segment[np.argmax(is_beyond)]
            row = self.rows[first]
            num_tokens = column.lengths[row]
            num_read = self.length[self.segment == first][0]
            raise ValueError(
                f"column {name!r} has {num_tokens} tokens in row {row}, but the plan reads"
                f" {num_read}; every token column needs a value for each token of its row"
            )
        gathered[where] = column.values[source]
        return gathered

    @classmethod
    def of_rows(cls, microbatch: Microbatch) -> Grid:
        """Return the grid of all tokens of complete rows, one after the other, without padding."""
        lengths = np.array(microbatch.lengths, dtype=np.int64)
        segment, position = segment_positions(lengths)
        return cls(
            rows=np.array(microbatch.rows, dtype=np.int64),
            num_rows=len(lengths),
            is_packed=True,
            shape=(1, len(segment)),
            bounds=segment_starts(lengths),
            segment=segment,
            position=position,
            length=lengths[segment],
        )


class KeyIndex(NamedTuple):
    """The keys of each query segment of a rank; see `exchange.Exchange`."""

    kv_index: np.ndarray
    """int64 [T_k]"""
    lengths_q: np.ndarray
    """int64 [S]"""
    lengths_k: np.ndarray
    """int64 [S]"""


@dataclass(frozen=True)
class SharedGrid:
    """Where a rank computes the tokens of rows that share prefixes."""

    rows: Grid
    """All tokens of the complete rows, on every context-parallel rank: T_r positions."""
    source: np.ndarray
    """int64 [T_r]: the position of this rank that computes each of them; -1: another rank."""
    keys: KeyIndex

    @classmethod
    def of(cls, microbatch: Microbatch, spec: PlanSpec, cp_rank: int) -> SharedGrid:
        """Build the grid of a microbatch with `shared` prefixes in the packed layout."""
        rows = Grid.of_rows(microbatch)
        segments = segment_lengths(microbatch.padded_lengths, microbatch.num_tokens)
        bounds = segment_starts(segments)
        # Positions of the microbatch to positions in the ranks' shares, one after the other.
        index = cp_gather_positions(segments, spec.cp_size)
        paths: list[np.ndarray] = []
        for row, (length, shared) in enumerate(
            zip(microbatch.lengths, microbatch.shared, strict=True)
        ):
            own = np.arange(bounds[row], bounds[row] + length - shared)
            # The row before it has the shared tokens, or leads to them.
            path = np.concatenate((paths[-1][:shared], own)) if shared else own
            paths.append(path)
        num_positions = len(index) // spec.cp_size
        source = index[np.concatenate(paths)] - cp_rank * num_positions
        source[(source < 0) | (source >= num_positions)] = -1
        prefixes = [path[:shared] for path, shared in zip(paths, microbatch.shared, strict=True)]
        return cls(rows, source, _key_index(prefixes, bounds, index, spec.cp_size, cp_rank))


def _key_index(
    prefixes: Sequence[np.ndarray],
    bounds: np.ndarray,
    index: np.ndarray,
    cp_size: int,
    cp_rank: int,
) -> KeyIndex:
    """Build the keys of each segment: the prefix of its row, then its own positions.

    `prefixes` are the positions of the microbatch with the shared tokens of each row, `bounds`
    int64 [segments + 1] the bounds of all segments, `index` int64 [num_tokens] as in
    `SharedGrid.of`. With context parallelism a segment has two query chunks on this rank, each with
    the keys up to its own end.
    """
    chunks = (0,) if cp_size == 1 else (cp_rank, 2 * cp_size - 1 - cp_rank)
    num_chunks = 1 if cp_size == 1 else 2 * cp_size
    kv_index = []
    lengths_q = []
    lengths_k = []
    for segment, (start, stop) in enumerate(pairwise(bounds.tolist())):
        # All tokens of a row may be shared.
        if start == stop:
            continue
        own = np.arange(start, stop)
        keys = np.concatenate((prefixes[segment], own)) if segment < len(prefixes) else own
        num_shared = len(keys) - len(own)
        chunk_length = len(own) // num_chunks
        for chunk in chunks:
            num_keys = num_shared + (chunk + 1) * chunk_length
            kv_index.append(index[keys[:num_keys]])
            lengths_q.append(chunk_length)
            lengths_k.append(num_keys)
    return KeyIndex(np.concatenate(kv_index), np.array(lengths_q), np.array(lengths_k))
