"""The loader: every row once an epoch, never lost at its end, and resumed at the very next row."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.config.errors import ConfigError
from nemo_like.data.collate import EncodedRow, collate
from nemo_like.data.loader import RowLoader, ShuffledIndices


@given(num_rows=st.integers(1, 12), batch_size=st.integers(1, 30), seed=st.integers(0, 2**64 - 1), shuffle=st.booleans())
def test_every_epoch_visits_every_row_once(num_rows: int, batch_size: int, seed: int, shuffle: bool) -> None:
    batches = ShuffledIndices(num_rows, batch_size, seed=seed, shuffle=shuffle)
    visited = [next(batches) for _ in range(3 * num_rows)]
    assert all(len(batch) == batch_size for batch in visited)
    flat = np.concatenate(visited)
    for epoch in range(len(flat) // num_rows):
        assert sorted(flat[epoch * num_rows : (epoch + 1) * num_rows].tolist()) == list(range(num_rows))
    assert batches.epoch == len(flat) // num_rows


def test_order_example_without_shuffling() -> None:
    batches = ShuffledIndices(5, 2, shuffle=False)
    assert [next(batches).tolist() for _ in range(4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]
    assert batches.batches_per_epoch == 3


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def first_epochs(seed: int) -> list[list[int]]:
        batches = ShuffledIndices(50, 50, seed=seed)
        return [next(batches).tolist() for _ in range(2)]

    assert first_epochs(1) == first_epochs(1)
    assert first_epochs(1)[0] != first_epochs(1)[1]
    assert first_epochs(1)[0] != first_epochs(2)[0]
    assert first_epochs(1)[0] != list(range(50))


def test_the_global_generator_is_left_alone() -> None:
    np.random.seed(0)
    before = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    next(ShuffledIndices(50, 10))
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index, union-attr]


@given(num_batches=st.integers(0, 20), batch_size=st.integers(1, 9))
def test_resume_goes_on_with_the_next_row(num_batches: int, batch_size: int) -> None:
    straight = RowLoader(range(7), str, batch_size=batch_size, seed=3)
    for _ in range(num_batches):
        next(straight)
    resumed = RowLoader(range(7), str, batch_size=batch_size, seed=3)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert [next(resumed) for _ in range(5)] == [next(straight) for _ in range(5)]
    assert resumed.epoch == straight.epoch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": range(8)}, "num_rows=7, this run has 8: the data file or data.max_train_rows changed"),
        ({"seed": 4}, "seed=3, this run has 4"),
        ({"shuffle": False}, "shuffle=True, this run has False: data.shuffle changed"),
    ],
)
def test_resume_refuses_other_data(arguments: dict[str, Any], message: str) -> None:
    state = RowLoader(range(7), str, batch_size=2, seed=3).state_dict()
    other = {"rows": range(7), "seed": 3, **arguments}
    with pytest.raises(ConfigError, match=message):
        RowLoader(other.pop("rows"), str, batch_size=2, **other).load_state_dict(state)


def test_rows_are_encoded_when_asked_for() -> None:
    encoded: list[int] = []

    def encode(row: int) -> int:
        encoded.append(row)
        return row * 10

    loader = RowLoader(range(100), encode, batch_size=4, shuffle=False)
    assert encoded == []
    assert next(loader) == [0, 10, 20, 30]
    assert encoded == [0, 1, 2, 3]


def test_one_pass_is_every_row_in_order_and_moves_nothing() -> None:
    loader = RowLoader(range(5), str, batch_size=2, seed=1)
    state = loader.state_dict()
    assert list(loader.one_pass()) == [["0", "1"], ["2", "3"], ["4"]]
    assert loader.state_dict() == state
    assert (len(loader), loader.batches_per_epoch) == (5, 3)


def test_an_error_says_where_the_row_stands() -> None:
    def encode(row: int) -> int:
        raise ConfigError("no assistant turn")

    with pytest.raises(ConfigError, match="row 0: no assistant turn"):
        next(RowLoader(range(5), encode, batch_size=2, shuffle=False))


def test_a_loader_needs_rows() -> None:
    with pytest.raises(ValueError, match="got 0 rows and batch_size=2"):
        RowLoader([], str, batch_size=2)


def test_collate_example() -> None:
    rows = [
        EncodedRow(np.array([5, 6, 7], np.int32), np.array([0, 1, 1], np.uint8)),
        EncodedRow(np.array([8, 9], np.int32), np.array([0, 1], np.uint8)),
    ]
    columns = collate(rows)
    assert [row.tolist() for row in columns["input_ids"]] == [[5, 6, 7], [8, 9]]
    assert [row.tolist() for row in columns["token_mask"]] == [[0, 1, 1], [0, 1]]
    assert columns["length"].tolist() == [3, 2]  # type: ignore[union-attr]
    assert columns["row_mask"].tolist() == [True, True]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="at least one row"):
        collate([])
