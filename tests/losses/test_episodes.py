"""The weight of an episode does not depend on the rows that it is split into."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.losses import ClippedPolicyGradientLoss, GlobalCounts, LossInputs
from nemo_like.losses.reduce import token_weights
from nemo_like.metrics import merge_metrics, metric_values
from tests.losses.definition import DefinedRow, loss_value
from tests.losses.test_surrogates import counts_of, leaves_of, make_rows, member, to_inputs

CONFIGS = [
    member(surrogate, normalization, kind)
    for surrogate in ("ppo", "cispo", "reinforce")
    for normalization in ("token", "sequence", "constant")
    for kind in ("none", "token_truncate")
]
ARRAYS = ("policy", "prev", "generation", "reference", "entropy", "is_trained")


def tokens_of(row: DefinedRow, tokens: np.ndarray) -> DefinedRow:
    return dataclasses.replace(row, **{name: getattr(row, name)[tokens] for name in ARRAYS})


def random_parts(row: DefinedRow, source: random.Random) -> list[np.ndarray]:
    """Each token is in one of at most four rows."""
    num_rows = source.randint(1, 4)
    part_of = np.array([source.randrange(num_rows) for _ in row.policy])
    parts = [np.flatnonzero(part_of == part) for part in range(num_rows)]
    return [part for part in parts if len(part)]


def inputs_of(
    rows: list[DefinedRow], episode_tokens: list[int], leaves: list[torch.Tensor]
) -> LossInputs:
    dtype = leaves[0].dtype
    entropies = leaves_of(rows, "entropy", dtype)
    inputs = to_inputs(
        rows,
        leaves,
        entropies,
        row_num_tokens=torch.tensor([int(row.is_trained.sum()) for row in rows], dtype=dtype),
        episode_num_tokens=torch.tensor(episode_tokens, dtype=dtype),
    )
    # Columns per row become float32, and so do their products with numbers.
    advantages = torch.tensor([row.advantage for row in rows], dtype=dtype)[inputs.row_ids]
    return dataclasses.replace(inputs, columns={**inputs.columns, "advantages": advantages})


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    seed=st.integers(0, 100_000),
    config=st.sampled_from(CONFIGS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    source=st.randoms(use_true_random=False),
)
def test_any_split_of_episodes_has_the_loss_and_the_gradient_of_one_row_for_each(
    lengths, seed, config, dtype, source
):
    episodes = make_rows(lengths, seed)
    loss = ClippedPolicyGradientLoss(config=config)
    denominator = loss.denominator(counts_of(episodes))
    num_tokens = [int(row.is_trained.sum()) for row in episodes]
    # As rows without the column `episode`, in one microbatch.
    complete = leaves_of(episodes, "policy", dtype)
    together = dataclasses.replace(
        inputs_of(episodes, num_tokens, complete), episode_num_tokens=None
    )
    (loss(together).loss_sum / denominator).backward()
    split = [
        (episode, part, tokens_of(row, part))
        for episode, row in enumerate(episodes)
        for part in random_parts(row, source)
    ]
    source.shuffle(split)
    leaves = leaves_of([row for _, _, row in split], "policy", dtype)
    cut = source.randint(1, len(split))
    total, metrics = 0.0, []
    for microbatch in filter(len, (range(cut), range(cut, len(split)))):
        rows = [split[index][2] for index in microbatch]
        counts = [num_tokens[split[index][0]] for index in microbatch]
        terms = loss(inputs_of(rows, counts, [leaves[index] for index in microbatch]))
        (terms.loss_sum / denominator).backward()
        total += float(terms.loss_sum.detach()) / denominator
        metrics.append(terms.fetch_metrics())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    policies = [row.policy for row in episodes]
    expected = loss_value(episodes, policies, policies, config)
    assert total == pytest.approx(expected, rel=tolerance, abs=tolerance)
    for (episode, part, _), leaf in zip(split, leaves, strict=True):
        reference = complete[episode].grad
        assert reference is not None and leaf.grad is not None
        torch.testing.assert_close(leaf.grad, reference[part], rtol=tolerance, atol=tolerance)
    found = metric_values(merge_metrics(metrics))["policy/loss"]
    assert found == pytest.approx(total, rel=1e-4, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 100_000), source=st.randoms(use_true_random=False))
def test_the_weights_of_an_episode_sum_to_one_for_any_number_of_rows(seed, source):
    (episode,) = make_rows([12], seed)
    num_tokens = int(episode.is_trained.sum())
    rows = [tokens_of(episode, part) for part in random_parts(episode, source)]
    inputs = inputs_of(rows, [num_tokens] * len(rows), leaves_of(rows, "policy", torch.float64))
    assert float(token_weights(inputs, "sequence").sum()) == pytest.approx(1, rel=1e-12)
    assert float(token_weights(inputs, "token").sum()) == num_tokens
    constant = ClippedPolicyGradientLoss(config=member("ppo", "constant", "none")).normalizer
    assert float(constant.count(inputs)) == pytest.approx(7, rel=1e-12)


def test_a_ratio_of_sequences_is_the_one_of_the_row():
    """Two rows with mean log-ratios 0.3 and -0.1: 2 of 5 and 3 of 5 trained tokens."""
    config = PolicyGradientLossConfig(
        surrogate="gspo", ratio_clip_min=0.9, ratio_clip_max=0.9, reference_policy_kl_penalty=0.0
    )
    log_ratio = torch.tensor([0.2, 0.4, -0.3, 0.0, 0.0], dtype=torch.float64)
    prev = torch.full((5,), -1.0, dtype=torch.float64)
    leaf = (prev + log_ratio).requires_grad_()
    inputs = LossInputs(
        policy_logprobs=leaf,
        token_mask=torch.ones(5, dtype=torch.bool),
        row_ids=torch.tensor([0, 0, 1, 1, 1]),
        row_num_tokens=torch.tensor([2.0, 3.0]).double(),
        episode_num_tokens=torch.tensor([5.0, 5.0]).double(),
        columns={"prev_logprobs": prev, "generation_logprobs": prev},
        row_columns={"advantages": torch.tensor([2.0, 2.0]).double()},
    )
    loss = ClippedPolicyGradientLoss(config=config)
    total = loss(inputs).loss_sum / loss.denominator(GlobalCounts(num_tokens=5, num_rows=1))
    total.backward()
    ratios = [np.exp(0.3), np.exp(-0.1)]
    expected = -2.0 * (2 / 5 * ratios[0] + 3 / 5 * ratios[1])
    assert float(total.detach()) == pytest.approx(expected, rel=1e-6)
    gradient = [-2.0 * ratio / 5 for ratio in np.repeat(ratios, [2, 3])]
    assert leaf.grad is not None
    np.testing.assert_allclose(leaf.grad.numpy(), gradient, rtol=1e-6)
