"""Batches whose rows are partly deferred: every row once an epoch, and a position to resume."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.config.errors import ConfigError
from nemo_like.data.loader import LastBatch, RowLoader, num_batches
from nemo_like.data.oversampling import OversamplingLoader
from nemo_like.data.row_order import RowOrder
from tests.data.lazy_rows import LazyRows


@dataclass
class Case:
    """A data set, a loader's options, and what ends first."""

    num_rows: int
    batch_size: int
    num_sampled: int
    last_batch: LastBatch
    dropped: frozenset[int] = frozenset()
    seed: int = 0
    chosen: dict[int, list[int]] = field(default_factory=dict)

    def loader(self) -> OversamplingLoader[str]:
        def encode(row: int) -> str | None:
            return None if row in self.dropped else str(row)

        rows: Any = LazyRows(list(range(self.num_rows)), encode)
        return OversamplingLoader(
            rows,
            RowOrder(self.num_rows, rows.digests, seed=self.seed),
            batch_size=self.batch_size,
            num_sampled=self.num_sampled,
            last_batch=self.last_batch,
        )

    def train(self, loader: OversamplingLoader[str], step: int) -> tuple[list[int], list[int]]:
        """The rows of a step that are trained, and those that are deferred."""
        batch = next(loader)
        rows = list(loader.batch_rows)
        assert batch == list(map(str, rows))
        rng = np.random.default_rng((self.seed, step))
        kept = sorted(rng.permutation(len(rows))[: loader.num_wanted].tolist())
        loader.keep(kept)
        assert list(loader.batch_rows) == [rows[index] for index in kept]
        return list(loader.batch_rows), [row for row in rows if row not in loader.batch_rows]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_rows = draw(st.integers(1, 25))
    batch_size = draw(st.integers(1, 8))
    last_batch: LastBatch = draw(st.sampled_from(["keep", "drop"]))
    dropped = draw(st.frozensets(st.integers(0, num_rows - 1), max_size=num_rows - 1))
    if last_batch == "drop":
        batch_size = min(batch_size, num_rows - len(dropped))
    num_sampled = batch_size + draw(st.integers(1, 9))
    return Case(num_rows, batch_size, num_sampled, last_batch, dropped, draw(st.integers(0, 2**32)))


@settings(deadline=None)
@given(cases())
def test_an_epoch_trains_each_row_once_and_defers_it_at_most_once(case: Case) -> None:
    loader = case.loader()
    usable = set(range(case.num_rows)) - case.dropped
    per_epoch = num_batches(len(usable), case.batch_size, case.last_batch)
    step = 0
    for epoch in range(3):
        trained: list[int] = []
        deferred: Counter[int] = Counter()
        for index in range(per_epoch):
            rows, others = case.train(loader, step)
            assert loader.batch_epoch == epoch
            assert len(rows) + len(others) <= case.num_sampled
            is_rest = index == per_epoch - 1 and case.last_batch == "keep"
            assert len(rows) == case.batch_size or (is_rest and rows and not others)
            trained += rows
            deferred.update(others)
            step += 1
        assert len(set(trained)) == len(trained)
        assert max(deferred.values(), default=0) <= 1
        if case.last_batch == "keep":
            assert set(trained) == usable
            assert not loader.deferred.rows
        else:
            assert set(trained) | set(loader.deferred.rows) <= usable


@settings(deadline=None)
@given(cases(), st.integers(0, 12))
def test_a_resumed_loader_continues_with_the_same_batches(case: Case, stop: int) -> None:
    straight = case.loader()
    for step in range(stop):
        case.train(straight, step)
    state = json.loads(json.dumps(straight.position.state_dict()))
    resumed = case.loader()
    assert resumed.load_state_dict(state)
    for step in range(stop, stop + 12):
        assert case.train(resumed, step) == case.train(straight, step)
        assert resumed.position.state_dict() == straight.position.state_dict()


def test_deferred_rows_are_the_next_batch_when_they_fill_one() -> None:
    """By hand: 7 rows in batches of 2 of 3, the first of each batch is cancelled."""
    rows: Any = LazyRows(list(range(7)), str)
    order = RowOrder(7, rows.digests, shuffle=False)
    loader = OversamplingLoader(rows, order, batch_size=2, num_sampled=3)
    trained = []
    for _ in range(5):
        batch = next(loader)
        first = len(batch) - loader.num_wanted
        loader.keep(range(first, len(batch)))
        trained.append((batch, list(loader.batch_rows), loader.batch_epoch))
    assert trained == [
        (["0", "1", "2"], [1, 2], 0),
        (["3", "4", "5"], [4, 5], 0),
        (["0", "3"], [0, 3], 0),
        (["6"], [6], 0),
        (["0", "1", "2"], [1, 2], 1),
    ]


def test_a_bad_row_leaves_the_position_and_the_deferred_rows() -> None:
    def encode(row: int) -> str:
        if row == 4:
            raise ConfigError("bad")
        return str(row)

    rows: Any = LazyRows(list(range(6)), encode)
    order = RowOrder(6, rows.digests, shuffle=False)
    loader = OversamplingLoader(rows, order, batch_size=2, num_sampled=3)
    next(loader)
    loader.keep([0, 2])
    before = loader.state_dict()
    for _ in range(2):
        with pytest.raises(ConfigError, match="row 4: bad"):
            next(loader)
        assert loader.state_dict() == before
    assert before["deferred"] == {"rows": [1], "probabilities": [1.0], "epoch": 0}


@pytest.mark.parametrize("dropped", [frozenset({0, 1, 2}), frozenset({1})])
def test_rows_that_fill_no_batch_are_an_error(dropped: frozenset[int]) -> None:
    loader = Case(3, 3, 4, "drop", dropped).loader()
    with pytest.raises(ConfigError, match=r"every row is dropped|has 2 usable rows, fewer than"):
        next(loader)


def test_deferred_rows_need_a_loader_that_has_them(caplog: pytest.LogCaptureFixture) -> None:
    case = Case(9, 3, 4, "keep")
    loader = case.loader()
    case.train(loader, 0)
    state = loader.state_dict()
    plain = RowLoader(loader.rows, loader.order.copy(), batch_size=3)
    with pytest.raises(ConfigError, match=r"1 prompts .* grpo.oversampling_factor above 1"):
        plain.load_state_dict(state)
    other = Case(8, 3, 4, "keep").loader()
    assert not other.load_state_dict(state, allow_changed_rows=True)
    assert not other.deferred.rows
    assert "1 deferred rows are left out" in caplog.text
    # Without one it continues, in both directions.
    assert plain.load_state_dict(case.loader().state_dict())
    assert case.loader().load_state_dict(plain.state_dict())
