"""Importance correction against float64 numbers that NumPy computes from the definition."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nemo_like.config.loss import (
    CorrectionKind,
    ImportanceCorrectionConfig,
    PolicyGradientLossConfig,
)
from nemo_like.losses import ClippedPolicyGradientLoss, GlobalCounts, LossInputs
from nemo_like.losses.importance import mismatch_metrics
from nemo_like.losses.policy_gradient import divergence_metrics
from nemo_like.metrics import merge_metrics, metric_values
from tests.policy.thread_ranks import run_thread_ranks

KINDS: tuple[CorrectionKind, ...] = get_args(CorrectionKind)
BOUNDS = {
    "token_truncate": (0.0, 2.0),
    "sequence_truncate": (0.0, 2.0),
    "token_mask": (0.5, 5.0),
    "sequence_mask": (0.999, 1.002),
}
Row = dict[str, np.ndarray]


def make_rows(lengths: list[int], seed: int) -> list[Row]:
    """Rows whose mismatch is absent, small or large."""
    generator = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        policy = -3 * generator.random(length)
        prev = policy + 0.3 * generator.normal(size=length)
        mismatch = generator.choice([0.0, 3e-4, 0.3, 1.5]) * generator.normal(size=length)
        rows.append(
            {
                "policy_logprobs": policy,
                "prev_logprobs": prev,
                "generation_logprobs": prev - mismatch,
                "reference_logprobs": -3 * generator.random(length),
                "advantages": np.full(length, generator.normal()),
                "token_mask": generator.random(length) > 0.3,
            }
        )
    for row in rows:
        for name, values in row.items():
            # What the loss gets is float32, and the definition is evaluated at the same numbers.
            if values.dtype == np.float64:
                row[name] = values.astype(np.float32).astype(np.float64)
    return rows


def by_definition(
    rows: list[Row], config: PolicyGradientLossConfig, *, is_single_step: bool
) -> tuple[float, np.ndarray, dict[str, float], float]:
    """Loss, gradient over all tokens, metrics, and distance of a weight to a bound or clip."""
    kind = config.importance_correction.kind
    num_tokens = max(sum(row["token_mask"].sum() for row in rows), 1)
    num_rows = max(sum(row["token_mask"].any() for row in rows), 1)
    loss = 0.0
    gradients = []
    applied: list[float] = []
    outside: list[bool] = []
    distance = math.inf
    for row in rows:
        mask = row["token_mask"]
        policy = row["policy_logprobs"]
        engine = row["prev_logprobs"]
        if is_single_step or kind == "bypass":
            engine = policy
        generation = row["generation_logprobs"]
        w = np.exp(engine - generation)
        lower, upper = BOUNDS.get(kind, (0.5, 5.0))
        weights = np.ones_like(w)
        row_value = 1.0
        if mask.any():
            row_w = w[mask]
            if kind == "sequence_truncate":
                row_value = float(np.prod(row_w))
                weights = np.full_like(w, min(row_value, upper))
            elif kind == "sequence_mask":
                row_value = float(np.prod(row_w) ** (1 / mask.sum()))
                weights = w if lower <= row_value <= upper else np.zeros_like(w)
        if kind == "token_truncate":
            weights = np.minimum(w, upper)
        elif kind == "token_mask":
            weights = np.where((w < lower) | (w > upper), 0.0, w)
        values = [row_value] if kind.startswith("sequence") else w[mask].tolist()
        if mask.any():
            outside += [not lower <= value <= upper for value in values]
            distance = min(
                [distance, *(abs(value - b) for value in values for b in (lower, upper))]
            )
        applied += weights[mask].tolist()
        prev = generation if kind == "bypass" else engine
        ratio = np.exp(policy - prev)
        low, high = 0.8, 1.2
        advantage = row["advantages"]
        surrogate = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, low, high))
        is_clipped = ((ratio > high) & (advantage > 0)) | ((ratio < low) & (advantage < 0))
        gradient = np.where(is_clipped, 0.0, -advantage * ratio)
        distance = min(distance, *np.abs(ratio - low), *np.abs(ratio - high))
        difference = row["reference_logprobs"] - policy
        kl = np.minimum(np.exp(difference) - 1 - difference, 10.0)
        scale = mask / num_tokens
        if config.normalization == "sequence":
            scale = mask / max(mask.sum(), 1) / num_rows
        penalty = config.reference_policy_kl_penalty
        loss += float((scale * (weights * surrogate + penalty * kl)).sum())
        gradients.append(scale * (weights * gradient - penalty * difference))
    metrics = {"importance/out_of_bounds_share": sum(outside) / max(len(outside), 1)}
    if kind not in ("none", "bypass"):
        metrics["importance/weight_mean"] = sum(applied) / max(len(applied), 1)
    return loss, np.concatenate(gradients), metrics, distance


def to_inputs(rows: list[Row], leaves: list[torch.Tensor], **keys: Any) -> LossInputs:
    names = set(rows[0]) - {"policy_logprobs", "token_mask"}

    def joined(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([row[name] for row in rows]).astype(np.float32))

    lengths = torch.tensor([len(row["token_mask"]) for row in rows])
    num_tokens = [float(row["token_mask"].sum()) for row in rows]
    return LossInputs(
        **{
            "policy_logprobs": torch.cat(leaves),
            "token_mask": joined("token_mask").bool(),
            "row_ids": torch.repeat_interleave(torch.arange(len(rows)), lengths),
            "row_num_tokens": torch.tensor(num_tokens),
            "columns": {name: joined(name) for name in names},
            **keys,
        }
    )


def leaf_of(row: Row) -> torch.Tensor:
    return torch.from_numpy(row["policy_logprobs"].astype(np.float32)).requires_grad_()


def counts_of(rows: list[Row]) -> GlobalCounts:
    return GlobalCounts(
        num_tokens=float(sum(row["token_mask"].sum() for row in rows)),
        num_rows=float(sum(row["token_mask"].any() for row in rows)),
    )


def make_loss(kind: CorrectionKind, *, is_single_step: bool = False, **keys: Any) -> Any:
    config = PolicyGradientLossConfig(
        importance_correction=ImportanceCorrectionConfig(kind=kind),
        **{"reference_policy_kl_penalty": 0.1, **keys},
    )
    return ClippedPolicyGradientLoss(config=config, is_single_step=is_single_step)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    seed=st.integers(0, 100_000),
    kind=st.sampled_from(KINDS),
    normalization=st.sampled_from(["token", "sequence"]),
    is_single_step=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_loss_gradient_and_metrics_are_those_of_the_definition(
    lengths, seed, kind, normalization, is_single_step, order
):
    """In any split into microbatches and any order of rows."""
    rows = make_rows(lengths, seed)
    loss = make_loss(kind, normalization=normalization, is_single_step=is_single_step)
    expected, gradient, expected_metrics, distance = by_definition(
        rows, loss.config, is_single_step=is_single_step
    )
    # Float32 decides such a comparison by its rounding.
    assume(distance > 1e-5)
    leaves = [leaf_of(row) for row in rows]
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)
    cut = order.randint(1, len(rows))
    total, parts = 0.0, []
    for group in filter(None, (shuffled[:cut], shuffled[cut:])):
        columns = [rows[i] for i in group]
        if is_single_step or kind == "bypass":
            columns = [
                {name: values for name, values in row.items() if name != "prev_logprobs"}
                for row in columns
            ]
        terms = loss(to_inputs(columns, [leaves[i] for i in group]))
        value = terms.loss_sum / loss.denominator(counts_of(rows))
        value.backward()
        total += float(value.detach())
        parts.append(terms.fetch_metrics())
    metrics = metric_values(merge_metrics(parts))
    found = torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None])
    assert total == pytest.approx(expected, rel=2e-5, abs=2e-6)
    np.testing.assert_allclose(found.numpy(), gradient, rtol=2e-5, atol=2e-6)
    assert metrics["policy/loss"] == pytest.approx(expected, rel=2e-5, abs=2e-6)
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    assert metrics.keys() & {"importance/weight_mean"} == expected_metrics.keys() & {
        "importance/weight_mean"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_divided_over_context_parallel_ranks_has_the_weights_of_the_full_row(kind):
    rows = make_rows([7, 4, 9, 5], seed=8)
    loss = make_loss(kind, normalization="sequence")
    alone_leaves = [leaf_of(row) for row in rows]
    alone = loss(to_inputs(rows, alone_leaves))
    alone.loss_sum.backward()

    def rank(group: dist.ProcessGroup) -> Any:
        shares = [{name: x[group.rank() :: 2] for name, x in row.items()} for row in rows]

        def all_reduce(values: torch.Tensor) -> torch.Tensor:
            total = values.clone()
            group.allreduce([total]).wait()
            return total

        leaves = [leaf_of(share) for share in shares]
        row_num_tokens = torch.tensor([float(row["token_mask"].sum()) for row in rows])
        terms = loss(
            to_inputs(shares, leaves, row_num_tokens=row_num_tokens, sum_over_cp=all_reduce)
        )
        terms.loss_sum.backward()
        return float(terms.loss_sum.detach()), [leaf.grad for leaf in leaves], terms.fetch_metrics()

    ranks = run_thread_ranks(2, rank)
    assert sum(value for value, _, _ in ranks) == pytest.approx(
        float(alone.loss_sum.detach()), rel=1e-5
    )
    for index, leaf in enumerate(alone_leaves):
        assert leaf.grad is not None
        for start, (_, gradients, _) in enumerate(ranks):
            torch.testing.assert_close(gradients[index], leaf.grad[start::2], rtol=1e-5, atol=1e-6)
    metrics = metric_values(merge_metrics(metrics for _, _, metrics in ranks))
    assert metrics == pytest.approx(metric_values(alone.fetch_metrics()), rel=1e-5, abs=1e-6)


def test_one_optimizer_step_needs_no_pass_and_has_its_gradient_and_metrics() -> None:
    rows = make_rows([5, 8, 3], seed=1)
    for row in rows:
        row["prev_logprobs"] = row["policy_logprobs"]
    for kind in KINDS:
        results = []
        for is_single_step in (False, True):
            leaves = [leaf_of(row) for row in rows]
            terms = make_loss(kind, is_single_step=is_single_step)(to_inputs(rows, leaves))
            terms.loss_sum.backward()
            results.append((metric_values(terms.fetch_metrics()), [leaf.grad for leaf in leaves]))
        assert results[0][0] == results[1][0], kind
        for with_pass, without in zip(results[0][1], results[1][1], strict=True):
            assert torch.equal(with_pass, without), kind


def test_the_names_of_the_log_prob_pass() -> None:
    both = ("prev_logprobs", "reference_logprobs")
    for kind in KINDS:
        loss = make_loss(kind)
        expected = both if kind != "bypass" else both[1:]
        assert loss.for_num_steps(2).logprob_names == expected
        assert loss.for_num_steps(1).logprob_names == both[1:]
        without = make_loss(kind, reference_policy_kl_penalty=0.0)
        assert without.for_num_steps(1).logprob_names == ()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_without_a_finite_weight_does_not_train(kind, bad):
    """A sampler that returned no number must not decide the step."""
    rows = make_rows([4, 6], seed=5)
    for row in rows:
        row["token_mask"][:] = True
        engine = row["policy_logprobs" if kind == "bypass" else "prev_logprobs"]
        row["generation_logprobs"] = engine.copy()
    rows[0]["generation_logprobs"][2] = bad
    leaves = [leaf_of(row) for row in rows]
    loss = make_loss(kind, reference_policy_kl_penalty=0.0)
    terms = loss(to_inputs(rows, leaves))
    terms.loss_sum.backward()
    metrics = metric_values(terms.fetch_metrics())
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["mismatch/num_nonfinite"] == 1.0
    assert metrics["mismatch/gen_kl_k3"] == pytest.approx(0.0, abs=1e-3)
    gradients = [leaf.grad for leaf in leaves]
    assert gradients[0] is not None and gradients[1] is not None
    assert bool(gradients[1].any())
    if kind == "none":
        assert bool(gradients[0][2] != 0)
    elif kind.startswith("sequence"):
        assert not gradients[0].any()
    else:
        assert gradients[0][2] == 0
        assert bool(gradients[0].any())


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_that_is_not_finite_is_not_hidden_by_a_weight_of_zero(kind):
    """The optimizer step is skipped because of it; a loss of 0 would be applied."""
    rows = make_rows([4], seed=5)
    rows[0]["token_mask"][:] = True
    rows[0]["policy_logprobs"][1] = math.nan
    for is_single_step in (False, True):
        terms = make_loss(kind, is_single_step=is_single_step)(to_inputs(rows, [leaf_of(rows[0])]))
        assert not bool(terms.loss_sum.isfinite())


@pytest.mark.parametrize("name", ["generation_logprobs", "prev_logprobs", "reference_logprobs"])
def test_a_missing_column_is_an_error(name):
    rows = make_rows([4, 2], seed=0)
    for row in rows:
        del row[name]
    with pytest.raises(ValueError, match=f"the batch has no column {name}, which the loss reads"):
        make_loss("none")(to_inputs(rows, [leaf_of(row) for row in rows]))


@given(
    gaps=st.lists(st.integers(0, 8), min_size=1, max_size=30),
    seed=st.integers(0, 1000),
    cut=st.integers(0, 30),
)
@settings(max_examples=50, deadline=None)
def test_mismatch_by_version_gap_is_a_mean_over_the_tokens_of_the_gap(gaps, seed, cut):
    (row,) = make_rows([len(gaps)], seed)
    row["version_gap"] = np.array(gaps, dtype=np.float64)
    loss = make_loss("none")
    parts = []
    for part in (slice(0, cut), slice(cut, None)):
        share = {name: values[part] for name, values in row.items()}
        if len(share["token_mask"]):
            parts.append(loss(to_inputs([share], [leaf_of(share)])).fetch_metrics())
    metrics = metric_values(merge_metrics(parts))
    mask = row["token_mask"]
    gap = np.array(gaps)[mask]
    log_weight = (row["prev_logprobs"] - row["generation_logprobs"])[mask]
    kl = np.exp(log_weight) - 1 - log_weight
    assert metrics["staleness/mean"] == pytest.approx(gap.mean() if len(gap) else 0.0, rel=1e-6)
    assert metrics["staleness/max"] == (gap.max() if len(gap) else 0.0)
    for group in range(6):
        name = f"mismatch/gap_{group}" if group < 5 else "mismatch/gap_5_or_more"
        is_in_group = np.minimum(gap, 5) == group
        if not is_in_group.any():
            assert f"{name}/gen_kl_k3" not in metrics
            continue
        assert metrics[f"{name}/gen_kl_k3"] == pytest.approx(
            kl[is_in_group].mean(), rel=1e-4, abs=1e-6
        )
        assert metrics[f"{name}/importance_ratio_mean"] == pytest.approx(
            np.exp(log_weight[is_in_group]).mean(), rel=1e-5
        )
    assert len([name for name in metrics if name.startswith("mismatch/gap_")]) <= 12


def test_without_the_column_there_are_no_gaps() -> None:
    (row,) = make_rows([5], seed=0)
    row["token_mask"][:] = True
    terms = make_loss("none")(to_inputs([row], [leaf_of(row)]))
    assert not any(name.startswith(("staleness/", "mismatch/gap_")) for name in terms.metrics)


def test_the_bounds_of_the_config_replace_the_defaults() -> None:
    rows = make_rows([6, 6], seed=3)
    for row in rows:
        row["token_mask"][:] = True
        row["generation_logprobs"] = row["prev_logprobs"] - math.log(4.0)
    for keys, expected in [
        ({"kind": "token_truncate", "upper": 3.0}, 3.0),
        ({"kind": "token_truncate", "upper": 10.0}, 4.0),
        ({"kind": "token_mask", "upper": 3.5}, 0.0),
        ({"kind": "sequence_mask", "upper": 5.0}, 4.0),
        ({"kind": "sequence_truncate", "upper": 2.5}, 2.5),
    ]:
        config = PolicyGradientLossConfig(importance_correction=ImportanceCorrectionConfig(**keys))
        loss = ClippedPolicyGradientLoss(config=config)
        metrics = metric_values(
            loss(to_inputs(rows, [leaf_of(row) for row in rows])).fetch_metrics()
        )
        assert metrics["importance/weight_mean"] == pytest.approx(expected, rel=1e-5), keys
    below = [dict(row, generation_logprobs=row["prev_logprobs"] + 3.0) for row in rows]
    correction = ImportanceCorrectionConfig(kind="token_truncate", lower=0.5)
    config = dataclasses.replace(loss.config, importance_correction=correction)
    loss = ClippedPolicyGradientLoss(config=config)
    metrics = metric_values(loss(to_inputs(below, [leaf_of(row) for row in below])).fetch_metrics())
    assert metrics["importance/weight_mean"] == pytest.approx(0.5)
    assert metrics["importance/out_of_bounds_share"] == 1.0


def test_small_differences_of_log_probs_have_the_right_kl_k3():
    """exp(d) - 1 - d in float32 is negative, or has no right digit, below d = 1e-4."""
    generation = torch.full((6,), -2.5)
    difference = torch.tensor([1e-3, -1e-3, 1e-4, -1e-4, 2e-5, 0.5])
    policy = generation + difference
    exact = (policy.double() - generation.double()).numpy()
    expected = np.expm1(exact) - exact
    metrics = mismatch_metrics(policy, generation, torch.ones(6, dtype=torch.bool))
    metric: Any = metrics["mismatch/gen_kl_k3"]
    total = metric.total
    assert float(total) == pytest.approx(expected.sum(), rel=1e-4)
    k3 = divergence_metrics(policy - generation)["policy/approx_kl_k3"]
    np.testing.assert_allclose(k3.numpy(), expected, rtol=2e-2)
