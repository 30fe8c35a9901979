"""Batches by token count: every row once, within the limit, as few as possible, equal shapes."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.torch_data.token_batches import TokenBatches, batch_by_tokens


def form(lengths: list[int], max_tokens: int, **options: Any) -> TokenBatches:
    return batch_by_tokens(np.array(lengths, dtype=np.int64), max_tokens, **options)


@st.composite
def settings_of_a_case(draw: st.DrawFn) -> tuple[list[int], int, dict[str, Any]]:
    min_rows = draw(st.integers(1, 3))
    options = {
        "order": draw(st.sampled_from(["given", "random", "length"])),
        "counts": draw(st.sampled_from(["padded", "summed"])),
        "min_rows": min_rows,
        "max_rows": draw(st.none() | st.integers(min_rows, 6)),
        "microbatches_per_step": draw(st.integers(1, 5)),
        "same_shape": draw(st.booleans()),
        "oversize": draw(st.sampled_from(["drop", "truncate", "singleton"])),
        "length_multiple": draw(st.integers(1, 8)),
        "seed": draw(st.integers(0, 100)),
    }
    lengths = draw(st.lists(st.integers(1, 40), max_size=60))
    return lengths, draw(st.integers(8, 50)), options


def rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def cost(lengths: list[int], counts: str) -> int:
    return sum(lengths) if counts == "summed" else max(lengths, default=0) * len(lengths)


def test_tokens_per_batch_with_short_then_long_rows() -> None:
    """Example 22 of the reference, which loses the last row: 10, 4 and 1 rows."""
    lengths = [3] * 10 + [7] * 5
    for counts in ("padded", "summed"):
        batches = form(lengths, 30, counts=counts)
        assert batches.steps() == [[list(range(10))], [[10, 11, 12, 13]], [[14]]]
        assert batches.step_num_rows.tolist() == [10, 4, 1]
        assert batches.padding_share == 0


def test_two_microbatches_per_step() -> None:
    """Example 24 of the reference, which loses the ninth row."""
    for counts in ("padded", "summed"):
        free = form([5] * 9, 10, counts=counts, microbatches_per_step=2)
        assert free.steps() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8]]]
        assert free.step_num_rows.tolist() == [4, 4, 1]
        same = form([5] * 9, 10, counts=counts, microbatches_per_step=2, same_shape=True)
        assert same.steps() == [[[0, 2], [1, 3]], [[4, 6], [5, 7]], [[8], []]]
        assert same.padded_rows.tolist() == [2, 2, 2, 2, 1, 1]
        assert same.padded_lengths.tolist() == [5] * 6
        assert same.padded_microbatch(5).tolist() == [-1]


def test_min_rows_that_the_limit_forbids_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The reference forms nothing from these rows."""
    with caplog.at_level(logging.WARNING):
        batches = form([20, 20, 1, 1, 1, 1, 1], 30, counts="summed", min_rows=2)
    assert batches.steps() == [[[0]], [[1, 2, 3, 4, 5, 6]]]
    assert batches.below_min_rows.tolist() == [0]
    assert "1 of 2 microbatches have fewer than min_rows=2 rows within 30 tokens" in caplog.text


def test_oversize_rows(caplog: pytest.LogCaptureFixture) -> None:
    lengths = [3, 25, 4, 4]
    with pytest.raises(ValueError, match="1 rows have more than 20 tokens, row 1 has 25: raise"):
        form(lengths, 20)
    with caplog.at_level(logging.WARNING):
        dropped = form(lengths, 20, oversize="drop")
    assert (dropped.steps(), dropped.dropped.tolist()) == ([[[0, 2, 3]]], [1])
    assert "dropped 1 rows above 20 tokens" in caplog.text
    truncated = form(lengths, 20, oversize="truncate")
    assert truncated.steps() == [[[0]], [[1]], [[2, 3]]]
    assert truncated.lengths.tolist() == [3, 20, 4, 4]
    singleton = form(lengths, 20, oversize="singleton")
    assert singleton.steps() == [[[0]], [[1]], [[2, 3]]]
    assert singleton.padded_lengths.tolist() == [3, 25, 4]


def test_orders() -> None:
    lengths = [4, 2, 4, 1]
    assert form(lengths, 8, order="length").steps() == [[[3, 1]], [[0, 2]]]
    given_order = batch_by_tokens(np.array(lengths), 8, order=np.array([2, 0, 1, 3]))
    assert given_order.steps() == [[[2, 0]], [[1, 3]]]
    many = [1] * 50
    first, again, next_epoch = (
        form(many, 50, order="random", seed=seed) for seed in ((1, 0), (1, 0), (1, 1))
    )
    assert first.steps() == again.steps() != next_epoch.steps()


def test_no_rows() -> None:
    for same_shape in (False, True):
        empty = form([], 8, same_shape=same_shape, microbatches_per_step=2)
        assert (empty.num_microbatches, empty.num_steps, empty.padding_share) == (0, 0, 0)
        assert empty.steps() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_rows": 0}, "min_rows is 0"),
        ({"microbatches_per_step": 0}, "microbatches_per_step is 0"),
        ({"min_rows": 3, "max_rows": 2}, "max_rows is 2: give at least min_rows, 3"),
        ({"length_multiple": 16}, "length_multiple is 16: give at most max_tokens, 8"),
        ({"counts": "tokens"}, "counts is 'tokens': give padded or summed"),
        ({"order": "seqlen"}, "order is 'seqlen': give given, random, length"),
        ({"order": np.array([0, 0])}, "order is not a permutation of the 2 rows"),
        ({"oversize": "skip"}, "oversize is 'skip': give error, drop"),
    ],
)
def test_invalid_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch_by_tokens(np.array([1, 2]), **{"max_tokens": 8, **options})


@settings(max_examples=300, deadline=None)
@given(settings_of_a_case())
def test_every_row_once_and_within_the_limit(case: tuple[list[int], int, dict[str, Any]]) -> None:
    lengths, max_tokens, options = case
    multiple = options["length_multiple"]
    batches = form(lengths, max_tokens, **options)
    used = [row for step in batches.steps() for microbatch in step for row in microbatch]
    assert Counter(used + batches.dropped.tolist()) == Counter(range(len(lengths)))
    limit = max_tokens // multiple * multiple
    is_oversize = [length > limit for length in lengths]
    if options["oversize"] == "drop":
        assert batches.dropped.tolist() == np.flatnonzero(is_oversize).tolist()
    else:
        assert len(batches.dropped) == 0
    for microbatch in range(batches.num_microbatches):
        rows = batches.microbatch(microbatch).tolist()
        sizes = [rounded(int(batches.lengths[row]), multiple) for row in rows]
        num_padded = int(batches.padded_rows[microbatch])
        padded_length = int(batches.padded_lengths[microbatch])
        assert padded_length >= max(sizes, default=0)
        assert num_padded <= (options["max_rows"] or len(lengths))
        if num_padded > 1:
            assert cost(sizes, options["counts"]) <= max_tokens
            if options["counts"] == "padded":
                assert num_padded * padded_length <= max_tokens
        if not options["same_shape"]:
            assert (num_padded, padded_length) == (len(rows), max(sizes))


@settings(max_examples=200, deadline=None)
@given(settings_of_a_case())
def test_microbatches_of_a_step_have_one_shape(case: tuple[list[int], int, dict[str, Any]]) -> None:
    lengths, max_tokens, options = case
    per_step = options["microbatches_per_step"]
    order = np.random.default_rng(options["seed"]).permutation(len(lengths))
    batches = form(lengths, max_tokens, **{**options, "same_shape": True, "order": order})
    kept = [row for row in order.tolist() if row not in batches.dropped]
    positions = {row: position for position, row in enumerate(kept)}
    next_position = 0
    for step in range(batches.num_steps):
        first, stop = batches.step_offsets[step : step + 2].tolist()
        assert stop - first == per_step
        assert len(set(batches.padded_rows[first:stop].tolist())) == 1
        assert len(set(batches.padded_lengths[first:stop].tolist())) == 1
        rows = [row for index in range(first, stop) for row in batches.microbatch(index).tolist()]
        num_dummy = int(batches.padded_rows[first:stop].sum()) - len(rows)
        # Only the last step has places without a row, and fewer than one per microbatch.
        assert num_dummy == 0 or (step == batches.num_steps - 1 and num_dummy < per_step)
        run = sorted(positions[row] for row in rows)
        assert run == list(range(next_position, next_position + len(rows)))
        next_position += len(rows)
        for index in range(first, stop):
            dealt = [positions[row] for row in batches.microbatch(index).tolist()]
            assert dealt == run[index - first :: per_step]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=14),
    st.integers(12, 30),
    st.sampled_from(["padded", "summed"]),
)
def test_the_number_of_microbatches_is_minimal_for_the_order(
    lengths: list[int], max_tokens: int, counts: str
) -> None:
    fewest = [0] + [len(lengths)] * len(lengths)
    for stop in range(1, len(lengths) + 1):
        for start in range(stop):
            if cost(lengths[start:stop], counts) <= max_tokens:
                fewest[stop] = min(fewest[stop], fewest[start] + 1)
    assert form(lengths, max_tokens, counts=counts).num_microbatches == fewest[-1]


@settings(max_examples=100, deadline=None)
@given(settings_of_a_case(), st.integers(1, 5))
def test_ranks_have_equally_many_microbatches(
    case: tuple[list[int], int, dict[str, Any]], num_ranks: int
) -> None:
    lengths, max_tokens, options = case
    batches = form(lengths, max_tokens, **options)
    for step in range(batches.num_steps):
        ranks = [batches.rank_microbatches(step, rank, num_ranks) for rank in range(num_ranks)]
        assert len({len(microbatches) for microbatches in ranks}) == 1
        first, stop = batches.step_offsets[step : step + 2].tolist()
        real = sorted(index for microbatches in ranks for index in microbatches if index >= 0)
        assert real == list(range(first, stop))
        num_missing = -(stop - first) % num_ranks
        assert sum(microbatches.count(-1) for microbatches in ranks) == num_missing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, -1, 2), "rank is -1"),
        ((0, 2, 2), "rank is 2, of 2"),
        ((0, 0, 0), "num_ranks is 0"),
        ((-1, 0, 2), "step is -1"),
        ((3, 0, 2), "step is 3, of 3"),
    ],
)
def test_a_step_or_rank_out_of_range_is_an_error(
    arguments: tuple[int, int, int], message: str
) -> None:
    batches = batch_by_tokens(np.full(3, 5), 5)
    with pytest.raises(ValueError, match=message):
        batches.rank_microbatches(*arguments)


@pytest.mark.parametrize("number", [-1, 3])
def test_a_microbatch_out_of_range_is_an_error(number: int) -> None:
    batches = batch_by_tokens(np.full(3, 5), 5)
    for read in (batches.microbatch, batches.padded_microbatch):
        with pytest.raises(ValueError, match=f"microbatch is {number}"):
            read(number)
