"""The loader: every row once an epoch, no batch of two epochs, and a position to resume."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.config.errors import ConfigError
from nemo_like.data.jagged import EncodedRow, collate
from nemo_like.data.loader import LastBatch, RowLoader, num_batches
from nemo_like.data.row_order import RowOrder
from tests.data.lazy_rows import LazyRows


def loader_of(rows: Any, batch_size: int, encode: Any = str, **options: Any) -> RowLoader[str]:
    source = LazyRows(list(rows), encode)
    last_batch = options.pop("last_batch", "keep")
    order = RowOrder(len(source), source.digests, **options)
    return RowLoader(source, order, batch_size=batch_size, last_batch=last_batch)


@settings(deadline=None)
@given(
    num_rows=st.integers(1, 12),
    batch_size=st.integers(1, 30),
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.booleans(),
)
def test_every_epoch_visits_every_row_once_and_no_batch_has_rows_of_two(
    num_rows: int, batch_size: int, seed: int, shuffle: bool
) -> None:
    loader = loader_of(range(num_rows), batch_size, seed=seed, shuffle=shuffle)
    per_epoch = num_batches(num_rows, batch_size, "keep")
    for epoch in range(3):
        batches = [next(loader) for _ in range(per_epoch)]
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (per_epoch - 1)
        assert sorted(row for batch in batches for row in batch) == sorted(
            map(str, range(num_rows))
        )
        assert loader.epoch == epoch + 1


def test_ten_rows_with_batch_size_32_are_one_batch_of_ten_rows() -> None:
    loader = loader_of(range(10), 32)
    assert sorted(map(int, next(loader))) == list(range(10))
    assert loader.batches_left(1, np.ones(10, bool)) == 0


@settings(deadline=None)
@given(num_rows=st.integers(1, 12), batch_size=st.integers(1, 12), seed=st.integers(0, 9))
def test_drop_leaves_the_short_batch_of_each_epoch_out(
    num_rows: int, batch_size: int, seed: int
) -> None:
    loader = loader_of(range(num_rows), batch_size, seed=seed, last_batch="drop")
    if num_rows < batch_size:
        with pytest.raises(
            ConfigError, match=f"{num_rows} usable rows?, fewer than the {batch_size} of one batch"
        ):
            next(loader)
        return
    for epoch in range(3):
        batches = [next(loader) for _ in range(num_rows // batch_size)]
        assert all(len(batch) == batch_size for batch in batches)
        flat = [row for batch in batches for row in batch]
        assert len(set(flat)) == len(flat)
        assert loader.batches_left(epoch + 1, np.ones(num_rows, bool)) == 0


def test_order_example_without_shuffling() -> None:
    keep, drop = (
        loader_of(range(5), 2, shuffle=False, last_batch=last) for last in ("keep", "drop")
    )
    assert [next(keep) for _ in range(4)] == [["0", "1"], ["2", "3"], ["4"], ["0", "1"]]
    assert [next(drop) for _ in range(3)] == [["0", "1"], ["2", "3"], ["0", "1"]]


@settings(deadline=None)
@given(
    num_rows=st.integers(1, 20),
    batch_size=st.integers(1, 7),
    is_kept=st.lists(st.booleans(), min_size=20, max_size=20),
    last_batch=st.sampled_from(["keep", "drop"]),
    num_epochs=st.integers(1, 3),
)
def test_batches_left_counts_what_comes(
    num_rows: int, batch_size: int, is_kept: list[bool], last_batch: LastBatch, num_epochs: int
) -> None:
    kept = np.array(is_kept[:num_rows])
    loader = loader_of(
        range(num_rows),
        batch_size,
        lambda row: str(row) if kept[row] else None,
        last_batch=last_batch,
    )
    left = loader.batches_left(num_epochs, kept)
    assert left == num_epochs * num_batches(int(kept.sum()), batch_size, last_batch)
    visited: list[str] = []
    while left:
        visited += next(loader)
        left -= 1
        assert loader.batches_left(num_epochs, kept) == left
    if last_batch == "keep":
        assert sorted(visited) == sorted([str(row) for row in np.flatnonzero(kept)] * num_epochs)


def test_rows_without_an_encoding_are_left_out_and_counted() -> None:
    loader = loader_of(range(6), 2, lambda row: None if row in (1, 3) else str(row), shuffle=False)
    assert (next(loader), loader.num_dropped) == (["0", "2"], 1)
    assert (next(loader), loader.num_dropped) == (["4", "5"], 1)
    with pytest.raises(ConfigError, match=r"every row is dropped by policy\.oversize_rows=drop"):
        next(loader_of(range(6), 2, lambda row: None))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def first_epochs(seed: int) -> list[list[str]]:
        loader = loader_of(range(50), 50, seed=seed)
        return [next(loader) for _ in range(2)]

    assert first_epochs(1) == first_epochs(1)
    assert first_epochs(1)[0] != first_epochs(1)[1]
    assert first_epochs(1)[0] != first_epochs(2)[0]
    assert first_epochs(1)[0] != list(map(str, range(50)))


def test_the_order_is_a_uniform_shuffle() -> None:
    """Chi-square of where each of 8 rows stands over 4,000 epochs, and of the row that follows it:
    49 degrees of freedom.
    """
    order = RowOrder(8, seed=5)
    epochs = []
    for _ in range(4000):
        epochs.append(order.order)
        order.start_epoch()
    place = np.array([np.bincount(np.array(epochs)[:, at], minlength=8) for at in range(8)])
    assert ((place - 500) ** 2 / 500).sum() < 95


@settings(deadline=None, max_examples=40)
@given(num_batches_before=st.integers(0, 20), batch_size=st.integers(1, 9), shuffle=st.booleans())
def test_resume_goes_on_with_the_next_row(
    num_batches_before: int, batch_size: int, shuffle: bool
) -> None:
    straight = loader_of(range(7), batch_size, seed=3, shuffle=shuffle)
    for _ in range(num_batches_before):
        next(straight)
    resumed = loader_of(range(7), batch_size, seed=3, shuffle=shuffle)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert resumed.epoch == straight.epoch
    assert resumed.state_dict() == straight.state_dict()
    assert [next(resumed) for _ in range(5)] == [next(straight) for _ in range(5)]


@given(num_visited=st.integers(0, 9), change=st.sampled_from(["edit", "append", "remove"]))
def test_changed_rows_are_an_error_or_allowed(num_visited: int, change: str) -> None:
    before = loader_of(range(5), 1, seed=2)
    for _ in range(num_visited):
        next(before)
    state = json.loads(json.dumps(before.state_dict()))
    rows = {"edit": [0, 1, 9, 3, 4], "append": range(6), "remove": range(4)}[change]
    with pytest.raises(ConfigError, match=r"data\.allow_changed_rows=true"):
        loader_of(rows, 1, seed=2).load_state_dict(state)
    after = loader_of(rows, 1, seed=2)
    assert not after.load_state_dict(state, allow_changed_rows=True)
    assert after.epoch == num_visited // 5
    # With the same number of rows the position is kept; else the epoch begins again.
    visited = before.order.order[: num_visited % 5].tolist() if change == "edit" else []
    left = [str(row) for index, row in enumerate(rows) if index not in visited]
    assert sorted(next(after)[0] for _ in left) == sorted(left)
    assert after.epoch == num_visited // 5 + 1


def test_the_same_rows_continue_with_allow_changed_rows() -> None:
    before = loader_of(range(5), 2, seed=2)
    next(before)
    after = loader_of(range(5), 2, seed=2)
    assert after.load_state_dict(before.state_dict(), allow_changed_rows=True)
    assert next(after) == next(before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 4}, "seed=3, this run has seed=4"),
        ({"shuffle": False}, "data.shuffle=true, this run has data.shuffle=false"),
    ],
)
def test_resume_refuses_another_order(options: dict[str, Any], message: str) -> None:
    state = loader_of(range(7), 2, seed=3).state_dict()
    with pytest.raises(ConfigError, match=message):
        loader_of(range(7), 2, **{"seed": 3, **options}).load_state_dict(state)


def test_resume_refuses_the_state_of_another_version() -> None:
    state = {"epoch": 0, "cursor": 3, "num_rows": 7, "seed": 0, "shuffle": True}
    with pytest.raises(ConfigError, match="format of another version"):
        loader_of(range(7), 2).load_state_dict(state)


def test_the_state_does_not_grow_with_the_rows() -> None:
    order = RowOrder(200_000, seed=1)
    order.take(120_000)
    assert len(json.dumps(order.state_dict())) < 500


def test_rows_are_encoded_when_requested() -> None:
    encoded: list[int] = []

    def encode(row: int) -> int:
        encoded.append(row)
        return row * 10

    loader = RowLoader(LazyRows(range(100), encode), RowOrder(100, shuffle=False), batch_size=4)
    assert encoded == []
    assert next(loader) == [0, 10, 20, 30]
    assert encoded == [0, 1, 2, 3]
    assert loader.first_rows(2) == [0, 10]
    assert next(loader) == [40, 50, 60, 70]


def test_an_error_names_the_location_of_the_row() -> None:
    def encode(row: int) -> int:
        raise ConfigError("no assistant turn")

    with pytest.raises(ConfigError, match="row 0: no assistant turn"):
        next(loader_of(range(5), 2, encode, shuffle=False))


def test_a_loader_needs_rows_and_a_batch_size() -> None:
    with pytest.raises(ValueError, match="an order needs at least one row"):
        loader_of([], 2)
    with pytest.raises(ValueError, match="a batch size of at least 1, got 0"):
        loader_of(range(5), 0)


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


@settings(deadline=None)
@given(
    num_rows=st.integers(2, 20),
    batch_size=st.integers(1, 8),
    num_before=st.integers(0, 6),
    seed=st.integers(0, 9),
    last_batch=st.sampled_from(["keep", "drop"]),
    data=st.data(),
)
def test_a_bad_row_leaves_the_position_as_it_was(
    num_rows: int,
    batch_size: int,
    num_before: int,
    seed: int,
    last_batch: LastBatch,
    data: st.DataObject,
) -> None:
    bad = set(data.draw(st.sets(st.integers(0, num_rows - 1))))
    is_bad = False

    def encode(row: int) -> str:
        if is_bad and row in bad:
            raise ConfigError("bad")
        return str(row)

    batch_size = min(batch_size, num_rows)
    loader, other = (
        loader_of(range(num_rows), batch_size, encode, seed=seed, last_batch=last_batch)
        for _ in range(2)
    )
    for _ in range(num_before):
        assert next(loader) == next(other)
    is_bad = True
    before = json.dumps(loader.state_dict())
    with suppress(ConfigError):
        next(loader)
        return
    assert json.dumps(loader.state_dict()) == before
    is_bad = False
    for _ in range(5):
        assert next(loader) == next(other)
        assert loader.state_dict() == other.state_dict()


@settings(deadline=None)
@given(
    num_rows=st.integers(1, 12),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=10),
    stop=st.integers(0, 9),
    seed=st.integers(0, 9),
)
def test_batches_of_any_size_visit_every_row_once_and_resume_where_they_were(
    num_rows: int, sizes: list[int], stop: int, seed: int
) -> None:
    loader = loader_of(range(num_rows), 4, seed=seed)
    seen: list[tuple[int, str]] = []
    for index, size in enumerate(sizes):
        if index == stop:
            state = json.loads(json.dumps(loader.state_dict()))
            loader = loader_of(range(num_rows), 4, seed=seed)
            loader.load_state_dict(state)
        rows = loader.take(size)
        assert 1 <= len(rows) <= size
        seen += [(loader.batch_epoch, row) for row in rows]
    assert len(set(seen)) == len(seen), "no row twice in an epoch"
    for epoch in range(loader.epoch):
        assert sum(row_epoch == epoch for row_epoch, _ in seen) == num_rows


@pytest.mark.parametrize("last_batch", ["keep", "drop"])
def test_rows_in_an_epoch_are_never_those_of_the_next(last_batch: LastBatch) -> None:
    def encode(row: int) -> str | None:
        return str(row) if row < 6 else None

    loader = loader_of(range(8), 2, encode, shuffle=False, last_batch=last_batch)
    assert next(loader) == ["0", "1"]
    assert loader.take(1, in_epoch=True) == ["2"]
    assert loader.take(2, in_epoch=True) == ["3", "4"] and loader.epoch == 0
    # Two rows are wanted; the others of the epoch are dropped.
    assert loader.take(2, in_epoch=True) == ["5"] and (loader.epoch, loader.num_dropped) == (1, 2)
    assert next(loader) == ["0", "1"]
    loader.take(4, in_epoch=True)
    assert loader.take(1, in_epoch=True) == []
    assert loader.epoch == 2
