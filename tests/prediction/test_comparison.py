"""Every strategy plans every row, and the reported numbers are those of the plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemo_like.config.schema import AdapterConfig
from nemo_like.data.planning.plan import BatchPlan, PlanSpec
from nemo_like.data.planning.prefixes import SharedPrefixes
from nemo_like.data.planning.spec import CostModel
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.integer_math import round_up
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.prediction.comparison import compare, plan_ranks_first
from nemo_like.prediction.duration import StepDuration, train_passes
from nemo_like.prediction.lengths import RowLengths
from nemo_like.prediction.placement import Placement
from nemo_like.prediction.plan_report import PlanReport, PlanRequest, make_plan, max_useful_tokens

COST = CostModel(linear=50.0, quadratic=1.0, head=20.0)


@st.composite
def settings_of_a_plan(draw: st.DrawFn) -> tuple[np.ndarray, PlanSpec]:
    num_ranks, batch_size = draw(st.integers(1, 5)), draw(st.integers(5, 24))
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=60))
    cp_size = draw(st.sampled_from([1, 2]))
    spec = PlanSpec(
        max_tokens=round_up(max(lengths), 2 * cp_size) + draw(st.integers(0, 120)) * 2 * cp_size,
        num_ranks=num_ranks,
        global_batch_size=batch_size,
        sync=draw(st.sampled_from(["microbatch", "step"])),
        cp_size=cp_size,
        cost=COST,
    )
    return np.array(lengths), spec


def max_tokens_of(spec: PlanSpec) -> int:
    assert spec.max_tokens is not None
    return spec.max_tokens


def work_by_hand(plan: BatchPlan) -> np.ndarray:
    """Work of each microbatch [R, M] from the microbatches themselves."""

    def work(rows: tuple[int, ...], num_tokens: int) -> float:
        # Positions that fill up a microbatch have no loss.
        if rows:
            return float(COST.of(rows).sum()) + 30.0 * (num_tokens - sum(rows))
        return 30.0 * num_tokens + num_tokens**2

    return np.array(
        [[work(mb.padded_lengths, mb.num_tokens) for mb in rank] for rank in plan.ranks]
    )


@settings(max_examples=40, deadline=None)
@given(settings_of_a_plan())
@example(
    (
        np.array([1, 1, 3, 3, 3]),
        PlanSpec(max_tokens=4, num_ranks=3, global_batch_size=5, sync="step", cost=COST),
    )
)
def test_every_strategy_holds_every_row_once_and_is_told_as_it_is(
    case: tuple[np.ndarray, PlanSpec],
):
    lengths, spec = case
    comparison = compare(TokenCounts(lengths), spec, max_tokens_of(spec))
    for outcome in comparison.outcomes:
        plan = outcome.plan
        rows = [row for rank in plan.ranks for microbatch in rank for row in microbatch.rows]
        assert sorted(rows) == list(range(len(lengths))), outcome.strategy.key
        np.testing.assert_array_equal(plan.lengths, lengths[plan.rows])
        np.testing.assert_allclose(outcome.work, work_by_hand(plan))
        positions = sum(microbatch.num_tokens for rank in plan.ranks for microbatch in rank)
        assert outcome.padding_share == pytest.approx(1 - lengths.sum() / positions)
        if outcome.metrics["packing/num_dummies"] == 0 and spec.total_multiple == 1:
            assert outcome.rank_flops == pytest.approx(
                outcome.metrics["packing/rank_imbalance_flops"]
            )
            assert outcome.rank_tokens == pytest.approx(
                outcome.metrics["packing/rank_imbalance_tokens"]
            )
        if plan.spec.layout == "packed":
            assert outcome.utilization == pytest.approx(outcome.metrics["packing/utilization"])
            assert outcome.num_microbatches >= comparison.min_microbatches
            assert outcome.over_bound is not None and outcome.over_bound >= 1 - 1e-9
        assert outcome.step_time >= 1 - 1e-9


@settings(max_examples=40, deadline=None)
@given(settings_of_a_plan())
def test_a_step_takes_as_long_as_its_slowest_ranks(case: tuple[np.ndarray, PlanSpec]):
    lengths, spec = case
    comparison = compare(TokenCounts(lengths), spec, max_tokens_of(spec), bubble=2.0)
    for outcome in comparison.outcomes:
        work, offsets, total = work_by_hand(outcome.plan), outcome.plan.step_offsets, 0.0
        for start, stop in pairwise(offsets):
            part = work[:, start:stop]
            waited = part.max(axis=0).sum() if spec.sync == "microbatch" else part.sum(axis=1).max()
            total += waited * (stop - start + 2) / (stop - start)
        assert outcome.step_time == pytest.approx(total * spec.num_ranks / COST.of(lengths).sum())


@settings(max_examples=40, deadline=None)
@given(settings_of_a_plan(), st.integers(1, 6), st.integers(0, 60), st.booleans())
def test_shared_prefixes_are_planned_beside_complete_rows(
    case: tuple[np.ndarray, PlanSpec], group_size: int, prefix: int, is_used: bool
):
    lengths, spec = case
    prefixes = np.minimum(lengths, prefix)
    counts = TokenCounts(
        lengths, prefixes=SharedPrefixes.of_groups(np.arange(len(lengths)) // group_size, prefixes)
    )
    comparison = compare(counts, spec, max_tokens_of(spec), shared_prefix=is_used)
    shared = comparison.shared
    assert (comparison.chosen is shared) == is_used
    if shared is None:
        return
    separate = comparison.separate
    assert separate.plan.shared is None and separate.plan.spec == shared.plan.spec
    # The unit of time is the work of complete rows, so that both times are comparable.
    ideal = COST.of(lengths).sum() / spec.num_ranks
    starts = shared.plan.step_offsets[:-1]
    by_microbatch = shared.work.max(axis=0).sum()
    by_rank = np.add.reduceat(shared.work, starts, axis=1).max(axis=0).sum()
    time = by_microbatch if spec.sync == "microbatch" else by_rank
    assert shared.step_time == pytest.approx(time / ideal)
    largest = shared.largest_microbatch
    keys = [
        sum(microbatch.shared) + microbatch.num_tokens
        for rank in shared.plan.ranks
        for microbatch in rank
    ]
    assert shared.keys_per_token == pytest.approx(max(keys) / largest)
    work = sum(
        COST.of([padded + common]).item() - COST.of([common]).item()
        for rank in shared.plan.ranks
        for microbatch in rank
        for padded, common in zip(
            microbatch.padded_lengths, microbatch.shared or [0] * len(microbatch.rows), strict=True
        )
    )
    tail = shared.plan.num_tokens.sum() - shared.plan.padded_lengths.sum()
    if shared.metrics["packing/num_dummies"] == 0:
        assert shared.work.sum() == pytest.approx(work + 30.0 * tail)


def request(
    rows: RowLengths, max_tokens: int, *, batch_size: int = 8, dp: int = 1, **values: Any
) -> PlanRequest:
    """The request for a packed 7B model on `dp` ranks."""
    model, placement = load_spec("7b"), sharded(dp)
    sync = placement.parallel_layout.sync("dtensor", model.num_params)
    spec = PlanSpec(
        max_tokens=max_tokens,
        num_ranks=dp,
        global_batch_size=batch_size,
        sync=sync,
        cost=CostModel.from_spec(model),
    )
    return PlanRequest(
        rows=rows, spec=spec, max_tokens=max_tokens, model=model, placement=placement, **values
    )


def plan(lengths: list[int], max_tokens: int, **values: Any) -> PlanReport:
    return make_plan(
        request(RowLengths(TokenCounts(np.array(lengths)), "a test"), max_tokens, **values)
    )


def test_padded_batches_have_as_many_rows_as_fit_at_the_longest():
    report = plan([10, 20, 30, 40] * 4, max_tokens=80)
    outcome = report.comparison["padded/microbatch"]
    assert outcome.strategy.title == "2 rows at a time, padded"
    rows_of_rank = outcome.plan.padded_lengths.reshape(-1, 2)
    assert (rows_of_rank == outcome.plan.lengths.reshape(-1, 2).max(axis=1, keepdims=True)).all()


def test_the_baseline_is_the_fastest_simple_method():
    lengths = np.random.default_rng(3).lognormal(5, 1, 400).clip(1, 2000).astype(int).tolist()
    report = plan(lengths, max_tokens=2048, batch_size=80, dp=4)
    comparison = report.comparison
    expected = ["padded batches", *["ranks in turn"] * 4, "ranks before microbatches"]
    simple = [outcome for outcome in comparison.outcomes if outcome.strategy.method]
    assert [outcome.strategy.method for outcome in simple] == expected
    times = [outcome.step_time for outcome in simple]
    assert comparison.baseline.step_time == min(times)
    assert comparison.speedup(comparison.baseline) == 1
    assert set(comparison.by_method) == set(expected)


@settings(max_examples=40, deadline=None)
@given(settings_of_a_plan())
def test_ranks_first_divides_the_rows_before_it_packs_them(case: tuple[np.ndarray, PlanSpec]):
    lengths, spec = case
    plan = plan_ranks_first(TokenCounts(lengths), spec)
    size = spec.global_batch_size or len(lengths)
    rows = [
        [[row for microbatch in rank.step(step) for row in microbatch.rows] for rank in ranks]
        for ranks in [[plan.rank_plan(r, np.arange(len(lengths))) for r in range(spec.num_ranks)]]
        for step in range(plan.num_steps)
    ]
    for step, by_rank in enumerate(rows):
        first, stop = step * size, min((step + 1) * size, len(lengths))
        assert sorted(row for own in by_rank for row in own) == list(range(first, stop))
        counts = [len(own) for own in by_rank]
        assert max(counts) - min(counts) <= 1
        # The rank with most tokens needs at least so many microbatches.
        padded = round_up(lengths, spec.row_multiple)
        needed = max(int(padded[own].sum()) for own in by_rank)
        num_microbatches = plan.step_offsets[step + 1] - plan.step_offsets[step]
        assert num_microbatches >= -(-needed // spec.capacity)
    assert plan.num_tokens.max() <= max_tokens_of(spec)


def test_full_batches_are_planned_and_the_rest_is_named():
    report = plan(list(range(1, 22)), max_tokens=64)
    assert report.comparison.num_steps == 2 and "5 rows do not fill a batch" in report.notes[0]
    assert plan([3, 4, 5], max_tokens=64).comparison.num_steps == 1


@pytest.mark.parametrize(
    ("oversize", "num_rows", "longest"), [("truncate", 8, 50), ("drop", 6, 9), ("singleton", 8, 70)]
)
def test_rows_above_the_budget_are_the_same_in_every_strategy(
    oversize: str, num_rows: int, longest: int
):
    report = plan([70, 60, 9, 9, 9, 9, 9, 9], max_tokens=50, oversize=oversize)
    assert "2 of 8 rows are above policy.sequence_packing.train_mb_tokens 50" in report.notes[0]
    for outcome in report.comparison.outcomes:
        assert (len(outcome.plan.lengths), outcome.plan.lengths.max()) == (num_rows, longest), (
            outcome.strategy.key
        )


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_with_the_max_useful_tokens_every_step_is_one_microbatch(
    lengths: list[int], num_ranks: int
):
    rows = RowLengths(TokenCounts(np.array(lengths)), "a test", is_ordered=True)
    batch_size = max(num_ranks, 7)
    num_full = len(lengths) // batch_size * batch_size or len(lengths)
    spec = PlanSpec(max_tokens=1, num_ranks=num_ranks, global_batch_size=batch_size)
    budget = max_useful_tokens(rows.counts.lengths[:num_full], spec, 256)
    report = make_plan(request(rows, budget, batch_size=batch_size, dp=num_ranks))
    assert report.comparison.chosen.num_microbatches == 1


def test_a_small_microbatch_takes_as_long_as_moving_the_weights():
    lengths = [20] * 64
    slow = plan(lengths, max_tokens=20, batch_size=64, dp=2).comparison
    fast = plan(lengths, max_tokens=20, batch_size=64, dp=1).comparison
    assert fast.chosen.step_time == pytest.approx(1.0)
    assert slow.chosen.step_time > 50  # 8 bytes against 6 FLOPs: 1,778 tokens


def sharded(dp: int) -> Placement:
    return Placement(parallel_layout=ParallelLayout(dp=dp))


def test_frozen_weights_need_less_work_and_less_communication():
    full = sharded(2)
    lora = replace(full, adapter=AdapterConfig(enabled=True))
    # 4 bytes against 4 FLOPs, and not 8 bytes against 6.
    model = load_spec("7b", "policy.model_name")
    tokens = StepDuration(model, full).min_tokens
    assert StepDuration(model, lora).min_tokens == pytest.approx(0.75 * tokens)
    assert [train_passes(each) for each in (full, lora)] == [3, 2]
    recomputed = replace(lora, activation_checkpointing="full")
    assert train_passes(recomputed) == 3
