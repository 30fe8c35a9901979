"""The six sentences of `BatchPlan`'s docstring, one property each, and what users of a plan rely
on.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import replace
from itertools import pairwise
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.packing.algorithms import PackingAlgorithm, get_packer
from nemo_like.data.packing.metrics import PackingMetrics
from nemo_like.data.planning.oversize import OversizeWarning
from nemo_like.data.planning.plan import BatchPlan, Microbatch, PlanSpec, plan_batch
from nemo_like.data.planning.spec import Balance, CostModel
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.integer_math import round_up
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import RowLayout, Sync

LENGTHS = np.clip(
    np.random.default_rng(0).lognormal(np.log(300), 0.9, 256).astype(np.int64), 4, 2048
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], PlanSpec, list[int] | None]:
    """Lengths, a spec and groups (or none): every packer, both layouts, all policies, alignments
    and multiples.
    """
    layout: RowLayout = draw(st.sampled_from(["packed", "padded"]))
    by_rows = layout == "padded" and draw(st.booleans())
    step = draw(st.none() | st.integers(1, 6).map(lambda count: 4 * count))
    algorithm = draw(st.sampled_from(PackingAlgorithm))
    # The balanced algorithm of the packed layout needs a measure of work.
    needs_balance = layout == "packed" and algorithm == PackingAlgorithm.BALANCED
    balances: list[Balance] = ["flops", "tokens"] if needs_balance else ["flops", "tokens", "none"]
    spec = PlanSpec(
        layout=layout,
        max_tokens=None if by_rows and draw(st.booleans()) else draw(st.integers(48, 160)),
        max_rows=draw(st.integers(4, 8)) if by_rows else None,
        num_ranks=draw(st.integers(1, 5)),
        global_batch_size=step,
        algorithm=algorithm,
        balance=draw(st.sampled_from(balances)),
        sync=draw(st.sampled_from(["microbatch", "step"])),
        microbatch_order=draw(st.sampled_from(["packer", "largest_first"])),
        sequence_length_round=draw(st.sampled_from([1, 3, 4])),
        microbatch_length_round=draw(st.sampled_from([1, 5, 24])) if layout == "packed" else 1,
        cp_size=draw(st.sampled_from([1, 2])),
        tp_size=draw(st.sampled_from([1, 2])),
        sequence_parallel=draw(st.booleans()),
        microbatch_multiple=draw(st.integers(1, 3)),
        oversize=draw(st.sampled_from(["truncate", "singleton", "drop"])),
        seed=draw(st.integers(0, 3)),
    )
    lengths = draw(st.lists(st.integers(1, 60) | st.integers(1, 250), max_size=40))
    if not draw(st.booleans()):
        return lengths, spec, None
    # Each divides 4, so no group crosses a step, and a group that is truncated fits its microbatch.
    is_limited = spec.oversize == "truncate" and spec.has_token_limit
    limit = spec.capacity if is_limited else None
    sizes = [size for size in (1, 2, 4) if size * spec.row_multiple <= (limit or 1 << 60)]
    size = draw(st.sampled_from(sizes))
    return lengths, spec, [7 * (row // size) % 101 for row in range(len(lengths))]


def planned(case: tuple[list[int], PlanSpec, list[int] | None]) -> BatchPlan:
    lengths, spec, groups = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OversizeWarning)
        return plan_batch(lengths, spec, groups)


def microbatches(plan: BatchPlan) -> list[Microbatch]:
    return [microbatch for rank in plan.ranks for microbatch in rank]


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_row_is_exactly_once_in_microbatches_deferred_or_dropped(
    case: tuple[list[int], PlanSpec, list[int] | None],
) -> None:
    lengths, spec, _ = case
    plan = planned(case)
    placed = [row for microbatch in microbatches(plan) for row in microbatch.rows]
    assert sorted([*placed, *plan.deferred, *plan.dropped]) == list(range(len(lengths)))
    assert not plan.dropped or spec.oversize == "drop"
    assert plan.metrics()["packing/num_dropped"] == len(plan.dropped)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_no_microbatch_is_above_the_cap_except_one_row_or_group_alone(
    case: tuple[list[int], PlanSpec, list[int] | None],
) -> None:
    lengths, spec, groups = case
    plan = planned(case)
    num_truncated = 0
    for microbatch in microbatches(plan):
        assert len(microbatch.lengths) == len(microbatch.padded_lengths) == len(microbatch.rows)
        if microbatch.num_tokens > (spec.max_tokens or 1 << 60):
            assert spec.oversize == "singleton"
            assert (
                len(microbatch.rows) == 1
                or len({(groups or lengths)[row] for row in microbatch.rows}) == 1
            )
        assert spec.max_rows is None or len(microbatch.rows) <= spec.max_rows
        for row, length, padded in zip(
            microbatch.rows, microbatch.lengths, microbatch.padded_lengths, strict=True
        ):
            assert length <= padded
            assert length == lengths[row] or (
                spec.oversize == "truncate" and 1 <= length < lengths[row]
            )
            num_truncated += length < lengths[row]
    assert plan.num_truncated == num_truncated


@settings(max_examples=150, deadline=None)
@given(cases())
def test_ranks_run_the_same_number_of_microbatches_in_a_step(
    case: tuple[list[int], PlanSpec, list[int] | None],
) -> None:
    lengths, spec, _ = case
    plan = planned(case)
    assert {len(rank) for rank in plan.ranks} == {plan.num_microbatches}
    assert plan.num_steps == -(-len(lengths) // (spec.global_batch_size or max(len(lengths), 1)))
    for start, stop in pairwise(plan.step_offsets):
        assert stop > start and (stop - start) % spec.microbatch_multiple == 0
        num_dummies = sum(
            microbatch.is_dummy for rank in plan.ranks for microbatch in rank[start:stop]
        )
        assert (
            spec.max_rows is not None
            or num_dummies == 0
            or spec.oversize == "drop"
            or is_short_of_items(case, plan, start, stop)
        )
    for microbatch in microbatches(plan):
        assert not microbatch.is_dummy or microbatch == Microbatch((), (), (), spec.dummy_tokens)


def is_short_of_items(
    case: tuple[list[int], PlanSpec, list[int] | None], plan: BatchPlan, start: int, stop: int
) -> bool:
    """Whether the step has fewer rows (or groups) than microbatches."""
    groups = case[2] or range(len(case[0]))
    items = {
        groups[row]
        for rank in plan.ranks
        for microbatch in rank[start:stop]
        for row in microbatch.rows
    }
    return len(items) < (stop - start) * plan.spec.num_ranks


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_same_lengths_groups_and_spec_give_the_same_plan(
    case: tuple[list[int], PlanSpec, list[int] | None],
) -> None:
    plan = planned(case)
    assert plan == planned(case) and hash(plan) == hash(planned(case))
    again = BatchPlan.from_json(plan.to_json())
    assert again == plan and again.ranks == plan.ranks and again.metrics() == plan.metrics()


@settings(max_examples=150, deadline=None)
@given(cases())
def test_no_row_crosses_a_global_batch_and_groups_stay_together(
    case: tuple[list[int], PlanSpec, list[int] | None],
) -> None:
    lengths, spec, groups = case
    plan = planned(case)
    rows_per_step = spec.global_batch_size or max(len(lengths), 1)
    home: dict[int, tuple[int, int]] = {}
    for step, (start, stop) in enumerate(pairwise(plan.step_offsets)):
        for rank in range(spec.num_ranks):
            for m in range(start, stop):
                for row in plan.ranks[rank][m].rows:
                    assert row // rows_per_step == step
                    if groups is not None:
                        assert home.setdefault(groups[row], (rank, m)) == (rank, m)
    if groups is not None:
        assert not {groups[row] for row in plan.dropped} & set(home)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_padded_lengths_and_totals_are_multiples_of_what_cp_and_tp_need(
    case: tuple[list[int], PlanSpec, list[int] | None],
) -> None:
    _, spec, _ = case
    chunks = 2 * spec.cp_size if spec.cp_size > 1 else 1
    total = lcm(chunks, spec.cp_size * spec.tp_size if spec.sequence_parallel else 1)
    total = lcm(total, spec.microbatch_length_round)
    for microbatch in microbatches(planned(case)):
        assert microbatch.num_tokens % total == 0
        padded = sum(microbatch.padded_lengths)
        if spec.layout == "packed":
            assert microbatch.is_dummy or padded <= microbatch.num_tokens < padded + total
            for length, row in zip(microbatch.lengths, microbatch.padded_lengths, strict=True):
                assert row == -(-length // lcm(spec.sequence_length_round, chunks)) * lcm(
                    spec.sequence_length_round, chunks
                )
        else:
            assert microbatch.is_dummy or padded == microbatch.num_tokens
            assert len(set(microbatch.padded_lengths)) <= 1
            assert all(
                row % lcm(spec.sequence_length_round, total) == 0
                for row in microbatch.padded_lengths
            )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 96), min_size=1, max_size=40), st.integers(1, 4))
def test_rounding_to_the_budget_gives_all_microbatches_one_shape(
    lengths: list[int], num_ranks: int
) -> None:
    plain = PlanSpec(max_tokens=96, num_ranks=num_ranks)
    plan = plan_batch(lengths, replace(plain, microbatch_length_round=96))
    assert {microbatch.num_tokens for microbatch in microbatches(plan)} == {96}
    # The padding is counted, and the rows of microbatches are the same.
    num_positions = 96 * plan.num_microbatches * num_ranks
    share = 1 - sum(lengths) / num_positions
    assert plan.metrics()["packing/padding_share"] == pytest.approx(share)
    assert plan.offsets.tolist() == plan_batch(lengths, plain).offsets.tolist()
    with pytest.raises(ValueError, match="microbatch_length_round applies to the packed layout"):
        PlanSpec(layout="padded", max_tokens=96, microbatch_length_round=96)


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(48, 400))
def test_another_budget_keeps_rows_on_their_ranks_and_steps(
    case: tuple[list[int], PlanSpec, list[int] | None], max_tokens: int
) -> None:
    plan = planned(case)
    by_rows = plan.spec.max_tokens is None
    other = plan.with_budget(max_rows=3) if by_rows else plan.with_budget(max_tokens)
    assert len({len(rank) for rank in other.ranks}) == 1 and other.num_steps == plan.num_steps
    for rank in range(plan.spec.num_ranks):
        shard_rows = plan.rows_of_rank(rank)
        local = other.rank_plan(rank, shard_rows)
        for step in range(plan.num_steps):
            before, after = plan.rank_plan(rank).step(step), local.step(step)
            assert sorted(row for m in before for row in m.rows) == sorted(
                row for m in after for row in m.rows
            )
            kept = {
                row: length for m in before for row, length in zip(m.rows, m.lengths, strict=True)
            }
            for microbatch in after:
                within = microbatch.num_tokens <= (other.spec.max_tokens or 1 << 60)
                assert within or len(microbatch.rows) == 1 or other is plan
                assert [kept[row] for row in microbatch.rows] == list(microbatch.lengths)
                assert len(microbatch.rows) <= (other.spec.max_rows or len(shard_rows))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_rank_plan_is_the_same_microbatches_over_consecutive_rows(
    case: tuple[list[int], PlanSpec, list[int] | None],
) -> None:
    plan = planned(case)
    assert sorted(
        [row for rank in range(plan.spec.num_ranks) for row in plan.rows_of_rank(rank)]
        + list(plan.dropped)
    ) == list(range(len(case[0])))
    for rank in range(plan.spec.num_ranks):
        rank_plan, next_row = plan.rank_plan(rank), 0
        for local, of_batch in zip(rank_plan.microbatches, plan.ranks[rank], strict=True):
            assert local.rows == tuple(range(next_row, next_row + len(local.rows)))
            assert tuple(plan.rows_of_rank(rank)[list(local.rows)].tolist()) == of_batch.rows
            assert (local.lengths, local.padded_lengths, local.num_tokens) == of_batch_numbers(
                of_batch
            )
            next_row += len(local.rows)
        assert rank_plan.num_steps == plan.num_steps and rank_plan.step_offsets == plan.step_offsets


def of_batch_numbers(microbatch: Microbatch) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return microbatch.lengths, microbatch.padded_lengths, microbatch.num_tokens


def test_worked_example_packed() -> None:
    plan = plan_batch([5, 3, 4, 4], PlanSpec(max_tokens=8, num_ranks=2))
    assert sorted(sorted(microbatch.rows) for microbatch in microbatches(plan)) == [[0, 1], [2, 3]]
    assert plan.step_offsets == (0, 1) and {
        microbatch.num_tokens for microbatch in microbatches(plan)
    } == {8}


BIN_PACKERS = [name for name in PackingAlgorithm if name != PackingAlgorithm.BALANCED]


def test_no_balance_assigns_the_packers_bins_round_robin() -> None:
    for algorithm in BIN_PACKERS:
        spec = PlanSpec(max_tokens=2048, num_ranks=4, algorithm=algorithm, balance="none")
        bins = get_packer(algorithm, 2048, bin_count_multiple=4).pack(LENGTHS)
        plan = plan_batch(LENGTHS, spec)
        assert [list(plan.ranks[b % 4][b // 4].rows) for b in range(len(bins))] == bins


@pytest.mark.parametrize("algorithm", BIN_PACKERS)
def test_a_bin_packer_keeps_its_bins_whatever_the_balance(algorithm: PackingAlgorithm) -> None:
    in_turn, by_work = (
        plan_batch(
            LENGTHS, PlanSpec(max_tokens=2048, num_ranks=4, algorithm=algorithm, balance=balance)
        )
        for balance in ("none", "flops")
    )
    assert {m.rows for m in microbatches(in_turn)} == {m.rows for m in microbatches(by_work)}
    assert (
        by_work.metrics()["packing/rank_imbalance_flops"]
        <= in_turn.metrics()["packing/rank_imbalance_flops"]
    )


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("sync", ["microbatch", "step"])
def test_each_balance_evens_its_own_measure(layout: RowLayout, sync: Sync) -> None:
    spec = PlanSpec(layout=layout, max_tokens=2048, num_ranks=8, sync=sync)
    flops = plan_batch(LENGTHS, spec).metrics()
    tokens = plan_batch(LENGTHS, replace(spec, balance="tokens")).metrics()
    none = plan_batch(
        LENGTHS, replace(spec, algorithm="best_fit_decreasing", balance="none")
    ).metrics()
    assert flops["packing/rank_imbalance_flops"] < min(1.02, none["packing/rank_imbalance_flops"])
    assert tokens["packing/rank_imbalance_tokens"] < min(
        1.02, none["packing/rank_imbalance_tokens"]
    )


def test_balanced_is_the_default_and_balances_better_than_bins_assigned_by_work() -> None:
    spec = PlanSpec(max_tokens=2048, num_ranks=8, sync="step")
    assert spec.algorithm == PackingAlgorithm.BALANCED
    balanced = plan_batch(LENGTHS, spec)
    best_fit = plan_batch(LENGTHS, replace(spec, algorithm="best_fit_decreasing"))
    assert balanced.num_microbatches <= best_fit.num_microbatches
    imbalance = "packing/rank_imbalance_flops"
    assert balanced.metrics()[imbalance] < best_fit.metrics()[imbalance]


def test_balanced_without_a_balance_is_refused_in_the_packed_layout_only() -> None:
    with pytest.raises(ValueError, match=r"algorithm balanced .* set balance to flops or tokens"):
        PlanSpec(max_tokens=2048, algorithm="balanced", balance="none")
    PlanSpec(layout="padded", max_tokens=2048, algorithm="balanced", balance="none")


def test_largest_first_runs_the_microbatches_of_a_rank_by_size() -> None:
    for layout in ("packed", "padded"):
        spec = PlanSpec(
            layout=layout, max_tokens=2048, num_ranks=4, microbatch_order="largest_first"
        )
        for rank in plan_batch(LENGTHS, spec).ranks:
            sizes = [microbatch.num_tokens for microbatch in rank]
            assert sizes == sorted(sizes, reverse=True)


def test_rows_at_a_time_are_in_the_given_order() -> None:
    plan = plan_batch(
        [3, 9, 2, 5, 7, 1, 8],
        PlanSpec(layout="padded", max_rows=2, num_ranks=2, global_batch_size=4),
    )
    assert [[m.rows for m in rank] for rank in plan.ranks] == [[(0, 1), (4,)], [(2, 3), (5, 6)]]
    assert plan.ranks[0][0].padded_lengths == (9, 9) and plan.ranks[1][1].num_tokens == 16
    assert plan.step_offsets == (0, 1, 2)


def test_fewer_rows_than_ranks_leave_dummies() -> None:
    for spec in (
        PlanSpec(max_tokens=16),
        PlanSpec(layout="padded", max_tokens=16),
        PlanSpec(layout="padded", max_rows=2),
    ):
        plan = plan_batch([5, 9], replace(spec, num_ranks=4, cp_size=2))
        assert plan.num_microbatches == 1
        assert sorted(m.rows for m in microbatches(plan)) == [(), (), (0,), (1,)]
        assert plan.metrics()["packing/num_dummies"] == 2
        assert {m.num_tokens for m in microbatches(plan) if m.is_dummy} == {4}


def test_an_empty_batch_is_a_plan_without_steps() -> None:
    for spec in (
        PlanSpec(max_tokens=16, num_ranks=2),
        PlanSpec(layout="padded", max_rows=2, num_ranks=2),
        PlanSpec(max_tokens=16, num_ranks=2, pp_size=2),
    ):
        plan = plan_batch([], spec)
        assert plan.metrics().get("packing/pipeline_bubble_share", 0.0) == 0.0
        assert (plan.num_steps, plan.num_microbatches, plan.ranks) == (0, 0, ((), ()))
        assert plan.rank_plan(1).microbatches == () and len(plan.rows_of_rank(1)) == 0
        assert plan.metrics()["packing/padding_share"] == 0.0
        assert BatchPlan.from_json(plan.to_json()) == plan and "0 rows" in str(plan)


def test_one_row_is_one_microbatch() -> None:
    for layout in ("packed", "padded"):
        plan = plan_batch([5], PlanSpec(layout=layout, max_tokens=16))
        assert plan.ranks == ((Microbatch((0,), (5,), (5,), 5),),)


def test_metrics_are_those_of_the_packing_over_real_tokens() -> None:
    spec = PlanSpec(max_tokens=2048, num_ranks=4, cp_size=2, sequence_length_round=64)
    plan = plan_batch(LENGTHS, spec)
    bins = [list(microbatch.rows) for microbatch in microbatches(plan)]
    stats = PackingMetrics().calculate_stats_only(LENGTHS, bins, 2048)
    metrics = plan.metrics()
    assert metrics["packing/utilization"] == pytest.approx(stats["average_utilization"])
    assert metrics["packing/waste_ratio"] == pytest.approx(stats["waste_ratio"])
    assert metrics["packing/bin_balance"] == pytest.approx(stats["bin_balance"])
    assert metrics["packing/efficiency"] == pytest.approx(stats["bin_efficiency"])
    positions = sum(microbatch.num_tokens for microbatch in microbatches(plan))
    assert metrics["packing/padding_share"] == pytest.approx(1 - LENGTHS.sum() / positions)
    by_rank = [sum(sum(microbatch.padded_lengths) for microbatch in rank) for rank in plan.ranks]
    assert metrics["packing/rank_imbalance_tokens"] == pytest.approx(
        max(by_rank) / np.mean(by_rank)
    )
    work = [
        sum(spec.cost.of(microbatch.padded_lengths).sum() for microbatch in rank)
        for rank in plan.ranks
    ]
    assert metrics["packing/rank_imbalance_flops"] == pytest.approx(max(work) / np.mean(work))
    assert metrics["packing/num_microbatches"] == plan.num_microbatches


def test_imbalance_over_steps_is_weighted_by_work() -> None:
    """Steps of tokens (6, 2) and (1, 1): ratios 1.5 and 1, work 8 and 2, so (1.5 * 8 + 1 * 2) /
    10.
    """
    spec = PlanSpec(layout="padded", max_rows=1, num_ranks=2, global_batch_size=2)
    assert plan_batch([6, 2, 1, 1], spec).metrics()[
        "packing/rank_imbalance_tokens"
    ] == pytest.approx(1.4)


def test_a_logprob_budget_below_a_row_is_an_error_or_runs_it_alone() -> None:
    plan = plan_batch([30, 5, 6], PlanSpec(max_tokens=32))
    with pytest.raises(
        ValueError, match=r"row 0 has 30 tokens .* policy.sequence_packing.logprob_mb_tokens = 16"
    ):
        plan.with_budget(16)
    alone = replace(plan, spec=replace(plan.spec, oversize="singleton")).with_budget(16)
    assert [m.rows for m in alone.ranks[0]] == [(0,), (2, 1)]
    assert plan.with_budget(32) is plan


def test_a_larger_logprob_budget_needs_fewer_microbatches() -> None:
    for spec in (PlanSpec(max_tokens=2048), PlanSpec(layout="padded", max_tokens=2048)):
        plan = plan_batch(LENGTHS, replace(spec, num_ranks=4, global_batch_size=64))
        assert plan.with_budget(8192).num_microbatches < plan.num_microbatches / 2


def test_a_plan_prints_what_it_does() -> None:
    plan = plan_batch(LENGTHS, PlanSpec(max_tokens=2048, num_ranks=2, global_batch_size=128))
    sizes = f"256 rows, 2 optimizer steps, 2 ranks, {plan.num_microbatches} microbatches per rank"
    assert str(plan).startswith(f"{sizes} of at most 2,048 tokens (packed), ")
    assert "max-loaded rank" in str(plan) and "\n" not in str(plan)
    one_row = plan_batch([5], PlanSpec(max_tokens=8))
    assert str(one_row) == "1 row, 1 microbatch of at most 8 tokens (packed), 0.0% padding"


def test_ranks_and_steps_out_of_range_are_named() -> None:
    plan = plan_batch([5, 3], PlanSpec(max_tokens=8, num_ranks=2))
    with pytest.raises(IndexError, match="dp_rank 2 of 2"):
        plan.rows_of_rank(2)
    with pytest.raises(IndexError, match="step 1 of 1"):
        plan.rank_plan(0).step(1)


def test_large_batches_keep_every_promise() -> None:
    """One case above every threshold of compiled code, with several steps and ranks."""
    lengths = np.clip(
        np.random.default_rng(1).lognormal(np.log(300), 0.9, 12_000).astype(np.int64), 4, 2048
    )
    for algorithm in PackingAlgorithm:
        spec = PlanSpec(
            max_tokens=2048,
            num_ranks=4,
            global_batch_size=6000,
            algorithm=algorithm,
            microbatch_multiple=2,
        )
        plan = plan_batch(lengths, spec)
        assert np.array_equal(np.sort(plan.rows), np.arange(12_000))
        assert plan.num_tokens.max() <= 2048 and plan.num_steps == 2
        assert all(count % 2 == 0 for count in np.diff(plan.step_offsets))


# Of plans from lengths alone, before rows had a number of trained tokens.
DIGESTS = {
    "lockstep": ({"sync": "microbatch"}, "403ece575c8c7a11"),
    "makespan": ({"sync": "step"}, "0e443bafc901ffc4"),
    "packer": ({"algorithm": "first_fit_decreasing"}, "d1b0b485732c3c5f"),
    "padded": ({"layout": "padded"}, "7adb49c81d91eae4"),
    "context parallel": ({"cp_size": 2}, "d83f66a449b9067c"),
}


def digest(plan: BatchPlan) -> str:
    arrays = (plan.rows, plan.padded_lengths, plan.offsets)
    return hashlib.sha256(b"".join(array.astype("<i8").tobytes() for array in arrays)).hexdigest()


@pytest.mark.parametrize("name", DIGESTS)
def test_plans_of_rows_whose_tokens_all_have_a_loss_did_not_change(name: str):
    keys, expected = DIGESTS[name]
    lengths = np.random.default_rng(0).integers(1, 2000, 150)
    cost = CostModel.from_spec(load_spec("0.5b"))
    spec = PlanSpec(max_tokens=8192, num_ranks=4, global_batch_size=75, cost=cost, **keys)
    plan = plan_batch(lengths, spec)
    assert digest(plan)[:16] == expected
    if name in ("lockstep", "makespan", "packer"):
        # Elsewhere there is padding, which has no loss.
        assert digest(plan_batch(TokenCounts(lengths, lengths), spec))[:16] == expected


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("with_groups", [False, True])
def test_ranks_are_balanced_by_the_work_of_the_tokens_with_loss(layout: str, with_groups: bool):
    """Rows of one length, half of them without loss, for a model that is mostly vocabulary."""
    lengths = np.full(64, 100)
    num_trained = np.random.default_rng(1).permutation(np.arange(32) % 2 * 99).repeat(2)
    cost = CostModel(linear=100.0, quadratic=0.0, head=90.0)
    spec = PlanSpec(layout=layout, max_tokens=400, num_ranks=4, cost=cost, sync="step")  # type: ignore[arg-type]
    groups = np.arange(64) // 2 if with_groups else None
    work = 10.0 * lengths + 90.0 * num_trained
    plan = plan_batch(TokenCounts(lengths, num_trained), spec, groups)
    by_rank = [work[plan.rows_of_rank(rank)].sum() for rank in range(4)]
    assert max(by_rank) / np.mean(by_rank) == pytest.approx(1.0)
    assert plan.metrics()["packing/rank_imbalance_flops"] == pytest.approx(1.0)
    assert plan == BatchPlan.from_json(plan.to_json())
    in_half = plan.with_budget(200)
    assert (in_half.num_trained == num_trained[in_half.rows]).all()
    # Lengths alone give no reason to spread the rows with loss.
    blind = plan_batch(lengths, spec, groups)
    blind_work = [work[blind.rows_of_rank(rank)].sum() for rank in range(4)]
    assert max(blind_work) / np.mean(blind_work) > 1.1


def test_truncation_removes_trained_tokens_first():
    spec = PlanSpec(max_tokens=10, oversize="truncate")
    with pytest.warns(OversizeWarning):
        plan = plan_batch(TokenCounts(np.array([14, 15, 6]), np.array([8, 3, 2])), spec)
    counts = np.zeros(3, dtype=np.int64)
    assert plan.num_trained is not None
    counts[plan.rows] = plan.num_trained
    assert counts.tolist() == [4, 0, 2]


@pytest.mark.parametrize("num_trained", [[1], [1, 2, 3, 9], [1.0, 2.0, 3.0], [-1, 0, 0], [0, 9, 0]])
def test_wrong_numbers_of_trained_tokens_are_refused(num_trained: list):
    lengths = np.array([5, 6, 7])
    with pytest.raises(ValueError, match="num_trained"):
        plan_batch(TokenCounts(lengths, np.array(num_trained)), PlanSpec(max_tokens=8))


@pytest.mark.parametrize(("stages", "virtual"), [(2, 1), (4, 1), (8, 1), (8, 2)])
def test_pipelines_run_the_number_of_microbatches_with_the_shortest_step(
    stages: int, virtual: int
) -> None:
    lengths = np.random.default_rng(stages).integers(64, 2048, 512)
    spec = PlanSpec(max_tokens=16384, num_ranks=4, balance="tokens")
    fewest = plan_batch(lengths, spec).num_microbatches
    multiple = stages if virtual > 1 else 1
    pipeline = replace(spec, pp_size=stages, vpp_size=virtual, microbatch_multiple=multiple)
    plan = plan_batch(lengths, pipeline)

    def seconds(num_microbatches: int) -> float:
        work = lengths.sum() / 4 + 512 * num_microbatches
        return (num_microbatches + (stages - 1) / virtual) / num_microbatches * work

    assert fewest < plan.num_microbatches <= 128
    possible = range(round_up(fewest, multiple), 129, multiple)
    assert plan.num_microbatches in possible
    assert seconds(plan.num_microbatches) <= 1.001 * min(map(seconds, possible))
    assert all(microbatch.rows for rank in plan.ranks for microbatch in rank)


@settings(max_examples=60, deadline=None)
@given(case=cases(), episodes=st.lists(st.integers(-3, 9), min_size=1, max_size=40))
def test_rows_of_an_episode_are_in_one_step_and_a_step_has_so_many_episodes(case, episodes):
    _, spec, _ = case
    spec = replace(spec, oversize="truncate")
    lengths = [1 + 3 * (index % 7) for index in range(len(episodes))]
    plan = plan_batch(lengths, spec, episodes=episodes, warn=False)
    in_order = list(dict.fromkeys(episodes))
    size = spec.global_batch_size or len(in_order)
    assert plan.num_steps == -(-len(in_order) // size)
    for step, (start, stop) in enumerate(pairwise(plan.step_offsets)):
        rows = [row for rank in plan.ranks for each in rank[start:stop] for row in each.rows]
        own = set(in_order[step * size : (step + 1) * size])
        assert sorted(rows) == [row for row, each in enumerate(episodes) if each in own]


@settings(max_examples=40, deadline=None)
@given(case=cases(), first=st.integers(0, 9))
def test_episodes_of_one_row_have_the_plan_of_rows(case, first):
    lengths, spec, groups = case
    spec = replace(spec, oversize="singleton")
    episodes = np.arange(len(lengths))[::-1] + first
    plan = plan_batch(lengths, spec, groups, episodes=episodes, warn=False)
    assert plan == plan_batch(lengths, spec, groups, warn=False)


def test_a_group_of_two_steps_and_ids_for_other_rows_are_errors():
    spec = PlanSpec(max_tokens=64, global_batch_size=1)
    with pytest.raises(ValueError, match="group 4 has rows 0 and 1, of two optimizer steps"):
        plan_batch([3, 3, 3], spec, [4, 4, 5], episodes=[0, 1, 1])
    assert plan_batch([3, 3, 3], spec, [4, 4, 5], episodes=[0, 0, 1]).num_steps == 2
    with pytest.raises(ValueError, match=r"episode has one id per row; got shape \(2,\) for 3"):
        plan_batch([3, 3, 3], spec, episodes=[0, 1])
