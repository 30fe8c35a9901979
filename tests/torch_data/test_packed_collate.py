"""Packed batches hold the tokens of their rows, and padding and slices change nothing that is
trained.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from nemo_like.torch_data.packed_batch import (
    cu_seq_lens_from_position_ids,
    pad_packed_input,
    shift_packed_labels,
    slice_for_sequence_parallel,
    tail_padding_length,
)
from nemo_like.torch_data.packed_collate import PackingCollator, pack_length

Row = dict[str, Any]

PER_TOKEN = ("input_ids", "labels", "position_ids", "attention_mask")

lengths_of_rows = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def rows_of(lengths: list[int]) -> list[Row]:
    """Rows of distinct tokens, none of which is the padding token 0."""
    rows = []
    first = 1
    for length in lengths:
        tokens = list(range(first, first + length))
        rows.append({"input_ids": tokens, "labels": list(tokens)})
        first += length
    return rows


def values(batch: dict[str, Any], name: str) -> list[int]:
    """The only row of a column [1, T]."""
    (row,) = batch[name].tolist()
    return row


def bounds(batch: dict[str, Any]) -> list[int]:
    assert torch.equal(batch["cu_seq_lens_q"], batch["cu_seq_lens_k"])
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    return batch["cu_seq_lens_q"].tolist()


# --- Examples of the seed document and of the reference -------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "length", "position_ids", "cu_seq_lens"),
    [
        ([4, 2], 8, [0, 1, 2, 3, 0, 1, 0, 1], [0, 4, 6, 8]),
        ([3, 2, 2], 10, [0, 1, 2, 0, 1, 0, 1, 0, 1, 2], [0, 3, 5, 7, 10]),
        ([4, 1], pack_length(2, 4), [0, 1, 2, 3, 0, 0, 1, 2], [0, 4, 5, 8]),
    ],
)
def test_examples_of_the_seed_document(
    lengths: list[int], length: int, position_ids: list[int], cu_seq_lens: list[int]
) -> None:
    total = sum(lengths)
    packed = PackingCollator()(rows_of(lengths))
    padded = PackingCollator(pad_to_length=length)(rows_of(lengths))
    assert values(packed, "input_ids") == list(range(1, total + 1))
    assert values(packed, "position_ids") == position_ids[:total]
    assert bounds(packed) == cu_seq_lens[:-1]
    assert values(padded, "input_ids") == list(range(1, total + 1)) + [0] * (length - total)
    assert values(padded, "position_ids") == position_ids
    assert bounds(padded) == cu_seq_lens
    assert values(padded, "labels")[total:] == [-100] * (length - total)
    assert values(padded, "attention_mask") == [1] * length


def test_example_of_the_reference_with_sequence_parallelism() -> None:
    rows = [
        {"input_ids": [11, 12, 13], "labels": [2, 3, 4]},
        {"input_ids": [21, 22], "labels": [1, 2]},
    ]
    packed = PackingCollator()(rows)
    assert bounds(packed) == [0, 3, 5]
    assert packed["max_length_q"] == packed["max_length_k"] == 3
    assert values(packed, "position_ids") == [0, 1, 2, 0, 1]
    batch = PackingCollator(pad_to_length=8)(rows)
    assert values(batch, "input_ids") == [11, 12, 13, 21, 22, 0, 0, 0]
    # The reference keeps the first label of the first row, 2, which nothing predicts.
    assert values(batch, "labels") == [-100, 3, 4, -100, 2, -100, -100, -100]
    assert bounds(batch) == [0, 3, 5, 8]
    first, second = [slice_for_sequence_parallel(batch, rank, 2) for rank in range(2)]
    assert values(first, "input_ids") == [11, 12, 13, 21]
    assert values(first, "labels") == [3, 4, -100, 2]
    assert values(second, "input_ids") == [22, 0, 0, 0]
    assert values(second, "labels") == [-100] * 4
    assert bounds(first) == bounds(second) == [0, 3, 5, 8]


# --- Properties of packing and padding ------------------------------------------------------------


@given(
    lengths=lengths_of_rows,
    multiple=st.integers(1, 16),
    slack=st.one_of(st.none(), st.integers(0, 4)),
    shift_labels=st.booleans(),
)
def test_a_batch_holds_the_tokens_of_its_rows_and_one_segment_of_padding(
    lengths: list[int], multiple: int, slack: int | None, shift_labels: bool
) -> None:
    rows = rows_of(lengths)
    total = sum(lengths)
    length = None if slack is None else (-(-total // multiple) + slack) * multiple
    batch = PackingCollator(length, multiple, shift_labels=shift_labels)(rows)
    num_tokens = batch["input_ids"].shape[1]
    assert num_tokens == (length or -(-total // multiple) * multiple)
    tokens = [token for row in rows for token in row["input_ids"]]
    assert values(batch, "input_ids") == tokens + [0] * (num_tokens - total)
    ends = np.cumsum([0, *lengths]).tolist()
    assert bounds(batch) == ends + [num_tokens] * (num_tokens > total)
    assert (batch["cu_seq_lens_q"].diff() > 0).all()
    segments = batch["cu_seq_lens_q"].diff().tolist()
    assert values(batch, "position_ids") == [i for size in segments for i in range(size)]
    assert batch["max_length_q"] == batch["max_length_k"] == max(segments)
    assert torch.equal(cu_seq_lens_from_position_ids(batch["position_ids"]), batch["cu_seq_lens_q"])
    # All labels except the first one of each row, at their own position or one earlier.
    expected = [-100] * num_tokens
    for begin, size in zip(ends, lengths, strict=False):
        for position in range(begin + 1, begin + size):
            expected[position - shift_labels] = tokens[position]
    assert values(batch, "labels") == expected
    for name in PER_TOKEN:
        assert batch[name].shape == (1, num_tokens) and batch[name].dtype == torch.int64


@given(lengths=lengths_of_rows, first=st.integers(1, 9), second=st.integers(1, 9))
def test_padding_twice_is_one_segment(lengths: list[int], first: int, second: int) -> None:
    batch = PackingCollator()(rows_of(lengths))
    total = sum(lengths)
    twice = pad_packed_input(pad_packed_input(batch, total + first), total + first + second)
    once = pad_packed_input(batch, total + first + second)
    assert twice.keys() == once.keys()
    for name, column in once.items():
        assert torch.equal(torch.as_tensor(twice[name]), torch.as_tensor(column))


def test_a_batch_without_room_for_padding_keeps_its_segments() -> None:
    batch = PackingCollator(pad_to_length=6)(rows_of([4, 2]))
    assert bounds(batch) == [0, 4, 6]


@pytest.mark.parametrize("kind", ["tensor", "array", "read_only", "list", "uint16"])
def test_rows_are_not_modified_and_may_have_any_array_type(kind: str) -> None:
    rows = rows_of([5, 3])
    expected = PackingCollator()(rows)
    for row in rows:
        for name, tokens in row.items():
            if kind == "tensor":
                row[name] = torch.tensor(tokens, dtype=torch.int32)
            elif kind == "uint16":
                row[name] = np.asarray(tokens, np.uint16)
            elif kind != "list":
                row[name] = np.asarray(tokens)
                row[name].flags.writeable = kind == "array"
    before = copy.deepcopy(rows)
    batch = PackingCollator(shift_labels=True, pad_to_length=9)(rows)
    slice_for_sequence_parallel(batch, 0, 2)
    for name in PER_TOKEN:
        assert torch.equal(PackingCollator()(rows)[name], expected[name])
    for row, old in zip(rows, before, strict=True):
        assert all(np.array_equal(row[name], old[name]) for name in old)


def test_a_batch_of_one_tensor_does_not_share_its_memory() -> None:
    row = {"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([1, 2])}
    PackingCollator()([row])["input_ids"].zero_()
    assert row["input_ids"].tolist() == [1, 2] and row["labels"].tolist() == [1, 2]


@given(lengths=lengths_of_rows, left=st.integers(0, 3), right=st.integers(0, 3))
def test_padding_of_rows_is_removed(lengths: list[int], left: int, right: int) -> None:
    rows = rows_of(lengths)
    padded_rows = []
    for row in rows:
        tokens = [0] * left + row["input_ids"] + [0] * right
        mask = [0] * left + [1] * len(row["input_ids"]) + [0] * right
        padded_rows.append({"input_ids": tokens, "labels": tokens, "attention_mask": mask})
    batch = PackingCollator()(padded_rows)
    expected = PackingCollator()(rows)
    for name in PER_TOKEN:
        assert torch.equal(batch[name], expected[name])


def test_additional_columns_are_packed_padded_and_sliced() -> None:
    collator = PackingCollator(
        pad_to_length=6,
        pad_token_id=9,
        ignore_index=-1,
        pad_values={"weight": 0.5, "type": 7},
        with_attention_mask=False,
    )
    row = {"input_ids": [1, 2], "labels": [1, 2], "weight": [0.25, 0.75], "type": np.array([1, 0])}
    batch = collator([row, row])
    assert "attention_mask" not in batch
    assert values(batch, "weight") == [0.25, 0.75, 0.25, 0.75, 0.5, 0.5]
    assert values(batch, "type") == [1, 0, 1, 0, 7, 7]
    assert values(batch, "labels") == [-1, 2, -1, 2, -1, -1]
    assert values(batch, "input_ids") == [1, 2, 1, 2, 9, 9]
    images = torch.zeros(3, 5)
    share = slice_for_sequence_parallel(
        batch | {"pixel_values": images},
        rank=1,
        size=4,
        pad_token_id=9,
        ignore_index=-1,
        pad_values=collator.pad_values,
    )
    assert values(share, "type") == [1, 0]
    assert values(share, "labels") == [2, -1]
    assert share["pixel_values"] is images
    assert bounds(share) == [0, 2, 4, 8]


@pytest.mark.parametrize("shift_labels", [False, True])
@pytest.mark.parametrize("pad_to_length", [None, 12])
def test_a_dummy_has_the_columns_of_a_batch_and_no_supervised_token(
    pad_to_length: int | None, shift_labels: bool
) -> None:
    collator = PackingCollator(pad_to_length, 4, pad_values={"type": 7}, shift_labels=shift_labels)
    dummy = collator.dummy()
    batch = collator([row | {"type": row["labels"]} for row in rows_of([3, 2])])
    assert dummy.keys() == batch.keys()
    assert bounds(dummy) == [0, pad_to_length or 4]
    assert (dummy["labels"] == -100).all()
    assert all(dummy[name].dtype == batch[name].dtype for name in (*PER_TOKEN, "type"))


def test_a_dataloader_with_workers_uses_the_collator() -> None:
    rows = rows_of([3, 1, 4, 1, 5])
    loader = DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=2,
        num_workers=1,
        collate_fn=PackingCollator(pad_multiple=4),
    )
    batches = list(loader)
    assert [bounds(batch) for batch in batches] == [[0, 3, 4], [0, 4, 5, 8], [0, 5, 8]]


# --- Batches longer than the length ---------------------------------------------------------------


def test_a_batch_above_the_length_follows_the_overflow_policy() -> None:
    rows = rows_of([9, 4])
    with pytest.raises(ValueError, match=r"13 tokens but is padded to 8.*overflow"):
        PackingCollator(pad_to_length=8)(rows)
    kept = PackingCollator(pad_to_length=8, overflow="keep")(rows)
    assert bounds(kept) == [0, 9, 13]
    kept = PackingCollator(pad_to_length=8, pad_multiple=2, overflow="keep")(rows)
    assert bounds(kept) == [0, 9, 13, 14]
    rounded = PackingCollator(pad_to_length=8, pad_multiple=2, overflow="round")(rows)
    assert bounds(rounded) == [0, 9, 13, 16]


# --- Labels and sequence parallelism --------------------------------------------------------------


@given(
    lengths=lengths_of_rows,
    size=st.integers(1, 8),
    slack=st.integers(0, 10),
    shift_labels=st.booleans(),
)
def test_slices_of_all_ranks_are_the_full_sequence(
    lengths: list[int], size: int, slack: int, shift_labels: bool
) -> None:
    total = sum(lengths)
    batch = PackingCollator(total + slack, shift_labels=shift_labels)(rows_of(lengths))
    shares = [slice_for_sequence_parallel(batch, rank, size) for rank in range(size)]
    full = pad_packed_input(shift_packed_labels(batch), multiple=size)
    num_tokens = full["input_ids"].shape[1]
    assert num_tokens == -(-(total + slack) // size) * size
    for name in ("input_ids", "labels", "shift_labels", "position_ids"):
        joined = torch.cat([share[name] for share in shares], dim=1)
        assert torch.equal(joined, full[name])
        assert all(share[name].shape == (1, num_tokens // size) for share in shares)
    padding = [num_tokens] * (num_tokens > total)
    for share in shares:
        assert bounds(share) == [*np.cumsum([0, *lengths]).tolist(), *padding]
        assert share["max_length_q"] == full["max_length_q"]
        assert values(share, "attention_mask") == [1] * num_tokens
    # As many supervised tokens with and without sequence parallelism.
    counts = [int((share["labels"] != -100).sum()) for share in shares]
    unshifted = PackingCollator()(rows_of(lengths))["labels"]
    assert sum(counts) == int((unshifted != -100).sum()) == total - len(lengths)


def test_labels_are_shifted_once_and_not_across_rows() -> None:
    position_ids = torch.tensor([[0, 1, 2, 0, 1]])
    labels = torch.tensor([[1, 2, 3, 4, 5]])
    batch = {"input_ids": labels, "labels": labels, "position_ids": position_ids}
    shifted = shift_packed_labels(batch)
    assert values(shifted, "labels") == [2, 3, -100, 5, -100]
    assert shifted["shift_labels"] is shifted["labels"]
    assert shift_packed_labels(shifted)["labels"] is shifted["labels"]
    assert values(batch, "labels") == [1, 2, 3, 4, 5]


def test_a_batch_without_labels_can_be_padded_and_sliced() -> None:
    batch = PackingCollator()(rows_of([3, 2]))
    del batch["labels"]
    shares = [slice_for_sequence_parallel(batch, rank, 2) for rank in range(2)]
    assert [values(share, "input_ids") for share in shares] == [[1, 2, 3], [4, 5, 0]]
    assert "labels" not in shares[0]
    with pytest.raises(ValueError, match="no labels"):
        shift_packed_labels(batch)


# --- Errors ---------------------------------------------------------------------------------------

ROW = {"input_ids": [1, 2], "labels": [1, 2]}


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([], "at least one row"),
        ([ROW, {"input_ids": [], "labels": []}], "row 1 has no tokens"),
        ([ROW | {"attention_mask": [0, 0]}], "row 0 has no tokens"),
        ([{"input_ids": [1, 2, 3], "labels": [1, 2, 3], "attention_mask": [1, 0, 1]}], "between"),
        ([{"input_ids": [1, 2]}], "no column labels"),
        ([ROW | {"labels": [1]}], "different lengths.*'labels': 1"),
        ([ROW | {"attention_mask": [1]}], "different lengths.*'attention_mask': 1"),
        ([ROW | {"reward": [1, 2]}], "unknown columns reward.*pad_values"),
        ([ROW | {"position_ids": [0, 1]}], "remove position_ids from the rows"),
        ([ROW | {"input_ids": [[1], [2]]}], r"one dimension, not the shape \[2, 1\]"),
        ([ROW | {"input_ids": [1.0, 2.0]}], "input_ids of row 0 must be integers"),
        ([ROW | {"input_ids": ["a", "b"]}], "must be numbers"),
    ],
)
def test_invalid_rows_are_refused(rows: list[Row], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PackingCollator()(rows)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"pad_to_length": 0}, "length to pad to is 0"),
        ({"pad_multiple": 0}, "pad multiple is 0"),
        ({"pad_to_length": 10, "pad_multiple": 4}, "use 12"),
        ({"overflow": "drop"}, "'drop'; choose one of error, keep, round"),
        ({"pad_values": {"labels": 0}}, "must not contain labels"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PackingCollator(**settings)


def test_invalid_batches_are_refused() -> None:
    batch = PackingCollator()(rows_of([3, 3]))
    with pytest.raises(ValueError, match="rank is 2"):
        slice_for_sequence_parallel(batch, 2, 2)
    with pytest.raises(ValueError, match="size is 0"):
        slice_for_sequence_parallel(batch, 0, 0)
    share = slice_for_sequence_parallel(batch, 1, 2)
    del share["attention_mask"]
    with pytest.raises(ValueError, match="ends at 6 but the batch has 3 tokens"):
        pad_packed_input(share, 8)
    with pytest.raises(ValueError, match=r"begins with 2.*before slicing"):
        cu_seq_lens_from_position_ids(torch.tensor([[2, 0, 1]]))
    with pytest.raises(ValueError, match="column reward has no padding value"):
        pad_packed_input(batch | {"reward": torch.zeros(1, 6)}, 8)
    with pytest.raises(ValueError, match="labels must have the shape"):
        pad_packed_input(batch | {"labels": torch.zeros(1, 5)}, 8)
    with pytest.raises(ValueError, match="no column position_ids"):
        pad_packed_input({"input_ids": batch["input_ids"]}, 8)
    with pytest.raises(ValueError, match=r"shape \[1, T\]"):
        cu_seq_lens_from_position_ids(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="max_seq_len is 0"):
        pack_length(2, 0)


@given(lengths_of_rows, st.integers(0, 20))
def test_the_padding_at_the_end_is_counted(lengths: list[int], padding: int) -> None:
    batch = PackingCollator(pad_to_length=sum(lengths) + padding)(rows_of(lengths))
    assert tail_padding_length(batch) == padding
    shifted = PackingCollator(sum(lengths) + padding, shift_labels=True)(rows_of(lengths))
    assert tail_padding_length(shifted) == padding


def test_a_class_label_of_a_row_is_at_its_last_token() -> None:
    """Labels of sequence classification: one class per row, which stays at its position."""
    rows = [
        {"input_ids": [7] * length, "labels": [-100] * (length - 1) + [label]}
        for length, label in ((3, 1), (2, 0), (5, 4))
    ]
    batch = PackingCollator(pad_to_length=12)(rows)
    positions = [row for row, label in enumerate(values(batch, "labels")) if label != -100]
    assert positions == [end - 1 for end in batch["cu_seq_lens_q"].tolist()[1:4]]
    assert [values(batch, "labels")[position] for position in positions] == [1, 0, 4]
