"""Aligned ranks: random shards, all interleavings of small ones, and process groups of gloo."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.row_order import ShardedOrder
from nemo_like.data.streaming.alignment import (
    AlignedPlanner,
    AlignedStep,
    AlignmentError,
    SingleCoordinator,
    waiting_rows,
)
from nemo_like.data.streaming.former import OversizeRowError
from nemo_like.data.streaming.spec import StreamSpec
from tests.data.streaming.gloo_ranks import GlooCase, Outcome, run_rank
from tests.data.streaming.stream_cases import (
    Row,
    check_metrics,
    check_step,
    max_row_length,
    stream_specs,
    trained_of,
    with_policy,
)

pytestmark = pytest.mark.filterwarnings("ignore::nemo_like.data.planning.oversize.OversizeWarning")

SHARD_SIZES = (0, 0, 1, 2, 3, 7, 30)


class Recorder:
    """One simulated rank. It keeps what it sends; the test does the exchange."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.sent: list[list[int]] = []

    def all_gather(self, values: Sequence[int]) -> np.ndarray:
        self.sent.append(list(values))
        return np.zeros((self.num_ranks, len(values)), dtype=np.int64)


class Case(NamedTuple):
    spec: StreamSpec
    join: bool
    shards: list[list[Row]]

    @property
    def ends_incomplete(self) -> bool:
        return not self.join or self.spec.tail == "drop"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """1 to 16 ranks with shards of very different sizes, empty ones among them."""
    spec = draw(stream_specs(st.just(1)))
    num_ranks = draw(st.integers(1, 4) | st.integers(1, 16))
    generator = np.random.default_rng(draw(st.integers(0, 2**20)))
    sizes = draw(st.lists(st.sampled_from(SHARD_SIZES), min_size=num_ranks, max_size=num_ranks))
    shards = []
    for size in sizes:
        lengths = np.clip(generator.lognormal(3.2, 0.9, size), 1, 260).astype(int).tolist()
        rows = [Row(length, length * (length % 4) // 3, length % 5) for length in lengths]
        shards.append(with_policy(rows, spec))
    return Case(spec, draw(st.booleans()), shards)


class Group:
    """Simulated ranks that read their shards and exchange proposals."""

    def __init__(self, case: Case) -> None:
        self.case = case
        num_ranks = len(case.shards)
        self.planners = [
            AlignedPlanner(case.spec, Recorder(rank, num_ranks), join=case.join)
            for rank in range(num_ranks)
        ]
        self.read = [0] * num_ranks
        self.num_exchanges = 0
        self.num_formed: list[np.ndarray] = []

    def propose(self, rank: int) -> list[int]:
        planner = self.planners[rank]
        shard = self.case.shards[rank]
        while planner.needs_rows:
            number = self.read[rank]
            if number == len(shard):
                planner.close()
                continue
            row = shard[number]
            planner.push(number, row.length, row.num_trained, row.extra)
            self.read[rank] += 1
        return planner.proposal()

    def exchange(self) -> list[AlignedStep] | None:
        """The next step on all ranks; None at the end, which all ranks reach at once."""
        matrix = np.array([self.propose(rank) for rank in range(len(self.planners))])
        self.num_exchanges += 1
        self.num_formed.append(matrix[:, 0])
        steps = [planner.resolve(matrix) for planner in self.planners]
        found = [step for step in steps if step is not None]
        assert len(found) in (0, len(steps))
        assert all(planner.is_finished == (not found) for planner in self.planners)
        return found or None

    def reload(self) -> None:
        """Replace every planner by one that is restored from its state."""
        for rank, planner in enumerate(self.planners):
            state = json.loads(json.dumps(planner.state_dict()))
            coordinator = Recorder(rank, len(self.planners))
            other = AlignedPlanner(self.case.spec, coordinator, join=self.case.join)
            other.load_state_dict(state)
            assert other.state_dict() == state
            assert other.waiting == planner.waiting
            self.planners[rank] = other


def run(case: Case) -> tuple[Group, list[list[AlignedStep]]]:
    group = Group(case)
    steps = []
    while (step := group.exchange()) is not None:
        steps.append(step)
    # A rank with rows left has at least one in each step, and without `join` a full step.
    sizes = [len(shard) for shard in case.shards]
    num_rows_per_step = case.spec.microbatches_per_step if case.ends_incomplete else 1
    max_rows = min(sizes) if case.ends_incomplete else max(sizes)
    assert group.num_exchanges <= max_rows // num_rows_per_step + 1
    return group, steps


def check_aligned(case: Case, steps: list[AlignedStep], num_formed: np.ndarray) -> None:
    """Check one step of all ranks, which had formed `num_formed` int64 [R] microbatches."""
    spec = case.spec
    counts = {step.own.plan.num_microbatches for step in steps}
    assert len(counts) == 1
    num_microbatches = counts.pop()
    assert num_microbatches == -(-num_formed.max() // spec.plan.microbatch_multiple) * (
        spec.plan.microbatch_multiple
    )
    is_split = ((num_formed > 0) & (num_formed < num_microbatches)).any()
    num_dummies = 0
    num_trained = 0
    positions = []
    for step, shard in zip(steps, case.shards, strict=True):
        check_step(spec, step.own, dict(enumerate(shard)))
        filled = [mb for mb in step.own.plan.ranks[0] if mb.rows]
        if len(filled) < num_microbatches:
            # Dummies run only where there is no second row to split off.
            assert all(len(microbatch.rows) == 1 for microbatch in filled)
            num_dummies += num_microbatches - len(filled)
        rows = [shard[row] for row in step.own.rows]
        num_trained += trained_of(rows, max_row_length(spec), spec)
        positions.append(sum(sum(microbatch.padded_lengths) for microbatch in filled))
    num_rows = sum(len(step.own.rows) for step in steps)
    assert num_rows > 0
    for step in steps:
        assert step.own.num_trained == num_trained
        assert step.num_rows == num_rows
        assert step.num_dummies == num_dummies
        # Splitting padded microbatches changes their positions.
        if spec.plan.layout == "packed" or not is_split:
            assert step.position_imbalance == pytest.approx(max(positions) / np.mean(positions))
    # The metrics of all ranks take as long as everything else.
    metrics = steps[0].metrics()
    assert metrics["packing/num_rows"] == num_rows
    assert metrics["packing/num_dummies"] == num_dummies
    check_metrics(steps[-1].own)


@settings(max_examples=300, deadline=None)
@given(case=cases())
def test_all_ranks_run_the_same_microbatches_and_every_row_is_used_or_counted(case: Case) -> None:
    group, steps = run(case)
    for number, step in enumerate(steps):
        check_aligned(case, step, group.num_formed[number])
        assert {aligned.own.step for aligned in step} == {number}
    is_full = [
        all(
            sum(bool(mb.rows) for mb in aligned.own.plan.ranks[0])
            == case.spec.microbatches_per_step
            for aligned in step
        )
        for step in steps
    ]
    for rank, (planner, shard) in enumerate(zip(group.planners, case.shards, strict=True)):
        emitted = [row for step in steps for row in step[rank].own.rows]
        assert len(set(emitted)) == len(emitted)
        counts = planner.counts
        assert counts.num_pushed == group.read[rank]
        assert counts.num_emitted == len(emitted)
        assert counts.num_dropped == counts.num_pushed - len(emitted)
        if not case.ends_incomplete:
            assert counts.num_pushed == len(shard)
            num_oversize = counts.num_oversize if case.spec.plan.oversize == "drop" else 0
            assert counts.num_dropped == num_oversize
        assert planner.waiting == ()
        assert not planner.needs_rows
        assert planner.next_step() is None
        with pytest.raises(ValueError, match="after the end"):
            planner.push(len(shard), 1)
    assert bool((group.num_formed[-1] < case.spec.microbatches_per_step).any())
    if case.ends_incomplete:
        # Some rank has read all its rows, and no step before the end was incomplete.
        assert all(is_full)
        read = zip(group.read, case.shards, strict=True)
        assert any(number == len(shard) for number, shard in read)
    assert group.num_exchanges == len(steps) + 1


@settings(max_examples=120, deadline=None)
@given(case=cases())
def test_ranks_that_are_restored_at_every_step_continue_identically(case: Case) -> None:
    _, wanted = run(case)
    group = Group(case)
    steps = []
    while True:
        # Also with rows in the incomplete step.
        for rank in range(len(group.planners)):
            group.propose(rank)
        group.reload()
        step = group.exchange()
        group.reload()
        if step is None:
            break
        steps.append(step)
    assert len(steps) == len(wanted)
    for own, other in zip(steps, wanted, strict=True):
        for left, right in zip(own, other, strict=True):
            assert (left.own.rows, left.own.plan) == (right.own.rows, right.own.plan)
            assert left.metrics() == right.metrics()
            assert left.own.num_trained == right.own.num_trained


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_a_second_epoch_repeats_the_first_after_the_common_end(case: Case) -> None:
    case = case._replace(spec=replace(case.spec, warmup_steps=0))
    group, first = run(case)
    for planner in group.planners:
        planner.reopen()
        with pytest.raises(ValueError, match="has not ended"):
            planner.reopen()
    group.read = [0] * len(group.planners)
    for step in first:
        again = group.exchange()
        assert again is not None
        own = [aligned.own.rows for aligned in step]
        assert [aligned.own.rows for aligned in again] == own
    assert group.exchange() is None


@settings(max_examples=120, deadline=None)
@given(
    data=st.data(),
    spec=stream_specs(st.just(1), ("singleton",)),
    num_rows=st.integers(0, 80),
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=4),
)
def test_another_number_of_ranks_continues_the_epoch_with_every_row_once(
    data: st.DataObject, spec: StreamSpec, num_rows: int, sizes: list[int]
) -> None:
    """Each part of the epoch has another number of ranks, which share one order of the rows."""
    spec = replace(spec, tail="emit")
    lengths = np.random.default_rng(num_rows).integers(1, 80, num_rows).tolist()
    emitted: list[int] = []
    num_steps = 0
    states: list[dict[str, Any]] = []
    order_states: list[dict[str, Any]] = []
    for part, num_ranks in enumerate(sizes):
        planners = [planner_of(rank, num_ranks, spec) for rank in range(num_ranks)]
        orders = [
            ShardedOrder(num_rows, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)
        ]
        if part:
            for planner, order in zip(planners, orders, strict=True):
                planner.load_global_state(states)
                order.load_global_state(order_states, [waiting_rows(state) for state in states])
        num_part_steps = data.draw(st.integers(0, 3)) if part + 1 < len(sizes) else num_rows + 1
        for _ in range(num_part_steps):
            for planner, order in zip(planners, orders, strict=True):
                while planner.needs_rows:
                    if order.num_left == 0:
                        planner.close()
                        continue
                    row = int(order.take(1)[0])
                    planner.push(row, lengths[row])
            matrix = gathered(planners)
            steps = [planner.resolve(matrix) for planner in planners]
            if planners[0].is_finished:
                break
            for step in steps:
                assert step is not None
                assert step.own.step == num_steps
                emitted += step.own.rows
            num_steps += 1
        states = [json.loads(json.dumps(planner.state_dict())) for planner in planners]
        order_states = [json.loads(json.dumps(order.state_dict())) for order in orders]
        if planners[0].is_finished:
            break
    assert sorted(emitted) == list(range(num_rows))


def test_states_of_a_group_are_those_of_all_ranks_at_one_step() -> None:
    first, second = (planner_of(rank, 2).state_dict() for rank in range(2))
    planner = planner_of(0, 1)
    with pytest.raises(ValueError, match=r"ranks \[1\]"):
        planner.load_global_state([second])
    with pytest.raises(ValueError, match=r"ranks \[\]"):
        planner.load_global_state([])
    with pytest.raises(ValueError, match=r"different steps \[0, 3\]"):
        planner.load_global_state([first, {**second, "num_steps": 3}])


class RankState(NamedTuple):
    """A rank of the model: its next operation, and everything that the operation depends on."""

    operation: str
    """`run`, `proposed` (it waits for the exchange), `gathered`, `done`, `failed` or `error`."""
    num_read: int
    planner: str
    """State of the planner as JSON."""
    values: tuple[Any, ...]
    """Own values while `proposed`, those of all ranks while `gathered`."""
    rows: tuple[tuple[int, ...], ...]
    """Rows of each step."""
    num_trained: tuple[int, ...]


class Model:
    """All states of a group of ranks in which each rank can be the next to advance.

    An exchange is complete when all ranks have proposed. Afterwards each rank resolves at its own
    time, and may propose again before the others resolve.
    """

    def __init__(self, case: Case, *, can_fail: bool = False) -> None:
        self.case = case
        self.can_fail = can_fail
        self._successors: dict[tuple[int, RankState], list[RankState]] = {}

    def planner(self, rank: int, state: RankState) -> tuple[AlignedPlanner, Recorder]:
        recorder = Recorder(rank, len(self.case.shards))
        planner = AlignedPlanner(self.case.spec, recorder, join=self.case.join)
        planner.load_state_dict(json.loads(state.planner))
        return planner, recorder

    def start(self) -> tuple[RankState, ...]:
        states = []
        for rank in range(len(self.case.shards)):
            recorder = Recorder(rank, len(self.case.shards))
            planner = AlignedPlanner(self.case.spec, recorder, join=self.case.join)
            state = json.dumps(planner.state_dict())
            states.append(RankState("run", 0, state, (), (), ()))
        return tuple(states)

    def of_rank(self, rank: int, state: RankState) -> list[RankState]:
        """States of one rank after its next operation, without the exchange."""
        key = (rank, state)
        if key not in self._successors:
            found = []
            if state.operation == "run":
                found.append(self._advanced(rank, state))
                if self.can_fail:
                    found.append(self._failed(rank, state))
            elif state.operation == "gathered":
                found.append(self._resolved(rank, state))
            self._successors[key] = found
        return self._successors[key]

    def _advanced(self, rank: int, state: RankState) -> RankState:
        planner, _ = self.planner(rank, state)
        shard = self.case.shards[rank]
        num_read = state.num_read
        if not planner.needs_rows:
            values = tuple(planner.proposal())
            text = json.dumps(planner.state_dict())
            return state._replace(operation="proposed", planner=text, values=values)
        if num_read == len(shard):
            planner.close()
        else:
            planner.push(num_read, *shard[num_read])
            num_read += 1
        return state._replace(num_read=num_read, planner=json.dumps(planner.state_dict()))

    def _failed(self, rank: int, state: RankState) -> RankState:
        planner, recorder = self.planner(rank, state)
        planner.fail()
        return state._replace(operation="failed", values=tuple(recorder.sent[0]))

    def _resolved(self, rank: int, state: RankState) -> RankState:
        planner, recorder = self.planner(rank, state)
        try:
            step = planner.resolve(np.array(state.values))
        except AlignmentError:
            # A rank that handles the error by `fail` or continues does not wait for anyone.
            planner.fail()
            with pytest.raises(AlignmentError):
                planner.next_step()
            assert recorder.sent == []
            return state._replace(operation="error", values=())
        text = json.dumps(planner.state_dict())
        if step is None:
            planner.fail()
            assert planner.next_step() is None
            assert recorder.sent == []
            return state._replace(operation="done", planner=text, values=())
        return state._replace(
            operation="run",
            planner=text,
            values=(),
            rows=(*state.rows, step.own.rows),
            num_trained=(*state.num_trained, step.own.num_trained),
        )

    def successors(self, states: tuple[RankState, ...]) -> list[tuple[RankState, ...]]:
        found = []
        for rank, state in enumerate(states):
            for other in self.of_rank(rank, state):
                found.append((*states[:rank], other, *states[rank + 1 :]))
        if all(state.operation in ("proposed", "failed") for state in states):
            if any(state.values == () for state in states):
                # A rank that failed takes part in one exchange only.
                return found
            matrix = tuple(state.values for state in states)
            gathered = []
            for state in states:
                if state.operation == "failed":
                    gathered.append(state._replace(values=()))
                else:
                    gathered.append(state._replace(operation="gathered", values=matrix))
            found.append(tuple(gathered))
        return found

    def explore(self) -> tuple[list[tuple[RankState, ...]], int]:
        """Return the states without successor, and the number of all states, breadth first."""
        start = self.start()
        seen = {start}
        level = [start]
        ends = []
        while level:
            following = []
            for states in level:
                successors = self.successors(states)
                if not successors:
                    ends.append(states)
                for other in successors:
                    if other not in seen:
                        seen.add(other)
                        following.append(other)
            level = following
        return ends, len(seen)


def small_case(
    lengths: tuple[tuple[int, ...], ...], *, microbatches: int, window_rows: int, join: bool
) -> Case:
    """Shards of `lengths` with microbatches of 4 tokens."""
    spec = StreamSpec(
        plan=PlanSpec(max_tokens=4),
        microbatches_per_step=microbatches,
        window_rows=window_rows,
        window_tokens=0,
    )
    shards = [[Row(length, length, 0) for length in shard] for shard in lengths]
    return Case(spec, join, shards)


def shards_of(lengths: Sequence[int], max_rows: int) -> list[tuple[int, ...]]:
    """All shards of up to `max_rows` rows of `lengths`."""
    sizes = range(max_rows + 1)
    return [shard for size in sizes for shard in itertools.product(lengths, repeat=size)]


SMALL_GROUPS = [
    *itertools.product(shards_of((1, 4), 3), repeat=2),
    *itertools.product(shards_of((2, 4), 2), repeat=3),
]
"""All pairs and triples of small shards."""


@pytest.mark.parametrize(
    ("microbatches", "window_rows", "join"),
    [(1, 1, True), (1, 1, False), (2, 2, False), (2, 3, True)],
)
def test_every_interleaving_reaches_the_same_end_without_a_deadlock(
    microbatches: int, window_rows: int, join: bool
) -> None:
    num_states = 0
    for lengths in SMALL_GROUPS:
        case = small_case(lengths, microbatches=microbatches, window_rows=window_rows, join=join)
        ends, num_explored = Model(case).explore()
        num_states += num_explored
        # One end: a second one would depend on the order of the ranks, and no other state is
        # without a successor, so none is a deadlock.
        (end,) = ends
        check_end(case, end)
    assert num_states > 20_000


def check_end(case: Case, end: tuple[RankState, ...]) -> None:
    """All ranks ended after the same steps, those of `run`, and no row is lost."""
    assert {state.operation for state in end} == {"done"}
    assert len({len(state.rows) for state in end}) == 1
    assert len({state.num_trained for state in end}) == 1
    _, steps = run(case)
    for rank, state in enumerate(end):
        assert state.rows == tuple(step[rank].own.rows for step in steps)
        counts = json.loads(state.planner)["counts"]
        emitted = [row for rows in state.rows for row in rows]
        assert counts["num_emitted"] + counts["num_dropped"] == state.num_read
        if case.join:
            assert sorted(emitted) == list(range(len(case.shards[rank])))


@pytest.mark.parametrize("lengths", [((4, 4), ()), ((2, 2, 2), (4,)), ((4,), (2, 2), ())], ids=str)
@pytest.mark.parametrize("join", [True, False])
def test_every_interleaving_with_failures_ends_in_an_error_on_the_other_ranks(
    lengths: tuple[tuple[int, ...], ...], join: bool
) -> None:
    """Any rank may fail at any time, also several."""
    case = small_case(lengths, microbatches=1, window_rows=2, join=join)
    ends, _ = Model(case, can_fail=True).explore()
    outcomes = set()
    for end in ends:
        operations = {state.operation for state in end}
        outcomes.add(frozenset(operations))
        # All ranks emitted the same steps before the failure.
        assert len({len(state.rows) for state in end}) == 1
    assert outcomes == {frozenset({"done"}), frozenset({"failed", "error"}), frozenset({"failed"})}


def gathered(planners: Sequence[AlignedPlanner]) -> np.ndarray:
    return np.array([planner.proposal() for planner in planners])


def planner_of(
    rank: int, num_ranks: int, spec: StreamSpec | None = None, *, join: bool = True
) -> AlignedPlanner:
    spec = spec or StreamSpec(plan=PlanSpec(max_tokens=8), window_rows=2, window_tokens=0)
    return AlignedPlanner(spec, Recorder(rank, num_ranks), join=join)


@pytest.mark.parametrize(
    "other",
    [
        lambda spec: planner_of(1, 2, replace(spec, microbatches_per_step=2)),
        lambda spec: planner_of(1, 2, replace(spec, tail="drop")),
        lambda spec: planner_of(1, 2, spec, join=False),
    ],
)
def test_different_settings_are_an_error_on_all_ranks(
    other: Callable[[StreamSpec], AlignedPlanner],
) -> None:
    spec = StreamSpec(plan=PlanSpec(max_tokens=8))
    planners = [planner_of(0, 2, spec), other(spec)]
    for planner in planners:
        planner.close()
    matrix = gathered(planners)
    for planner in planners:
        with pytest.raises(AlignmentError, match="different settings"):
            planner.resolve(matrix)


def test_ranks_of_different_checkpoints_are_an_error_on_all_ranks() -> None:
    planners = [planner_of(rank, 2) for rank in range(2)]
    for planner in planners:
        for row in range(4):
            planner.push(row, 8)
        planner.close()
    before = planners[1].state_dict()
    matrix = gathered(planners)
    for planner in planners:
        assert planner.resolve(matrix) is not None
    planners[1].load_state_dict(before)
    matrix = gathered(planners)
    for planner in planners:
        with pytest.raises(AlignmentError, match=r"different steps \[1, 0\]"):
            planner.resolve(matrix)


def test_a_state_of_another_rank_or_number_of_ranks_is_an_error() -> None:
    state = planner_of(1, 2).state_dict()
    with pytest.raises(ValueError, match="rank=1, this is rank=0"):
        planner_of(0, 2).load_state_dict(state)
    with pytest.raises(ValueError, match="num_ranks=2, this is num_ranks=3"):
        planner_of(1, 3).load_state_dict(state)


def test_a_failure_names_the_rank_and_leaves_no_rank_waiting() -> None:
    recorders = [Recorder(rank, 3) for rank in range(3)]
    spec = StreamSpec(plan=PlanSpec(max_tokens=8), window_rows=2, window_tokens=0)
    planners = [AlignedPlanner(spec, recorder) for recorder in recorders]
    with pytest.raises(OversizeRowError):
        planners[1].push(0, 9)
    planners[1].fail()
    planners[1].fail()
    assert len(recorders[1].sent) == 1
    with pytest.raises(AlignmentError, match="this rank"):
        planners[1].next_step()
    planners[0].close()
    planners[2].close()
    matrix = np.array([planners[0].proposal(), recorders[1].sent[0], planners[2].proposal()])
    for rank in (0, 2):
        with pytest.raises(AlignmentError, match="rank 1 could not form its step"):
            planners[rank].resolve(matrix)


def test_a_step_needs_its_rows_and_the_spec_of_one_rank() -> None:
    with pytest.raises(ValueError, match=r"num_ranks must be 1, got 2"):
        planner_of(0, 2, StreamSpec(plan=PlanSpec(max_tokens=8, num_ranks=2)))
    planner = planner_of(0, 1)
    planner.push(0, 3)
    with pytest.raises(ValueError, match="push rows while `needs_rows`"):
        planner.next_step()


def test_one_rank_needs_no_process_group() -> None:
    spec = StreamSpec(plan=PlanSpec(max_tokens=8), window_rows=2, window_tokens=0)
    planner = AlignedPlanner(spec, SingleCoordinator())
    found = []
    for row in range(5):
        planner.push(row, 4)
    planner.close()
    while (step := planner.next_step()) is not None:
        found.append(step.own.rows)
    assert found == [(0, 1), (2, 3), (4,)]


def gloo_cases(num_ranks: int) -> list[GlooCase]:
    """Shards with an empty one, only empty ones, and very uneven ones, in both join modes."""
    sizes = [[9, 0, 3, 1], [0, 0, 0, 0], [2, 31, 0, 8], [5, 5, 5, 5], [0, 0, 1, 0]]
    generator = np.random.default_rng(1)
    found: list[GlooCase] = []
    for number, shard_sizes in enumerate(sizes):
        shards = [generator.integers(1, 30, size).tolist() for size in shard_sizes[:num_ranks]]
        for join in (True, False):
            spec = StreamSpec(
                plan=PlanSpec(layout=("packed", "padded")[number % 2], max_tokens=32),
                microbatches_per_step=1 + number % 3,
                window_rows=4,
            )
            found.append((spec, join, shards))
    return found


def outcome_of(rank: int, steps: list[list[AlignedStep]], group: Group) -> Outcome:
    own = [step[rank] for step in steps]
    return Outcome(
        [step.own.rows for step in own],
        [step.own.plan.num_microbatches for step in own],
        [step.own.num_trained for step in own],
        [step.num_dummies for step in own],
        group.planners[rank].counts.num_dropped,
    )


@pytest.mark.parametrize(
    ("num_ranks", "start_method"),
    [pytest.param(2, "spawn", marks=pytest.mark.exhaustive), (4, "forkserver")],
)
def test_process_groups_give_the_steps_of_simulated_ranks(
    num_ranks: int, start_method: str, tmp_path: Path
) -> None:
    cases = gloo_cases(num_ranks)
    context = multiprocessing.get_context(start_method)
    with ProcessPoolExecutor(num_ranks, mp_context=context) as pool:
        futures = [
            pool.submit(run_rank, rank, num_ranks, tmp_path / "meeting", cases)
            for rank in range(num_ranks)
        ]
        results = [future.result(timeout=600) for future in futures]
    for rank, (outcomes, (uninitialized, failure, other_group)) in enumerate(results):
        for (spec, join, shards), outcome in zip(cases, outcomes, strict=True):
            rows = [[Row(length, length // 2, 0) for length in shard] for shard in shards]
            group, steps = run(Case(spec, join, rows))
            assert outcome == outcome_of(rank, steps, group)
        assert "torch.distributed is not initialized" in uninitialized
        assert ("this rank reported" if rank == 1 else "rank 1 could not form") in failure
        members = [[member, 7] for member in range(1, num_ranks)]
        assert other_group == str(members) if rank else "not in the group" in other_group
