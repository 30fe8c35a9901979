"""Mixtures: shares at every prefix, exact resume, and the steps of an epoch."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.config.errors import ConfigError
from nemo_like.data.loader import LastBatch, RowLoader
from nemo_like.data.row_order import Curriculum, Mixture, RowOrder

WEIGHTS = st.lists(st.sampled_from([1, 2, 3, 5, 0.5, 0.3, 0.2, 0.01, 0.17, 40]), min_size=1)


class NumberedRows:
    """Rows that are their own index; those with a remainder of 0 by `drop_every` are dropped."""

    num_skipped = 0

    def __init__(self, num_rows: int, num_sources: int = 1, drop_every: int = 0) -> None:
        self.digests = ("x",) * num_sources
        self._num_rows = num_rows
        self._drop_every = drop_every

    def __len__(self) -> int:
        return self._num_rows

    def fetch(self, rows) -> list[int | None]:
        return [None if self.is_dropped(row) else row for row in rows]

    def is_dropped(self, row: int) -> bool:
        return self._drop_every > 0 and row % self._drop_every == 0

    def location(self, row: int) -> str:
        return f"row {row}"


def order_of(mixture: Mixture, **options: Any) -> RowOrder:
    digests = ["x"] * len(mixture.names)
    return RowOrder(sum(mixture.sizes), digests, mixture=mixture, **options)


def assert_shares(sources: np.ndarray, weights: list[float]) -> None:
    """After n rows the count of each source is its share of n, within half a row plus half of its
    share of the number of sources.
    """
    fractions = [Fraction(str(weight)) for weight in weights]
    total = sum(fractions)
    for source, fraction in enumerate(fractions):
        share = fraction / total
        bound = Fraction(1, 2) + share * len(weights) / 2
        counts = np.cumsum(sources == source).tolist()
        for num_rows, count in enumerate(counts, 1):
            assert abs(count - share * num_rows) <= bound, (source, num_rows)


def mixture_of(weights: list[float], size: int = 5) -> tuple[RowOrder, np.ndarray]:
    """Sources of `size` rows each, and the source of every row."""
    num_sources = len(weights)
    names = tuple(map(str, range(num_sources)))
    mixture = Mixture(names, (size,) * num_sources, tuple(weights))
    order = order_of(mixture)
    return order, np.repeat(np.arange(num_sources), size)


def take_over_epochs(order: RowOrder, num_rows: int) -> np.ndarray:
    parts = []
    while num_rows > 0:
        if order.num_left == 0:
            order.start_epoch()
        parts.append(order.take(num_rows))
        num_rows -= len(parts[-1])
    return np.concatenate(parts)


@settings(max_examples=60, deadline=None)
@given(
    weights=WEIGHTS.map(lambda weights: weights[:12]),
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=20),
)
def test_every_prefix_has_the_shares_of_the_weights(weights: list[float], sizes: list[int]) -> None:
    order, source_of = mixture_of(weights)
    rows = take_over_epochs(order, 900)
    assert_shares(source_of[rows], weights)
    # The sources do not depend on the numbers of rows that are taken at once.
    again, _ = mixture_of(weights)
    parts = [take_over_epochs(again, size) for size in sizes]
    assert np.concatenate(parts)[:900].tolist() == rows[: sum(sizes)].tolist()


def test_shares_are_within_one_percent_over_10_000_rows() -> None:
    weights = [0.1234567891, 1 / 3, 0.7000000001]
    order, source_of = mixture_of(weights)
    counts = np.bincount(source_of[take_over_epochs(order, 10_000)])
    assert np.allclose(counts / 10_000, np.array(weights) / sum(weights), rtol=0.01)


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_a_weight_that_is_no_share_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="a weight is a finite number above 0, got"):
        Mixture(("a", "b"), (1, 1), (1, weight))


def test_every_source_needs_a_row() -> None:
    with pytest.raises(ValueError, match="every source needs a row"):
        Mixture(("a", "b"), (2, 0), (1, 1))


def test_three_sources_over_10_000_rows_also_after_a_resume() -> None:
    """The shares 0.5, 0.3 and 0.2 hold for every prefix, and a resumed run has the same rows."""
    mixture = Mixture(("web", "code", "math"), (9000, 700, 300), (0.5, 0.3, 0.2))
    ends = np.cumsum(mixture.sizes)

    def loader() -> RowLoader[int]:
        rows = NumberedRows(10_000, 3)
        order = RowOrder(len(rows), rows.digests, seed=7, mixture=mixture)
        return RowLoader(rows, order, batch_size=32)

    run = loader()
    visited: list[int] = []
    states = []
    while len(visited) < 10_000:
        states.append(json.loads(json.dumps(run.state_dict())))
        visited += next(run)
    assert_shares(np.searchsorted(ends, visited, side="right"), [0.5, 0.3, 0.2])
    for step in (1, 100, 200, len(states) - 1):
        resumed = loader()
        resumed.load_state_dict(states[step])
        again = visited[: 32 * step]
        while len(again) < 10_000:
            again += next(resumed)
        assert again == visited


def test_a_source_visits_each_row_once_per_pass() -> None:
    mixture = Mixture(("large", "small"), (60, 10), (1, 1))
    order = order_of(mixture, seed=3)
    rows = order.take(70)
    small = rows[rows >= 60]
    assert len(small) == 35
    for start in range(0, 30, 10):
        assert sorted(small[start : start + 10]) == list(range(60, 70))
    # A new pass has a new order, and the large source continues in the next epoch.
    assert small[:10].tolist() != small[10:20].tolist()
    assert order.num_left == 0
    order.start_epoch()
    large = np.concatenate([rows[rows < 60], order.take(70)])
    large = large[large < 60]
    assert sorted(large[:60]) == list(range(60))


def test_left_and_order_do_not_advance() -> None:
    order = order_of(Mixture(("a", "b"), (15, 5), (1, 2)), seed=1)
    order.take(4)
    left = order.left
    assert len(left) == order.num_left == 16
    assert order.order[4:].tolist() == left.tolist()
    assert order.take(100).tolist() == left.tolist()


def test_rows_of_a_source_follow_the_curriculum() -> None:
    difficulty = np.array([3.0, 1.0, 2.0, 30.0, 10.0, 20.0])
    order = order_of(
        Mixture(("a", "b"), (3, 3), (1, 1)), curriculum=Curriculum("length", difficulty)
    )
    rows = order.take(6)
    assert rows[rows < 3].tolist() == [1, 2, 0]
    assert rows[rows >= 3].tolist() == [4, 5, 3]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    batch_size=st.integers(1, 12),
    num_taken=st.integers(0, 5),
    drop_every=st.sampled_from([0, 2, 3]),
    last_batch=st.sampled_from(["keep", "drop"]),
)
def test_the_number_of_batches_left_is_exact(
    sizes: list[int], batch_size: int, num_taken: int, drop_every: int, last_batch: LastBatch
) -> None:
    names = tuple(map(str, range(len(sizes))))
    mixture = Mixture(names, tuple(sizes), tuple(range(1, len(sizes) + 1)))
    rows = NumberedRows(sum(sizes), len(sizes), drop_every)
    is_kept = np.array([not rows.is_dropped(row) for row in range(sum(sizes))])
    order = RowOrder(len(rows), rows.digests, mixture=mixture)
    loader = RowLoader(rows, order, batch_size=batch_size, last_batch=last_batch)
    try:
        for _ in range(num_taken):
            next(loader)
        expected = loader.batches_left(3, is_kept)
        counted = 0
        while loader.epoch < 3:
            next(loader)
            counted += loader.batch_epoch < 3
    except ConfigError:
        # An epoch without a batch: too few rows for `last_batch="drop"`, or all are dropped.
        return
    assert counted == expected


def test_another_mixture_is_refused_on_resume() -> None:
    order = order_of(Mixture(("a", "b"), (3, 3), (1, 1)))
    order.take(3)
    state = order.state_dict()
    for names, weights in ((("a", "b"), (1, 2)), (("b", "a"), (1, 1)), (("a", "c"), (1, 1))):
        other = order_of(Mixture(names, (3, 3), weights))
        with pytest.raises(ConfigError, match=r"written with data\.train_weights .*, this run has"):
            other.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"written with data\.train_sets, this run has"):
        RowOrder(6).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"written with data\.train_path, this run has"):
        order.load_state_dict(RowOrder(6).state_dict())


def test_changed_rows_of_a_source_are_an_error_or_allowed() -> None:
    mixture = Mixture(("a", "b"), (3, 3), (1, 1))
    order = order_of(mixture, shuffle=False)
    assert order.take(4).tolist() == [0, 3, 1, 4]
    changed = ["x", "y"]
    resumed = RowOrder(6, changed, mixture=mixture, shuffle=False)
    with pytest.raises(ConfigError, match=r"resume: .*\(data\.train_sets\.b\)"):
        resumed.load_state_dict(order.state_dict())
    resumed = RowOrder(6, changed, mixture=mixture, shuffle=False)
    assert not resumed.load_state_dict(order.state_dict(), allow_changed_rows=True)
    assert resumed.take(2).tolist() == [2, 5]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    num_taken=st.integers(0, 30),
    num_rows=st.integers(0, 30),
    shuffle=st.booleans(),
    is_mixed=st.booleans(),
)
def test_upcoming_rows_are_those_that_come(
    sizes: list[int], num_taken: int, num_rows: int, shuffle: bool, is_mixed: bool
) -> None:
    mixture = None
    if is_mixed:
        names = tuple(map(str, range(len(sizes))))
        mixture = Mixture(names, tuple(sizes), tuple(range(1, len(sizes) + 1)))
    digests = ["x"] * (len(sizes) if is_mixed else 1)
    order = RowOrder(sum(sizes), digests, mixture=mixture, seed=1, shuffle=shuffle)
    for _ in range(num_taken):
        order.take(1)
        if order.num_left == 0:
            order.start_epoch()
    state = order.state_dict()
    upcoming = order.upcoming(num_rows).tolist()
    assert order.state_dict() == state
    visits = []
    while len(visits) < min(num_rows, 2 * sum(sizes)):
        if order.num_left == 0:
            order.start_epoch()
        visits += order.take(1).tolist()
    assert upcoming == list(dict.fromkeys(visits))
