"""Invariants of `StreamingPlanner` over random streams, exact resume, and microbatch counts."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.planning.plan import BatchPlan
from nemo_like.data.planning.plan_step import form_padded
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.streaming.former import OversizeRowError, WindowWarning
from nemo_like.data.streaming.planner import PlannedStep, StreamingPlanner, plan_stream
from nemo_like.data.streaming.selection import Selection
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.parallel_layout import Oversize
from tests.data.streaming.stream_cases import (
    Row,
    check_metrics,
    check_step,
    is_window_ready,
    max_row_length,
    stream_rows,
    stream_specs,
    trained_of,
    with_policy,
)

RANKS = st.integers(1, 4) | st.integers(1, 16)
# Dropped, truncated and single oversize rows are warned about; they are counted here.
pytestmark = pytest.mark.filterwarnings("ignore::nemo_like.data.planning.oversize.OversizeWarning")


def push(planner: StreamingPlanner, number: int, row: Row) -> bool:
    return planner.push(number, row.length, row.num_trained, row.extra)


def steps_now(planner: StreamingPlanner) -> list[PlannedStep]:
    """All steps that the planner has without further rows."""
    steps = []
    while (step := planner.next_step()) is not None:
        steps.append(step)
    return steps


def run(spec: StreamSpec, rows: list[Row]) -> tuple[StreamingPlanner, list[PlannedStep]]:
    planner = StreamingPlanner(spec)
    steps = []
    for number, row in enumerate(rows):
        push(planner, number, row)
        steps += steps_now(planner)
    planner.close()
    return planner, steps + steps_now(planner)


def rows_of(steps: list[PlannedStep]) -> list[int]:
    return [row for step in steps for row in step.rows]


def is_equal(step: PlannedStep, other: PlannedStep) -> bool:
    own = (step.step, step.rows, step.plan, step.num_trained, step.metrics())
    return own == (other.step, other.rows, other.plan, other.num_trained, other.metrics())


def filled(step: PlannedStep) -> int:
    """Microbatches with rows, over all ranks."""
    return sum(1 for rank in step.plan.ranks for microbatch in rank if microbatch.rows)


@settings(max_examples=250, deadline=None)
@given(spec=stream_specs(RANKS), rows=stream_rows(300))
def test_every_row_is_once_in_a_step_within_the_limits_or_counted(
    spec: StreamSpec, rows: list[Row]
) -> None:
    rows = with_policy(rows, spec)
    planner, steps = run(spec, rows)
    row_of = dict(enumerate(rows))
    for number, step in enumerate(steps):
        assert step.step == number
        check_step(spec, step, row_of)
        check_metrics(step)
        restored = BatchPlan.from_json(step.plan.to_json())
        assert restored == step.plan
        assert restored.ranks == step.plan.ranks
        json.dumps(step.metrics())
        limit = max_row_length(spec)
        assert step.num_trained == trained_of([row_of[row] for row in step.rows], limit, spec)
    # Only the last step may be smaller.
    for step in steps[:-1]:
        assert filled(step) == spec.num_bins
    emitted = rows_of(steps)
    assert len(set(emitted)) == len(emitted)
    counts = planner.counts
    oversize = [row for row in rows if row.length > max_row_length(spec)]
    assert counts.num_pushed == len(rows)
    assert counts.num_oversize == len(oversize)
    assert counts.num_truncated == (len(oversize) if spec.plan.oversize == "truncate" else 0)
    assert counts.num_emitted == len(emitted)
    assert counts.num_dropped == len(rows) - len(emitted)
    # The counts of a step are those of the rows that were pushed since the previous step.
    of_steps = [step.metrics() for step in steps]
    assert sum(values["packing/num_dropped"] for values in of_steps) <= counts.num_dropped
    if spec.tail != "drop":
        num_truncated = sum(values["packing/num_truncated"] for values in of_steps)
        num_oversize = sum(values["packing/num_oversize"] for values in of_steps)
        assert num_truncated == counts.num_truncated
        assert num_oversize == counts.num_oversize or spec.plan.oversize == "drop"
        assert counts.num_dropped == (len(oversize) if spec.plan.oversize == "drop" else 0)
    assert planner.num_waiting == 0


@settings(max_examples=150, deadline=None)
@given(spec=stream_specs(RANKS, ("singleton",)), rows=stream_rows(200))
def test_a_row_waits_for_at_most_as_many_microbatches_as_rows_are_before_it(
    spec: StreamSpec, rows: list[Row]
) -> None:
    """A row that arrives after k rows of the window is in one of the next k + 1 microbatches.

    With b microbatches already in the current step s it is in step s + (b + k) // num_bins or
    before.
    """
    planner = StreamingPlanner(spec)
    last_step = {}
    arrived_in = {}
    steps = []
    for number, row in enumerate(rows):
        num_formed = planner.num_steps * spec.num_bins + len(planner.state_dict()["bins"])
        last_step[number] = (num_formed + len(planner.window)) // spec.num_bins
        arrived_in[number] = planner.num_steps
        push(planner, number, row)
        lengths = [rows[waiting.row].length for waiting in planner.window]
        before = planner.num_steps * spec.num_bins + len(planner.state_dict()["bins"])
        is_ready = is_window_ready(spec, planner.num_steps, lengths)
        steps += steps_now(planner)
        after = planner.num_steps * spec.num_bins + len(planner.state_dict()["bins"])
        # A microbatch is formed as soon as the window is ready and not before. So memory is
        # bounded: fewer rows wait than make the window ready.
        assert (after > before) == is_ready
        lengths = [rows[waiting.row].length for waiting in planner.window]
        assert not is_window_ready(spec, planner.num_steps, lengths)
    planner.close()
    for step in steps + steps_now(planner):
        for row in step.rows:
            assert step.step <= last_step[row]
        assert step.max_wait == max(step.step - arrived_in[row] for row in step.rows)


@settings(max_examples=100, deadline=None)
@given(spec=stream_specs(RANKS), rows=stream_rows(120))
def test_a_planner_that_is_restored_at_every_event_continues_identically(
    spec: StreamSpec, rows: list[Row]
) -> None:
    rows = with_policy(rows, spec)
    planner, wanted = run(spec, rows)

    def restored(planner: StreamingPlanner) -> StreamingPlanner:
        state = json.loads(json.dumps(planner.state_dict()))
        other = StreamingPlanner(spec)
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert other.waiting == planner.waiting
        return other

    other = StreamingPlanner(spec)
    steps: list[PlannedStep] = []
    for number in range(len(rows) + 1):
        if number < len(rows):
            push(other, number, rows[number])
        else:
            other.close()
        other = restored(other)
        while (step := other.next_step()) is not None:
            steps.append(step)
            other = restored(other)
        other = restored(other)
    assert len(steps) == len(wanted)
    assert all(map(is_equal, steps, wanted))
    assert other.counts == planner.counts


@settings(max_examples=100, deadline=None)
@given(
    spec=stream_specs(RANKS),
    rows=stream_rows(150),
    sizes=st.lists(st.tuples(st.integers(0, 150), RANKS), min_size=1, max_size=4),
)
def test_another_number_of_ranks_continues_without_a_lost_or_repeated_row(
    spec: StreamSpec, rows: list[Row], sizes: list[tuple[int, int]]
) -> None:
    rows = with_policy(rows, spec)
    changes = dict(sizes)
    planner = StreamingPlanner(spec)
    row_of = dict(enumerate(rows))
    steps = []
    for number, row in enumerate(rows):
        if number in changes:
            state = json.loads(json.dumps(planner.state_dict()))
            spec = replace(spec, plan=replace(spec.plan, num_ranks=changes[number]))
            waiting = planner.waiting
            planner = StreamingPlanner(spec)
            planner.load_state_dict(state)
            assert planner.waiting == waiting
        push(planner, number, row)
        for step in steps_now(planner):
            check_step(spec, step, row_of)
            steps.append(step)
    planner.close()
    for step in steps_now(planner):
        check_step(spec, step, row_of)
        steps.append(step)
    emitted = rows_of(steps)
    assert [step.step for step in steps] == list(range(len(steps)))
    assert len(set(emitted)) == len(emitted)
    assert planner.counts.num_dropped == len(rows) - len(emitted)
    assert planner.counts.num_emitted == len(emitted)


@settings(max_examples=60, deadline=None)
@given(spec=stream_specs(st.integers(1, 4)), rows=stream_rows(60), num_epochs=st.integers(1, 3))
def test_epochs_follow_each_other_with_and_without_a_tail(
    spec: StreamSpec, rows: list[Row], num_epochs: int
) -> None:
    rows = with_policy(rows, spec)
    planner = StreamingPlanner(spec)
    row_of = dict(enumerate(rows * num_epochs))
    steps = []
    for epoch in range(num_epochs):
        for number, row in enumerate(rows):
            push(planner, epoch * len(rows) + number, row)
            steps += steps_now(planner)
        if spec.tail != "wrap":
            # The window is emptied, so no row of this epoch is in a step of the next.
            planner.close()
            steps += steps_now(planner)
            assert planner.num_waiting == 0
            planner.reopen()
    for step in steps:
        check_step(spec, step, row_of)
        if spec.tail == "wrap":
            assert filled(step) == spec.num_bins
        else:
            assert len({row // len(rows) for row in step.rows}) == 1
    counts = planner.counts
    assert counts.num_pushed == len(row_of)
    assert counts.num_emitted == len(set(rows_of(steps))) == len(rows_of(steps))
    assert counts.num_emitted + counts.num_dropped + planner.num_waiting == counts.num_pushed


def test_an_oversize_row_is_an_error_that_names_the_limit() -> None:
    planner = StreamingPlanner(StreamSpec(plan=PlanSpec(max_tokens=8)))
    with pytest.raises(
        OversizeRowError, match=r"row 3 has 9 tokens.*max_tokens = 8.*train_mb_tokens"
    ):
        planner.push(3, 9)
    # The row is nowhere, so it does not count.
    assert planner.counts.num_pushed == 0
    planner = StreamingPlanner(StreamSpec(plan=PlanSpec(max_tokens=8), count_mode="effective"))
    with pytest.raises(OversizeRowError, match=r"13 tokens, above 12 \(max_tokens = 8.* x 1.5\)"):
        planner.push(3, 13)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0), "length of row 0 is 0"),
        ((1, 4, 5), "row 1 has 5 trained tokens"),
        ((1, 4, -1), "num_trained of row 1 is -1"),
        ((1, 4, 4, -2), "extra of row 1 is -2"),
    ],
)
def test_wrong_numbers_of_a_row_are_errors(arguments: tuple[Any, ...], message: str) -> None:
    planner = StreamingPlanner(StreamSpec(plan=PlanSpec(max_tokens=8)))
    with pytest.raises(ValueError, match=message):
        planner.push(*arguments)
    assert planner.counts.num_pushed == 0


def test_dropped_rows_are_counted_in_the_next_step() -> None:
    planner = StreamingPlanner(
        StreamSpec(plan=PlanSpec(max_tokens=8, oversize="drop"), window_rows=1)
    )
    found = []
    for row, length in enumerate((8, 9, 9, 8, 8)):
        planner.push(row, length)
        found += [step.metrics()["packing/num_dropped"] for step in steps_now(planner)]
    assert found == [0, 2, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": PlanSpec(layout="padded", max_rows=2)}, "set max_tokens of the plan"),
        ({"plan": PlanSpec(layout="padded", max_rows=2, max_tokens=9)}, "max_rows of the StreamS"),
        ({"plan": PlanSpec(max_tokens=9, global_batch_size=4)}, "must be None, got 4"),
        ({"plan": PlanSpec(max_tokens=9, microbatch_multiple=2)}, "multiple of 2"),
        ({"selection": "best"}, "selection is one of"),
        ({"tail": "keep"}, "tail is one of"),
        ({"count_mode": "all"}, "count_mode is one of"),
        ({"microbatches_per_step": 0}, "microbatches_per_step is 0"),
        ({"window_rows": 0}, "window_rows is 0"),
        ({"window_tokens": -1}, "window_tokens is -1"),
        ({"max_extra": 0}, "max_extra is 0"),
        ({"physical_overflow_ratio": 0.9}, "must be at least 1"),
    ],
)
def test_wrong_settings_are_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StreamSpec(**{"plan": PlanSpec(max_tokens=9), **change})


def test_no_row_follows_the_end() -> None:
    planner = StreamingPlanner(StreamSpec(plan=PlanSpec(max_tokens=8)))
    planner.close()
    with pytest.raises(ValueError, match="after the end of the stream"):
        planner.push(0, 1)
    planner.reopen()
    assert planner.push(0, 1)


def test_a_state_of_another_version_is_refused() -> None:
    planner = StreamingPlanner(StreamSpec(plan=PlanSpec(max_tokens=8)))
    with pytest.raises(ValueError, match="version 0"):
        planner.load_state_dict({**planner.state_dict(), "version": 0})


def test_a_complete_step_takes_no_further_microbatch() -> None:
    planner = StreamingPlanner(StreamSpec(plan=PlanSpec(max_tokens=8)))
    for row in range(3):
        planner.push(row, 8)
    planner.form_now()
    with pytest.raises(ValueError, match="has all its microbatches"):
        planner.form_now()
    step = planner.next_step()
    assert step is not None
    assert step.rows == (0,)


def state_of_five_rows() -> tuple[StreamSpec, list[Row], dict[str, Any]]:
    """A state with one microbatch of 16 tokens and the other rows in the window."""
    spec = StreamSpec(
        plan=PlanSpec(max_tokens=16), microbatches_per_step=2, window_rows=9, window_tokens=0
    )
    rows = [Row(length, length, 0) for length in (5, 4, 3, 4, 9)]
    planner = StreamingPlanner(spec)
    for number, row in enumerate(rows):
        push(planner, number, row)
    planner.form_now()
    state = planner.state_dict()
    assert len(state["bins"]) == 1
    return spec, rows, state


@pytest.mark.parametrize("oversize", ["drop", "truncate", "singleton"])
def test_a_lower_limit_applies_to_the_rows_of_a_state(oversize: Oversize) -> None:
    spec, rows, state = state_of_five_rows()
    lower = replace(spec, plan=replace(spec.plan, max_tokens=8, oversize=oversize))
    planner = StreamingPlanner(lower)
    planner.load_state_dict(state)
    planner.close()
    steps = steps_now(planner)
    for step in steps:
        check_step(lower, step, dict(enumerate(rows)))
    wanted = [0, 1, 2, 3] if oversize == "drop" else [0, 1, 2, 3, 4]
    assert sorted(rows_of(steps)) == wanted
    assert planner.counts.num_dropped == 5 - len(wanted)


def test_a_lower_limit_is_an_error_for_a_row_of_a_state_that_exceeds_it() -> None:
    spec, _, state = state_of_five_rows()
    planner = StreamingPlanner(replace(spec, plan=replace(spec.plan, max_tokens=8)))
    with pytest.raises(OversizeRowError, match="row 4 has 9 tokens"):
        planner.load_state_dict(state)


def test_other_multiples_apply_to_the_rows_of_a_state() -> None:
    spec, rows, state = state_of_five_rows()
    other = replace(spec, plan=replace(spec.plan, cp_size=2, sequence_length_round=3))
    planner = StreamingPlanner(other)
    planner.load_state_dict(state)
    planner.close()
    steps = steps_now(planner)
    for step in steps:
        check_step(other, step, dict(enumerate(rows)))
    assert sorted(rows_of(steps)) == [0, 1, 2, 3, 4]


def lognormal_lengths(num_rows: int) -> np.ndarray:
    """Lengths with mean 600 and a coefficient of variation of 1, int64 [num_rows]."""
    sigma = math.sqrt(math.log(2))
    lengths = np.random.default_rng(0).lognormal(math.log(600) - sigma**2 / 2, sigma, num_rows)
    return np.clip(lengths, 1, 4096).astype(np.int64)


def num_microbatches(lengths: np.ndarray, layout: str, rule: Selection, window_rows: int) -> int:
    """Microbatches that the rows of `lengths` int64 [n] need with a window of `window_rows`."""
    spec = StreamSpec(
        plan=PlanSpec(layout=layout, max_tokens=4096),  # type: ignore[arg-type]
        selection=rule,
        window_rows=window_rows,
        window_tokens=0,
    )
    _, steps = run(spec, [Row(length, length, 0) for length in lengths.tolist()])
    return len(steps)


def reference_groups(lengths: list[int], max_tokens: int) -> int:
    """Groups of one window by ODB's rule: each group is sized by the last row of the one before."""
    num_groups = 0
    size = 0
    max_size = 0
    for length in sorted(lengths, reverse=True):
        size += 1
        if size >= max_size:
            num_groups += 1
            size = 0
            max_size = max(max_tokens // length, 1)
    return num_groups + (size > 0)


def over_windows(lengths: np.ndarray, window_rows: int) -> list[list[int]]:
    values = lengths.tolist()
    return [values[start : start + window_rows] for start in range(0, len(values), window_rows)]


def optimal_groups(lengths: list[int]) -> int:
    """Minimum number of padded microbatches of one window."""
    ones = np.ones(len(lengths), dtype=np.int64)
    return form_padded(np.array(lengths), ones, None, 4096).num_bins


@pytest.mark.parametrize("window_rows", [64, 256])
def test_packed_microbatches_are_within_2_percent_of_the_minimum(window_rows: int) -> None:
    lengths = lognormal_lengths(4000)
    minimum = math.ceil(lengths.sum() / 4096)
    assert num_microbatches(lengths, "packed", "best_fit", window_rows) <= 1.02 * minimum


@pytest.mark.parametrize("window_rows", [16, 64, 256])
def test_padded_microbatches_are_at_most_those_of_separate_optimal_windows(
    window_rows: int,
) -> None:
    lengths = lognormal_lengths(4000)
    windows = over_windows(lengths, window_rows)
    separate = sum(map(optimal_groups, windows))
    number = num_microbatches(lengths, "padded", "best_fit", window_rows)
    assert number <= separate
    assert number < sum(reference_groups(window, 4096) for window in windows)


@pytest.mark.parametrize("rule", get_args(Selection))
def test_oversize_rows_of_every_rule_run_alone(rule: Selection) -> None:
    spec = StreamSpec(
        plan=PlanSpec(max_tokens=20, oversize="singleton"), selection=rule, window_rows=3
    )
    with warnings.catch_warnings(record=True):
        _, steps = run(spec, [Row(length, 0, 0) for length in (3, 25, 3)])
    assert [step.rows for step in steps if 1 in step.rows] == [(1,)]


@pytest.mark.parametrize("length", ["4", 1.5, None])
def test_a_length_that_is_no_integer_is_an_error(length: Any) -> None:
    planner = StreamingPlanner(StreamSpec(plan=PlanSpec(max_tokens=8)))
    with pytest.raises(ValueError, match=r"length of row 0 is .*; give an integer"):
        planner.push(0, length)


@pytest.mark.parametrize("change", [{"window_rows": 1.5}, {"window_tokens": "8"}, {"plan": None}])
def test_settings_of_another_type_are_errors(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(change))} is .*; give a"):
        StreamSpec(**{"plan": PlanSpec(max_tokens=8), **change})


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("kind", ["best_fit", "first_fit", "in_order"])
@pytest.mark.parametrize(
    ("mean_length", "max_tokens", "min_fill"), [(177, 32_768, 0.99), (20, 65_536, 0.97)]
)
def test_short_rows_fill_a_large_budget(
    kind: Selection, num_ranks: int, mean_length: int, max_tokens: int, min_fill: float
) -> None:
    """The window and the rule have enough rows for a microbatch of any budget."""
    num_rows = 12 * max_tokens // mean_length
    lengths = np.random.default_rng(0).exponential(mean_length, num_rows).astype(np.int64) + 1
    window_rows = 200 if kind == "first_fit" else 256
    spec = StreamSpec(
        plan=PlanSpec(max_tokens=max_tokens, num_ranks=num_ranks),
        selection=kind,
        window_rows=window_rows,
    )
    with warnings.catch_warnings(category=WindowWarning, action="error"):
        plan = plan_stream(lengths, spec)
    fills = [
        lengths[list(microbatch.rows)].sum() / max_tokens
        for microbatches in plan.ranks
        # The last step has what is left.
        for microbatch in microbatches[:-1]
    ]
    assert len(fills) >= 8
    assert np.mean(fills) >= min_fill


def test_a_window_of_rows_alone_that_limits_microbatches_gives_one_warning() -> None:
    spec = StreamSpec(plan=PlanSpec(max_tokens=100), window_rows=4, window_tokens=0)
    planner = StreamingPlanner(spec)
    with pytest.warns(WindowWarning, match="has all 4 rows of the window and uses 12 of 100"):
        assert _push_until_step(planner) == 1
    with warnings.catch_warnings(category=WindowWarning, action="error"):
        _push_until_step(planner)


def _push_until_step(planner: StreamingPlanner) -> int:
    for number in range(4):
        planner.push(number, 3)
    return len(steps_now(planner))


@pytest.mark.parametrize("oversize", ["drop", "truncate", "singleton"])
def test_oversize_rows_give_one_warning_and_are_counted(oversize: Oversize) -> None:
    planner = StreamingPlanner(StreamSpec(plan=PlanSpec(max_tokens=8, oversize=oversize)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number in range(5):
            planner.push(number, 9 + number)
    assert len(seen) == 1
    assert "row 0 has 9 tokens" in str(seen[0].message)
    assert planner.counts.num_oversize == 5
