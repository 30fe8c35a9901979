"""Padding, label shift, sequence-parallel slices, model arguments and loss scale of packed batches.

`packed_collate` describes the columns of a batch and the order of the operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemo_like.integer_math import check_integer, round_up

IGNORE_INDEX = -100
"""Label of a token without loss, the default of `torch.nn.functional.cross_entropy`."""

PadValues: TypeAlias = Mapping[str, int | float]
"""Padding value of each additional column."""

Overflow: TypeAlias = Literal["error", "keep", "round"]
"""Treatment of a batch longer than the length that it is padded to.

* `error`: ValueError.
* `keep`: the batch keeps its own length, rounded up to the pad multiple.
* `round`: it is padded to the next multiple of the length, which bounds the number of shapes.
"""

FLASH_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
COMPUTED_COLUMNS = frozenset(("position_ids", "shift_labels", *FLASH_ARGUMENTS))
_PADDED = frozenset(("input_ids", "labels", "shift_labels", "attention_mask"))


def cu_seq_lens_from_position_ids(position_ids: Tensor) -> Tensor:
    """Return the bounds of the segments, int32 [R+1], of `position_ids`, integers [1, T].

    A segment begins at every position id of 0. Raises ValueError for another shape and if the first
    position id is not 0, as in a slice of a longer sequence.
    """
    if position_ids.ndim != 2 or position_ids.shape[0] != 1 or position_ids.shape[1] == 0:
        shape = list(position_ids.shape)
        raise ValueError(f"position_ids must have the shape [1, T] with T >= 1, not {shape}")
    starts = torch.nonzero(position_ids[0] == 0).flatten()
    if len(starts) == 0 or starts[0] != 0:
        first = int(position_ids[0, 0])
        raise ValueError(
            f"position_ids begins with {first}: the bounds of the segments follow from the full"
            " sequence only, so compute them before slicing"
        )
    return F.pad(starts, (0, 1), value=position_ids.shape[1]).to(torch.int32)


def pad_packed_input(
    batch: Mapping[str, Any],
    length: int | None = None,
    multiple: int = 1,
    *,
    pad_token_id: int = 0,
    ignore_index: int = IGNORE_INDEX,
    pad_values: PadValues | None = None,
    overflow: Overflow = "error",
) -> dict[str, Any]:
    """Return `batch` padded at the end to `length` tokens, or to a multiple of `multiple`.

    `batch` needs `input_ids` and `position_ids`, integers [1, T]. All padding is one segment of its
    own: a last segment that holds padding values in every column is the padding of an earlier call
    and grows. The FlashAttention arguments are computed again from the position ids. Values other
    than [1, T] tensors are kept. `batch` is not modified.

    Position ids of the padding may exceed all others, which matters for models with learned
    position embeddings: `length` must not exceed their number by more than the rows fill.

    Raises ValueError for a batch longer than `length` if `overflow` is "error", a [1, T] column
    without a padding value, a slice of a sequence, and a `length` that is not a multiple of
    `multiple`.
    """
    check_target(length, multiple, overflow)
    values = _padding_values(pad_token_id, ignore_index, pad_values)
    num_tokens = _check_columns(batch, values)
    cu_seq_lens = cu_seq_lens_from_position_ids(batch["position_ids"])
    padding = _padded_length(num_tokens, length, multiple, overflow) - num_tokens
    padded = dict(batch)
    if padding > 0:
        begin = _padding_begin(batch, int(cu_seq_lens[-2]), values)
        for name in values.keys() & batch.keys():
            padded[name] = F.pad(batch[name], (0, padding), value=values[name])
        position_ids = batch["position_ids"]
        positions = torch.arange(num_tokens - begin, num_tokens - begin + padding)
        padded["position_ids"] = torch.cat((position_ids, positions[None].to(position_ids)), dim=1)
        cu_seq_lens = cu_seq_lens_from_position_ids(padded["position_ids"])
    max_length = int(cu_seq_lens.diff().max())
    padded.update(zip(FLASH_ARGUMENTS, [cu_seq_lens] * 2 + [max_length] * 2, strict=True))
    return padded


def tail_padding_length(
    batch: Mapping[str, Any],
    *,
    pad_token_id: int = 0,
    ignore_index: int = IGNORE_INDEX,
    pad_values: PadValues | None = None,
) -> int:
    """Return how many tokens at the end of `batch` are the padding of `pad_packed_input`.

    `batch` has the columns [1, T] of the full sequence, and the padding values are those that it
    was padded with. Raises ValueError for a slice of a sequence.
    """
    cu_seq_lens = cu_seq_lens_from_position_ids(batch["position_ids"])
    values = _padding_values(pad_token_id, ignore_index, pad_values)
    return batch["input_ids"].shape[1] - _padding_begin(batch, int(cu_seq_lens[-2]), values)


def shift_packed_labels(
    batch: Mapping[str, Any], ignore_index: int = IGNORE_INDEX
) -> dict[str, Any]:
    """Return `batch` with labels that are shifted left by one position within each segment.

    `batch` needs `labels` and `position_ids`, integers [1, T] of the full sequence. The last
    position of every segment gets `ignore_index`. The result has the same tensor as `labels` and
    `shift_labels`; a batch that has `shift_labels` is returned as it is. Raises ValueError without
    labels.
    """
    if "shift_labels" in batch:
        return dict(batch)
    if "labels" not in batch:
        raise ValueError("the batch has no labels to shift; add the column labels")
    following = batch["labels"][:, 1:]
    is_next_row = batch["position_ids"][:, 1:] == 0
    shifted = F.pad(following.masked_fill(is_next_row, ignore_index), (0, 1), value=ignore_index)
    return {**batch, "labels": shifted, "shift_labels": shifted}


def slice_for_sequence_parallel(
    batch: Mapping[str, Any],
    rank: int,
    size: int,
    *,
    pad_token_id: int = 0,
    ignore_index: int = IGNORE_INDEX,
    pad_values: PadValues | None = None,
) -> dict[str, Any]:
    """Return the share of `batch` of one rank of a sequence-parallel group of `size` ranks.

    Labels are shifted first, as the label of the last position of a share is in the next share.
    Then the batch is padded to a multiple of `size`. The per-token columns of the result are the
    contiguous positions of `rank`, [1, T/size]. `attention_mask`, `cu_seq_lens` and `max_length`
    describe the full sequence, as attention does after the all-to-all of Ulysses. A batch without
    labels is sliced without them. `batch` is not modified.

    Raises ValueError for a rank outside the group and everything that `pad_packed_input` refuses.
    """
    check_integer("size", size, 1)
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank} but must be between 0 and size - 1 = {size - 1}")
    shifted = shift_packed_labels(batch, ignore_index) if "labels" in batch else dict(batch)
    share = pad_packed_input(
        shifted,
        multiple=size,
        pad_token_id=pad_token_id,
        ignore_index=ignore_index,
        pad_values=pad_values,
    )
    num_tokens = share["input_ids"].shape[1] // size
    begin = rank * num_tokens
    names = {"input_ids", "labels", "position_ids", *(pad_values or {})} & share.keys()
    for name in names:
        # A copy: a view would keep the memory of the full sequence.
        share[name] = share[name][:, begin : begin + num_tokens].clone()
    if "shift_labels" in share:
        share["shift_labels"] = share["labels"]
    return share


def forward_arguments(batch: Mapping[str, Any], attn_implementation: str) -> dict[str, Any]:
    """Return the arguments of a transformers model for `batch`, a result of `PackingCollator`.

    Rows stay separate under each implementation of attention, which take their bounds from
    different arguments: "flash_attention_2" and other names with "flash" from `cu_seq_lens_q` and
    so on, "nemo_like" (`inputs.attention`) from `cu_seqlens` and `max_seqlen`, "sdpa" and "eager"
    from `position_ids`, but only without an `attention_mask` and a cache. Only the columns
    `input_ids`, `labels`, `shift_labels` and `position_ids` are included.

    Raises ValueError for another implementation, and for a slice of a sequence except with flash
    attention.
    """
    names = ("input_ids", "position_ids", "labels", "shift_labels")
    arguments = {name: batch[name] for name in names if name in batch}
    # With a cache, transformers takes the rows of a packed batch for one row.
    arguments["use_cache"] = False
    if "flash" in attn_implementation:
        return {**arguments, **{name: batch[name] for name in FLASH_ARGUMENTS}}
    if attn_implementation not in ("nemo_like", "sdpa", "eager"):
        raise ValueError(
            f"no packed attention is known for attn_implementation {attn_implementation!r}; use"
            " flash_attention_2, nemo_like, sdpa or eager"
        )
    num_tokens = batch["input_ids"].shape[1]
    if int(batch["cu_seq_lens_q"][-1]) != num_tokens:
        raise ValueError(
            f"{attn_implementation} attention needs the full sequence, not a slice of"
            f" {num_tokens} tokens; use flash attention with sequence parallelism"
        )
    if attn_implementation == "nemo_like":
        arguments["cu_seqlens"] = batch["cu_seq_lens_q"]
        arguments["max_seqlen"] = batch["max_length_q"]
    return arguments


def _padding_values(
    pad_token_id: int, ignore_index: int, pad_values: PadValues | None
) -> dict[str, int | float]:
    """Return the padding value of every per-token column except the position ids."""
    extra = pad_values or {}
    check_pad_values(extra)
    return {
        "input_ids": pad_token_id,
        "labels": ignore_index,
        "shift_labels": ignore_index,
        "attention_mask": 1,
        **extra,
    }


def _padding_begin(
    batch: Mapping[str, Any], last_begin: int, values: Mapping[str, int | float]
) -> int:
    """Return where the padding of `batch` begins: T, or `last_begin`, the begin of its last
    segment, if that holds nothing but padding values.
    """
    for name in values.keys() & batch.keys():
        if not bool((batch[name][0, last_begin:] == values[name]).all()):
            return batch["input_ids"].shape[1]
    return last_begin


def _padded_length(num_tokens: int, length: int | None, multiple: int, overflow: Overflow) -> int:
    """Return the length that a batch of `num_tokens` tokens is padded to."""
    if length is None or (num_tokens > length and overflow == "keep"):
        return round_up(num_tokens, multiple)
    if num_tokens > length and overflow == "error":
        raise ValueError(
            f"the packed batch has {num_tokens} tokens but is padded to {length}; pack fewer rows,"
            ' increase the length, or use overflow="round" (the next multiple of the length) or'
            ' overflow="keep" (no padding)'
        )
    return round_up(num_tokens, length)


def _check_columns(batch: Mapping[str, Any], values: Mapping[str, int | float]) -> int:
    """Return the number of tokens of `batch` after a check of its columns, which are [1, T]."""
    for name in ("input_ids", "position_ids"):
        if name not in batch:
            raise ValueError(f"the batch has no column {name}; a packed batch needs it")
    shape = tuple(batch["input_ids"].shape)
    for name, column in batch.items():
        is_column = isinstance(column, Tensor) and tuple(column.shape[:2]) == shape
        if name in values or name == "position_ids":
            if not isinstance(column, Tensor) or tuple(column.shape) != shape:
                found = list(column.shape) if isinstance(column, Tensor) else type(column).__name__
                raise ValueError(f"{name} must have the shape {list(shape)} of input_ids: {found}")
        elif is_column:
            raise ValueError(
                f"column {name} has no padding value; add it to pad_values or remove it"
            )
    if "cu_seq_lens_q" in batch and int(batch["cu_seq_lens_q"][-1]) != shape[1]:
        end = int(batch["cu_seq_lens_q"][-1])
        raise ValueError(
            f"cu_seq_lens_q ends at {end} but the batch has {shape[1]} tokens; pad and slice the"
            " full sequence only"
        )
    return shape[1]


def check_target(length: int | None, multiple: int, overflow: str) -> None:
    """Raise ValueError unless batches can be padded to `length` and `multiple`."""
    check_integer("the pad multiple", multiple, 1)
    if overflow not in get_args(Overflow):
        choices = ", ".join(get_args(Overflow))
        raise ValueError(f"overflow is {overflow!r}; choose one of {choices}")
    if length is None:
        return
    check_integer("the length to pad to", length, 1)
    if length % multiple != 0:
        raise ValueError(
            f"the length to pad to, {length}, is not a multiple of the pad multiple {multiple}; use"
            f" {round_up(length, multiple)}"
        )


def check_pad_values(pad_values: PadValues) -> None:
    """Raise ValueError if `pad_values` has a column with a padding value of its own."""
    reserved = sorted(pad_values.keys() & (COMPUTED_COLUMNS | _PADDED))
    if reserved:
        raise ValueError(
            f"pad_values must not contain {', '.join(reserved)}; use pad_token_id and ignore_index"
        )


def count_supervised_tokens(labels: Iterable[Tensor], ignore_index: int = IGNORE_INDEX) -> int:
    """Return the number of supervised tokens of `labels`, integer tensors of any shape, one per
    microbatch.

    Labels of `PackingCollator` give the same number shifted or not. For other unshifted labels, the
    label of the first token of each row must be ignored, as the loss never reads it.
    """
    return sum(int((tensor != ignore_index).sum()) for tensor in labels)


def sum_over_ranks(
    num_tokens: int, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> int:
    """Return the sum of `num_tokens` over the ranks of `group`, or of the default group for None.

    Every rank must call it. `device` is one that the backend of the group supports. Ranks that hold
    copies of the same tokens, as in tensor parallelism, must not be in one group. Raises ValueError
    without a process group.
    """
    if group is None and not dist.is_initialized():
        raise ValueError("no process group: call torch.distributed.init_process_group first")
    total = torch.tensor(num_tokens, dtype=torch.int64, device=device)
    dist.all_reduce(total, group=group)
    return int(total)


def token_mean_scale(global_tokens: int, world_size: int = 1) -> float:
    """Return the factor of a sum of token losses: `world_size / global_tokens`.

    The loss of a step is then the mean over its supervised tokens of all microbatches and ranks. It
    does not depend on how rows are distributed over them. A mean of the means of microbatches does:
    a token counts more in a shorter microbatch.

    `global_tokens` is the number of supervised tokens of the step over all microbatches and ranks.
    `world_size` is the number of ranks whose gradients are averaged, as DDP and FSDP do: the factor
    cancels their division. It is 1 where gradients are summed. Raises ValueError for numbers below
    1: a step without supervised tokens has no token mean, and every rank must skip it.
    """
    if global_tokens < 1:
        raise ValueError(
            f"the step has {global_tokens} supervised tokens and no token mean; skip it on every"
            " rank"
        )
    return check_integer("world_size", world_size, 1) / global_tokens
