"""Counts of rows: those of a batch, and what rows of subsets and joined parts have in common."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.prefixes import SharedPrefixes
from nemo_like.data.planning.token_counts import TokenCounts

ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=10)


def counts_of(rows: list[list[int]]) -> TokenCounts:
    prefixes = SharedPrefixes.of_tokens([0] * len(rows), Jagged.from_rows(rows, np.int32))
    lengths = np.array([len(row) for row in rows])
    return TokenCounts(lengths, lengths - 1, prefixes)


def common(counts: TokenCounts) -> np.ndarray:
    """Leading tokens that each two rows have in common, int64 [B, B]."""
    assert counts.prefixes is not None
    counts.prefixes.check(counts.lengths)
    found = np.diag(counts.lengths)
    order, shared = counts.prefixes.order, counts.prefixes.shared
    for first in range(len(order)):
        for last in range(first + 1, len(order)):
            num_common = shared[first + 1 : last + 1].min()
            found[order[first], order[last]] = found[order[last], order[first]] = num_common
    return found


@settings(max_examples=60, deadline=None)
@given(ROWS, st.randoms())
def test_a_subset_shares_what_its_rows_share(rows: list[list[int]], random):
    counts = counts_of(rows)
    kept = np.array(random.sample(range(len(rows)), random.randint(1, len(rows))))
    subset = counts.take(kept)
    np.testing.assert_array_equal(subset.lengths, counts.lengths[kept])
    np.testing.assert_array_equal(common(subset), common(counts)[np.ix_(kept, kept)])


@settings(max_examples=60, deadline=None)
@given(ROWS, ROWS)
def test_rows_of_two_parts_share_nothing(first: list[list[int]], second: list[list[int]]):
    joined = TokenCounts.concat([counts_of(first), counts_of(second)])
    n = len(first)
    found = common(joined)
    assert not found[:n, n:].any()
    np.testing.assert_array_equal(found[:n, :n], common(counts_of(first)))
    np.testing.assert_array_equal(found[n:, n:], common(counts_of(second)))
    # Rows of a record without prefixes have nothing in common.
    without = TokenCounts.concat([counts_of(first), TokenCounts(np.array([3, 3]))])
    assert not common(without)[n, n + 1] and without.num_trained is None


@settings(max_examples=30, deadline=None)
@given(ROWS)
def test_a_record_has_everything(rows: list[list[int]]):
    counts = counts_of(rows)
    again = TokenCounts.from_dict(json.loads(json.dumps({"step": 3, **counts.to_dict()})))
    assert again.to_dict() == counts.to_dict() and again.prefixes == counts.prefixes
    assert TokenCounts.from_dict({"lengths": [4]}).prefixes is None


@pytest.mark.parametrize("column", ["group", "pair"])
def test_counts_of_a_batch(column: str):
    rows = [[1, 2, 3], [4, 5], [1, 2, 6, 7]]
    masks = Jagged.from_rows([[1, 0, 1], [1, 1], [0, 0, 1, 1]], np.uint8)
    batch = {
        "length": np.array([3, 2, 4]),
        "input_ids": Jagged.from_rows(rows, np.int32),
        "token_mask": masks,
        "row_mask": np.array([True, True, False]),
        column: np.array([7, 3, 7]),
    }
    counts = TokenCounts.of_batch(batch)
    # The first token of a row has no loss, and the last row has none at all.
    assert counts.num_trained is not None and counts.num_trained.tolist() == [1, 1, 0]
    np.testing.assert_array_equal(common(counts), [[3, 0, 2], [0, 2, 0], [2, 0, 4]])
    assert TokenCounts.of_batch(batch, with_prefixes=False).prefixes is None
    del batch[column]
    assert TokenCounts.of_batch(batch).prefixes is None
