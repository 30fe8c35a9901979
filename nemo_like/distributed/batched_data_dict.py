"""Columns of rows, and their way to the data-parallel ranks and back. A container: it never plans.

Every question of which rows go where is put to `plan_batch`, and the answer travels with the data
as `plan`. A column is a torch.Tensor [B, ...], a np.ndarray [B, ...], a Jagged or a list of B
entries.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, overload

import numpy as np
import torch
from torch import Tensor

from nemo_like.data.columns import (
    Column,
    concat_rows,
    num_rows,
    repeat_rows,
    row_widths,
    slice_rows,
    take_rows,
    truncate_rows,
)
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import BatchPlan, Microbatch, PlanSpec, RankPlan, plan_batch
from nemo_like.distributed.batching_args import (
    DynamicBatchingArgs,
    SequencePackingArgs,
    dynamic_spec,
    packing_spec,
)

__all__ = [
    "BatchedDataDict",
    "DynamicBatchingArgs",
    "SequencePackingArgs",
    "SlicedDataDict",
    "unshard",
]


class BatchedDataDict(UserDict[str, Any]):
    """Named columns with one entry per row.

    Example: `BatchedDataDict(input_ids=Jagged.from_rows([[1, 2, 3], [4]], np.int32),
    reward=np.array([1.0, 0.0]))`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.plan: RankPlan | None = None
        """The microbatches of these rows, where they came from a plan."""
        self.logprob_plan: RankPlan | None = None
        """The same rows and steps in microbatches of another token budget."""
        super().__init__(*args, **kwargs)

    # The container

    @property
    def size(self) -> int:
        """Number of rows, 0 without columns. Raises ValueError if the columns disagree."""
        sizes = {name: num_rows(name, column) for name, column in self.data.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(
                "columns disagree on the number of rows: "
                + ", ".join(f"{name} {n}" for name, n in sizes.items())
            )
        return next(iter(sizes.values()), 0)

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """All rows of all batches, in order. A batch without rows need not have every column.

        Tensors and arrays of different size along dim 1 are right-padded with 0, or with
        `pad_value_dict[name]`. Raises KeyError for a column that a batch with rows lacks. The
        result has no plan: one plan belongs to one rank's rows.
        """
        names = list(dict.fromkeys(name for batch in batches for name in batch))
        for index, batch in enumerate(batches):
            missing = sorted(set(names) - set(batch))
            if missing and BatchedDataDict(batch).size:
                raise KeyError(
                    f"batch {index} has rows but no column {', '.join(map(repr, missing))}; its"
                    f" columns are {sorted(batch)}"
                )
        pad = pad_value_dict or {}
        return cls(
            {
                name: concat_rows(
                    name, [batch[name] for batch in batches if name in batch], pad.get(name, 0)
                )
                for name in names
            }
        )

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict:
        """Part `rank` of `chunks` equal contiguous parts of the rows, copied and without a plan.

        Raises ValueError if the rows do not divide, and IndexError for a part that there is not.
        """
        if chunks < 1 or self.size % chunks:
            raise ValueError(f"{self.size} rows are not a multiple of chunks={chunks}")
        if not 0 <= rank < chunks:
            raise IndexError(f"chunk {rank} of {chunks}")
        size = self.size // chunks
        return self._take(np.arange(rank * size, (rank + 1) * size))

    def select_indices(self, indices: Sequence[int] | np.ndarray | Tensor) -> Self:
        """The given rows in the given order, copied."""
        rows = _as_int64(indices)
        return type(self)({name: take_rows(column, rows) for name, column in self.data.items()})

    def slice(self, start: int, end: int) -> SlicedDataDict:
        """Rows [start, end), as views where the column allows it; carries no plan (`get_batch`
        does).
        """
        return SlicedDataDict(
            {name: slice_rows(column, start, end) for name, column in self.data.items()}
        )

    def reorder_data(self, reorder_indices: Sequence[int] | np.ndarray | Tensor) -> None:
        """In place: the row that is now at i goes to position `reorder_indices[i]`.

        With the indices that `shard_by_batch_size` returned, the rows of all shards, end to end,
        are in order again. Raises ValueError if the indices are not a permutation of the rows.
        """
        target = _as_int64(reorder_indices)
        if len(target) != self.size or not np.array_equal(np.sort(target), np.arange(len(target))):
            raise ValueError(
                f"reorder_data needs each of the {self.size} row positions exactly once, got"
                f" {len(target)} indices"
            )
        order = np.argsort(target)
        self.data = {name: take_rows(column, order) for name, column in self.data.items()}
        self.plan = self.logprob_plan = None

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Each row `num_repeats` times in a row; entries of lists are deep copies."""
        return type(self)(
            {name: repeat_rows(column, num_repeats) for name, column in self.data.items()}
        )

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """In place: columns with `dim` are cut there to at most `truncated_len`; dim 1 of a Jagged
        is its tokens.
        """
        self.data = {
            name: truncate_rows(column, dim, truncated_len) for name, column in self.data.items()
        }

    def to(self, device: str | torch.device) -> Self:
        """In place: tensors move to `device`, the rest stays. Returns self."""
        self.data = {
            name: column.to(device) if isinstance(column, Tensor) else column
            for name, column in self.data.items()
        }
        return self

    def get_dict(self) -> dict[str, Any]:
        """The plain dict of columns."""
        return self.data

    # What the plan says of the rows, by the names of NeMo-RL; None without a plan

    @property
    def micro_batch_indices(self) -> list[list[list[int]]] | None:
        """For each global batch, the rows [start, end) of each microbatch, counted within the
        global batch.
        """
        if self.plan is None:
            return None
        return [
            _bounds([len(item.rows) for item in self.plan.step(step)])
            for step in range(self.plan.num_steps)
        ]

    @property
    def micro_batch_lengths(self) -> list[list[int]] | None:
        """For each global batch, the length of each microbatch: its tokens if packed, its padded
        row length if not.
        """
        if self.plan is None:
            return None
        return [
            [_length(item, self.plan.spec) for item in self.plan.step(step)]
            for step in range(self.plan.num_steps)
        ]

    @property
    def elem_counts_per_gb(self) -> list[int] | None:
        """How many rows of each global batch are here."""
        if self.plan is None:
            return None
        return [
            sum(len(item.rows) for item in self.plan.step(step))
            for step in range(self.plan.num_steps)
        ]

    # To the ranks and back

    def shard(self, plan: BatchPlan, logprob_plan: BatchPlan | None = None) -> list[SlicedDataDict]:
        """One shard per data-parallel rank, rows in the order in which the plan visits them, each
        token copied once.

        `logprob_plan` must have the same rows on the same ranks and steps (`plan.with_budget`).
        Raises ValueError if a plan was made for other rows.
        """
        if plan.num_rows != self.size:
            raise ValueError(f"the plan is for {plan.num_rows} rows, the batch has {self.size}")
        shards = []
        for dp_rank in range(plan.spec.num_ranks):
            shard = self._take(plan.rows_of_rank(dp_rank))
            shard.plan = plan.rank_plan(dp_rank)
            shard.logprob_plan = (
                None if logprob_plan is None else _localize(logprob_plan, plan, dp_rank)
            )
            shards.append(shard)
        return shards

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: None = None,
        sequence_packing_args: None = None,
    ) -> list[SlicedDataDict]: ...
    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> tuple[list[SlicedDataDict], list[int]]: ...
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> list[SlicedDataDict] | tuple[list[SlicedDataDict], list[int]]:
        """Rows for `shards` ranks; every `batch_size` rows (default: all) are one global batch,
        which no row leaves.

        Plain: a list of shards; shard s has the s-th contiguous part of each global batch
        (`allow_uneven_shards`: the last shards may be short or empty). With packing or dynamic
        batching: `(shards, sorted_indices)`; each shard carries its plan and has equally many
        microbatches (dummies of zero rows where rows run out), and `from_batches(shards)`, then
        `reorder_data(sorted_indices)`, is the input, for any number of global batches. Raises
        ValueError for sizes that do not divide, both modes at once, or a row above the budget.
        """
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise ValueError(
                "dynamic_batching_args and sequence_packing_args exclude each other; pass one of"
                " them"
            )
        if allow_uneven_shards and batch_size is not None:
            raise ValueError(
                "allow_uneven_shards treats all rows as one batch; leave batch_size out"
            )
        batch_size = self.size if batch_size is None else batch_size
        if batch_size < 1 or self.size % batch_size:
            raise ValueError(
                f"{self.size} rows are not a whole number of batches of batch_size={batch_size}"
            )
        if sequence_packing_args is not None:
            return self._shard_by_plan(
                packing_spec(sequence_packing_args, shards, batch_size), sequence_packing_args
            )
        if dynamic_batching_args is not None:
            return self._shard_by_plan(
                dynamic_spec(dynamic_batching_args, shards, batch_size), dynamic_batching_args
            )
        return self._split_evenly(shards, batch_size, allow_uneven_shards)

    def _take(self, rows: np.ndarray) -> SlicedDataDict:
        return SlicedDataDict({name: take_rows(column, rows) for name, column in self.data.items()})

    def _shard_by_plan(
        self, spec: PlanSpec, args: DynamicBatchingArgs | SequencePackingArgs
    ) -> tuple[list[SlicedDataDict], list[int]]:
        for key in ("input_key", "input_lengths_key"):
            if args[key] not in self.data:
                raise KeyError(
                    f"{key} {args[key]!r} is not a column; there are {sorted(self.data)}"
                )
        lengths = _as_int64(self.data[args["input_lengths_key"]])
        beyond = np.flatnonzero(lengths > row_widths(self.data[args["input_key"]]))
        if len(beyond):
            raise ValueError(
                f"{args['input_lengths_key']} says {lengths[beyond[0]]} tokens for row {beyond[0]},"
                f" more than "
                f"{args['input_key']} has"
            )
        plan = plan_batch(lengths, spec)
        sorted_indices = np.concatenate(
            [plan.rows_of_rank(dp_rank) for dp_rank in range(spec.num_ranks)]
        )
        return self.shard(plan), sorted_indices.tolist()

    def _split_evenly(
        self, shards: int, batch_size: int, allow_uneven_shards: bool
    ) -> list[SlicedDataDict]:
        if batch_size % shards and not allow_uneven_shards:
            raise ValueError(
                f"batch_size={batch_size} is not a multiple of shards={shards};"
                f" allow_uneven_shards=True splits anyway"
            )
        share = -(-batch_size // shards)
        shard_of_row = np.arange(self.size) % batch_size // share
        return [self._take(np.flatnonzero(shard_of_row == shard)) for shard in range(shards)]

    # The microbatches of one rank

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict:
        """This rank's rows of global batch `batch_idx`, with the part of the plan that is theirs.

        Without a plan it is rows [batch_idx x batch_size, (batch_idx + 1) x batch_size); a plan
        needs none.
        """
        if self.plan is None:
            if batch_size is None:
                raise ValueError("get_batch needs batch_size for rows that carry no plan")
            if not 0 <= batch_idx * batch_size < self.size:
                raise IndexError(
                    f"batch {batch_idx} of {batch_size} rows is outside the {self.size} rows"
                )
            return self.slice(batch_idx * batch_size, (batch_idx + 1) * batch_size)
        start, stop = _rows_of_step(self.plan, batch_idx)
        batch = self.slice(start, stop)
        batch.plan = _plan_of_step(self.plan, batch_idx, start)
        batch.logprob_plan = (
            None
            if self.logprob_plan is None
            else _plan_of_step(self.logprob_plan, batch_idx, start)
        )
        return batch

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[SlicedDataDict]:
        """Microbatches of `microbatch_size` rows. Raises ValueError if the rows do not divide."""
        if self.size % microbatch_size:
            raise ValueError(
                f"{self.size} rows are not a whole number of microbatches of {microbatch_size}"
            )
        return (
            self.slice(start, start + microbatch_size)
            for start in range(0, self.size, microbatch_size)
        )

    def make_microbatch_iterator_with_dynamic_shapes(
        self, sequence_dim: int = 1
    ) -> Iterator[SlicedDataDict]:
        """The plan's microbatches, cut along `sequence_dim` to their own padded length. A dummy has
        zero rows.
        """
        return (
            self._cut(microbatch, sequence_dim)
            for microbatch in self._plan_of_one_step().microbatches
        )

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """How many microbatches `make_microbatch_iterator_with_dynamic_shapes` yields."""
        return len(self._plan_of_one_step().microbatches)

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[SlicedDataDict]:
        """The rows of each of the plan's microbatches, not yet packed (`layout.build_inputs`). A
        dummy has zero rows.
        """
        return (
            self._contiguous(microbatch.rows)
            for microbatch in self._plan_of_one_step().microbatches
        )

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """How many microbatches there are, and the tokens of the largest."""
        microbatches = self._plan_of_one_step().microbatches
        return len(microbatches), max(
            (microbatch.num_tokens for microbatch in microbatches), default=0
        )

    def _plan_of_one_step(self) -> RankPlan:
        if self.plan is None:
            raise ValueError(
                "these rows carry no plan; use a shard that shard_by_batch_size made with packing"
                " or dynamic batching, "
                "or get_batch of it"
            )
        if self.plan.num_steps != 1:
            raise ValueError(
                f"these rows belong to {self.plan.num_steps} global batches; call get_batch(i)"
                f" first and iterate over one"
            )
        return self.plan

    def _cut(self, microbatch: Microbatch, sequence_dim: int) -> SlicedDataDict:
        rows = self._contiguous(microbatch.rows)
        rows.truncate_tensors(
            sequence_dim, max(microbatch.padded_lengths, default=microbatch.num_tokens)
        )
        return rows

    def _contiguous(self, rows: tuple[int, ...]) -> SlicedDataDict:
        return self.slice(rows[0], rows[-1] + 1) if rows else self.slice(0, 0)


class SlicedDataDict(BatchedDataDict):
    """Rows of one data-parallel rank."""


def unshard(parts: Sequence[Column], plan: BatchPlan) -> Column:
    """One column of every rank, rows in the ranks' own order, back in the order of the batch.

    Rows that the plan gave to no rank (deferred or dropped) are empty in a Jagged, 0 in an array or
    a tensor, None in a list. Raises ValueError if the ranks returned another number of rows than
    they got.
    """
    rows = np.concatenate([plan.rows_of_rank(dp_rank) for dp_rank in range(plan.spec.num_ranks)])
    counts = [len(plan.rows_of_rank(dp_rank)) for dp_rank in range(plan.spec.num_ranks)]
    if [len(part) for part in parts] != counts:
        raise ValueError(
            f"the ranks returned {[len(part) for part in parts]} rows, the plan gave them {counts}"
        )
    column = concat_rows("of the ranks", parts)
    missing = plan.num_rows - len(rows)
    if missing:
        column = concat_rows("of the ranks", [column, _blank_rows(column, missing)])
        rows = np.concatenate([rows, np.setdiff1d(np.arange(plan.num_rows), rows)])
    return take_rows(column, np.argsort(rows))


def _blank_rows(column: Column, count: int) -> Column:
    if isinstance(column, list):
        return [None] * count
    if isinstance(column, Jagged):
        return Jagged(column.values[:0], np.zeros(count + 1, dtype=np.int64))
    if isinstance(column, Tensor):
        return column.new_zeros((count, *column.shape[1:]))
    return np.zeros((count, *column.shape[1:]), dtype=column.dtype)


def _localize(logprob_plan: BatchPlan, plan: BatchPlan, dp_rank: int) -> RankPlan:
    """`logprob_plan` of one rank with row indices that point into the shard that `plan` laid out."""
    wanted, laid_out = logprob_plan.rows_of_rank(dp_rank), plan.rows_of_rank(dp_rank)
    if not np.array_equal(np.sort(wanted), np.sort(laid_out)):
        raise ValueError(
            f"the score plan has other rows on dp rank {dp_rank} than the plan; make it with"
            f" plan.with_budget"
        )
    return logprob_plan.rank_plan(dp_rank, laid_out)


def _rows_of_step(plan: RankPlan, step: int) -> tuple[int, int]:
    if not 0 <= step < plan.num_steps:
        raise IndexError(f"global batch {step} of {plan.num_steps}")
    counts = [0, *np.cumsum([len(microbatch.rows) for microbatch in plan.microbatches]).tolist()]
    return counts[plan.step_offsets[step]], counts[plan.step_offsets[step + 1]]


def _plan_of_step(plan: RankPlan, step: int, first_row: int) -> RankPlan:
    microbatches = tuple(
        replace(item, rows=tuple(row - first_row for row in item.rows)) for item in plan.step(step)
    )
    return replace(plan, microbatches=microbatches, step_offsets=(0, len(microbatches)))


def _bounds(counts: Sequence[int]) -> list[list[int]]:
    """[start, end) of consecutive ranges. Example: [2, 0, 1] gives [[0, 2], [2, 2], [2, 3]]."""
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    return [[end - count, end] for count, end in zip(counts, ends, strict=True)]


def _length(microbatch: Microbatch, spec: PlanSpec) -> int:
    """Tokens of a packed microbatch, the padded length of the rows of another."""
    if spec.layout == "packed":
        return microbatch.num_tokens
    return max(microbatch.padded_lengths, default=microbatch.num_tokens)


def _as_int64(values: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    return np.asarray(values, dtype=np.int64)
