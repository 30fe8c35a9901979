"""The loader of planned steps: every row once per epoch, exact resume, changed worlds and files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.config.errors import ConfigError
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.row_order import RowOrder
from nemo_like.data.streaming.planner import RowNumbers, StreamLoader
from nemo_like.data.streaming.spec import StreamSpec

CAPACITY = 40


class LengthRows:
    """Rows that are their own length; None where a row is dropped."""

    num_skipped = 0

    def __init__(self, lengths: Sequence[int | None]) -> None:
        self.lengths = list(lengths)
        self.digests = (str(self.lengths),)

    def __len__(self) -> int:
        return len(self.lengths)

    def fetch(self, rows: Sequence[int]) -> list[int | None]:
        return [self.lengths[row] for row in rows]

    def location(self, row: int) -> str:
        return f"rows.jsonl:{row + 1}"


def loader(
    rows: LengthRows,
    *,
    ranks: int = 2,
    tail: str = "emit",
    num_epochs: int | None = 2,
    selection: str = "best_fit",
    microbatches: int = 2,
    window_rows: int = 6,
) -> StreamLoader[int]:
    spec = StreamSpec(
        plan=PlanSpec(max_tokens=CAPACITY, num_ranks=ranks),
        selection=selection,  # pyright: ignore[reportArgumentType]
        microbatches_per_step=microbatches,
        window_rows=window_rows,
        tail=tail,  # pyright: ignore[reportArgumentType]
    )
    numbers = lambda length: RowNumbers(length, length)  # noqa: E731
    return StreamLoader(
        rows, RowOrder(len(rows), rows.digests, seed=3), spec, numbers, num_epochs=num_epochs
    )


def drain(stream: StreamLoader[int], max_steps: int = 10_000) -> list[tuple[int, ...]]:
    """The row ids of every step up to the end."""
    steps = []
    for rows in stream:
        assert [stream.rows.fetch([row])[0] for row in stream.planned.rows] == rows
        steps.append(stream.planned.rows)
        if len(steps) == max_steps:
            break
    return steps


lengths_strategy = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60)


@settings(max_examples=80, deadline=None)
@given(
    lengths=lengths_strategy,
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 3),
    window_rows=st.integers(1, 12),
    selection=st.sampled_from(["best_fit", "first_fit", "in_order", "prefer_closest"]),
)
def test_every_epoch_has_each_row_once(
    lengths: list[int], ranks: int, microbatches: int, window_rows: int, selection: str
) -> None:
    stream = loader(
        LengthRows(lengths),
        ranks=ranks,
        microbatches=microbatches,
        window_rows=window_rows,
        selection=selection,
    )
    rows = [row for step in drain(stream) for row in step]
    assert sorted(rows[: len(lengths)]) == list(range(len(lengths)))
    assert sorted(rows[len(lengths) :]) == list(range(len(lengths)))
    assert stream.is_finished()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, CAPACITY), min_size=8, max_size=60),
    tail=st.sampled_from(["emit", "drop", "wrap"]),
    stop=st.integers(0, 30),
)
def test_a_resumed_stream_equals_the_uninterrupted_one(
    lengths: list[int], tail: str, stop: int
) -> None:
    def new() -> StreamLoader[int]:
        num_epochs = None if tail == "wrap" else 3
        return loader(LengthRows(lengths), tail=tail, num_epochs=num_epochs, microbatches=1)

    if tail == "drop" and sum(lengths) < 4 * CAPACITY:
        return
    complete = drain(new(), 40)
    first = new()
    begun = drain(first, min(stop, len(complete) - 1)) if stop else []
    state = json.loads(json.dumps(first.state_dict()))
    second = new()
    second.load_state_dict(state)
    assert begun + drain(second, 40 - len(begun)) == complete


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_strategy, before=st.integers(1, 4), after=st.integers(1, 4))
def test_another_number_of_ranks_continues_without_losing_or_repeating_rows(
    lengths: list[int], before: int, after: int
) -> None:
    first = loader(LengthRows(lengths), ranks=before, num_epochs=1)
    rows = [row for step in drain(first, 2) for row in step]
    second = loader(LengthRows(lengths), ranks=after, num_epochs=1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rows += [row for step in drain(second) for row in step]
    assert sorted(rows) == list(range(len(lengths)))


@settings(max_examples=40, deadline=None)
@given(lengths=lengths_strategy, window_rows=st.integers(1, 100))
def test_wrapped_epochs_never_put_a_row_twice_into_a_microbatch(
    lengths: list[int], window_rows: int
) -> None:
    stream = loader(
        LengthRows(lengths), tail="wrap", num_epochs=None, window_rows=window_rows, ranks=1
    )
    counts = np.zeros(len(lengths), dtype=int)
    for _ in range(12):
        next(stream)
        plan = stream.planned.plan
        assert plan.metrics()["packing/num_dummies"] == 0
        for microbatch in plan.ranks[0]:
            ids = [stream.planned.rows[row] for row in microbatch.rows]
            assert len(set(ids)) == len(ids)
            counts[ids] += 1
    # A row waits at most one pass behind the others.
    assert counts.max() - counts.min() <= 2


def test_dropped_tail_is_counted_and_the_end_is_known() -> None:
    # Ten rows of a full microbatch each, four microbatches per step.
    stream = loader(LengthRows([CAPACITY] * 10), tail="drop", num_epochs=1)
    next(stream)
    assert not stream.is_finished()
    next(stream)
    assert stream.is_finished()
    with pytest.raises(StopIteration):
        next(stream)


@pytest.mark.parametrize("tail", ["emit", "drop"])
def test_the_end_is_known_after_every_step(tail: str) -> None:
    lengths = np.random.default_rng(0).integers(1, CAPACITY, 200).tolist()
    stream = loader(LengthRows(lengths), tail=tail, num_epochs=2)
    ends = []
    while True:
        try:
            next(stream)
        except StopIteration:
            break
        ends.append(stream.is_finished())
    assert ends[-1]
    assert not any(ends[:-1])


def test_rows_without_encoding_are_left_out() -> None:
    stream = loader(LengthRows([5, None, 7, None]), num_epochs=1)
    kept = np.array([True, False, True, False])
    assert sorted(drain(stream)[0]) == [0, 2]
    assert stream.is_finished(kept)


@pytest.mark.parametrize(("lengths", "tail"), [([None] * 3, "emit"), ([5, 5], "drop")])
def test_an_epoch_without_a_step_is_an_error(lengths: list[int | None], tail: str) -> None:
    for num_epochs in (1, 3):
        with pytest.raises(ConfigError, match=r"every row is dropped|do not fill"):
            next(loader(LengthRows(lengths), tail=tail, num_epochs=num_epochs))


@pytest.mark.parametrize(("lengths", "tail"), [([None] * 3, "emit"), ([5, 5], "drop")])
def test_a_stream_that_never_has_a_step_is_not_finished(
    lengths: list[int | None], tail: str
) -> None:
    stream = loader(LengthRows(lengths), tail=tail, num_epochs=1)
    kept = np.array([length is not None for length in lengths])
    assert not stream.is_finished(kept)
    with pytest.raises(ConfigError, match=r"every row is dropped|do not fill"):
        next(stream)


def test_wrapped_epochs_without_rows_end_with_an_error() -> None:
    with pytest.raises(ConfigError, match="every row is dropped"):
        next(loader(LengthRows([None, None]), tail="wrap", num_epochs=None))


def test_an_error_of_a_row_keeps_the_position() -> None:
    class Bad(LengthRows):
        is_bad = True

        def fetch(self, rows: Sequence[int]) -> list[int | None]:
            if 5 in rows and self.is_bad:
                raise ConfigError("rows.jsonl:6: bad")
            return super().fetch(rows)

    rows = Bad([CAPACITY // 2] * 12)
    stream = loader(rows, num_epochs=1, microbatches=1, window_rows=1)
    steps = []
    state: dict[str, Any] = {}
    with pytest.raises(ConfigError, match="bad"):
        while True:
            state = stream.state_dict()
            next(stream)
            steps.append(stream.planned.rows)
    assert json.dumps(stream.state_dict()) == json.dumps(state)
    rows.is_bad = False
    assert steps + drain(stream) == drain(
        loader(LengthRows([CAPACITY // 2] * 12), num_epochs=1, microbatches=1, window_rows=1)
    )


def test_changed_rows_begin_the_epoch_again_with_the_rows_that_waited() -> None:
    lengths = np.random.default_rng(1).integers(1, CAPACITY, 60).tolist()
    first = loader(LengthRows(lengths), num_epochs=1)
    drain(first, 3)
    state = json.loads(json.dumps(first.state_dict()))
    changed = LengthRows([*lengths, 1])
    with pytest.raises(ConfigError, match="allow_changed_rows"):
        loader(changed, num_epochs=1).load_state_dict(state)
    second = loader(changed, num_epochs=1)
    assert not second.load_state_dict(state, allow_changed_rows=True)
    assert sorted(row for step in drain(second) for row in step) == list(range(61))
