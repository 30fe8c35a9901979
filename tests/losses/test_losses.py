"""The losses: exact formulas, independence from how rows are split, and masked positions that
cannot poison anything.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.losses import (
    ClippedPolicyGradientLoss,
    GlobalCounts,
    Loss,
    LossInputs,
    NllLoss,
    fetch_metrics,
)
from nemo_like.losses.importance import mismatch_metrics
from nemo_like.losses.policy_gradient import reference_kl
from nemo_like.losses.reduce import Normalization
from nemo_like.metrics import merge_metrics, metric_values


def make_rows(lengths: list[int], seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        mask = torch.rand(length, generator=generator) > 0.3
        rows.append(
            {
                "policy_logprobs": -torch.rand(length, generator=generator) * 3,
                "token_mask": mask,
                "advantages": torch.randn(1, generator=generator).expand(length).clone(),
                "prev_logprobs": -torch.rand(length, generator=generator) * 3,
                "generation_logprobs": -torch.rand(length, generator=generator) * 3,
                "reference_logprobs": -torch.rand(length, generator=generator) * 3,
            }
        )
    return rows


def to_inputs(rows: list[dict[str, torch.Tensor]], leaf: list[torch.Tensor]) -> LossInputs:
    columns = ("advantages", "prev_logprobs", "generation_logprobs", "reference_logprobs")
    return LossInputs(
        policy_logprobs=torch.cat(leaf),
        token_mask=torch.cat([row["token_mask"] for row in rows]),
        row_ids=torch.cat([torch.full((len(row["token_mask"]),), i) for i, row in enumerate(rows)]),
        row_num_tokens=torch.tensor([float(row["token_mask"].sum()) for row in rows]),
        columns={name: torch.cat([row[name] for row in rows]) for name in columns},
    )


def grad_of(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad


def loss_and_grad(
    rows: list[dict[str, torch.Tensor]], partition: list[list[int]], loss: Loss
) -> tuple[float, torch.Tensor, dict[str, float]]:
    leaves = [row["policy_logprobs"].clone().requires_grad_() for row in rows]
    counts = GlobalCounts(
        num_tokens=float(sum(row["token_mask"].sum() for row in rows)),
        num_rows=float(sum(bool(row["token_mask"].any()) for row in rows)),
    )
    total, parts = 0.0, []
    for group in partition:
        terms = loss(to_inputs([rows[i] for i in group], [leaves[i] for i in group]))
        value = terms.loss_sum / loss.denominator(counts)
        value.backward()
        total += float(value.detach())
        parts.append(terms.fetch_metrics())
    return total, torch.cat([grad_of(leaf) for leaf in leaves]), metric_values(merge_metrics(parts))


def clipped_loss(normalization: Normalization) -> ClippedPolicyGradientLoss:
    config = PolicyGradientLossConfig(
        normalization=normalization, reference_policy_kl_penalty=0.1, ratio_clip_c=3.0
    )
    return ClippedPolicyGradientLoss(config=config)


def nll_loss(normalization: Normalization) -> NllLoss:
    return NllLoss(normalization=normalization)


LOSSES = [clipped_loss, nll_loss]
"""Constructors of every loss that is a sum over rows; `make_rows` has the columns they read."""


@pytest.mark.parametrize("make_loss", LOSSES)
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    seed=st.integers(0, 10_000),
    normalization=st.sampled_from(["token", "sequence"]),
    order=st.randoms(use_true_random=False),
)
def test_the_split_into_microbatches_and_the_order_of_rows_change_nothing(
    make_loss, lengths, seed, normalization, order
):
    rows = make_rows(lengths, seed)
    loss = make_loss(normalization)
    full = loss_and_grad(rows, [list(range(len(rows)))], loss)
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)
    cut = order.randint(1, len(rows))
    partition = [part for part in (shuffled[:cut], shuffled[cut:]) if part]
    split = loss_and_grad(rows, partition, loss)
    assert split[0] == pytest.approx(full[0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(split[1], full[1], rtol=1e-5, atol=1e-7)
    assert split[2] == pytest.approx(full[2], rel=1e-4, abs=1e-6)
    assert full[2]["policy/loss"] == pytest.approx(full[0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_nll_is_the_mean_over_the_global_batch(normalization: Normalization):
    rows = make_rows([5, 2, 7], seed=3)
    value, _, metrics = loss_and_grad(rows, [[0], [1, 2]], NllLoss(normalization=normalization))
    if normalization == "token":
        picked = torch.cat([-row["policy_logprobs"][row["token_mask"]] for row in rows])
        expected = picked.mean()
    else:
        picked = [-row["policy_logprobs"][row["token_mask"]] for row in rows]
        expected = torch.stack([row.mean() for row in picked if len(row)]).mean()
    assert value == pytest.approx(float(expected), rel=1e-6)
    assert metrics["policy/loss"] == pytest.approx(value, rel=1e-6)


def test_the_loss_of_each_source_is_the_mean_over_its_tokens():
    rows = make_rows([5, 2, 7, 4], seed=3)
    sources = [2, 0, 2, 0]
    loss = NllLoss(sources=("web", "code", "math"))
    parts = []
    for part in ([0, 1], [2, 3]):
        chosen = [rows[index] for index in part]
        inputs = to_inputs(chosen, [row["policy_logprobs"] for row in chosen])
        column = torch.tensor([sources[index] for index in part])
        parts.append(loss(replace(inputs, row_columns={"source": column})).fetch_metrics())
    metrics = metric_values(merge_metrics(parts))
    assert {name for name in metrics if "source" in name} == {
        "policy/source_web/loss",
        "policy/source_math/loss",
    }
    for index, name in ((0, "web"), (2, "math")):
        own = [row for row, source in zip(rows, sources, strict=True) if source == index]
        picked = torch.cat([-row["policy_logprobs"][row["token_mask"]] for row in own])
        expected = pytest.approx(float(picked.mean()), rel=1e-6)
        assert metrics[f"policy/source_{name}/loss"] == expected


def single(
    logprob: float, prev: float, advantage: float, config: PolicyGradientLossConfig
) -> tuple[float, float, dict[str, float]]:
    leaf = torch.tensor([logprob], requires_grad=True)
    columns = {name: torch.tensor([prev]) for name in ("prev_logprobs", "generation_logprobs")}
    columns["advantages"] = torch.tensor([advantage])
    inputs = LossInputs(
        policy_logprobs=leaf,
        token_mask=torch.tensor([True]),
        row_ids=torch.tensor([0]),
        row_num_tokens=torch.tensor([1.0]),
        columns=columns,
    )
    terms = ClippedPolicyGradientLoss(config=config)(inputs)
    terms.loss_sum.backward()
    return (
        float(terms.loss_sum.detach()),
        float(grad_of(leaf)),
        metric_values(terms.fetch_metrics()),
    )


def test_clip_stops_the_gradient_only_on_the_side_that_gains():
    config = PolicyGradientLossConfig(ratio_clip_min=0.2, ratio_clip_max=0.28)
    log = math.log
    value, grad, metrics = single(log(1.5), 0.0, advantage=2.0, config=config)
    assert (value, grad) == (pytest.approx(-2.0 * 1.28), 0.0)
    assert (
        metrics["policy/clip_fraction_high"] == 1.0 and metrics["policy/clip_fraction_low"] == 0.0
    )
    value, grad, _ = single(log(1.5), 0.0, advantage=-2.0, config=config)
    assert (value, grad) == (pytest.approx(3.0), pytest.approx(3.0))
    value, grad, metrics = single(log(0.5), 0.0, advantage=-1.0, config=config)
    assert (value, grad) == (pytest.approx(0.8), 0.0)
    assert metrics["policy/clip_fraction_low"] == 1.0


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    config = PolicyGradientLossConfig(ratio_clip_c=3.0)
    value, grad, metrics = single(math.log(10.0), 0.0, advantage=-1.0, config=config)
    assert (value, grad) == (pytest.approx(3.0), 0.0)
    assert metrics["policy/clip_fraction_dual"] == 1.0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_gradient_is_unbiased_and_k1_k3_values_too(kind: str):
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    exact_grad = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    estimate = reference_kl(policy, reference, torch.ones(6, dtype=torch.bool), kind)
    expected = (
        policy.exp().detach() * estimate
    ).sum()  # expectation over samples from the policy, samples held fixed
    torch.testing.assert_close(torch.autograd.grad(expected, logits)[0], exact_grad)
    if kind != "k2":
        torch.testing.assert_close(expected, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_gradient_has_the_correct_sign_and_is_bounded(kind: str, dtype: torch.dtype) -> None:
    """A table over differences from -30 to 30, against float64 numbers computed without torch."""
    differences = [step / 16 for step in range(-480, 481)]
    table = []
    for difference in differences:
        bounded = max(-20.0, min(20.0, difference))
        exact = {"k1": -bounded, "k2": bounded**2 / 2, "k3": math.expm1(bounded) - bounded}[kind]
        gradient = -difference
        table.append((max(-10.0, min(10.0, exact)), max(-10.0, min(10.0, gradient))))
    reference = torch.full((len(differences),), -31.0, dtype=dtype)
    policy = (reference - torch.tensor(differences, dtype=dtype)).requires_grad_()
    value = reference_kl(policy, reference, torch.ones(len(differences), dtype=torch.bool), kind)
    value.sum().backward()
    gradient = grad_of(policy)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    expected_values, expected_gradients = torch.tensor(table, dtype=torch.float64).unbind(1)
    torch.testing.assert_close(
        value.detach().double(), expected_values, rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(
        gradient.double(), expected_gradients, rtol=tolerance, atol=tolerance
    )
    assert torch.equal(gradient.sign(), (policy - reference).detach().sign())
    assert float(gradient.abs().max()) <= 10.0
    assert bool((gradient.diff() <= 0).all()), "the gradient is monotone in the difference"
    assert float(gradient.diff().abs().max()) <= 1 / 16 + 1e-5, "the gradient has no jump"


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("start", [-30.0, -3.0, -0.5, 0.5, 3.0, 30.0])
def test_descending_the_kl_moves_the_policy_to_the_reference(kind: str, start: float) -> None:
    reference = torch.tensor([-31.0])
    policy = (reference - start).requires_grad_()
    for _ in range(200):
        kl = reference_kl(policy, reference, torch.tensor([True]), kind)
        (gradient,) = torch.autograd.grad(kl.sum(), policy)
        policy = (policy - 0.1 * gradient).detach().requires_grad_()
    assert abs(float((policy - reference).detach())) < abs(start) * 0.01


def test_masked_positions_with_infinities_leave_values_and_gradients_finite():
    leaf = torch.tensor([-1.0, -float("inf")], requires_grad=True)
    bad = torch.tensor([-1.1, -float("inf")])
    inputs = LossInputs(
        policy_logprobs=leaf,
        token_mask=torch.tensor([True, False]),
        row_ids=torch.tensor([0, 0]),
        row_num_tokens=torch.tensor([1.0]),
        columns={
            "advantages": torch.ones(2),
            "prev_logprobs": bad,
            "generation_logprobs": bad,
            "reference_logprobs": bad,
        },
        entropy=torch.tensor([0.5, float("nan")]),
    )
    loss = ClippedPolicyGradientLoss(
        config=PolicyGradientLossConfig(reference_policy_kl_penalty=0.1, entropy_coefficient=0.01)
    )
    terms = loss(inputs)
    terms.loss_sum.backward()
    assert leaf.grad is not None and torch.isfinite(leaf.grad).all() and leaf.grad[1] == 0
    assert all(math.isfinite(value) for value in metric_values(terms.fetch_metrics()).values())


def test_the_entropy_is_computed_only_where_it_is_read():
    def needs_entropy(**keys: object) -> bool:
        loss = ClippedPolicyGradientLoss(config=PolicyGradientLossConfig(**keys))  # type: ignore[arg-type]
        return loss.needs_entropy

    assert not needs_entropy()
    assert needs_entropy(entropy_coefficient=0.01)


def test_the_entropy_estimate_is_the_mean_of_minus_the_logprobs():
    logprobs = torch.tensor([-1.0, -2.5, -40.0], requires_grad=True)
    inputs = LossInputs(
        policy_logprobs=logprobs,
        token_mask=torch.tensor([True, True, False]),
        row_ids=torch.zeros(3, dtype=torch.long),
        row_num_tokens=torch.tensor([2.0]),
        columns={
            "advantages": torch.ones(3),
            "prev_logprobs": logprobs.detach(),
            "generation_logprobs": logprobs.detach(),
        },
    )
    terms = ClippedPolicyGradientLoss(config=PolicyGradientLossConfig())(inputs)
    assert metric_values(terms.fetch_metrics())["policy/entropy_estimate"] == 1.75


def test_mismatch_metrics_are_zero_error_when_engines_agree():
    logprobs = -torch.rand(10)
    values = metric_values(
        fetch_metrics([mismatch_metrics(logprobs, logprobs, torch.ones(10, dtype=torch.bool))])[0]
    )
    assert values["mismatch/gen_kl_k3"] == 0.0 and values["mismatch/token_mult_prob_error"] == 1.0
    assert values["mismatch/logprob_diff_max"] == 0.0


def test_a_step_that_trains_nothing_has_zero_loss():
    assert GlobalCounts(0.0, 0.0).denominator("token") == 1.0
