"""The preference loss against its definition, for any pairs, row order and split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.algorithms.preferences.config import PreferenceLossConfig
from nemo_like.algorithms.preferences.loss import PreferenceLoss
from nemo_like.losses import GlobalCounts, LossInputs
from nemo_like.metrics import merge_metrics, metric_values
from nemo_like.policy.loss_step import row_loss_sums
from tests.policy.preferences import LOSSES, loss_by_definition


def inputs_of(rows: list[int], policy: list[torch.Tensor], reference: list[torch.Tensor]):
    """One microbatch of `rows` in this order; row 2i is the chosen one of pair i."""
    lengths = [len(policy[row]) for row in rows]
    return LossInputs(
        policy_logprobs=torch.cat([policy[row] for row in rows]),
        token_mask=torch.ones(sum(lengths), dtype=torch.bool),
        row_ids=torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)),
        row_num_tokens=torch.tensor(lengths, dtype=torch.float32),
        columns={"reference_logprobs": torch.cat([reference[row] for row in rows])},
        row_columns={
            "pair": torch.tensor([row // 2 for row in rows]),
            "is_chosen": torch.tensor([row % 2 == 0 for row in rows]),
        },
    )


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(sorted(LOSSES)),
)
def test_value_gradient_and_metrics(lengths: list[tuple[int, int]], seed: int, name: str) -> None:
    generator = np.random.default_rng(seed)
    flat = [length for pair in lengths for length in pair]
    policy = [torch.tensor(-generator.exponential(size=size), dtype=torch.float32) for size in flat]
    reference = [
        torch.tensor(-generator.exponential(size=size), dtype=torch.float32) for size in flat
    ]
    config = LOSSES[name]
    exact = [values.double().requires_grad_() for values in policy]
    expected = loss_by_definition(exact, [values.double() for values in reference], config)
    expected.backward()

    leaves = [values.clone().requires_grad_() for values in policy]
    loss = PreferenceLoss(config=config)
    counts = GlobalCounts(num_tokens=sum(flat), num_rows=len(flat))
    num_first = int(generator.integers(0, len(lengths) + 1))
    pairs = generator.permutation(len(lengths))
    parts = []
    total = 0.0
    for chosen_pairs in (pairs[:num_first], pairs[num_first:]):
        rows = generator.permutation(
            [row for pair in chosen_pairs for row in (2 * pair, 2 * pair + 1)]
        )
        if len(rows) == 0:
            continue
        terms = loss(inputs_of(rows.tolist(), leaves, reference))
        value = terms.loss_sum / loss.denominator(counts)
        value.backward()
        total += float(value.detach())
        parts.append(terms.fetch_metrics())
    assert total == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-6)
    for leaf, right in zip(leaves, exact, strict=True):
        assert leaf.grad is not None and right.grad is not None
        assert torch.allclose(leaf.grad.double(), right.grad, rtol=1e-4, atol=1e-6)
    metrics = metric_values(merge_metrics(parts))
    assert metrics["policy/loss"] == pytest.approx(total, rel=1e-5, abs=1e-6)
    assert metrics["rewards/margins"] == pytest.approx(
        metrics["rewards/chosen"] - metrics["rewards/rejected"], abs=1e-4
    )


def test_a_microbatch_without_rows_has_no_loss_and_a_graph() -> None:
    """A dummy: one row without tokens, some positions of padding."""
    logprobs = torch.zeros(3, requires_grad=True)
    inputs = LossInputs(
        policy_logprobs=logprobs,
        token_mask=torch.zeros(3, dtype=torch.bool),
        row_ids=torch.zeros(3, dtype=torch.int64),
        row_num_tokens=torch.zeros(1),
        columns={"reference_logprobs": torch.zeros(3)},
        row_columns={"pair": torch.zeros(1, dtype=torch.int64), "is_chosen": torch.zeros(1)},
    )
    for config in LOSSES.values():
        terms = PreferenceLoss(config=config)(inputs)
        terms.loss_sum.backward()
        assert float(terms.loss_sum.detach()) == 0.0
    assert logprobs.grad is not None and not logprobs.grad.any()


def test_the_pair_with_a_value_that_is_not_finite_is_found() -> None:
    policy = [torch.full((2,), -1.0) for _ in range(4)]
    policy[3][1] = float("nan")
    inputs = inputs_of([2, 0, 3, 1], policy, [torch.full((2,), -1.0)] * 4)
    sums = row_loss_sums(PreferenceLoss(config=PreferenceLossConfig()), inputs)
    assert [np.isfinite(value) for value in sums] == [False, True, False, True]
    assert sums[1] == pytest.approx(np.log(2)) == sums[3]
