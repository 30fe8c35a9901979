"""Plans with context-parallel groups of different sizes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.context_parallel import lower_bound
from nemo_like.data.planning.plan import BatchPlan, plan_batch
from nemo_like.data.planning.spec import CostModel, PlanSpec
from nemo_like.parallel_layout import LayoutError, ParallelLayout


def parts_of_slot(plan: BatchPlan, rank: int, index: int) -> dict[tuple[int, ...], set[int]]:
    """Rows of the part of each context-parallel rank -> the ranks that compute it."""
    microbatch = plan.ranks[rank][index]
    found: dict[tuple[int, ...], set[int]] = {}
    for cp_rank in range(plan.spec.cp_size):
        part, _, _ = microbatch.on_context_rank(cp_rank, plan.spec)
        found.setdefault(part.rows, set()).add(cp_rank)
    return found


def check(plan: BatchPlan) -> None:
    """Each row is in one group; groups are aligned, within their limit, and cover their ranks."""
    spec = plan.spec
    seen = []
    for rank, microbatches in enumerate(plan.ranks):
        assert len(microbatches) == plan.num_microbatches
        for index, microbatch in enumerate(microbatches):
            total = 0
            for rows, ranks in parts_of_slot(plan, rank, index).items():
                first = min(ranks)
                part, part_spec, group_rank = microbatch.on_context_rank(first, spec)
                if not rows:
                    # Ranks without a group have a dummy each.
                    assert part_spec.cp_size == 1
                    total += part.num_tokens * len(ranks)
                    continue
                assert ranks == set(range(first, first + part_spec.cp_size))
                assert first % part_spec.cp_size == 0 and group_rank == 0
                assert part.num_tokens % part_spec.total_multiple == 0
                assert all(each % part_spec.row_multiple == 0 for each in part.padded_lengths)
                if len(rows) > 1 or part_spec.cp_size < spec.cp_size:
                    assert part.num_tokens <= part_spec.capacity
                total += part.num_tokens
                seen += rows
            assert total == plan.num_tokens[rank, index]
    assert sorted([*seen, *plan.dropped]) == list(range(plan.num_rows))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), max_size=40),
    cp=st.sampled_from([2, 3, 4, 6, 8]),
    num_ranks=st.integers(1, 3),
    options=st.fixed_dictionaries(
        {
            "global_batch_size": st.sampled_from([None, 7]),
            "sync": st.sampled_from(["microbatch", "step"]),
            "microbatch_multiple": st.integers(1, 2),
            "sequence_length_round": st.sampled_from([1, 4]),
            "oversize": st.sampled_from(["singleton", "drop", "truncate"]),
        }
    ),
    limit=st.integers(96, 160),
)
def test_every_row_is_in_one_aligned_group_within_its_limit(lengths, cp, num_ranks, options, limit):
    spec = PlanSpec(
        max_tokens=limit, num_ranks=num_ranks, cp_size=cp, dynamic_context=True, **options
    )
    plan = plan_batch(lengths, spec, warn=False)
    check(plan)
    check(plan.with_budget(limit + 64))
    assert plan_batch(lengths, spec, warn=False) == plan
    assert BatchPlan.from_json(plan.to_json()) == plan
    # A step has the rows of a global batch.
    for step, (start, stop) in enumerate(pairwise(plan.step_offsets)):
        rows = [row for rank in plan.ranks for each in rank[start:stop] for row in each.rows]
        size = options["global_batch_size"] or max(len(lengths), 1)
        assert all(row // size == step for row in rows)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5)), min_size=1, max_size=30))
def test_rows_of_a_group_are_in_one_part(rows):
    lengths = [length for length, _ in rows]
    groups = [group for _, group in rows]
    spec = PlanSpec(
        max_tokens=240, num_ranks=2, cp_size=4, dynamic_context=True, oversize="singleton"
    )
    plan = plan_batch(lengths, spec, groups, warn=False)
    part_of = {}
    for rank, microbatches in enumerate(plan.ranks):
        for index in range(len(microbatches)):
            for part in parts_of_slot(plan, rank, index):
                part_of.update(dict.fromkeys(part, part))
    for row, group in enumerate(groups):
        assert part_of[row] == part_of[groups.index(group)]


def test_rows_are_on_as_few_ranks_as_their_length_needs():
    # 4 ranks with 100 tokens each: rows of 50, 150 and 400 tokens need 1, 2 and 4 ranks.
    spec = PlanSpec(
        max_tokens=400, cp_size=4, dynamic_context=True, cost=CostModel(linear=1.0, quadratic=0.0)
    )
    plan = plan_batch([400, 200, 100, 100, 200, 200], spec)
    sizes = dict(zip(plan.rows.tolist(), np.asarray(plan.context_size).tolist(), strict=True))
    assert sizes == {0: 4, 1: 2, 2: 1, 3: 1, 4: 2, 5: 2}
    assert plan.num_microbatches == 3
    assert plan.of_context_ranks(plan.lengths).tolist() == [[100.0] * 3] * 4
    metrics = plan.metrics()
    assert metrics["packing/mean_context_size"] == pytest.approx(
        (400 * 4 + 3 * 200 * 2 + 2 * 100) / 1200
    )
    assert metrics["packing/rank_imbalance_flops"] == 1.0


def test_a_dominant_row_gets_more_ranks_than_its_length_needs():
    spec = PlanSpec(max_tokens=4000, cp_size=4, dynamic_context=True)
    alone = plan_batch([500], spec)
    assert np.asarray(alone.context_size).tolist() == [4]


def test_balance_is_within_3_percent_of_the_bound():
    ratios = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(7, 1.2, 300), 8, 32768).astype(np.int64)
        spec = PlanSpec(max_tokens=32768, num_ranks=2, cp_size=8, dynamic_context=True)
        plan = plan_batch(lengths, spec)
        work = spec.cost.of(lengths)
        bound = lower_bound(work, lengths, 16, 8, 4096)
        ratios.append(plan.of_context_ranks(plan.work).max(axis=0).sum() / bound)
    assert np.mean(ratios) < 1.03


def test_what_has_no_meaning_is_refused():
    with pytest.raises(ValueError, match="dynamic_context divides packed microbatches"):
        PlanSpec(max_tokens=64, dynamic_context=True)
    with pytest.raises(ValueError, match="dynamic_context divides packed microbatches"):
        PlanSpec(layout="padded", max_tokens=64, cp_size=2, dynamic_context=True)
    with pytest.raises(LayoutError, match=r"parallel.context is 1: set it to false"):
        ParallelLayout(dp=2, dynamic_context=True)


def test_process_groups_of_the_smaller_sizes():
    layout = ParallelLayout(dp=2, cp=4, tp=2, dynamic_context=True)
    # Ranks of a cp group are tp apart.
    assert layout.context_groups == (
        ((0, 2), (4, 6), (1, 3), (5, 7), (8, 10), (12, 14), (9, 11), (13, 15)),
    )
    assert ParallelLayout(cp=2, dynamic_context=True).context_groups == ()
    assert ParallelLayout(cp=4).context_groups == ()
