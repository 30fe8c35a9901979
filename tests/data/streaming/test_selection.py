"""Selection of one microbatch: the worked examples of the systems, and limits on every rule."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.streaming.selection import (
    MicrobatchLimits,
    Selection,
    WaitingRow,
    Window,
    select_rows,
)

RULES = get_args(Selection)


def window_of(lengths: list[int], extras: list[int] | None = None) -> Window:
    extras = extras or [0] * len(lengths)
    return Window(
        WaitingRow(row, length, length, length, extra, 0)
        for row, (length, extra) in enumerate(zip(lengths, extras, strict=True))
    )


def microbatches(lengths: list[int], limits: MicrobatchLimits, rule: Selection) -> list[list[int]]:
    """Lengths of the microbatches that empty a window of all rows."""
    window = window_of(lengths)
    formed = []
    while len(window):
        numbers = select_rows(window, limits, rule)
        formed.append([window.remove(number).length for number in numbers])
    return formed


@pytest.mark.parametrize(
    ("layout", "rule", "lengths", "wanted"),
    [
        # The pool of Cosmos-RL with 20 tokens, observed on the reference.
        ("padded", "prefer_closest", [4, 2, 4, 9, 3, 7, 1], [[4, 4, 3, 2, 1], [9, 7]]),
        ("padded", "prefer_first", [4, 2, 4, 9, 3, 7, 1], [[4, 2, 4, 3, 1], [9, 7]]),
        ("packed", "prefer_closest", [4, 2, 4, 9, 3, 7, 1], [[4, 2, 4, 9, 1], [3, 7]]),
        ("packed", "first_fit", [12, 9, 8, 1], [[12, 8], [9, 1]]),
        ("padded", "prefer_closest", [25, 3, 3], [[25], [3, 3]]),
        ("padded", "prefer_closest", [3, 25, 3], [[3, 3], [25]]),
        ("padded", "prefer_closest", [20, 3], [[20], [3]]),
        ("packed", "in_order", [12, 9, 8, 1], [[12], [9, 8, 1]]),
    ],
)
def test_worked_examples_with_20_tokens(
    layout: str, rule: Selection, lengths: list[int], wanted: list[list[int]]
) -> None:
    limits = MicrobatchLimits(layout, 20)  # type: ignore[arg-type]
    assert microbatches(lengths, limits, rule) == wanted


def test_rows_of_equal_length_fill_every_microbatch() -> None:
    # The reference of online groups sizes a group by the previous one and needs three.
    limits = MicrobatchLimits("padded", 40)
    assert microbatches([10] * 8, limits, "best_fit") == [[10] * 4, [10] * 4]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Window, MicrobatchLimits]:
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=40))
    extras = [draw(st.integers(0, 9)) for _ in lengths]
    limits = MicrobatchLimits(
        draw(st.sampled_from(["packed", "padded"])),
        draw(st.integers(1, 120)),
        draw(st.none() | st.integers(1, 8)),
        draw(st.none() | st.integers(1, 90)),
        draw(st.none() | st.integers(1, 20)),
    )
    return window_of(lengths, extras), limits


def positions(rows: list[WaitingRow], limits: MicrobatchLimits) -> int:
    sizes = [row.size for row in rows]
    return sum(sizes) if limits.layout == "packed" else len(sizes) * max(sizes)


@settings(max_examples=400, deadline=None)
@given(case=cases(), rule=st.sampled_from(RULES))
def test_a_microbatch_has_the_oldest_row_and_stays_within_every_limit(
    case: tuple[Window, MicrobatchLimits], rule: Selection
) -> None:
    window, limits = case
    oldest = next(iter(window.rows))
    numbers = select_rows(window, limits, rule)
    rows = [window.rows[number] for number in numbers]
    assert numbers[0] == oldest
    assert len(set(numbers)) == len(numbers)
    if len(rows) == 1:
        return
    assert positions(rows, limits) <= limits.max_tokens
    assert limits.max_rows is None or len(rows) <= limits.max_rows
    trained = sum(row.num_trained for row in rows)
    assert limits.max_trained is None or trained <= limits.max_trained
    assert limits.max_extra is None or sum(row.extra for row in rows) <= limits.max_extra


@settings(max_examples=300, deadline=None)
@given(case=cases(), rule=st.sampled_from([rule for rule in RULES if rule != "in_order"]))
def test_no_waiting_row_fits_into_the_microbatch(
    case: tuple[Window, MicrobatchLimits], rule: Selection
) -> None:
    window, limits = case
    if rule == "best_fit" and limits.layout == "padded" and limits.has_other_limits:
        return
    chosen = [window.remove(number) for number in select_rows(window, limits, rule)]
    for row in window:
        rows = [*chosen, row]
        fits = (
            positions(rows, limits) <= limits.max_tokens
            and (limits.max_rows is None or len(rows) <= limits.max_rows)
            and (
                limits.max_trained is None or sum(r.num_trained for r in rows) <= limits.max_trained
            )
            and (limits.max_extra is None or sum(r.extra for r in rows) <= limits.max_extra)
        )
        assert not fits, (chosen, row)


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9), capacity=st.integers(1, 60))
def test_the_best_packed_combination_leaves_the_fewest_positions_unused(
    lengths: list[int], capacity: int
) -> None:
    window = window_of(lengths)
    numbers = select_rows(window, MicrobatchLimits("packed", capacity), "best_fit")
    chosen = sum(lengths[number] for number in numbers)
    if lengths[0] > capacity:
        assert numbers == [0]
        return
    # All subsets with the oldest row.
    sums = {lengths[0]}
    for length in lengths[1:]:
        sums |= {total + length for total in sums}
    assert chosen == max(total for total in sums if total <= capacity)


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9), capacity=st.integers(1, 60))
def test_the_best_padded_run_has_the_largest_sum(lengths: list[int], capacity: int) -> None:
    window = window_of(lengths)
    numbers = select_rows(window, MicrobatchLimits("padded", capacity), "best_fit")
    chosen = sum(lengths[number] for number in numbers)
    by_size = sorted(range(len(lengths)), key=lambda row: lengths[row])
    best = lengths[0]
    for start in range(len(by_size)):
        for stop in range(start + 1, len(by_size) + 1):
            run = [lengths[row] for row in by_size[start:stop]]
            if 0 in by_size[start:stop] and len(run) * max(run) <= capacity:
                best = max(best, sum(run))
    assert chosen == best


def test_a_packed_microbatch_can_have_hundreds_of_rows() -> None:
    window = window_of([1] * 200)
    assert len(select_rows(window, MicrobatchLimits("packed", 200), "best_fit")) == 200


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), num_rows=st.integers(200, 500), capacity=st.integers(12, 4000))
def test_of_many_rows_the_best_packed_combination_fills_the_microbatch(
    seed: int, num_rows: int, capacity: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, 13, num_rows).tolist()
    numbers = select_rows(window_of(lengths), MicrobatchLimits("packed", capacity), "best_fit")
    assert numbers[0] == 0
    assert len(set(numbers)) == len(numbers)
    sums = 1 << lengths[0]
    for length in lengths[1:]:
        sums |= sums << length
    best = (sums & ((1 << (capacity + 1)) - 1)).bit_length() - 1
    assert sum(lengths[number] for number in numbers) == best
