"""Every member of the policy-gradient losses against its definition in float64."""

from __future__ import annotations

import dataclasses
import itertools
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
    LossNormalization,
    PolicyGradientLossConfig,
    Surrogate,
)
from nemo_like.losses import ClippedPolicyGradientLoss, GlobalCounts, LossInputs
from nemo_like.metrics import merge_metrics, metric_values
from nemo_like.policy.loss_step import row_loss_sums
from tests.losses.definition import DefinedRow, distance_to_a_kink, gradient, loss_value
from tests.policy.thread_ranks import run_thread_ranks

SURROGATES: tuple[Surrogate, ...] = get_args(Surrogate)
CORRECTIONS: tuple[CorrectionKind, ...] = get_args(CorrectionKind)
NORMALIZATIONS: tuple[LossNormalization | None, ...] = (None, *get_args(LossNormalization))


def member(
    surrogate: Surrogate, normalization: LossNormalization | None, kind: CorrectionKind
) -> PolicyGradientLossConfig:
    """The member with a KL penalty and an entropy bonus, and a dual clip where it has one."""
    return PolicyGradientLossConfig(
        surrogate=surrogate,
        normalization=normalization,
        constant_length=7 if normalization == "constant" else None,
        ratio_clip_c=None if surrogate in ("cispo", "reinforce") else 1.3,
        reference_policy_kl_penalty=0.1,
        reference_policy_kl_type="k2",
        entropy_coefficient=0.05,
        importance_correction=ImportanceCorrectionConfig(kind=kind),
    )


ALL = [member(*names) for names in itertools.product(SURROGATES, NORMALIZATIONS, CORRECTIONS)]
MEMBERS = [config for config in ALL if not list(config.problems())]
"""Every legal combination of surrogate, normalization and importance correction."""


def make_rows(lengths: list[int], seed: int) -> list[DefinedRow]:
    """Rows with small or large updates and mismatches, and a third of the tokens not trained."""
    generator = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        policy = -3 * generator.random(length)
        update = generator.choice([2e-4, 0.3, 1.0]) * generator.normal(size=length)
        mismatch = generator.choice([0.0, 3e-4, 0.3]) * generator.normal(size=length)
        rows.append(
            DefinedRow(
                policy=policy,
                prev=policy - update,
                generation=policy - update - mismatch,
                reference=-3 * generator.random(length),
                entropy=generator.random(length),
                is_trained=generator.random(length) > 0.3,
                # A float32 number, because columns of rows are.
                advantage=float(np.float32(generator.normal())),
            )
        )
    return rows


def to_inputs(
    rows: list[DefinedRow], leaves: list[torch.Tensor], entropies: list[torch.Tensor], **keys: Any
) -> LossInputs:
    """The rows packed, in the dtype of `leaves`."""
    dtype = leaves[0].dtype

    def packed(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(row, name) for row in rows])).to(dtype)

    lengths = torch.tensor([len(row.policy) for row in rows])
    values: dict[str, Any] = {
        "policy_logprobs": torch.cat(leaves),
        "token_mask": packed("is_trained").bool(),
        "row_ids": torch.repeat_interleave(torch.arange(len(rows)), lengths),
        "row_num_tokens": torch.tensor([float(row.is_trained.sum()) for row in rows]),
        "columns": {
            "prev_logprobs": packed("prev"),
            "generation_logprobs": packed("generation"),
            "reference_logprobs": packed("reference"),
        },
        "row_columns": {"advantages": torch.tensor([row.advantage for row in rows])},
        "entropy": torch.cat(entropies),
    }
    return LossInputs(**{**values, **keys})


def leaves_of(rows: list[DefinedRow], name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.from_numpy(getattr(row, name)).to(dtype).requires_grad_() for row in rows]


def counts_of(rows: list[DefinedRow]) -> GlobalCounts:
    return GlobalCounts(
        num_tokens=float(sum(row.is_trained.sum() for row in rows)),
        num_rows=float(sum(row.is_trained.any() for row in rows)),
    )


def gradients_of(leaves: list[torch.Tensor]) -> np.ndarray:
    found = [leaf.grad for leaf in leaves]
    return torch.cat([each for each in found if each is not None]).double().numpy()


@settings(max_examples=250, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    seed=st.integers(0, 100_000),
    config=st.sampled_from(MEMBERS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    order=st.randoms(use_true_random=False),
)
def test_loss_and_gradient_are_those_of_the_definition(lengths, seed, config, dtype, order):
    """In any split into microbatches and any order of rows."""
    rows = make_rows(lengths, seed)
    # Near a kink float32 rounds to the other side, and finite differences mix both.
    assume(distance_to_a_kink(rows, config) > 1e-5)
    expected = loss_value(rows, [row.policy for row in rows], [row.policy for row in rows], config)
    loss = ClippedPolicyGradientLoss(config=config)
    leaves = leaves_of(rows, "policy", dtype)
    entropies = leaves_of(rows, "entropy", dtype)
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)
    cut = order.randint(1, len(rows))
    total, parts = 0.0, []
    for group in filter(None, (shuffled[:cut], shuffled[cut:])):
        inputs = to_inputs(
            [rows[i] for i in group], [leaves[i] for i in group], [entropies[i] for i in group]
        )
        terms = loss(inputs)
        value = terms.loss_sum / loss.denominator(counts_of(rows))
        value.backward()
        total += float(value.detach())
        parts.append(terms.fetch_metrics())
    tolerance = 5e-5 if dtype == torch.float32 else 1e-6
    assert total == pytest.approx(expected, rel=tolerance, abs=tolerance)
    np.testing.assert_allclose(
        gradients_of(leaves),
        np.concatenate(gradient(rows, config)),
        rtol=10 * tolerance,
        atol=tolerance,
    )
    assert metric_values(merge_metrics(parts))["policy/loss"] == pytest.approx(
        total, rel=1e-4, abs=1e-5
    )
    # The entropy bonus has the weight of a token, and no ratio or importance weight.
    inputs = to_inputs(rows, leaves, entropies)
    shares = loss.normalizer.weights(inputs).double().numpy() / loss.denominator(counts_of(rows))
    np.testing.assert_allclose(gradients_of(entropies), -0.05 * shares, rtol=1e-5, atol=1e-9)


def test_every_surrogate_normalization_and_correction_is_among_the_members() -> None:
    assert {config.surrogate for config in MEMBERS} == set(SURROGATES)
    for surrogate in SURROGATES:
        own = [config for config in MEMBERS if config.surrogate == surrogate]
        kinds = {config.importance_correction.kind for config in own}
        refused = {"gspo": {"token_truncate", "token_mask"}, "reinforce": {"bypass"}}.get(
            surrogate, set()
        )
        assert kinds == set(CORRECTIONS) - refused
        divisors = {config.divisor for config in own}
        legal = {"sequence"} if surrogate == "gspo" else {"token", "sequence", "constant"}
        assert divisors == legal


@pytest.mark.parametrize(
    "config",
    [config for config in MEMBERS if config.has_row_ratio or config.divisor == "constant"],
    ids=lambda config: (
        f"{config.surrogate}-{config.normalization}-{config.importance_correction.kind}"
    ),
)
def test_context_parallel_ranks_have_the_gradient_of_the_full_row(config) -> None:
    """The gradient of a row's ratio reaches the tokens of every rank."""
    rows = make_rows([7, 4, 9, 5], seed=12)
    loss = ClippedPolicyGradientLoss(config=config)
    alone = leaves_of(rows, "policy", torch.float64)
    entropies = leaves_of(rows, "entropy", torch.float64)
    terms = loss(to_inputs(rows, alone, entropies))
    terms.loss_sum.backward()

    def rank(group: dist.ProcessGroup) -> Any:
        shares = []
        for row in rows:
            columns = {
                name: value[group.rank() :: 2]
                for name, value in vars(row).items()
                if isinstance(value, np.ndarray)
            }
            shares.append(dataclasses.replace(row, **columns))

        def all_reduce(values: torch.Tensor) -> torch.Tensor:
            total = values.clone()
            group.allreduce([total]).wait()
            return total

        leaves = leaves_of(shares, "policy", torch.float64)
        inputs = to_inputs(
            shares,
            leaves,
            leaves_of(shares, "entropy", torch.float64),
            row_num_tokens=torch.tensor([float(row.is_trained.sum()) for row in rows]),
            sum_over_cp=all_reduce,
        )
        found = loss(inputs)
        found.loss_sum.backward()
        return float(found.loss_sum.detach()), leaves, found.fetch_metrics()

    ranks = run_thread_ranks(2, rank)
    total = sum(value for value, _, _ in ranks)
    assert total == pytest.approx(float(terms.loss_sum.detach()), rel=1e-6)
    for start, (_, leaves, _) in enumerate(ranks):
        for leaf, full in zip(leaves, alone, strict=True):
            assert leaf.grad is not None and full.grad is not None
            torch.testing.assert_close(leaf.grad, full.grad[start::2])
    metrics = metric_values(merge_metrics(metrics for _, _, metrics in ranks))
    assert metrics == pytest.approx(metric_values(terms.fetch_metrics()), rel=1e-5, abs=1e-6)


def run(config: PolicyGradientLossConfig, rows: list[DefinedRow]) -> tuple[float, np.ndarray, Any]:
    leaves = leaves_of(rows, "policy", torch.float64)
    loss = ClippedPolicyGradientLoss(config=config)
    terms = loss(to_inputs(rows, leaves, leaves_of(rows, "entropy", torch.float64)))
    terms.loss_sum.backward()
    metrics = metric_values(terms.fetch_metrics())
    return float(terms.loss_sum.detach()), gradients_of(leaves), metrics


def test_gspo_and_gspo_token_agree_for_advantages_of_rows() -> None:
    rows = make_rows([7, 4, 9, 5], seed=3)
    row_level = run(PolicyGradientLossConfig(surrogate="gspo"), rows)
    token_level = run(PolicyGradientLossConfig(surrogate="gspo_token"), rows)
    assert row_level[0] == pytest.approx(token_level[0])
    np.testing.assert_allclose(row_level[1], token_level[1])


def test_gspo_refuses_advantages_of_tokens_and_gspo_token_takes_them() -> None:
    rows = make_rows([3, 2], seed=0)
    leaves = leaves_of(rows, "policy", torch.float32)
    inputs = to_inputs(rows, leaves, leaves_of(rows, "entropy", torch.float32))
    columns = {**inputs.columns, "advantages": torch.linspace(-1, 1, 5)}
    inputs = dataclasses.replace(inputs, columns=columns, row_columns={})
    with pytest.raises(ValueError, match=r"needs one advantage per row: use .*gspo_token"):
        ClippedPolicyGradientLoss(config=PolicyGradientLossConfig(surrogate="gspo"))(inputs)
    config = PolicyGradientLossConfig(surrogate="gspo_token")
    assert bool(ClippedPolicyGradientLoss(config=config)(inputs).loss_sum.isfinite())


def constant_row(update: float, advantage: float, length: int = 4) -> DefinedRow:
    """A row whose tokens all changed by `update`."""
    prev = np.full(length, -1.0)
    return DefinedRow(
        policy=prev + update,
        prev=prev,
        generation=prev,
        reference=prev,
        entropy=prev,
        is_trained=np.ones(length, dtype=bool),
        advantage=advantage,
    )


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    row = constant_row(math.log(9.0), advantage=2.0)
    _, clipped, metrics = run(PolicyGradientLossConfig(surrogate="cispo"), [row])
    np.testing.assert_allclose(clipped, -5.0 * 2.0)
    assert metrics["policy/clip_fraction_high"] == 1.0
    _, removed, _ = run(PolicyGradientLossConfig(surrogate="ppo"), [row])
    assert not removed.any()
    below = constant_row(math.log(0.01), advantage=2.0)
    _, small, metrics = run(PolicyGradientLossConfig(surrogate="cispo"), [below])
    np.testing.assert_allclose(small, -0.01 * 2.0)
    assert metrics["policy/clip_fraction"] == 0.0, "there is no lower bound"
    two_sided = PolicyGradientLossConfig(surrogate="cispo", ratio_clip_min=0.5)
    np.testing.assert_allclose(run(two_sided, [below])[1], -0.5 * 2.0)


def test_reinforce_reads_no_previous_log_probs() -> None:
    config = PolicyGradientLossConfig(surrogate="reinforce")
    loss = ClippedPolicyGradientLoss(config=config)
    assert loss.for_num_steps(4).logprob_names == ()
    first = run(config, [constant_row(1.0, advantage=2.0)])
    np.testing.assert_allclose(first[1], -2.0)
    assert not any(name.startswith(("policy/ratio", "policy/clip")) for name in first[2])
    weighted = ImportanceCorrectionConfig(kind="token_truncate")
    corrected = dataclasses.replace(config, importance_correction=weighted)
    assert corrected.logprob_names(is_single_step=False) == ("prev_logprobs",)


def test_gspo_clips_complete_rows() -> None:
    config = PolicyGradientLossConfig(surrogate="gspo")
    rows = [constant_row(1e-3, 1.0), constant_row(2e-4, 1.0, length=2)]
    value, found, metrics = run(config, rows)
    assert value == pytest.approx(-(1 + 4e-4) - math.exp(2e-4))
    np.testing.assert_allclose(found, [0.0] * 4 + [-math.exp(2e-4) / 2] * 2)
    assert metrics["policy/clip_fraction_high"] == pytest.approx(4 / 6)


def test_the_constant_denominator_gives_every_token_the_same_weight() -> None:
    config = PolicyGradientLossConfig(
        surrogate="reinforce", normalization="constant", constant_length=10
    )
    loss = ClippedPolicyGradientLoss(config=config)
    rows = [constant_row(0.0, 1.0, length=2), constant_row(0.0, 1.0, length=8)]
    assert loss.denominator(counts_of(rows)) == 20.0
    assert loss.denominator(GlobalCounts(0.0, 0.0)) == 10.0
    np.testing.assert_allclose(run(config, rows)[1], -1.0)
    without = PolicyGradientLossConfig(normalization="constant")
    with pytest.raises(ValueError, match="constant_length is None"):
        ClippedPolicyGradientLoss(config=without).denominator(counts_of(rows))


@pytest.mark.parametrize("surrogate", ["gspo", "gspo_token"])
def test_the_losses_of_rows_add_up_to_that_of_the_microbatch(surrogate: Surrogate) -> None:
    """A skipped step is searched for rows that are not finite, one row at a time."""
    rows = make_rows([5, 3, 4], seed=2)
    rows[1].policy[:] = math.nan
    rows[1].is_trained[:] = True
    config = PolicyGradientLossConfig(surrogate=surrogate)
    leaves = leaves_of(rows, "policy", torch.float32)
    inputs = to_inputs(rows, leaves, leaves_of(rows, "entropy", torch.float32))
    sums = row_loss_sums(ClippedPolicyGradientLoss(config=config), inputs)
    assert [math.isfinite(value) for value in sums] == [True, False, True]
    finite = [rows[0], rows[2]]
    assert sums[0] + sums[2] == pytest.approx(run(config, finite)[0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("surrogate", ["gspo", "gspo_token"])
def test_a_row_without_a_ratio_does_not_train(surrogate: Surrogate) -> None:
    """The ratio of a row has no meaning if the sampler returned no number for one of its tokens."""
    rows = [constant_row(0.0, 1.0), constant_row(0.0, 1.0)]
    rows[0].generation[:] = [-1.0, math.nan, -1.0, -1.0]
    correction = ImportanceCorrectionConfig(kind="bypass")
    config = PolicyGradientLossConfig(surrogate=surrogate, importance_correction=correction)
    _, found, metrics = run(config, rows)
    np.testing.assert_allclose(found, [0.0] * 4 + [-0.25] * 4)
    assert metrics["mismatch/num_nonfinite"] == 1.0
    rows[0].policy[2] = math.nan
    assert math.isnan(run(config, rows)[0]), "a policy that is not finite is never hidden"
