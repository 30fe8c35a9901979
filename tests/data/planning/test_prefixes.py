"""Plans of rows with common leading tokens, against a trie of the tokens themselves."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.images import ImageRef, RowImage
from nemo_like.data.jagged import EncodedRow, Jagged, collate
from nemo_like.data.packing.algorithms import PackingAlgorithm
from nemo_like.data.planning.oversize import OversizeWarning
from nemo_like.data.planning.plan import BatchPlan, Microbatch, PlanSpec, plan_batch
from nemo_like.data.planning.prefixes import SharedPrefixes
from nemo_like.data.planning.shared_step import shared_work_bound
from nemo_like.data.planning.spec import Balance, CostModel
from nemo_like.data.planning.token_counts import TokenCounts, count_tokens


def forest_rows(seed: int, num_rows: int) -> list[list[int]]:
    """Rows of which most continue a part of an earlier one, or end in it."""
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = []
    for _ in range(num_rows):
        start: list[int] = []
        if rows and rng.random() < 0.8:
            earlier = rows[rng.integers(len(rows))]
            start = earlier[: rng.integers(len(earlier) + 1)]
        more = rng.integers(0, 3, rng.integers(0 if start else 1, 25)).tolist()
        rows.append(start + more)
    return rows


@dataclass
class Case:
    """Rows, what the planner gets, and groups that must share a microbatch."""

    rows: list[list[int]]
    spec: PlanSpec
    together: list[int] | None
    num_trained: list[int] | None
    prefixes: SharedPrefixes

    def plan(self) -> BatchPlan:
        lengths = np.array([len(row) for row in self.rows], dtype=np.int64)
        trained = None if self.num_trained is None else np.array(self.num_trained, dtype=np.int64)
        counts = TokenCounts(lengths, trained, self.prefixes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OversizeWarning)
            return plan_batch(counts, self.spec, self.together)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    algorithm = draw(st.sampled_from(PackingAlgorithm))
    balances: list[Balance] = ["flops", "tokens"]
    if algorithm != PackingAlgorithm.BALANCED:
        balances.append("none")
    spec = PlanSpec(
        max_tokens=draw(st.integers(64, 160)),
        num_ranks=draw(st.integers(1, 5)),
        global_batch_size=draw(st.none() | st.integers(1, 6).map(lambda count: 4 * count)),
        algorithm=algorithm,
        balance=draw(st.sampled_from(balances)),
        sync=draw(st.sampled_from(["microbatch", "step"])),
        microbatch_order=draw(st.sampled_from(["packer", "largest_first"])),
        sequence_length_round=draw(st.sampled_from([1, 3, 4])),
        microbatch_length_round=draw(st.sampled_from([1, 5, 24])),
        cp_size=draw(st.sampled_from([1, 2])),
        tp_size=draw(st.sampled_from([1, 2])),
        sequence_parallel=draw(st.booleans()),
        microbatch_multiple=draw(st.integers(1, 3)),
        oversize=draw(st.sampled_from(["truncate", "singleton", "drop"])),
        cost=CostModel(linear=100.0, quadratic=1.0, head=30.0),
        seed=draw(st.integers(0, 3)),
    )
    rows = forest_rows(draw(st.integers(0, 10_000)), draw(st.integers(0, 40)))
    size = draw(st.sampled_from([1, 2, 4, 40]))
    group_ids = [row // size for row in range(len(rows))]
    together = None
    if draw(st.booleans()):
        width = draw(st.sampled_from([1, 2, 4]))  # divides 4, so no group crosses a step
        together = [row // width for row in range(len(rows))]
    num_trained = [len(row) // 2 for row in rows] if draw(st.booleans()) else None
    ids = Jagged.from_rows(rows, np.int32)
    return Case(rows, spec, together, num_trained, SharedPrefixes.of_tokens(group_ids, ids))


def counted(lengths: Sequence[int] | np.ndarray, prefixes: SharedPrefixes) -> TokenCounts:
    return TokenCounts(np.asarray(lengths), prefixes=prefixes)


def microbatches(plan: BatchPlan) -> list[Microbatch]:
    return [microbatch for rank in plan.ranks for microbatch in rank]


def num_trie_nodes(rows: list[list[int]]) -> int:
    return len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})


def check_microbatch(case: Case, microbatch: Microbatch, plan: BatchPlan) -> None:
    """Its rows can be restored from what it stores, and it stores nothing twice."""
    spec = plan.spec
    rows = [
        case.rows[row][:length]
        for row, length in zip(microbatch.rows, microbatch.lengths, strict=True)
    ]
    shared = microbatch.shared or (0,) * len(rows)
    assert len(shared) == len(rows) and (not rows or shared[0] == 0)
    path: list[int] = []
    for row, common, positions in zip(rows, shared, microbatch.padded_lengths, strict=True):
        assert common <= len(path)
        path = path[:common] + row[common:]
        assert path == row
        assert positions == -(-(len(row) - common) // spec.row_multiple) * spec.row_multiple
    total = sum(microbatch.padded_lengths)
    expected = max(-(-total // spec.total_multiple) * spec.total_multiple, spec.dummy_tokens)
    assert microbatch.num_tokens == expected
    groups = of_group(case.prefixes, len(case.rows))
    trees: dict[int, list[list[int]]] = {}
    for row, tokens in zip(microbatch.rows, rows, strict=True):
        trees.setdefault(groups[row], []).append(tokens)
    stored = sum(len(row) - common for row, common in zip(rows, shared, strict=True))
    assert stored == sum(num_trie_nodes(tree) for tree in trees.values())


def of_group(prefixes: SharedPrefixes, num_rows: int) -> list[int]:
    """Tree of each row."""
    tree_of = [0] * num_rows
    tree = 0
    for row, shared in zip(prefixes.order.tolist(), prefixes.shared.tolist(), strict=True):
        tree += shared == 0
        tree_of[row] = tree
    return tree_of


@settings(max_examples=100, deadline=None)
@given(cases())
def test_each_token_of_each_row_is_stored_once_in_its_microbatch(case: Case) -> None:
    plan = case.plan()
    placed = [row for microbatch in microbatches(plan) for row in microbatch.rows]
    assert sorted([*placed, *plan.dropped]) == list(range(len(case.rows)))
    for microbatch in microbatches(plan):
        check_microbatch(case, microbatch, plan)
    computed = sum(
        sum(microbatch.lengths) - sum(microbatch.shared) for microbatch in microbatches(plan)
    )
    assert plan.computed_lengths.sum() == computed
    row_tokens = max(int(plan.lengths.sum()), 1)
    share = plan.metrics()["packing/shared_token_share"]
    assert share == pytest.approx(1 - computed / row_tokens)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_the_union_of_a_microbatch_is_within_the_limit(case: Case) -> None:
    plan = case.plan()
    for microbatch in microbatches(plan):
        if microbatch.num_tokens > (case.spec.max_tokens or 0):
            assert case.spec.oversize == "singleton"
            ids = case.together or list(range(len(case.rows)))
            assert len({ids[row] for row in microbatch.rows}) == 1
    home: dict[int, int] = {}
    for index, microbatch in enumerate(microbatches(plan)):
        for row in microbatch.rows if case.together else ():
            assert home.setdefault(case.together[row], index) == index  # type: ignore[index]


@settings(max_examples=100, deadline=None)
@given(cases())
def test_ranks_run_equally_many_microbatches_of_their_step(case: Case) -> None:
    plan = case.plan()
    rows_per_step = case.spec.global_batch_size or max(len(case.rows), 1)
    assert {len(rank) for rank in plan.ranks} == {plan.num_microbatches}
    assert plan.num_steps == -(-len(case.rows) // rows_per_step)
    for step in range(plan.num_steps):
        for rank in range(case.spec.num_ranks):
            in_step = plan.rank_plan(rank).step(step)
            assert in_step and len(in_step) % case.spec.microbatch_multiple == 0
            own = plan.rows_of_rank(rank)
            for microbatch in in_step:
                assert all(row // rows_per_step == step for row in own[list(microbatch.rows)])


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(48, 400))
def test_a_plan_is_repeatable_restored_and_repacked(case: Case, max_tokens: int) -> None:
    plan = case.plan()
    assert plan == case.plan() and hash(plan) == hash(case.plan())
    again = BatchPlan.from_json(plan.to_json())
    assert again == plan and again.ranks == plan.ranks and again.metrics() == plan.metrics()
    other = plan.with_budget(max_tokens)
    assert other == again.with_budget(max_tokens)
    for microbatch in microbatches(other):
        check_microbatch(case, microbatch, other)
        within = microbatch.num_tokens <= (other.spec.max_tokens or 0)
        assert within or len(microbatch.rows) == 1 or other is plan
    for rank in range(plan.spec.num_ranks):
        own, same = plan.rank_plan(rank), other.rank_plan(rank, plan.rows_of_rank(rank))
        for step in range(plan.num_steps):
            before = sorted(row for microbatch in own.step(step) for row in microbatch.rows)
            assert before == sorted(row for m in same.step(step) for row in m.rows)


def test_equal_ids_of_different_images_are_different_tokens() -> None:
    image = 5

    def row(answer: int, *files: str) -> EncodedRow:
        ids = np.array([7, *[image] * 4 * len(files), 8, answer], dtype=np.int32)
        images = [
            RowImage(ImageRef(file), (1, 4, 4), 1 + 4 * number, 4)
            for number, file in enumerate(files)
        ]
        return EncodedRow(ids, np.ones(len(ids), dtype=np.uint8), tuple(images))

    rows = [row(1, "a"), row(2, "b"), row(3, "a"), row(4, "a", "b"), row(5, "a", "c"), row(6)]
    # The ids of an image that was sampled are tokens of a text.
    sampled = np.array([7, *[image] * 4, 8, 9], dtype=np.int32)
    rows.append(EncodedRow(sampled, np.ones(7, dtype=np.uint8)))
    columns = collate(rows) | {"group": np.zeros(len(rows), dtype=np.int64)}
    columns |= {"images": [each.images for each in rows]}
    # "7 a 8", "7 a" and "7": what rows 0 and 2, one of them and 3, 3 and 4, and others share.
    expected = {(0, 2): 6, (0, 3): 5, (2, 3): 5, (0, 4): 5, (2, 4): 5, (3, 4): 5}
    for counts in (TokenCounts.of_batch(columns), count_tokens(rows, columns["group"])):
        prefixes = counts.prefixes
        assert prefixes is not None
        position_of = prefixes.position_of
        for first in range(len(rows)):
            for last in range(first + 1, len(rows)):
                ends = np.sort(position_of[[first, last]])
                common = int(prefixes.common(ends[:1], ends[1:])[0])
                assert common == expected.get((first, last), 1), (first, last)
    input_ids = columns["input_ids"]
    assert isinstance(input_ids, Jagged)
    without = SharedPrefixes.of_tokens([0] * len(rows), input_ids)
    assert int(without.shared.sum()) > int(prefixes.shared.sum())


def test_worked_example() -> None:
    rows = [[1, 2, 3, 4], [7, 7], [1, 2, 3, 5, 6], [1, 2, 8]]
    prefixes = SharedPrefixes.of_tokens([0, 0, 0, 0], Jagged.from_rows(rows, np.int64))
    assert prefixes.order.tolist() == [0, 2, 3, 1] and prefixes.shared.tolist() == [0, 3, 2, 0]
    plan = plan_batch(counted([4, 2, 5, 3], prefixes), PlanSpec(max_tokens=9))
    [[microbatch]] = plan.ranks
    assert microbatch == Microbatch((0, 2, 3, 1), (4, 5, 3, 2), (4, 2, 1, 2), 9, (0, 3, 2, 0))
    assert "35.7% of the row tokens shared" in str(plan)
    cost = plan.spec.cost
    expected = cost.linear * 9 + cost.quadratic * (16 + 25 - 9 + 9 - 4 + 4)
    assert plan.work.sum() == pytest.approx(expected)
    separate = cost.of([4, 2, 5, 3]).sum()
    saved = plan.metrics()["packing/shared_work_share"]
    assert saved == pytest.approx(1 - expected / separate)


def test_rows_of_one_group_share_the_smaller_prefix() -> None:
    prefixes = SharedPrefixes.of_groups([5, 3, 5, 5, 3], [4, 2, 6, 4, 2])
    assert prefixes.order.tolist() == [2, 0, 3, 1, 4]
    assert prefixes.shared.tolist() == [0, 4, 4, 0, 2]
    with pytest.raises(ValueError, match=r"row 4 shares 2 leading tokens .* 0 to 1"):
        plan_batch(counted([9, 9, 9, 9, 1], prefixes), PlanSpec(max_tokens=40))


def test_prefixes_of_other_rows_and_padded_rows_are_refused() -> None:
    prefixes = SharedPrefixes.of_groups([0, 0], [2, 2])
    with pytest.raises(ValueError, match="each of the 3 rows once"):
        plan_batch(counted([3, 3, 3], prefixes), PlanSpec(max_tokens=8))
    with pytest.raises(ValueError, match=r"packed layout only.*sequence_packing.enabled=true"):
        plan_batch(counted([3, 3], prefixes), PlanSpec(layout="padded", max_tokens=8))


@pytest.mark.parametrize(("prefix", "is_used"), [(1, False), (20, True)])
def test_prefixes_are_used_where_they_save_enough(prefix: int, is_used: bool) -> None:
    """Four rows of 50 tokens with work 100 per token: the union has 200 - 3 * prefix tokens."""
    spec = PlanSpec(max_tokens=200, cost=CostModel(linear=100.0, quadratic=0.0))
    counts = counted([50] * 4, SharedPrefixes.of_groups([0] * 4, [prefix] * 4))
    alone = plan_batch(counts.lengths, spec)
    plan = plan_batch(counts, spec, shared_prefix="auto")
    assert (plan != alone) == is_used == (3 * prefix / 200 >= 0.03)
    assert plan.num_tokens.sum() == (200 - 3 * prefix if is_used else 200)
    assert plan_batch(counts, spec).shared_work_share == pytest.approx(3 * prefix / 200)
    assert plan_batch(counts, spec, shared_prefix=False) == alone
    padded = replace(spec, layout="padded")
    without = plan_batch(counts.lengths, padded)
    assert plan_batch(counts, padded, shared_prefix="auto") == without
    assert without.shared_work_share == 0.0


def test_rows_that_share_nothing_get_the_plan_of_complete_rows() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 100)
    spec = PlanSpec(max_tokens=1024, num_ranks=4)
    prefixes = SharedPrefixes.of_groups(np.arange(100), lengths)
    alone, plan = (plan_batch(lengths, spec), plan_batch(counted(lengths, prefixes), spec))
    assert plan.num_microbatches == alone.num_microbatches
    assert plan.metrics()["packing/shared_token_share"] == 0.0
    assert not any(microbatch.shared for microbatch in microbatches(plan))
    assert plan.ranks != () and replace(alone, prefixes=prefixes) != alone


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 8), st.booleans())
def test_no_plan_is_below_the_bound_of_shared_work(
    seed: int, num_ranks: int, size: int, is_step: bool
) -> None:
    rows = forest_rows(seed, 24)
    prefixes = SharedPrefixes.of_tokens(np.arange(24) // size, Jagged.from_rows(rows, np.int32))
    lengths = np.array([len(row) for row in rows])
    longest = int(lengths.max())
    sync = "step" if is_step else "microbatch"
    spec = PlanSpec(max_tokens=longest + 20, num_ranks=num_ranks, sync=sync)
    bound = shared_work_bound(counted(lengths, prefixes), spec)
    plan = plan_batch(counted(lengths, prefixes), spec)
    before = np.concatenate([[0.0], np.cumsum(plan.work)])
    makespan = np.diff(before[plan.offsets]).reshape(num_ranks, -1).sum(1).max()
    assert bound <= makespan * (1 + 1e-9)
    # A rank alone computes every common token once if all fits into one microbatch.
    if num_ranks == 1:
        in_one = plan_batch(counted(lengths, prefixes), replace(spec, max_tokens=10_000))
        assert bound == pytest.approx(in_one.work.sum())


def test_a_prompt_is_computed_again_where_a_group_is_divided() -> None:
    """Two ranks, one prompt of 50 tokens and four completions of 25: 100 tokens on each rank."""
    prefixes = SharedPrefixes.of_groups([0] * 4, [50] * 4)
    spec = PlanSpec(max_tokens=200, num_ranks=2, balance="tokens")
    counts = counted(np.full(4, 75), prefixes)
    plan = plan_batch(counts, spec)
    assert plan.num_tokens.tolist() == [[100], [100]]
    assert shared_work_bound(counts, spec) == pytest.approx(100.0)
