"""Rows to tensors and back: what one microbatch of a plan looks like to a model, packed or padded,
whole or one context-parallel share of it. It decides nothing: which rows, how long and in which
order comes from the plan.

Everything is aligned on the predicting position: at position i of a row stand the label (token
i+1), and of each token column the value given for token i+1. A row's last real token and all
padding predict nothing. Segments are the rows in the microbatch's order, each with its own padding
behind its real tokens (causal attention never looks at it), and after them one segment of trailing
padding where the total is rounded up. Position ids start at 0 in every segment.

Context parallelism (`cp_size` c > 1): each segment is cut in 2c chunks, rank r holds chunks r and
2c-1-r in this order, and the shares are packed after cutting, in the padded layout too, where a
segment is a row with its padding. Labels and columns are aligned before the cut; `cu_seqlens` stays
global.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import Microbatch, PlanSpec


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """One microbatch as tensors; T positions are held here, `num_tokens` = T x cp_size on all
    context-parallel ranks.

    Example: rows [5, 6, 7] and [8, 9] packed with `padded_lengths` (4, 2) and `num_tokens` 6:
    `input_ids` [[5, 6, 7, 0, 8, 9]], `position_ids` [[0, 1, 2, 3, 0, 1]], `cu_seqlens` [0, 4, 6],
    `labels` [6, 7, 0, 0, 9, 0], `label_mask` [1, 1, 0, 0, 1, 0], `row_ids` [0, 0, 0, 0, 1, 1].
    """

    input_ids: Tensor
    """int64, packed [1, T]; padded [R, T / R] on one context-parallel rank, else [1, T] as well."""
    position_ids: Tensor
    """int64, the shape of `input_ids`."""
    cu_seqlens: Tensor | None
    """int32 [R+1] (or [R+2] with trailing padding): segment bounds over all cp ranks. None where
    `input_ids` is [R, T / R]: rows are right-padded then and causal attention needs no mask."""
    max_seqlen: int
    """Longest segment over all cp ranks."""
    labels: Tensor
    """int64 [T], 0 where there is none."""
    label_mask: Tensor
    """bool [T]: this position predicts a real token of its row."""
    row_ids: Tensor
    """int64 [T]: index of the row in the microbatch; 0 on padding."""
    columns: dict[str, Tensor]
    """[T, ...] token columns, 0 where there is no label; a name that ends in `_mask` is bool."""
    row_columns: dict[str, Tensor]
    """[R, ...] row columns. A dummy has one pretend row of zeros, so that `row_ids` always point
    somewhere.
    """
    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    num_tokens: int
    layout: Literal["packed", "padded"]
    cp_size: int = 1

    @property
    def num_rows(self) -> int:
        """R; 1 for a dummy."""
        return max(len(self.lengths), 1)

    def flattened(self) -> ModelInputs:
        """The same positions as one [1, T] sequence of segments, for a model that takes nothing
        else.
        """
        if self.cu_seqlens is not None:
            return self
        num_segments, width = self.input_ids.shape
        bounds = torch.arange(
            0, (num_segments + 1) * width, width, dtype=torch.int32, device=self.input_ids.device
        )
        return dataclasses.replace(
            self,
            input_ids=self.input_ids.reshape(1, -1),
            position_ids=self.position_ids.reshape(1, -1),
            cu_seqlens=bounds,
        )


def build_inputs(
    shard: Mapping[str, Any],
    microbatch: Microbatch,
    spec: PlanSpec,
    *,
    pad_token_id: int = 0,
    cp_rank: int = 0,
    device: str | torch.device = "cpu",
) -> ModelInputs:
    """The tensors of `microbatch`, whose `rows` index the columns of `shard`.

    Columns: `input_ids` (Jagged), any other Jagged is a token column, any array or tensor [n, ...]
    of numbers a row column; the rest (texts) is no input of a model and stays out. Raises
    ValueError where a token column is shorter than its row.
    """
    grid = _Grid.of(microbatch, spec, cp_rank)
    shape = grid.shape
    has_label = grid.position < grid.length - 1
    input_ids = grid.gather(
        "input_ids", shard["input_ids"], 0, grid.position < grid.length, pad_token_id
    )
    labels = grid.gather("input_ids", shard["input_ids"], 1, has_label, 0)
    columns: dict[str, Tensor] = {}
    row_columns: dict[str, Tensor] = {}
    for name, column in shard.items():
        if isinstance(column, Jagged):
            if name != "input_ids":
                columns[name] = _tensor(
                    grid.gather(name, column, 1, has_label, 0),
                    device,
                    is_mask=name.endswith("_mask"),
                )
        elif isinstance(column, Tensor) or (
            isinstance(column, np.ndarray) and column.dtype.kind in "biuf"
        ):
            row_columns[name] = _row_column(column, grid.rows, device)
    return ModelInputs(
        input_ids=_tensor(input_ids.astype(np.int64, copy=False).reshape(shape), device),
        position_ids=_tensor(grid.position.reshape(shape), device),
        cu_seqlens=_tensor(grid.bounds.astype(np.int32), device) if grid.is_packed else None,
        max_seqlen=int(np.diff(grid.bounds).max()),
        labels=_tensor(labels.astype(np.int64, copy=False), device),
        label_mask=_tensor(has_label, device),
        row_ids=_tensor(np.where(grid.position < grid.length, grid.segment, 0), device),
        columns=columns,
        row_columns=row_columns,
        lengths=microbatch.lengths,
        padded_lengths=microbatch.padded_lengths,
        num_tokens=microbatch.num_tokens,
        layout=spec.layout,
        cp_size=spec.cp_size,
    )


def unpack_tokens(values: Tensor, inputs: ModelInputs) -> Jagged:
    """Per-position `values` [num_tokens] back to rows: float32 Jagged in the microbatch's row
    order, padding dropped.

    The shift is undone: what stood at the position that predicts token i is the value of token i;
    token 0, which nothing predicts, has 0. With context parallelism `values` are the gathered ones
    (`cp_gather_positions`). A dummy gives no rows.
    """
    values = values.reshape(-1)
    if len(values) != inputs.num_tokens:
        raise ValueError(
            f"{len(values)} values for a microbatch of {inputs.num_tokens} positions; gather the cp"
            f" ranks' shares first"
        )
    flat = values.detach().to("cpu", torch.float32).numpy()
    lengths = np.array(inputs.lengths, dtype=np.int64)
    starts = _starts(inputs.padded_lengths)[:-1]
    row, token = segment_positions(lengths)
    result = np.zeros(len(token), dtype=np.float32)
    predicted = token > 0
    result[predicted] = flat[(starts[row] + token - 1)[predicted]]
    return Jagged.from_lengths(result, lengths)


def num_predicted_tokens(token_mask: Jagged, microbatch: Microbatch) -> np.ndarray:
    """int64 [R]: tokens of each row that the mask keeps and a position predicts (not token 0, not
    what was cut off).

    Counts whole rows also where this rank holds one context-parallel share of them. [1] of 0 for a
    dummy.
    """
    if not microbatch.rows:
        return np.zeros(1, dtype=np.int64)
    starts = token_mask.offsets[np.array(microbatch.rows, dtype=np.int64)]
    row, token = segment_positions(np.array(microbatch.lengths, dtype=np.int64))
    kept = (token_mask.values[starts[row] + token] != 0) & (token > 0)
    return np.bincount(row, weights=kept, minlength=len(starts)).astype(np.int64)


def segment_positions(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For segments laid end to end: segment of each position and position within it, int64
    [sum(lengths)] each.

    Example: lengths [2, 3] give segments [0, 0, 1, 1, 1] and positions [0, 1, 0, 1, 2].
    """
    segment = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    return segment, np.arange(len(segment), dtype=np.int64) - _starts(lengths)[:-1][segment]


def cp_chunk_positions(padded_length: int, cp_size: int, cp_rank: int) -> np.ndarray:
    """int64 [padded_length / cp_size]: positions of one row that `cp_rank` holds, in the order it
    holds them.

    Example: 8 positions on 2 ranks are chunks 01|23|45|67; rank 0 holds [0, 1, 6, 7], rank 1 [2, 3,
    4, 5].
    """
    return cp_shard_positions([padded_length], cp_size, cp_rank)


def cp_shard_positions(
    padded_lengths: Sequence[int] | np.ndarray, cp_size: int, cp_rank: int
) -> np.ndarray:
    """int64 [sum(padded_lengths) / cp_size]: positions of the pack that `cp_rank` holds; rows are
    cut, then packed.

    Raises ValueError for a padded length that is not a multiple of 2 x cp_size or a rank outside
    the axis.
    """
    padded = np.asarray(padded_lengths, dtype=np.int64)
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank {cp_rank} is not in 0..{cp_size - 1}")
    if cp_size == 1:
        return np.arange(padded.sum(), dtype=np.int64)
    if (padded % (2 * cp_size)).any():
        raise ValueError(
            f"padded lengths {padded.tolist()} are not all multiples of 2 x cp_size = {2 * cp_size}"
        )
    chunk = padded // (2 * cp_size)
    row, position = segment_positions(2 * chunk)
    second = position >= chunk[row]
    # The second chunk held is number 2c-1-r; `position` has already moved one chunk on when it
    # begins.
    skipped = np.where(second, 2 * cp_size - 2 - cp_rank, cp_rank)
    return _starts(padded)[:-1][row] + position + skipped * chunk[row]


def cp_gather_positions(padded_lengths: Sequence[int] | np.ndarray, cp_size: int) -> np.ndarray:
    """int64 [sum(padded_lengths)], the inverse: `concat(shares of rank 0, 1, ...)[result]` is the
    pack in order.
    """
    held = np.concatenate(
        [cp_shard_positions(padded_lengths, cp_size, rank) for rank in range(cp_size)]
    )
    inverse = np.empty_like(held)
    inverse[held] = np.arange(len(held), dtype=np.int64)
    return inverse


def segment_lengths(padded_lengths: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Padded length of every segment: the rows', and the trailing padding's where there is some."""
    trailing = num_tokens - sum(padded_lengths)
    return (*padded_lengths, trailing) if trailing else tuple(padded_lengths)


@dataclass(frozen=True)
class _Grid:
    """Where each of the T positions held here lies: NumPy index arrays, built once per
    microbatch.
    """

    rows: np.ndarray  # [R] rows of the shard
    num_rows: int
    is_packed: bool  # one sequence of segments, not a rectangle of rows
    shape: tuple[int, int]  # of input_ids
    bounds: np.ndarray  # [segments + 1], over all cp ranks
    segment: np.ndarray  # [T]
    position: np.ndarray  # [T] within the segment
    length: np.ndarray  # [T] real tokens of the segment

    @classmethod
    def of(cls, microbatch: Microbatch, spec: PlanSpec, cp_rank: int) -> _Grid:
        segments = segment_lengths(microbatch.padded_lengths, microbatch.num_tokens)
        bounds = _starts(segments)
        positions = cp_shard_positions(segments, spec.cp_size, cp_rank)
        segment = np.repeat(
            np.arange(len(segments), dtype=np.int64), np.array(segments) // spec.cp_size
        )
        num_rows = len(microbatch.rows)
        lengths = np.zeros(len(segments), dtype=np.int64)
        lengths[:num_rows] = microbatch.lengths
        is_packed = spec.layout == "packed" or spec.cp_size > 1
        width = len(positions) if is_packed else len(positions) // max(num_rows, 1)
        return cls(
            rows=np.array(microbatch.rows, dtype=np.int64),
            num_rows=num_rows,
            is_packed=is_packed,
            shape=(len(positions) // width, width),
            bounds=bounds,
            segment=segment,
            position=positions - bounds[segment],
            length=lengths[segment],
        )

    def gather(
        self, name: str, column: Jagged, shift: int, where: np.ndarray, fill: int
    ) -> np.ndarray:
        """[T, ...]: the value of token `position + shift` of each position's row where `where`,
        `fill` elsewhere.
        """
        gathered = np.full((len(where), *column.values.shape[1:]), fill, dtype=column.dtype)
        if self.num_rows == 0:
            return gathered
        segment = self.segment[where]
        source = column.offsets[self.rows][segment] + self.position[where] + shift
        beyond = source >= column.offsets[self.rows + 1][segment]
        if beyond.any():
            first = segment[np.argmax(beyond)]
            row, read = self.rows[first], self.length[self.segment == first][0]
            raise ValueError(
                f"column {name!r} has {column.lengths[row]} tokens in row {row}, but the plan reads"
                f" {read}; "
                "every token column needs a value for each token of its row"
            )
        gathered[where] = column.values[source]
        return gathered


def _starts(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [n+1]: where each segment begins, and the end."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _tensor(array: np.ndarray, device: str | torch.device, *, is_mask: bool = False) -> Tensor:
    tensor = torch.from_numpy(array.astype(bool) if is_mask else np.ascontiguousarray(array))
    return tensor.to(device, non_blocking=True)


def _row_column(
    column: np.ndarray | Tensor, rows: np.ndarray, device: str | torch.device
) -> Tensor:
    """[R, ...] on `device`; one row of zeros for a dummy."""
    # NumPy gathers first: arrays that arrive through shared memory are read-only, which torch
    # cannot represent.
    taken = (
        torch.from_numpy(column[rows])
        if isinstance(column, np.ndarray)
        else column[torch.from_numpy(rows).to(column.device)]
    )
    if len(rows) == 0:
        return taken.new_zeros((1, *column.shape[1:]), device=device)
    return taken.to(device)
