"""Filters of tokens: their definition, those of transformers, ties, and a sharded vocabulary."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from nemo_like.config.rollout import GenerationConfig
from nemo_like.sampling_filter import SamplingFilter, filter_logits
from tests.filter_definition import kept_tokens
from tests.policy.thread_ranks import run_thread_ranks

FILTERS = st.builds(
    SamplingFilter,
    top_k=st.one_of(st.none(), st.integers(-1, 40)),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)


def random_logits(seed: int, num_rows: int = 5, vocabulary: int = 37) -> Tensor:
    return torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def kept_sets(logits: Tensor, token_filter: SamplingFilter) -> list[set[int]]:
    kept = filter_logits(logits, token_filter).isfinite()
    return [set(row.nonzero().flatten().tolist()) for row in kept]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), token_filter=FILTERS)
def test_a_filter_keeps_what_its_definition_keeps(seed: int, token_filter: SamplingFilter) -> None:
    logits = random_logits(seed)
    assert kept_sets(logits, token_filter) == [
        kept_tokens(row.tolist(), token_filter) for row in logits
    ]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), token_filter=FILTERS)
def test_tokens_with_equal_logits_are_kept_or_removed_together(
    seed: int, token_filter: SamplingFilter
) -> None:
    """Four distinct values: most tokens are tied, also at the bounds of the filters."""
    logits = random_logits(seed).sign() + random_logits(seed + 1).sign() / 2
    found = kept_sets(logits, token_filter)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(seed))
    shuffled = kept_sets(logits[:, order], token_filter)
    for row, (kept, kept_shuffled) in enumerate(zip(found, shuffled, strict=True)):
        assert kept == {int(order[token]) for token in kept_shuffled}
        values = logits[row].tolist()
        assert kept == {
            token for token in range(37) if values[token] in {values[other] for other in kept}
        }


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(1, 40),
    top_p=st.floats(0.05, 0.99),
    min_p=st.floats(0.001, 0.9),
)
def test_filters_equal_those_of_transformers(
    seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(seed)
    ids = torch.LongTensor([[0]] * len(logits))
    scores = cast(torch.FloatTensor, logits)
    expected = TopKLogitsWarper(top_k=top_k)(ids, MinPLogitsWarper(min_p=min_p)(ids, scores))
    expected = TopPLogitsWarper(top_p=top_p)(ids, expected)
    found = filter_logits(logits, SamplingFilter(top_k=top_k, top_p=top_p, min_p=min_p))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("top_k", [None, 0, -1])
def test_filters_that_are_off_change_nothing(top_k: int | None) -> None:
    logits = random_logits(0)
    assert filter_logits(logits, SamplingFilter(top_k=top_k)) is logits
    assert SamplingFilter.from_config(GenerationConfig(top_k=top_k)) is None
    assert SamplingFilter.from_config(GenerationConfig(top_k=5, temperature=0.0)) is None
    active = SamplingFilter.from_config(GenerationConfig(top_k=top_k, min_p=0.1))
    assert active == SamplingFilter(top_k=top_k, min_p=0.1)
    with_top_p = filter_logits(logits, SamplingFilter(top_k=top_k, top_p=0.5))
    assert torch.equal(with_top_p, filter_logits(logits, SamplingFilter(top_p=0.5)))


def test_top_k_of_the_full_vocabulary_or_more_keeps_everything() -> None:
    logits = random_logits(2)
    for top_k in (37, 38, 1000):
        assert torch.equal(filter_logits(logits, SamplingFilter(top_k=top_k)), logits)


@pytest.mark.parametrize(
    "token_filter", [SamplingFilter(top_p=1e-6), SamplingFilter(min_p=1.0), SamplingFilter(top_k=1)]
)
def test_the_most_likely_token_is_always_kept(token_filter: SamplingFilter) -> None:
    logits = random_logits(1)
    assert kept_sets(logits, token_filter) == [{int(token)} for token in logits.argmax(dim=-1)]


def test_impossible_tokens_stay_impossible_and_nan_stays_nan() -> None:
    logits = random_logits(3)
    logits[:, 10:] = -torch.inf
    logits[1, 4] = torch.nan
    logits[2] = -torch.inf
    filtered = filter_logits(logits, SamplingFilter(top_k=20, top_p=0.9, min_p=0.01))
    assert not filtered[:, 10:].isfinite().any()
    assert bool(filtered[1, 4].isnan()), "a broken model must not look like a filtered one"
    assert not filtered[2].isfinite().any()


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    cuts=st.lists(st.integers(0, 37), min_size=1, max_size=3).map(sorted),
    token_filter=FILTERS,
    is_tied=st.booleans(),
)
def test_a_sharded_vocabulary_has_the_same_thresholds(seed, cuts, token_filter, is_tied) -> None:
    """Shards are uneven and may be empty."""
    logits = random_logits(seed).round() if is_tied else random_logits(seed)

    def thresholds(group: dist.ProcessGroup) -> Tensor:
        start, stop = [0, *cuts, 37][group.rank() : group.rank() + 2]
        return token_filter.thresholds(logits[:, start:stop].contiguous(), group)

    expected = logits >= token_filter.thresholds(logits)[:, None]
    for found in run_thread_ranks(len(cuts) + 1, thresholds):
        assert torch.equal(logits >= found[:, None], expected)
