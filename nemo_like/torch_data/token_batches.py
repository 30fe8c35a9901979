"""Batches by token count, formed once for rows of known lengths.

Consecutive rows of an order are joined while the microbatch stays within a limit of tokens, so that
a microbatch has many short rows or few long ones (next-fit). Next-fit minimizes the number of
microbatches for a fixed order, because every part of a microbatch within the limit is within it.
Every row is in exactly one microbatch, or in `dropped` by an explicit policy.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from nemo_like.data.packing.packers import checked_lengths, prefix_sums
from nemo_like.integer_math import ceil_div, check_integer, round_up
from nemo_like.parallel_layout import Oversize

logger = logging.getLogger(__name__)

Order = Literal["given", "random", "length"]
Counts = Literal["padded", "summed"]


@dataclass(frozen=True, eq=False)
class TokenBatches:
    """Microbatches and steps over N rows: M microbatches in S steps.

    Microbatch m has the rows `rows[offsets[m] : offsets[m + 1]]` and is computed with the shape
    `[padded_rows[m], padded_lengths[m]]`. Step s has the microbatches `step_offsets[s]` up to, not
    including, `step_offsets[s + 1]`. `padded_rows` exceeds the number of rows only in the last step
    of `same_shape`, where dummy rows without loss fill the missing places.
    """

    rows: np.ndarray
    """int64 [N'], the indices of the rows that were not dropped, each once."""
    offsets: np.ndarray
    """int64 [M + 1]."""
    step_offsets: np.ndarray
    """int64 [S + 1]."""
    padded_rows: np.ndarray
    """int64 [M], rows of each microbatch with dummy rows."""
    padded_lengths: np.ndarray
    """int64 [M], tokens to which the rows of each microbatch are padded."""
    lengths: np.ndarray
    """int64 [N], the length of each row after truncation, before rounding."""
    dropped: np.ndarray
    """int64 [D], the indices of the oversize rows that `oversize="drop"` left out, ascending."""
    below_min_rows: np.ndarray
    """int64 [B], the microbatches with fewer than `min_rows` rows (dummy rows count), ascending."""

    @property
    def num_microbatches(self) -> int:
        """M."""
        return len(self.offsets) - 1

    @property
    def num_steps(self) -> int:
        """S."""
        return len(self.step_offsets) - 1

    @property
    def step_num_rows(self) -> np.ndarray:
        """Rows of each step without dummy rows, int64 [S]: batch sizes for a learning rate."""
        return np.diff(self.offsets[self.step_offsets])

    @property
    def padding_share(self) -> float:
        """Share of padding in the tokens of all microbatches when they are padded; 0 without rows.

        Microbatches that are packed, as `counts="summed"` is meant for, have no such padding.
        """
        num_padded = int(np.dot(self.padded_rows, self.padded_lengths))
        num_real = int(self.lengths[self.rows].sum())
        return 1 - num_real / num_padded if num_padded else 0.0

    def microbatch(self, microbatch: int) -> np.ndarray:
        """Return the rows of a microbatch, int64 [n]; empty if it has dummy rows only.

        Raises ValueError for a microbatch out of range.
        """
        _check_index("microbatch", microbatch, len(self.offsets) - 1)
        return self.rows[self.offsets[microbatch] : self.offsets[microbatch + 1]]

    def padded_microbatch(self, microbatch: int) -> np.ndarray:
        """Return the rows of a microbatch, int64 [`padded_rows[microbatch]`]; -1 is a dummy row.

        Raises ValueError for a microbatch out of range.
        """
        rows = self.microbatch(microbatch)
        padded = np.full(int(self.padded_rows[microbatch]), -1, dtype=np.int64)
        padded[: len(rows)] = rows
        return padded

    def rank_microbatches(self, step: int, rank: int, num_ranks: int) -> list[int]:
        """Return the microbatches that one of `num_ranks` ranks computes in a step.

        Rank r gets microbatch r, r + num_ranks, ... of the step. All ranks get the same number; -1
        is a microbatch of dummy rows, for ranks beyond the microbatches of the last step. Raises
        ValueError for a step or a rank out of range.
        """
        check_integer("num_ranks", num_ranks, 1)
        _check_index("rank", rank, num_ranks)
        _check_index("step", step, len(self.step_offsets) - 1)
        first = int(self.step_offsets[step])
        stop = int(self.step_offsets[step + 1])
        per_rank = ceil_div(stop - first, num_ranks)
        candidates = range(first + rank, first + per_rank * num_ranks, num_ranks)
        return [candidate if candidate < stop else -1 for candidate in candidates]

    def microbatch_ids(self) -> list[tuple[int, list[int]]]:
        """Return (step, rows) of each microbatch; a row of -1 is a dummy row."""
        step_of = np.repeat(np.arange(self.num_steps), np.diff(self.step_offsets)).tolist()
        return [(step, self.padded_microbatch(m).tolist()) for m, step in enumerate(step_of)]

    def max_lengths(self) -> list[int]:
        """Return the padded length of the longest microbatch of each step."""
        bounds = pairwise(self.step_offsets.tolist())
        return [int(self.padded_lengths[start:stop].max()) for start, stop in bounds]

    def steps(self) -> list[list[list[int]]]:
        """Return the rows of each microbatch of each step as lists."""
        rows = self.rows.tolist()
        microbatches = [rows[start:stop] for start, stop in pairwise(self.offsets.tolist())]
        return [microbatches[start:stop] for start, stop in pairwise(self.step_offsets.tolist())]


def batch_by_tokens(
    lengths: np.ndarray,
    max_tokens: int,
    *,
    order: Order | np.ndarray = "given",
    counts: Counts = "padded",
    min_rows: int = 1,
    max_rows: int | None = None,
    microbatches_per_step: int = 1,
    same_shape: bool = False,
    oversize: Oversize = "error",
    length_multiple: int = 1,
    seed: int | tuple[int, ...] = 0,
) -> TokenBatches:
    """Form microbatches of at most `max_tokens` tokens from rows of `lengths`, int64 [N].

    Args:
        lengths: tokens of each row, integers [N], each at least 1.
        max_tokens: limit of a microbatch.
        order: the order in which rows are joined: as given, a permutation drawn from `seed`, by
            increasing length (equal lengths by index), or a permutation of the rows, int64 [N].
        counts: what the limit counts: `padded` is rows × longest row, `summed` is the sum of the
            lengths, for packed microbatches.
        min_rows: rows that a microbatch should have. The limit of tokens has precedence: a
            microbatch that cannot get so many rows is formed with fewer, listed in
            `below_min_rows` and logged. No row is dropped for it.
        max_rows: the maximum number of rows of a microbatch; None means no limit.
        microbatches_per_step: microbatches of a step, over all ranks; the last may have fewer.
        same_shape: all microbatches of a step get the same number of rows and the same padded
            length, as a pipeline schedule requires. A step is a run of consecutive rows of the
            order, dealt to its microbatches in turn. Every step has `microbatches_per_step`
            microbatches; in the last one, rows that are missing are dummy rows, and a microbatch
            may consist of dummy rows only. With `counts="summed"` the limit applies to the sum of
            each microbatch before it is padded.
        oversize: a row above the limit is an error, dropped, truncated to the limit, or alone in
            a microbatch; with `same_shape` its step then has one row per microbatch.
        length_multiple: row lengths are rounded up to multiples of it before they are counted.
        seed: for `order="random"`; a tuple such as (seed, epoch) gives a new order per epoch.

    Raises:
        ValueError: for an invalid argument, or for an oversize row with `oversize="error"`.

    Example: ten rows of 3 tokens, then five of 7, under 30 tokens: 10, 4 and 1 rows.
    """
    values = checked_lengths(lengths)
    row_limit = len(values) if max_rows is None else max_rows
    check_integer("max_tokens", max_tokens, 1)
    check_integer("min_rows", min_rows, 1)
    check_integer("microbatches_per_step", microbatches_per_step, 1)
    check_integer("length_multiple", length_multiple, 1)
    if max_rows is not None and max_rows < min_rows:
        raise ValueError(f"max_rows is {max_rows}: give at least min_rows, {min_rows}, or None")
    if length_multiple > max_tokens:
        raise ValueError(
            f"length_multiple is {length_multiple}: give at most max_tokens, {max_tokens}"
        )
    positions = _ordered(values, order, seed)
    kept, values = _without_oversize(values, positions, max_tokens, length_multiple, oversize)
    sizes = round_up(values[kept], length_multiple)
    # With `same_shape`, row j of block i is row i of microbatch j of the step that has the block.
    width = microbatches_per_step if same_shape else 1
    blocks = _blocks(sizes, width)
    block_offsets = _bounds(blocks, counts, max_tokens, row_limit)
    num_rows = np.repeat(np.diff(block_offsets), width)
    rows, offsets = _deal(kept, block_offsets, width)
    step_bounds = np.arange(0, len(num_rows) + microbatches_per_step, microbatches_per_step)
    is_dropped = np.ones(len(values), dtype=bool)
    is_dropped[kept] = False
    result = TokenBatches(
        rows=rows,
        offsets=offsets,
        step_offsets=np.unique(np.minimum(step_bounds, len(num_rows))),
        padded_rows=num_rows,
        padded_lengths=_longest_of_runs(blocks, block_offsets, width),
        lengths=values,
        dropped=np.flatnonzero(is_dropped),
        below_min_rows=np.flatnonzero(num_rows < min_rows),
    )
    _log(result, min_rows, max_tokens)
    return result


def _ordered(
    lengths: np.ndarray, order: Order | np.ndarray, seed: int | tuple[int, ...]
) -> np.ndarray:
    """Return the row indices of `lengths` int64 [N] in the requested order, int64 [N]."""
    num_rows = len(lengths)
    if isinstance(order, np.ndarray):
        positions = order.astype(np.int64)
        is_permutation = order.shape == (num_rows,) and bool(
            (np.sort(positions) == np.arange(num_rows)).all()
        )
        if not is_permutation:
            raise ValueError(
                f"order is not a permutation of the {num_rows} rows: give each row once"
            )
        return positions
    if order == "given":
        return np.arange(num_rows)
    if order == "random":
        return np.random.default_rng(seed).permutation(num_rows)
    if order == "length":
        return np.argsort(lengths, kind="stable")
    raise ValueError(f"order is {order!r}: give given, random, length or an array of row indices")


def _without_oversize(
    lengths: np.ndarray,
    positions: np.ndarray,
    max_tokens: int,
    length_multiple: int,
    oversize: Oversize,
) -> tuple[np.ndarray, np.ndarray]:
    """Apply the policy for rows above the limit.

    Takes `lengths` int64 [N] and `positions` int64 [N]. Returns the remaining positions int64 [N']
    in their order and the lengths int64 [N] after truncation.
    """
    if oversize not in get_args(Oversize):
        raise ValueError(f"oversize is {oversize!r}: give error, drop, truncate or singleton")
    max_length = max_tokens // length_multiple * length_multiple
    is_oversize = lengths > max_length
    if not is_oversize.any() or oversize == "singleton":
        return positions, lengths
    if oversize == "error":
        row = int(np.argmax(lengths))
        raise ValueError(
            f"{int(is_oversize.sum())} rows have more than {max_length} tokens, row {row} has "
            f"{lengths[row]}: raise max_tokens, or set oversize to drop, truncate or singleton"
        )
    if oversize == "truncate":
        return positions, np.minimum(lengths, max_length)
    return positions[~is_oversize[positions]], lengths


def _blocks(sizes: np.ndarray, width: int) -> np.ndarray:
    """Reshape `sizes` int64 [n] into int64 [ceil(n / width), width], filled up with 0."""
    filled = np.zeros(round_up(len(sizes), width), dtype=np.int64)
    filled[: len(sizes)] = sizes
    return filled.reshape(-1, width)


def _bounds(blocks: np.ndarray, counts: str, max_tokens: int, max_rows: int) -> np.ndarray:
    """Split `blocks` int64 [n, W] into runs within the limits; returns their bounds, int64 [R + 1].

    Raises ValueError for an unknown `counts`.
    """
    if counts == "padded":
        bounds = _padded_bounds(blocks.max(axis=1, initial=0).tolist(), max_tokens, max_rows)
    elif counts == "summed":
        bounds = _summed_bounds(blocks, max_tokens, max_rows)
    else:
        raise ValueError(f"counts is {counts!r}: give padded or summed")
    return np.asarray(bounds, dtype=np.int64)


def _padded_bounds(longest: list[int], max_tokens: int, max_rows: int) -> list[int]:
    """Split blocks into runs with blocks × longest row at most `max_tokens`; returns the bounds.

    `longest` has the longest row of each block. A run has at least one block.
    """
    bounds = [0]
    start = 0
    run_length = 0
    for block, length in enumerate(longest):
        new_length = max(run_length, length)
        num_blocks = block - start + 1
        if num_blocks > 1 and (num_blocks * new_length > max_tokens or num_blocks > max_rows):
            bounds.append(block)
            start = block
            run_length = length
        else:
            run_length = new_length
    if longest:
        bounds.append(len(longest))
    return bounds


def _summed_bounds(blocks: np.ndarray, max_tokens: int, max_rows: int) -> list[int]:
    """Split `blocks` int64 [n, W] into runs where each column sums to at most `max_tokens`.

    Returns the bounds of the runs. A run has at least one block.
    """
    num_blocks = len(blocks)
    first = np.arange(num_blocks)
    stops = np.minimum(first + max_rows, num_blocks)
    for column in blocks.T:
        tokens_before = prefix_sums(column)
        limits = tokens_before[:-1] + max_tokens
        column_stops = np.searchsorted(tokens_before, limits, side="right") - 1
        stops = np.minimum(stops, column_stops)
    # A list, because the loop below reads single elements.
    stop_of = np.maximum(stops, first + 1).tolist()
    bounds = [0]
    while bounds[-1] < num_blocks:
        bounds.append(stop_of[bounds[-1]])
    return bounds


def _deal(rows: np.ndarray, block_offsets: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Deal the rows of each run to `width` microbatches in turn.

    Takes `rows` int64 [n] and the bounds of R runs int64 [R + 1], in blocks of `width` rows.
    Returns the rows sorted by microbatch int64 [n] and the offsets int64 [R * width + 1].
    """
    num_runs = len(block_offsets) - 1
    positions = np.arange(len(rows))
    runs = np.repeat(np.arange(num_runs), np.diff(block_offsets) * width)[: len(rows)]
    microbatches = runs * width + positions % width
    sizes = np.bincount(microbatches, minlength=num_runs * width)
    return rows[np.argsort(microbatches, kind="stable")], prefix_sums(sizes)


def _longest_of_runs(blocks: np.ndarray, block_offsets: np.ndarray, width: int) -> np.ndarray:
    """Return the longest row of each run of `blocks` int64 [n, W], once per microbatch, int64 [M].

    `block_offsets` int64 [R + 1] are the bounds of the runs.
    """
    if len(blocks) == 0:
        return np.zeros(0, dtype=np.int64)
    longest = np.maximum.reduceat(blocks.max(axis=1), block_offsets[:-1])
    return np.repeat(longest, width)


def _log(batches: TokenBatches, min_rows: int, max_tokens: int) -> None:
    """Log the rows and microbatches to which a policy was applied."""
    if len(batches.dropped):
        logger.warning("dropped %d rows above %d tokens", len(batches.dropped), max_tokens)
    if len(batches.below_min_rows):
        logger.warning(
            "%d of %d microbatches have fewer than min_rows=%d rows within %d tokens",
            len(batches.below_min_rows),
            batches.num_microbatches,
            min_rows,
            max_tokens,
        )


def _check_index(name: str, index: int, count: int) -> None:
    """Raise ValueError unless `index` is from 0 to `count` - 1."""
    if check_integer(name, index, 0) >= count:
        raise ValueError(f"{name} is {index}, of {count}; it must be below {count}")
