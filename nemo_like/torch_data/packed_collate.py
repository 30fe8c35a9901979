"""Packed batches for plain PyTorch training loops: rows one after the other in [1, T] tensors.

The order of operations is: pack -> pad to a length -> shift the labels -> pad for sequence
parallelism -> slice. `PackingCollator` does the first three, `slice_for_sequence_parallel` the last
two. T is the number of tokens of a batch, R the number of segments: one per row, and one for the
padding at the end if there is any.

Columns of a batch:

* `input_ids`, `labels`: int64 [1, T]. Labels are not shifted unless `shift_labels` is set: position
  t of `labels` is the token at t, and the model or the loss shifts. The label of the first token of
  every row is ignored, as no position of that row predicts it. VeOmni keeps it for the first row,
  so its count of trained tokens differs by one with and without sequence parallelism.
* `shift_labels`: the same tensor as `labels`, only if these are shifted, so that position t holds
  the token at t + 1. transformers does not shift again if it receives this argument.
* `attention_mask`: int64 [1, T], 1 everywhere, also for padding: a zero would make transformers
  replace `cu_seq_lens` by row lengths of its own.
* `position_ids`: int64 [1, T], 0, 1, ... in each segment. The padding counts from 0 too. Zeros
  would be one segment per padding token for everything that derives segments from position ids, as
  transformers does for SDPA.
* `cu_seq_lens_q`, `cu_seq_lens_k`: int32 [R+1], the same tensor; `max_length_q`, `max_length_k`:
  int. The arguments of FlashAttention in transformers models, padding included.

Pass batches to a transformers model with `model(**forward_arguments(batch, implementation))`.
`model(**batch)` is correct for FlashAttention only. A model with another implementation ignores
`cu_seq_lens`, and rows attend to each other without an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from nemo_like.config.errors import ConfigError
from nemo_like.integer_math import check_integer
from nemo_like.models.spec import ModelSpec
from nemo_like.torch_data.packed_batch import (
    COMPUTED_COLUMNS,
    IGNORE_INDEX,
    Overflow,
    PadValues,
    check_pad_values,
    check_target,
    forward_arguments,
    pad_packed_input,
    shift_packed_labels,
)

Column: TypeAlias = Tensor | np.ndarray | Sequence[int]
"""One value per token of a row, [L]."""

_LENGTHS = (5, 8)
_MAX_DIFFERENCE = 1e-6
"""Maximum difference of the logits of a row whose neighbor changed. Attention leaves them
bit-equal; experts of an MoE layer change the order of a reduction.
"""


@dataclass(frozen=True)
class PackingCollator:
    """Collate rows of different lengths into one packed batch: a `collate_fn` for a DataLoader.

    A row is a mapping with `input_ids` and `labels`, of integers [L], the columns of `pad_values`
    [L], and optionally `attention_mask` [L], whose zeros are padding that is removed. The columns
    are tensors, NumPy arrays or lists, also of shape [1, L]. Rows are not modified.
    """

    pad_to_length: int | None = None
    """Tokens of every batch; None pads to `pad_multiple` only. See `pack_length`."""
    pad_multiple: int = 1
    """Every batch is a multiple of this many tokens."""
    pad_token_id: int = 0
    ignore_index: int = IGNORE_INDEX
    pad_values: PadValues = field(default_factory=dict)
    """Additional per-token columns and their padding values, such as `{"token_type_ids": 0}`."""
    shift_labels: bool = False
    """Shift the labels in the collator, for losses that compare position t with `labels[t]`."""
    overflow: Overflow = "error"
    metadata: Literal["error", "drop", "list"] = "error"
    """Other columns of the rows, such as an id: an error, dropped, or a list with the value of each
    row.
    """
    with_attention_mask: bool = True
    """Include `attention_mask`, for training loops that expect it; no model needs it."""

    def __post_init__(self) -> None:
        check_target(self.pad_to_length, self.pad_multiple, self.overflow)
        check_pad_values(self.pad_values)
        if self.metadata not in ("error", "drop", "list"):
            raise ValueError(f"metadata is error, drop or list; got {self.metadata!r}")

    def sample_numbers(self, row: Mapping[str, Column]) -> tuple[int, int]:
        """Return the tokens of `row` that a batch keeps, and how many of them have loss.

        Raises ValueError for a row that cannot be packed, except for one without tokens.
        """
        columns = _real_tokens(row, "a row", ("input_ids", "labels"))
        trained = columns["labels"][1:] != self.ignore_index
        return len(columns["input_ids"]), int(trained.sum())

    def __call__(self, rows: Sequence[Mapping[str, Column]]) -> dict[str, Any]:
        """Return the packed batch of `rows`; the columns are listed in the module docstring.

        Raises ValueError for no rows, a row without tokens, columns that are missing, unknown or of
        different lengths, and a batch longer than `pad_to_length` if `overflow` is "error".
        """
        if len(rows) == 0:
            raise ValueError(
                "a batch needs at least one row; dummy() is the batch of a microbatch without rows"
            )
        names = ("input_ids", "labels", *self.pad_values)
        columns = []
        for index, row in enumerate(rows):
            self._check_columns(row, index)
            columns.append(_real_tokens(row, f"row {index}", names))
            if len(columns[-1]["input_ids"]) == 0:
                raise ValueError(f"row {index} has no tokens; remove such rows before packing")
        batch: dict[str, Any] = {}
        for name in names:
            batch[name] = torch.cat([row[name] for row in columns]).unsqueeze(0)
        input_ids = batch["input_ids"]
        lengths = [len(row["input_ids"]) for row in columns]
        positions = [torch.arange(length, device=input_ids.device) for length in lengths]
        batch["position_ids"] = torch.cat(positions).unsqueeze(0)
        batch["labels"].masked_fill_(batch["position_ids"] == 0, self.ignore_index)
        if self.with_attention_mask:
            batch["attention_mask"] = torch.ones_like(input_ids)
        batch = pad_packed_input(
            batch,
            self.pad_to_length,
            self.pad_multiple,
            pad_token_id=self.pad_token_id,
            ignore_index=self.ignore_index,
            pad_values=self.pad_values,
            overflow=self.overflow,
        )
        if self.shift_labels:
            batch = shift_packed_labels(batch, self.ignore_index)
        if self.metadata == "list":
            for name in sorted(rows[0].keys() - {*names, "attention_mask"}):
                batch[name] = [row.get(name) for row in rows]
        return batch

    def _check_columns(self, row: Mapping[str, Column], index: int) -> None:
        """Raise ValueError for columns that the batch computes or that have no padding value."""
        unknown = sorted(row.keys() - {"input_ids", "labels", "attention_mask", *self.pad_values})
        computed = sorted(COMPUTED_COLUMNS & set(unknown))
        if computed:
            fix = f"remove {', '.join(computed)} from the rows, the collator computes them"
        elif self.metadata == "error":
            fix = (
                "add the padding values of columns with one value per token to pad_values, and set"
                ' metadata to "drop" or "list" for others'
            )
        else:
            return
        if unknown:
            raise ValueError(f"row {index} has unknown columns {', '.join(unknown)}; {fix}")

    def dummy(self) -> dict[str, Any]:
        """Return a batch of padding only, for a rank that has fewer microbatches than the others.

        It has `pad_to_length` tokens, or `pad_multiple` without a length. No token is supervised,
        so the sum of its token losses is 0 and so are its gradients; their mean is NaN.
        """
        length = self.pad_to_length or self.pad_multiple
        row = {
            "input_ids": torch.full((length,), self.pad_token_id),
            "labels": torch.full((length,), self.ignore_index),
        }
        for name, value in self.pad_values.items():
            row[name] = torch.full((length,), value)
        return self([row])


def pack_length(micro_batch_size: int, max_seq_len: int) -> int:
    """Return the tokens of a packed batch of `micro_batch_size` rows of up to `max_seq_len` tokens.

    It is the `pad_to_length` that VeOmni infers. Raises ValueError if a number is not positive.
    """
    num_rows = check_integer("micro_batch_size", micro_batch_size, 1)
    return num_rows * check_integer("max_seq_len", max_seq_len, 1)


def _real_tokens(row: Mapping[str, Column], place: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the columns `names` of `row`, tensors [L], without what its attention mask removes."""
    columns = {}
    for name in names:
        if row.get(name) is None:
            raise ValueError(f"{place} has no column {name}; every row needs it")
        columns[name] = _as_tensor(row[name], f"{name} of {place}")
    for name in ("input_ids", "labels"):
        tensor = columns[name]
        is_integer = not tensor.is_floating_point() and tensor.dtype != torch.bool
        # An empty list has the dtype of floats.
        if not is_integer and len(tensor) > 0:
            raise ValueError(f"{name} of {place} must be integers, not {tensor.dtype}")
        columns[name] = tensor.to(torch.int64)
    if "attention_mask" in row:
        columns["attention_mask"] = _as_tensor(row["attention_mask"], f"attention_mask of {place}")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of {place} have different lengths: {lengths}")
    mask = columns.pop("attention_mask", None)
    return columns if mask is None else _without_padding(columns, mask, place)


def _without_padding(columns: dict[str, Tensor], mask: Tensor, place: str) -> dict[str, Tensor]:
    """Return the span of `columns` [L] where `mask` [L] is 1."""
    kept = torch.nonzero(mask).flatten()
    begin = int(kept[0]) if len(kept) else 0
    end = int(kept[-1]) + 1 if len(kept) else 0
    if end - begin != len(kept):
        raise ValueError(
            f"attention_mask of {place} has zeros between ones; only padding on the left or on"
            " the right can be removed"
        )
    return {name: column[begin:end] for name, column in columns.items()}


def _as_tensor(column: Column, name: str) -> Tensor:
    """Return `column` [L] as a tensor."""
    if isinstance(column, Tensor):
        tensor = column
    else:
        array = np.asarray(column)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{name} must be numbers, not {array.dtype}")
        if array.dtype.kind == "u":
            array = array.astype(np.int64)
        # A copy, as arrays of memory maps are read-only and tensors cannot be.
        tensor = torch.from_numpy(np.array(array))
    if tensor.ndim == 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 1:
        raise ValueError(f"{name} must have one dimension, not the shape {list(tensor.shape)}")
    return tensor


def check_packing_support(model: nn.Module) -> None:
    """Raise ValueError unless `model`, a causal model of transformers, supports packed batches.

    With a model that does not, the loss still falls, but tokens see other rows.

    Its configuration is checked, and a forward pass without gradients on two packed rows of 13
    tokens together: a change of the first row must not change the logits of the second. With FSDP
    every rank must call it. The mode of the model (training or evaluation) is restored.
    """
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    if config is None or implementation is None:
        raise ValueError(
            f"{name} has no configuration of transformers, so how it separates packed rows is not"
            " known; set seq_packing_enabled=False"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} has an encoder, which packed batches do not support; pad instead")
    try:
        spec = ModelSpec.from_config(config, name)
    except ConfigError as error:
        raise ValueError(f"{name} cannot be checked for packed batches: {error}") from error
    if spec.linear_attention_layers:
        raise ValueError(
            f"{name} has layers with linear attention, whose state passes from one packed row to"
            " the next; set seq_packing_enabled=False"
        )
    difference = _second_row_difference(model, implementation, spec.vocab_size)
    # Written as `not a <= b`, so that NaN fails.
    if not difference <= _MAX_DIFFERENCE:
        raise ValueError(
            f"{name} with attn_implementation {implementation!r} does not separate packed rows: a"
            f" token of one row changed the logits of the next by {difference:.2g}; use another"
            " attn_implementation, or set seq_packing_enabled=False"
        )


def _second_row_difference(model: nn.Module, implementation: str, vocab_size: int) -> float:
    """Return the largest change of the second row's logits over its largest logit."""
    device = next(model.parameters()).device
    rows = [torch.arange(length) * 7 % vocab_size for length in _LENGTHS]
    was_training = model.training
    model.eval()
    try:
        before = _second_row_logits(model, implementation, rows, device)
        rows[0] = (rows[0] + 1) % vocab_size
        after = _second_row_logits(model, implementation, rows, device)
    finally:
        model.train(was_training)
    return float((after - before).abs().max() / before.abs().max())


def _second_row_logits(
    model: nn.Module, implementation: str, rows: list[Tensor], device: torch.device
) -> Tensor:
    """Return the logits [L, V] of the second of two packed `rows`, int64 [L] each."""
    samples = [{"input_ids": row, "labels": row} for row in rows]
    batch = PackingCollator()(samples)
    for column, value in batch.items():
        if isinstance(value, Tensor):
            batch[column] = value.to(device)
    arguments = forward_arguments(batch, implementation)
    del arguments["labels"]
    with torch.no_grad():
        logits = model(**arguments).logits
    return logits[0, _LENGTHS[0] :].float()
