"""The Bradley-Terry loss against its definition in float64 NumPy, for any pairs, row order and
split.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.algorithms.preferences.loss import BradleyTerryLoss, bradley_terry_losses
from nemo_like.losses import GlobalCounts, LossInputs
from nemo_like.metrics import merge_metrics, metric_values
from nemo_like.policy.loss_step import row_loss_sums


def loss_by_definition(scores: np.ndarray, margins: np.ndarray, center: float) -> float:
    """Mean loss of the pairs of `scores` float64 [2P]: chosen, rejected, chosen, ..."""
    chosen = scores[0::2]
    rejected = scores[1::2]
    differences = chosen - rejected - margins
    # -log sigmoid(x) = log(1 + exp(-x)), without an overflow.
    losses = np.logaddexp(0.0, -differences) + center * (chosen + rejected) ** 2
    return float(losses.mean())


def inputs_of(rows: np.ndarray, scores: torch.Tensor, margins: np.ndarray | None) -> LossInputs:
    """One microbatch of `rows` in this order; row 2i is the chosen one of pair i."""
    size = len(rows)
    row_columns = {
        "pair": torch.from_numpy(rows // 2),
        "is_chosen": torch.from_numpy(rows % 2 == 0),
    }
    if margins is not None:
        row_columns["margin"] = torch.from_numpy(margins[rows // 2].astype(np.float32))
    return LossInputs(
        policy_logprobs=torch.zeros(size),
        token_mask=torch.ones(size, dtype=torch.bool),
        row_ids=torch.arange(size),
        row_num_tokens=torch.ones(size),
        row_columns=row_columns,
        row_scores=scores[torch.from_numpy(rows)],
    )


@settings(max_examples=60, deadline=None)
@given(
    num_pairs=st.integers(1, 6),
    scale=st.sampled_from([0.1, 3.0, 60.0]),
    center=st.sampled_from([0.0, 0.01, 0.5]),
    has_margins=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_value_gradient_and_metrics(
    num_pairs: int, scale: float, center: float, has_margins: bool, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    values = generator.normal(scale=scale, size=2 * num_pairs).astype(np.float32)
    margins = generator.exponential(size=num_pairs) * has_margins
    exact = values.astype(np.float64)
    expected = loss_by_definition(exact, margins.astype(np.float32), center)
    scores = torch.from_numpy(values).requires_grad_()
    loss = BradleyTerryLoss(center_coefficient=center)
    counts = GlobalCounts(num_tokens=7.0, num_rows=2.0 * num_pairs)
    order = generator.permutation(num_pairs)
    split = int(generator.integers(0, num_pairs + 1))
    parts = []
    total = 0.0
    for pairs in (order[:split], order[split:]):
        if len(pairs) == 0:
            continue
        rows = generator.permutation(np.concatenate([2 * pairs, 2 * pairs + 1]))
        inputs = inputs_of(rows, scores, margins if has_margins else None)
        terms = loss(inputs)
        value = terms.loss_sum / loss.denominator(counts)
        value.backward()
        total += float(value.detach())
        parts.append(terms.fetch_metrics())
        sums = row_loss_sums(loss, inputs)
        assert len(sums) == len(rows)
    assert total == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert scores.grad is not None
    step = 1e-5
    for index in range(2 * num_pairs):
        moved = np.zeros_like(exact)
        moved[index] = step
        up = loss_by_definition(exact + moved, margins, center)
        down = loss_by_definition(exact - moved, margins, center)
        gradient = (up - down) / (2 * step)
        assert float(scores.grad[index]) == pytest.approx(gradient, rel=1e-3, abs=1e-5)
    metrics = metric_values(merge_metrics(parts))
    differences = exact[0::2] - exact[1::2]
    assert metrics["policy/loss"] == pytest.approx(total, rel=1e-5, abs=1e-6)
    assert metrics["rm/accuracy"] == pytest.approx(float((differences > 0).mean()))
    assert metrics["rm/margin"] == pytest.approx(float(differences.mean()), rel=1e-4, abs=1e-5)
    assert metrics["rm/chosen_score"] == pytest.approx(exact[0::2].mean(), rel=1e-4, abs=1e-5)
    assert metrics["rm/rejected_score"] == pytest.approx(exact[1::2].mean(), rel=1e-4, abs=1e-5)


def test_a_pair_that_is_far_on_the_wrong_side_has_a_finite_loss() -> None:
    scores = torch.tensor([-200.0], requires_grad=True)
    losses = bradley_terry_losses(scores, torch.tensor([200.0]))
    losses.sum().backward()
    assert losses.tolist() == [400.0]
    assert scores.grad is not None and scores.grad.tolist() == [-1.0]


def test_a_microbatch_without_pairs_has_the_loss_0() -> None:
    scores = torch.zeros(1, requires_grad=True)
    inputs = LossInputs(
        policy_logprobs=torch.zeros(4),
        token_mask=torch.zeros(4, dtype=torch.bool),
        row_ids=torch.zeros(4, dtype=torch.int64),
        row_num_tokens=torch.zeros(1),
        row_columns={
            "pair": torch.zeros(1, dtype=torch.int64),
            "is_chosen": torch.zeros(1, dtype=torch.bool),
            "margin": torch.zeros(1),
        },
        row_scores=scores * 1.0,
    )
    terms = BradleyTerryLoss(center_coefficient=0.1)(inputs)
    terms.loss_sum.backward()
    assert float(terms.loss_sum.detach()) == 0.0
    assert scores.grad is not None and scores.grad.tolist() == [0.0]
