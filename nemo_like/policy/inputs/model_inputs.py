"""One microbatch of a plan as model inputs: rows to tensors and back, packed or padded, positions
and labels.

Nothing is decided here: the rows, their padded lengths and their order come from the plan.

Everything is aligned on the predicting position: position i of a row has the label (token i+1) and,
of each token column, the value of token i+1. A row's last real token and all padding predict
nothing. Segments are the rows in the microbatch's order, each with its own padding after its real
tokens (causal attention does not see it), and then segments of trailing padding where the total is
rounded up. Position ids start at 0 in every segment, and are all 0 in a dummy.

Context parallelism (`cp_size` c > 1): each segment is split into 2c chunks, rank r has chunks r and
2c-1-r in this order (zig-zag), which balances the work of causal attention. These shares are
packed, in the padded layout too, where a segment is a row with its padding. Labels and columns are
aligned before the split; `cu_seqlens` stays global.

Shared prefixes (`Microbatch.shared`): the model computes the T positions of the segments, and each
of the T_r tokens of the complete rows has its label, its columns and its outputs in a sequence of
its own, the rows one after the other without padding. Two rows that share a position thus have
their own labels there, which are read from one hidden state (`hidden_positions`). On a
context-parallel rank this sequence has all rows, with labels where the rank has the hidden state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import Microbatch, PlanSpec
from nemo_like.data.routed_experts import ROUTED_EXPERTS, signed_experts
from nemo_like.device_transfer import tensor_to_device, to_device
from nemo_like.policy.inputs.exchange import Exchange
from nemo_like.policy.inputs.grid import (
    Grid,
    KeyIndex,
    SharedGrid,
    segment_positions,
    segment_starts,
)
from nemo_like.policy.inputs.images import RowImages, VisionInputs
from nemo_like.policy.inputs.segment_attention import Spans
from nemo_like.policy.outputs import OutputEmbedding, TokenLogprobs

NUM_TRAINED = "num_trained_tokens"
"""Row column of training inputs: float32 [R], trained tokens of each row."""


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """One microbatch as tensors: T positions on this rank, `num_tokens` = T x cp_size in total.

    With shared prefixes `labels`, `label_mask`, `row_ids` and `columns` are [T_r], of all tokens of
    the rows, instead of [T].

    Example: rows [5, 6, 7] and [8, 9] packed with `padded_lengths` (4, 2) and `num_tokens` 6:
    `input_ids` [[5, 6, 7, 0, 8, 9]], `position_ids` [[0, 1, 2, 3, 0, 1]], `cu_seqlens` [0, 4, 6],
    `labels` [6, 7, 0, 0, 9, 0], `label_mask` [1, 1, 0, 0, 1, 0], `label_positions` [0, 1, 4],
    `last_positions` [2, 5], `row_ids` [0, 0, 0, 0, 1, 1].
    """

    input_ids: Tensor
    """int64, packed [1, T]; padded [R, T / R] on one context-parallel rank, else [1, T] as well."""
    position_ids: Tensor
    """int64, the shape of `input_ids`."""
    row_lengths: Tensor
    """int64, the shape of `input_ids`: real tokens of the complete row, 0 on trailing padding; the
    same on all context-parallel ranks.
    """
    cu_seqlens: Tensor | None
    """int32 [R+1], longer with trailing padding: segment bounds over all cp ranks. None where
    `input_ids` is [R, T / R]: rows are right-padded then and causal attention needs no mask.
    """
    max_seqlen: int
    """Longest segment over all cp ranks."""
    labels: Tensor
    """int64 [T]: the next token, 0 at the end of a row."""
    label_mask: Tensor
    """bool [T]: True where the position predicts a real token of its row; in training, a trained
    token.
    """
    label_positions: Tensor
    """int64 [N]: the indices where `label_mask` is True, in order. Found on the host, because a
    search on the device waits for it.
    """
    hidden_positions: Tensor
    """int64 [N]: the position of the model that computes each of `label_positions`, the same unless
    prefixes are shared.
    """
    host_label_rows: np.ndarray
    """int64 [N]: the row of each of `label_positions`, in host memory."""
    last_positions: Tensor
    """int64 [M]: the positions of the model that compute the last tokens of rows, those on this
    context-parallel rank.
    """
    last_rows: Tensor
    """int64 [M]: the row of each of `last_positions`."""
    row_ids: Tensor
    """int64 [T]: index of the row in the microbatch; 0 on padding."""
    columns: dict[str, Tensor]
    """[T, ...] token columns, 0 where there is no label; a name that ends in `_mask` is bool."""
    row_columns: dict[str, Tensor]
    """[R, ...] row columns. A dummy has one row of zeros, so that `row_ids` are valid indices."""
    host_row_columns: dict[str, np.ndarray]
    """The values of `row_columns` in host memory, except values that were given as tensors."""
    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    num_tokens: int
    layout: Literal["packed", "padded"]
    cp_size: int = 1
    exchange: Exchange | None = None
    """Of shared prefixes: the keys of each segment of this rank. None: all rows are complete."""
    routed_experts: Tensor | None = None
    """int16 [T, layers, top-k]: the experts that the routers choose, -1 for their own choice."""
    vision: VisionInputs | None = None
    """Images of the rows; `position_ids` are int64 [3, 1, T] then."""
    head: Callable[[OutputEmbedding, ModelInputs], TokenLogprobs] | None = None
    """Computes the outputs of this microbatch in the place of the log-probs of `labels`."""

    @property
    def num_rows(self) -> int:
        """R; 1 for a dummy."""
        return max(len(self.lengths), 1)

    @property
    def output_bounds(self) -> np.ndarray:
        """Bounds of the rows in outputs gathered from all context-parallel ranks, int64 [R + 1]."""
        lengths = self.padded_lengths if self.exchange is None else self.lengths
        return segment_starts(lengths)

    @property
    def num_outputs(self) -> int:
        """Outputs of all context-parallel ranks: `num_tokens`, with shared prefixes T_r."""
        return self.num_tokens if self.exchange is None else int(self.output_bounds[-1])

    def flattened(self) -> ModelInputs:
        """Return the same positions as one [1, T] sequence of segments with `cu_seqlens`."""
        if self.cu_seqlens is not None:
            # Packed, or context-parallel: already one sequence.
            return self
        num_segments, width = self.input_ids.shape
        segment = torch.arange(num_segments + 1, dtype=torch.int32, device=self.input_ids.device)
        bounds = segment * width
        return dataclasses.replace(
            self,
            input_ids=self.input_ids.reshape(1, -1),
            position_ids=self.position_ids.reshape(1, -1),
            row_lengths=self.row_lengths.reshape(1, -1),
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
    num_trained: np.ndarray | None = None,
    images: RowImages | None = None,
) -> ModelInputs:
    """Build the tensors of `microbatch`, whose `rows` index the columns of `shard`.

    `input_ids` is Jagged, and so is `routed_experts`, if it exists; any other Jagged is a token
    column; any array or tensor [n, ...] of numbers is a row column. Other columns (texts) are
    ignored. Raises ValueError where a token column is shorter than its row.

    `num_trained`, int64 [R] ([1] for a dummy), are the trained tokens of each row over all
    context-parallel ranks. With it only trained tokens have a label: those with `token_mask` in
    rows that have some. The counts become the row column `NUM_TRAINED`, float32 [R]. `images` has
    the images of the rows of the shard.

    The host does not wait for the device.
    """
    grid = Grid.of(microbatch, spec, cp_rank)
    shared = SharedGrid.of(microbatch, spec, cp_rank) if any(microbatch.shared) else None
    labels = _LabelArrays.of(grid, shared)
    has_label = labels.has_next & labels.is_local
    columns, row_columns, row_tensors = _split_columns(shard, labels.grid, has_label, device)
    if num_trained is not None:
        row_columns[NUM_TRAINED] = num_trained.astype(np.float32)
        is_trained_row = num_trained > 0
        # Logits are computed only where there is a label, so a narrow mask saves memory.
        has_label &= columns["token_mask"] & is_trained_row[labels.grid.row_ids]
    label_positions = np.flatnonzero(has_label)
    keys = None if shared is None else shared.keys
    image_arrays = {} if images is None else images.arrays(grid)
    tensors = to_device(
        {
            **_position_arrays(grid, shard["input_ids"], pad_token_id, keys),
            **image_arrays,
            **_expert_arrays(grid, shard.get(ROUTED_EXPERTS), shared),
            **labels.arrays(shard["input_ids"]),
            "label_mask": has_label,
            "label_positions": label_positions,
            **({} if shared is None else {"hidden_positions": shared.source[label_positions]}),
            **{f"column/{name}": values for name, values in columns.items()},
            **{f"row/{name}": values for name, values in row_columns.items()},
        },
        device,
    )
    return ModelInputs(
        input_ids=tensors["input_ids"],
        position_ids=tensors["position_ids"],
        row_lengths=tensors["row_lengths"],
        cu_seqlens=tensors.get("cu_seqlens"),
        max_seqlen=int(np.diff(grid.bounds).max()),
        labels=tensors["labels"],
        label_mask=tensors["label_mask"],
        label_positions=tensors["label_positions"],
        hidden_positions=tensors.get("hidden_positions", tensors["label_positions"]),
        host_label_rows=labels.grid.row_ids[label_positions],
        last_positions=tensors["last_positions"],
        last_rows=tensors["last_rows"],
        row_ids=tensors["row_ids"],
        columns={name: tensors[f"column/{name}"] for name in columns},
        row_columns={name: tensors[f"row/{name}"] for name in row_columns} | row_tensors,
        host_row_columns=row_columns,
        lengths=microbatch.lengths,
        padded_lengths=microbatch.padded_lengths,
        num_tokens=microbatch.num_tokens,
        layout=spec.layout,
        cp_size=spec.cp_size,
        exchange=None if keys is None else _exchange(tensors, keys, microbatch.num_tokens),
        routed_experts=tensors.get(ROUTED_EXPERTS),
        vision=None if images is None else images.inputs(tensors, image_arrays),
    )


@dataclass(frozen=True)
class _LabelArrays:
    """The positions that have labels, columns and outputs: of the model, or of complete rows."""

    grid: Grid
    source: np.ndarray
    """int64 [T]: the position of the model that computes each of them, any if it is not local."""
    is_local: np.ndarray
    """bool [T]: True where this context-parallel rank computes it."""

    @classmethod
    def of(cls, grid: Grid, shared: SharedGrid | None) -> _LabelArrays:
        if shared is not None:
            return cls(shared.rows, shared.source, shared.source >= 0)
        num_positions = len(grid.position)
        return cls(grid, np.arange(num_positions), np.ones(num_positions, dtype=bool))

    @property
    def has_next(self) -> np.ndarray:
        """Bool [T]: True where the next token of the row is real, which is the label."""
        return self.grid.position < self.grid.length - 1

    def arrays(self, token_ids: Jagged) -> dict[str, np.ndarray]:
        """Return labels, rows and the last positions; shapes and dtypes are as in `ModelInputs`."""
        labels = self.grid.gather("input_ids", token_ids, 1, self.has_next, 0)
        is_last = (self.grid.position == self.grid.length - 1) & self.is_local
        return {
            "labels": labels.astype(np.int64, copy=False),
            "row_ids": self.grid.row_ids,
            "last_positions": self.source[is_last],
            "last_rows": self.grid.row_ids[is_last],
        }


def _exchange(tensors: Mapping[str, Tensor], keys: KeyIndex, num_tokens: int) -> Exchange:
    """Build the exchange of shared prefixes from the tensors of `_position_arrays`."""
    spans = Spans(
        tensors["cu_seqlens_q"],
        tensors["cu_seqlens_k"],
        int(keys.lengths_q.max()),
        int(keys.lengths_k.max()),
    )
    return Exchange.of(tensors["kv_index"], spans, num_tokens)


def _position_arrays(
    grid: Grid, token_ids: Jagged, pad_token_id: int, keys: KeyIndex | None
) -> dict[str, np.ndarray]:
    """Return ids and positions of the T positions, and the bounds of a packed layout.

    The shapes and dtypes are as in `ModelInputs`.
    """
    is_real = grid.position < grid.length
    input_ids = grid.gather("input_ids", token_ids, 0, is_real, pad_token_id)
    # Token ids are stored as int32; embedding and gather need int64.
    arrays = {
        "input_ids": input_ids.astype(np.int64, copy=False).reshape(grid.shape),
        # A dummy may be longer than any row, and a model may have no embedding of such positions.
        "position_ids": (grid.position * (grid.num_rows > 0)).reshape(grid.shape),
        "row_lengths": grid.length.reshape(grid.shape),
    }
    # Bounds are int32, as the attention kernels require.
    if grid.is_packed:
        arrays["cu_seqlens"] = grid.bounds.astype(np.int32)
    if keys is not None:
        arrays["kv_index"] = keys.kv_index
        arrays["cu_seqlens_q"] = segment_starts(keys.lengths_q).astype(np.int32)
        arrays["cu_seqlens_k"] = segment_starts(keys.lengths_k).astype(np.int32)
    return arrays


def _expert_arrays(
    grid: Grid, column: Jagged | None, shared: SharedGrid | None
) -> dict[str, np.ndarray]:
    """Return the experts of the T positions, int16 [T, layers, top-k]; none without a column.

    With shared prefixes a shared token has the values of the row that computes it, or of another
    row that contains it if that row has no values for it: the last token of a row, which was never
    computed in the rollout, may be followed by tokens of other rows.
    """
    if column is None:
        return {}
    is_real = grid.position < grid.length
    unknown = np.iinfo(column.dtype).max
    experts = grid.gather(ROUTED_EXPERTS, column, 0, is_real, unknown)
    if shared is not None:
        is_unknown = (experts == unknown).all((1, 2))
        # A token of another rank has the source -1.
        (others,) = np.nonzero((shared.source >= 0) & is_unknown[shared.source])
        rows = shared.rows
        starts = column.offsets[rows.rows[rows.segment[others]]]
        found = column.values[starts + rows.position[others]]
        is_known = ~(found == unknown).all((1, 2))
        experts[shared.source[others[is_known]]] = found[is_known]
    return {ROUTED_EXPERTS: signed_experts(experts)}


def _split_columns(
    shard: Mapping[str, Any], grid: Grid, has_label: np.ndarray, device: str | torch.device
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Tensor]]:
    """Return (token columns [T, ...], row columns [R, ...], row columns that are tensors [R, ...]).

    `has_label` is bool [T]; elsewhere a token column is 0.
    """
    columns: dict[str, np.ndarray] = {}
    row_columns: dict[str, np.ndarray] = {}
    row_tensors: dict[str, Tensor] = {}
    for name, column in shard.items():
        if name in ("input_ids", ROUTED_EXPERTS):
            continue
        if isinstance(column, Jagged):
            values = grid.gather(name, column, 1, has_label, 0)
            columns[name] = values.astype(bool) if name.endswith("_mask") else values
        elif isinstance(column, Tensor):
            row_tensors[name] = _row_tensor(column, grid.rows, device)
        elif isinstance(column, np.ndarray) and column.dtype.kind in "biuf":
            # Booleans, integers and floats; not texts or objects.
            row_columns[name] = _row_array(column, grid.rows)
    return columns, row_columns, row_tensors


def unpack_tokens(values: Tensor, inputs: ModelInputs) -> Jagged:
    """Convert per-position `values` [num_outputs] to rows, a float32 Jagged in microbatch order.

    The shift is undone: the value at the position that predicts token i becomes the value of token
    i; token 0, which no position predicts, gets 0. With context parallelism `values` are gathered
    over the cp ranks first (`cp_gather_positions`). A dummy has no rows. Raises ValueError for
    another number of values.
    """
    values = values.reshape(-1)
    if len(values) != inputs.num_outputs:
        raise ValueError(
            f"{len(values)} values for a microbatch of {inputs.num_outputs} outputs; gather the cp"
            f" ranks' shares first"
        )
    flat = values.detach().to("cpu", torch.float32).numpy()
    lengths = np.array(inputs.lengths, dtype=np.int64)
    # Rows start at padded offsets here, and at unpadded ones in the result.
    starts = inputs.output_bounds[:-1]
    row, token = segment_positions(lengths)
    result = np.zeros(len(token), dtype=np.float32)
    is_predicted = token > 0
    predicting_position = starts[row] + token - 1
    result[is_predicted] = flat[predicting_position[is_predicted]]
    return Jagged.from_lengths(result, lengths)


def num_predicted_tokens(token_mask: Jagged, microbatch: Microbatch) -> np.ndarray:
    """Count the tokens of each row that the mask keeps and a position predicts, int64 [R].

    Token 0 and truncated tokens are not counted. With context parallelism the count is still that
    of the full row. A dummy gives [1] of 0.
    """
    if not microbatch.rows:
        return np.zeros(1, dtype=np.int64)
    rows = np.array(microbatch.rows, dtype=np.int64)
    starts = token_mask.offsets[rows]
    # Lengths after truncation, which may be shorter than the rows of the mask.
    lengths = np.array(microbatch.lengths, dtype=np.int64)
    row, token = segment_positions(lengths)
    is_kept = token_mask.values[starts[row] + token] != 0
    is_counted = is_kept & (token > 0)
    counts = np.bincount(row, weights=is_counted, minlength=len(rows))
    return counts.astype(np.int64)


def _row_array(column: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the rows [R, ...] of `column` [n, ...]; one row of zeros for a dummy."""
    if len(rows) == 0:
        return np.zeros((1, *column.shape[1:]), dtype=column.dtype)
    # Indexing copies. An array from shared memory is read-only, which torch cannot represent.
    return column[rows]


def _row_tensor(column: Tensor, rows: np.ndarray, device: str | torch.device) -> Tensor:
    """Return the rows [R, ...] of `column` [n, ...] on `device`; one row of zeros for a dummy."""
    if len(rows) == 0:
        return column.new_zeros((1, *column.shape[1:]), device=device)
    index = tensor_to_device(torch.from_numpy(rows), column.device)
    return tensor_to_device(column[index], device)
