"""Shape buckets with minimal padding, and warmup plans with every shape on every rank."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.torch_data.static_shapes import ShapeBuckets, warmup_plan
from nemo_like.torch_data.token_batches import batch_by_tokens

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def num_padding(buckets: ShapeBuckets, lengths: np.ndarray) -> int:
    return int((buckets.padded_lengths(lengths) - lengths).sum())


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 8))
def test_padding_is_minimal(lengths: list[int], num_buckets: int, multiple: int) -> None:
    values = np.array(lengths)
    buckets = ShapeBuckets.from_lengths(values, num_buckets, multiple=multiple)
    assert len(buckets.lengths) <= num_buckets
    assert all(length % multiple == 0 for length in buckets.lengths)
    candidates = sorted({-(-length // multiple) * multiple for length in lengths})
    others = candidates[:-1]
    best = min(
        sum(min(bucket for bucket in chosen if bucket >= length) - length for length in lengths)
        for count in range(min(num_buckets, len(candidates)))
        for chosen in ((*subset, candidates[-1]) for subset in combinations(others, count))
    )
    assert num_padding(buckets, values) == best


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.lists(st.integers(1, 60), min_size=1, unique=True))
def test_rows_go_to_the_smallest_bucket(lengths: list[int], bounds: list[int]) -> None:
    buckets = ShapeBuckets((*sorted(bounds), 60 + max(lengths)))
    padded = buckets.padded_lengths(np.array(lengths)).tolist()
    for length, found in zip(lengths, padded, strict=True):
        assert found == min(bound for bound in buckets.lengths if bound >= length)


def test_many_distinct_lengths() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 100_000).astype(np.int64) + 1
    eight = ShapeBuckets.from_lengths(lengths, 8, multiple=8)
    quantiles = np.quantile(lengths, np.arange(1, 9) / 8, method="higher")
    by_quantiles = ShapeBuckets(tuple(int(value + 7) // 8 * 8 for value in quantiles))
    assert num_padding(eight, lengths) < 0.8 * num_padding(by_quantiles, lengths)
    # Each length has a bucket of its own.
    assert num_padding(ShapeBuckets.from_lengths(lengths[:50], 50), lengths[:50]) == 0


def test_shapes_of_buckets() -> None:
    buckets = ShapeBuckets((16, 64, 100))
    assert buckets.shapes(200) == ((12, 16), (3, 64), (2, 100))
    assert buckets.shapes(200, max_rows=8) == ((8, 16), (3, 64), (2, 100))
    assert buckets.padded_lengths(np.array([10, 16, 17])).tolist() == [16, 16, 64]
    with pytest.raises(ValueError, match="max_tokens is 99: give at least the largest bucket, 100"):
        buckets.shapes(99)
    with pytest.raises(ValueError, match="row 1 has 101 tokens, the largest bucket 100"):
        buckets.padded_lengths(np.array([3, 101]))


@pytest.mark.parametrize("lengths", [(), (3, 3), (4, 2), (0, 2)])
def test_invalid_buckets(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="give increasing lengths of at least 1"):
        ShapeBuckets(lengths)


def test_invalid_observations() -> None:
    with pytest.raises(ValueError, match="lengths is empty"):
        ShapeBuckets.from_lengths(np.array([], dtype=np.int64), 2)
    with pytest.raises(ValueError, match="num_buckets is 0"):
        ShapeBuckets.from_lengths(np.array([1]), 0)
    with pytest.raises(ValueError, match="num_ranks is 0"):
        warmup_plan([(1, 2)], 0)


def test_example_of_the_plan() -> None:
    plan = warmup_plan([(2, 8), (1, 4), (2, 8), (2, 8)], 2)
    assert plan.shapes == ((2, 8), (1, 4))
    assert plan.microbatches.tolist() == [[0, 2], [1, -1]]
    assert plan.remaining.tolist() == [3]
    assert warmup_plan([], 2).shapes == ()


def test_three_ranks_have_all_four_lengths_first() -> None:
    """Example of the description: in the order of the data, a rank has a new length later."""
    lengths = [10, 20, 10, 30, 10, 20, 40, 20, 30, 10, 40, 30, 20, 40, 10, 30]
    plan = warmup_plan([(1, length) for length in lengths], 3)
    for rank in range(3):
        assert [lengths[index] for index in plan.microbatches[:, rank]] == [40, 30, 20, 10]
    assert [lengths[index] for index in plan.remaining] == [10, 20, 10, 30]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([8, 16])), max_size=30), st.integers(1, 5)
)
def test_every_shape_on_every_rank_and_every_microbatch_once(
    shapes: list[tuple[int, int]], num_ranks: int
) -> None:
    plan = warmup_plan(shapes, num_ranks)
    assert len(plan.shapes) == len(set(shapes))
    assert set(plan.shapes) == set(shapes)
    tokens = [num_rows * length for num_rows, length in plan.shapes]
    assert tokens == sorted(tokens, reverse=True)
    assert plan.microbatches.shape == (len(plan.shapes), num_ranks)
    for shape, microbatches in zip(plan.shapes, plan.microbatches.tolist(), strict=True):
        assert {shapes[index] for index in microbatches if index >= 0} == {shape}
    warm = plan.microbatches[plan.microbatches >= 0].tolist()
    assert sorted(warm + plan.remaining.tolist()) == list(range(len(shapes)))
    # A dummy microbatch is used only where the shape has no other.
    assert {shapes[index] for index in plan.remaining}.isdisjoint(
        shape for shape, row in zip(plan.shapes, plan.microbatches, strict=True) if (row < 0).any()
    )


def test_token_batches_have_the_shapes_of_a_warmup() -> None:
    lengths = np.random.default_rng(1).integers(1, 60, 500)
    buckets = ShapeBuckets.from_lengths(lengths, 4)
    padded = buckets.padded_lengths(lengths)
    batches = batch_by_tokens(padded, 240, order="length")
    shapes = np.stack([batches.padded_rows, batches.padded_lengths], axis=1)
    allowed = {length: num_rows for num_rows, length in buckets.shapes(240)}
    for num_rows, length in shapes.tolist():
        assert num_rows <= allowed[length]
