"""Named columns of rows, and their distribution to data-parallel ranks. A container: never plans.

`plan_batch` decides which rows go where, and the decision is stored with the data as `plan`. A
column is a torch.Tensor [B, ...], a np.ndarray [B, ...], a Jagged or a list of B entries.

The package itself uses `size`, `slice` and `shard`. The other public methods are a compatibility
surface: users of NeMo RL know them by these names and arguments, so they stay although only tests
call them here. They are `from_batches`, `chunk`, `select_indices`, `reorder_data`,
`repeat_interleave`, `truncate_tensors`, `to`, `get_dict`, `shard_by_batch_size`, `get_batch`,
`make_microbatch_iterator`, `make_microbatch_iterator_with_dynamic_shapes`,
`make_microbatch_iterator_for_packable_sequences` with their `_len` functions, and the properties
`micro_batch_indices`, `micro_batch_lengths` and `elem_counts_per_gb`.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, TypedDict, overload

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
from nemo_like.data.planning.prefixes import SharedPrefixes
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.integer_math import ceil_div

__all__ = ["BatchedDataDict", "DynamicBatchingArgs", "SequencePackingArgs", "SlicedDataDict"]


class DynamicBatchingArgs(TypedDict):
    """Rows of similar length padded to microbatches under a token limit."""

    max_tokens_per_microbatch: int
    """Maximum tokens of a microbatch, rows x padded length."""
    sequence_length_round: int
    """The padded length of a microbatch is a multiple of this."""
    input_key: str
    """The column of token ids."""
    input_lengths_key: str
    """The column of row lengths, [B]."""


class _RequiredPackingArgs(TypedDict):
    """The keys of `SequencePackingArgs` without a default."""

    max_tokens_per_microbatch: int
    """Maximum tokens of a microbatch: the bin capacity."""
    input_key: str
    """The column of token ids."""
    input_lengths_key: str
    """The column of row lengths, [B]."""
    algorithm: str
    """Name of the bin packer, see `PackingAlgorithm`."""
    sequence_length_pad_multiple: int
    """Row lengths are rounded up to a multiple of this."""


class SequencePackingArgs(_RequiredPackingArgs, total=False):
    """Rows packed to microbatches under a token limit."""

    microbatch_order: Literal["packer", "largest_first"]
    """Default: `packer`."""
    group_key: str
    """The column of groups, [B], whose rows have leading tokens in common, as completions of one
    prompt. A microbatch counts such tokens once in its limit. Default: every row is complete.
    """


class BatchedDataDict(UserDict[str, Any]):
    """Named columns with one entry per row.

    Example: `BatchedDataDict(input_ids=Jagged.from_rows([[1, 2, 3], [4]], np.int32),
    reward=np.array([1.0, 0.0]))`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.plan: RankPlan | None = None
        """The microbatches of these rows; None for rows that were not sharded by a plan."""
        self.logprob_plan: RankPlan | None = None
        """The same rows and steps in microbatches of another token budget."""
        super().__init__(*args, **kwargs)

    # Container

    def __setitem__(self, name: str, column: Any) -> None:
        """Set a column. Raises ValueError unless it has as many rows as the others."""
        sizes = {each: num_rows(each, self.data[each]) for each in self.data if each != name}
        sizes[name] = num_rows(name, column)
        if len(set(sizes.values())) > 1:
            text = ", ".join(f"{each} {size}" for each, size in sizes.items())
            raise ValueError(f"columns disagree on the number of rows: {text}")
        super().__setitem__(name, column)

    def __repr__(self) -> str:
        columns = ", ".join(f"{name}: {_described(each)}" for name, each in self.data.items())
        return f"{type(self).__name__}({self.size} rows; {columns})"

    @property
    def size(self) -> int:
        """Number of rows, 0 without columns."""
        # All columns agree, so the first one decides.
        return next((num_rows(name, column) for name, column in self.data.items()), 0)

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """Concatenate the rows of all batches. A batch without rows may lack columns.

        Tensors and arrays of different size along dim 1 are right-padded with 0, or with
        `pad_value_dict[name]`. Raises KeyError for a column that a batch with rows lacks. The
        result has no plan: a plan belongs to the rows of one rank.
        """
        # A dict instead of a set: the columns have the order of their first occurrence.
        names = list(dict.fromkeys(name for batch in batches for name in batch))
        for index, batch in enumerate(batches):
            missing = sorted(set(names) - set(batch))
            if missing and BatchedDataDict(batch).size:
                raise KeyError(
                    f"batch {index} has rows but no column {', '.join(map(repr, missing))}; its"
                    f" columns are {sorted(batch)}"
                )
        pad_values = pad_value_dict or {}
        columns = {}
        for name in names:
            parts = [batch[name] for batch in batches if name in batch]
            columns[name] = concat_rows(name, parts, pad_values.get(name, 0))
        return cls(columns)

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict:
        """Return chunk `rank` of `chunks` equal contiguous chunks, copied and without a plan.

        Raises ValueError if the rows do not divide, and IndexError for a chunk out of range.
        """
        if chunks < 1 or self.size % chunks:
            raise ValueError(f"{self.size} rows are not a multiple of chunks={chunks}")
        if not 0 <= rank < chunks:
            raise IndexError(f"chunk {rank} of {chunks}")
        size = self.size // chunks
        return self._take(np.arange(rank * size, (rank + 1) * size))

    def select_indices(self, indices: Sequence[int] | np.ndarray | Tensor) -> Self:
        """Return the given rows in the given order, copied. `indices` is int [N]."""
        rows = _as_int64(indices)
        return type(self)({name: take_rows(column, rows) for name, column in self.data.items()})

    def slice(self, start: int, end: int) -> SlicedDataDict:
        """Return rows [start, end) without a plan, as views if the column supports them."""
        return SlicedDataDict(
            {name: slice_rows(column, start, end) for name, column in self.data.items()}
        )

    def reorder_data(self, reorder_indices: Sequence[int] | np.ndarray | Tensor) -> None:
        """Move row i to position `reorder_indices[i]` (int [B]), in place.

        With the indices that `shard_by_batch_size` returned, the concatenated rows of all shards
        are in the original order again. Raises ValueError if the indices are not a permutation of
        the rows.
        """
        target = _as_int64(reorder_indices)
        positions = np.arange(self.size)
        if not np.array_equal(np.sort(target), positions):
            raise ValueError(
                f"reorder_data needs each of the {self.size} row positions exactly once, got"
                f" {len(target)} indices"
            )
        # The inverse permutation: position p gets row order[p].
        order = np.argsort(target)
        self.data = {name: take_rows(column, order) for name, column in self.data.items()}
        # The plans refer to the rows in their previous order.
        self.plan = None
        self.logprob_plan = None

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Return each row `num_repeats` times in succession; list entries are deep copies."""
        return type(self)(
            {name: repeat_rows(column, num_repeats) for name, column in self.data.items()}
        )

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Truncate columns along `dim` to at most `truncated_len`, in place.

        Columns without that dim are unchanged; dim 1 of a Jagged is its tokens.
        """
        self.data = {
            name: truncate_rows(column, dim, truncated_len) for name, column in self.data.items()
        }

    def to(self, device: str | torch.device) -> Self:
        """Move tensors to `device`, in place, and return self."""
        for name, column in self.data.items():
            if isinstance(column, Tensor):
                self.data[name] = column.to(device)
        return self

    def get_dict(self) -> dict[str, Any]:
        """Return the columns as a plain dict."""
        return self.data

    # The plan in NeMo RL's format; None without a plan

    @property
    def micro_batch_indices(self) -> list[list[list[int]]] | None:
        """The rows [start, end) of each microbatch within its global batch, per global batch."""
        return None if self.plan is None else _microbatch_bounds(self.plan)

    @property
    def micro_batch_lengths(self) -> list[list[int]] | None:
        """The length of each microbatch, per global batch: packed tokens, or padded row length."""
        return None if self.plan is None else _microbatch_lengths(self.plan)

    @property
    def elem_counts_per_gb(self) -> list[int] | None:
        """The number of these rows in each global batch."""
        bounds = self.micro_batch_indices
        return None if bounds is None else [step[-1][1] if step else 0 for step in bounds]

    # Sharding

    def shard(self, plan: BatchPlan, logprob_plan: BatchPlan | None = None) -> list[SlicedDataDict]:
        """Return one shard per data-parallel rank, its rows in the order of the plan.

        Each token is copied once. `logprob_plan` must have the same rows on the same ranks and
        steps (`plan.with_budget`). Raises ValueError if a plan was made for other rows.
        """
        if plan.num_rows != self.size:
            raise ValueError(f"the plan is for {plan.num_rows} rows, the batch has {self.size}")
        shards = []
        for dp_rank in range(plan.spec.num_ranks):
            shard = self._take(plan.rows_of_rank(dp_rank))
            shard.plan = plan.rank_plan(dp_rank)
            if logprob_plan is not None:
                shard.logprob_plan = _localize_plan(logprob_plan, plan, dp_rank)
            shards.append(shard)
        return shards

    # A call without arguments for packing matches both overloads; the first one is meant.
    @overload
    def shard_by_batch_size(  # pyright: ignore[reportOverlappingOverload]
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
        """Split the rows for `shards` ranks; every `batch_size` rows (default: all) are one batch.

        No row moves to another global batch. Plain: returns a list of shards; shard s has the s-th
        contiguous chunk of each global batch (`allow_uneven_shards`: the last shards may be short
        or empty). With packing or dynamic batching: returns `(shards, sorted_indices)`; each shard
        carries its plan and has equally many microbatches (dummies of zero rows where rows run
        out), and `from_batches(shards)`, then `reorder_data(sorted_indices)`, is the input, for any
        number of global batches. With `group_key` of `sequence_packing_args` tokens that rows of a
        group have in common are counted once (`plan.microbatches[i].shared`), as
        `policy.inputs.model_inputs` computes them; the iterators still give complete rows, so code
        that computes each of them needs more tokens than the limit and leaves it out. Raises
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
            raise ValueError(f"{self.size} rows are not a multiple of batch_size={batch_size}")
        args = sequence_packing_args or dynamic_batching_args
        if args is not None:
            spec = _spec_of(args, sequence_packing_args is not None, shards, batch_size)
            return self._shard_by_plan(spec, args)
        return self._split_evenly(shards, batch_size, allow_uneven_shards)

    def _take(self, rows: np.ndarray) -> SlicedDataDict:
        """Select `rows`, int64 [n], of every column."""
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
        too_long = np.flatnonzero(lengths > row_widths(self.data[args["input_key"]]))
        if len(too_long):
            row = too_long[0]
            raise ValueError(
                f"{args['input_lengths_key']} gives {lengths[row]} tokens for row {row}, more than"
                f" {args['input_key']} has"
            )
        # The lengths refer to the unpadded rows, also if `input_key` is a padded tensor.
        plan = plan_batch(TokenCounts(lengths, prefixes=self._prefixes(lengths, args)), spec)
        rows_of_rank = [plan.rows_of_rank(dp_rank) for dp_rank in range(spec.num_ranks)]
        return self.shard(plan), np.concatenate(rows_of_rank).tolist()

    def _prefixes(
        self, lengths: np.ndarray, args: DynamicBatchingArgs | SequencePackingArgs
    ) -> SharedPrefixes | None:
        """Common leading tokens of rows of `lengths` int64 [B]; None without `group_key`."""
        key = args.get("group_key")
        if key is None:
            return None
        if key not in self.data:
            raise KeyError(f"group_key {key!r} is not a column; there are {sorted(self.data)}")
        ids = self.data[args["input_key"]]
        rows = [np.asarray(row)[:length] for row, length in zip(ids, lengths, strict=True)]
        dtype = rows[0].dtype if rows else np.int64
        groups = _as_int64(self.data[key])
        images = self.data.get("images", ())
        return SharedPrefixes.of_tokens(groups, Jagged.from_rows(rows, dtype), images)

    def _split_evenly(
        self, shards: int, batch_size: int, allow_uneven_shards: bool
    ) -> list[SlicedDataDict]:
        if batch_size % shards and not allow_uneven_shards:
            raise ValueError(
                f"batch_size={batch_size} is not a multiple of shards={shards};"
                " allow_uneven_shards=True splits anyway"
            )
        # Rounded up: the first shards are full, and the last ones get the rest.
        rows_per_shard = ceil_div(batch_size, shards)
        shard_of_row = np.arange(self.size) % batch_size // rows_per_shard
        return [self._take(np.flatnonzero(shard_of_row == shard)) for shard in range(shards)]

    # Microbatches of one rank

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict:
        """Return this rank's rows of global batch `batch_idx`, with their part of the plan.

        Without a plan these are rows [batch_idx x batch_size, (batch_idx + 1) x batch_size); with a
        plan `batch_size` is not used.
        """
        if self.plan is None:
            if batch_size is None:
                raise ValueError("get_batch needs batch_size for rows that carry no plan")
            if not 0 <= batch_idx * batch_size < self.size:
                raise IndexError(
                    f"batch {batch_idx} of {batch_size} rows is outside the {self.size} rows"
                )
            return self.slice(batch_idx * batch_size, (batch_idx + 1) * batch_size)
        # A shard has the rows of a global batch next to each other, so views are enough.
        start, stop = _rows_of_step(self.plan, batch_idx)
        batch = self.slice(start, stop)
        batch.plan = _plan_of_step(self.plan, batch_idx, start)
        if self.logprob_plan is not None:
            batch.logprob_plan = _plan_of_step(self.logprob_plan, batch_idx, start)
        return batch

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[SlicedDataDict]:
        """Yield microbatches of `microbatch_size` rows. Raises ValueError if they do not divide."""
        if self.size % microbatch_size:
            raise ValueError(
                f"{self.size} rows are not a multiple of the microbatch size {microbatch_size}"
            )
        starts = range(0, self.size, microbatch_size)
        # A generator expression instead of `yield`: the check above runs at the call.
        return (self.slice(start, start + microbatch_size) for start in starts)

    def make_microbatch_iterator_with_dynamic_shapes(
        self, sequence_dim: int = 1
    ) -> Iterator[SlicedDataDict]:
        """Yield the plan's microbatches, truncated along `sequence_dim` to their padded length.

        A dummy has zero rows.
        """
        microbatches = self._plan_of_one_step().microbatches
        lengths = [_padded_length(microbatch) for microbatch in microbatches]
        return (
            self._truncated(microbatch.rows, sequence_dim, length)
            for microbatch, length in zip(microbatches, lengths, strict=True)
        )

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Return the length of `make_microbatch_iterator_with_dynamic_shapes`."""
        return len(self._plan_of_one_step().microbatches)

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[SlicedDataDict]:
        """Yield the rows of each of the plan's microbatches, not yet packed.

        `policy.inputs.model_inputs` packs them. A dummy has zero rows.
        """
        microbatches = self._plan_of_one_step().microbatches
        return (self._contiguous(microbatch.rows) for microbatch in microbatches)

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Return the number of microbatches and the tokens of the largest."""
        microbatches = self._plan_of_one_step().microbatches
        max_tokens = max((microbatch.num_tokens for microbatch in microbatches), default=0)
        return len(microbatches), max_tokens

    def _plan_of_one_step(self) -> RankPlan:
        if self.plan is None:
            raise ValueError(
                "these rows carry no plan; use a shard that shard_by_batch_size made with packing"
                " or dynamic batching, or get_batch of it"
            )
        if self.plan.num_steps != 1:
            raise ValueError(
                f"these rows belong to {self.plan.num_steps} global batches; call get_batch(i)"
                " first and iterate over one"
            )
        return self.plan

    def _truncated(self, rows: tuple[int, ...], dim: int, length: int) -> SlicedDataDict:
        batch = self._contiguous(rows)
        batch.truncate_tensors(dim, length)
        return batch

    def _contiguous(self, rows: tuple[int, ...]) -> SlicedDataDict:
        """Return the rows of a microbatch: a shard has them in the order of the plan."""
        if not rows:
            return self.slice(0, 0)
        return self.slice(rows[0], rows[-1] + 1)


class SlicedDataDict(BatchedDataDict):
    """Rows of one data-parallel rank."""


def _as_int64(values: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
    """Return `values` as int64 [n]."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    return np.asarray(values, dtype=np.int64)


def _spec_of(
    args: Mapping[str, Any], is_packed: bool, num_ranks: int, global_batch_size: int
) -> PlanSpec:
    """Return the spec of the microbatches. Raises ValueError for a missing or unknown key."""
    kind: Any = SequencePackingArgs if is_packed else DynamicBatchingArgs
    # A misspelled optional key would be ignored otherwise.
    missing = sorted(kind.__required_keys__ - set(args))
    unknown = sorted(set(args) - kind.__required_keys__ - kind.__optional_keys__)
    if missing or unknown:
        name = "sequence_packing_args" if is_packed else "dynamic_batching_args"
        raise ValueError(
            f"{name}: missing keys {missing}, unknown keys {unknown}; the keys are"
            f" {sorted(kind.__required_keys__ | kind.__optional_keys__)}"
        )
    packed: dict[str, Any] = {}
    if is_packed:
        packed["algorithm"] = args["algorithm"]
        packed["microbatch_order"] = args.get("microbatch_order", "packer")
    key = "sequence_length_pad_multiple" if is_packed else "sequence_length_round"
    return PlanSpec(
        layout="packed" if is_packed else "padded",
        max_tokens=args["max_tokens_per_microbatch"],
        num_ranks=num_ranks,
        global_batch_size=global_batch_size,
        sequence_length_round=args[key],
        **packed,
    )


def _microbatch_bounds(plan: RankPlan) -> list[list[list[int]]]:
    """Return the rows [start, end) of each microbatch, per global batch.

    Rows are counted within the global batch.
    """
    bounds = []
    for step in range(plan.num_steps):
        counts = [len(microbatch.rows) for microbatch in plan.step(step)]
        ends = np.cumsum(counts).tolist()
        bounds.append([[end - count, end] for count, end in zip(counts, ends, strict=True)])
    return bounds


def _microbatch_lengths(plan: RankPlan) -> list[list[int]]:
    """Return the length of each microbatch, per global batch: its tokens, or its padded length."""
    lengths = []
    for step in range(plan.num_steps):
        microbatches = plan.step(step)
        if plan.spec.layout == "packed":
            lengths.append([each.num_tokens for each in microbatches])
        else:
            lengths.append([_padded_length(each) for each in microbatches])
    return lengths


def _padded_length(microbatch: Microbatch) -> int:
    # A dummy microbatch has no rows.
    return max(microbatch.padded_lengths, default=microbatch.num_tokens)


def _rows_of_step(plan: RankPlan, step: int) -> tuple[int, int]:
    """Return the rows [start, end) of the global batch `step`. Raises IndexError."""
    if not 0 <= step < plan.num_steps:
        raise IndexError(f"global batch {step} of {plan.num_steps}")
    # A shard has its rows in the order of the plan, so they are consecutive per step.
    counts = [len(microbatch.rows) for microbatch in plan.microbatches]
    offsets = [0, *np.cumsum(counts).tolist()]
    first_microbatch = plan.step_offsets[step]
    end_microbatch = plan.step_offsets[step + 1]
    return offsets[first_microbatch], offsets[end_microbatch]


def _plan_of_step(plan: RankPlan, step: int, first_row: int) -> RankPlan:
    """Return the plan of one global batch for rows that start at `first_row`."""
    microbatches = []
    for microbatch in plan.step(step):
        rows = tuple(row - first_row for row in microbatch.rows)
        microbatches.append(replace(microbatch, rows=rows))
    return replace(plan, microbatches=tuple(microbatches), step_offsets=(0, len(microbatches)))


def _localize_plan(logprob_plan: BatchPlan, plan: BatchPlan, dp_rank: int) -> RankPlan:
    """Return `logprob_plan` of one rank, with row indices into the shard of `plan`.

    Raises ValueError if the two plans have different rows on that rank.
    """
    # The order within a rank may differ, as the microbatches do.
    logprob_rows = logprob_plan.rows_of_rank(dp_rank)
    shard_rows = plan.rows_of_rank(dp_rank)
    if not np.array_equal(np.sort(logprob_rows), np.sort(shard_rows)):
        raise ValueError(
            f"the log-prob plan has other rows on dp rank {dp_rank} than the plan; make it with"
            " plan.with_budget"
        )
    return logprob_plan.rank_plan(dp_rank, shard_rows)


def unshard(parts: Sequence[Column], plan: BatchPlan) -> Column:
    """Concatenate one column of every rank and restore the row order of the batch.

    `parts[dp_rank]` has the rows in the order of `plan.rows_of_rank(dp_rank)`. A row that the plan
    assigns to no rank (deferred or dropped) is empty in a Jagged, 0 in an array or a tensor, None
    in a list. Raises ValueError if the ranks returned another number of rows than they got.
    """
    # A wrong number of rows would silently assign values to other rows.
    rows_of_rank = [plan.rows_of_rank(dp_rank) for dp_rank in range(plan.spec.num_ranks)]
    expected = [len(rows) for rows in rows_of_rank]
    returned = [len(part) for part in parts]
    if returned != expected:
        raise ValueError(f"the ranks returned {returned} rows, the plan gave them {expected}")
    rows = np.concatenate(rows_of_rank)
    column = concat_rows("of the ranks", parts)
    num_missing = plan.num_rows - len(rows)
    if num_missing:
        blank_rows = _blank_rows(column, num_missing)
        column = concat_rows("of the ranks", [column, blank_rows])
        missing_rows = np.setdiff1d(np.arange(plan.num_rows), rows)
        rows = np.concatenate([rows, missing_rows])
    # `rows` is a permutation now, and argsort gives its inverse.
    return take_rows(column, np.argsort(rows))


def _described(column: Column) -> str:
    """Return type and dims of a column. Example: `Tensor int64 [4, 16]`."""
    if isinstance(column, list):
        return "list"
    if isinstance(column, Jagged):
        return f"Jagged {column.values.dtype} of {len(column.values):,} tokens"
    dtype = str(column.dtype).removeprefix("torch.")
    return f"{type(column).__name__} {dtype} {list(column.shape)}"


def _blank_rows(column: Column, count: int) -> Column:
    """Return `count` rows without values, of the type and the dims of `column`."""
    if isinstance(column, list):
        return [None] * count
    if isinstance(column, Jagged):
        offsets = np.zeros(count + 1, dtype=np.int64)
        return Jagged(column.values[:0], offsets)
    if isinstance(column, Tensor):
        return column.new_zeros((count, *column.shape[1:]))
    return np.zeros((count, *column.shape[1:]), dtype=column.dtype)
