"""Curriculum: rows by difficulty, each once per epoch, independent of ranks and interruptions."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.torch_data.curriculum import (
    CurriculumSampler,
    DifficultySchedule,
    curriculum_order,
    rank_rows,
)

DIFFICULTIES = st.lists(st.integers(0, 8).map(float), min_size=1, max_size=40).map(np.array)

SCHEDULES = st.one_of(
    st.builds(DifficultySchedule, st.just("constant"), end=st.floats(-1, 9)),
    st.builds(
        DifficultySchedule,
        st.sampled_from(["linear", "root"]),
        start=st.floats(-1, 9),
        end=st.floats(-1, 9),
        num_steps=st.integers(1, 10),
        degree=st.floats(0.5, 4),
    ),
    st.lists(st.floats(0, 9), min_size=3, max_size=3).map(
        lambda levels: DifficultySchedule(
            "discrete", levels=(levels[0], levels[1], levels[2]), boundaries=(2, 4)
        )
    ),
)


@settings(max_examples=100, deadline=None)
@given(DIFFICULTIES, st.integers(0, 6), st.integers(0, 3), st.integers(1, 6))
def test_order_is_by_difficulty_and_balanced(
    difficulty: np.ndarray, seed: int, epoch: int, num_ranks: int
) -> None:
    order = curriculum_order(difficulty, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(len(difficulty)))
    assert (np.diff(difficulty[order]) >= 0).all()
    ranks = [rank_rows(order, rank, num_ranks) for rank in range(num_ranks)]
    counts = [len(rows) for rows in ranks]
    assert max(counts) - min(counts) <= 1
    for position in range(min(counts)):
        together = {int(rows[position]) for rows in ranks}
        assert together == set(order[position * num_ranks : (position + 1) * num_ranks].tolist())


def test_ties_change_with_seed_and_epoch_only() -> None:
    difficulty = np.zeros(100)
    first = curriculum_order(difficulty, seed=1, epoch=0).tolist()
    assert curriculum_order(difficulty, seed=1, epoch=0).tolist() == first
    assert curriculum_order(difficulty, seed=2, epoch=0).tolist() != first
    assert curriculum_order(difficulty, seed=1, epoch=1).tolist() != first
    assert first != sorted(first)


def test_a_difficulty_is_finite() -> None:
    with pytest.raises(ValueError, match="row 1 has difficulty inf"):
        curriculum_order(np.array([1, np.inf]), seed=0, epoch=0)


def test_schedules() -> None:
    def values(schedule: DifficultySchedule) -> list[float]:
        return [schedule.at(step) for step in (0, 1, 4, 9, 10, 1000)]

    linear = DifficultySchedule("linear", start=10, end=20, num_steps=10)
    assert values(linear) == pytest.approx([10, 11, 14, 19, 20, 20])
    square_root = DifficultySchedule("root", start=0, end=6, num_steps=9)
    assert values(square_root) == pytest.approx([0, 2, 4, 6, 6, 6])
    assert values(DifficultySchedule("constant", end=7)) == [7] * 6
    discrete = DifficultySchedule("discrete", levels=(1, 5, 9), boundaries=(4, 10))
    assert values(discrete) == [1, 1, 5, 5, 9, 9]


def test_schedules_of_deepspeed() -> None:
    # It counts steps from 1, and gives the last step of each level.
    discrete = DifficultySchedule("discrete", levels=(1, 2, 3, 4, 5), boundaries=(3, 5, 7, 9))
    assert [discrete.at(step) for step in range(1, 11)] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    for kind in ("linear", "root"):
        schedule = DifficultySchedule(
            kind, start=2, end=10, num_steps=8, degree=1, difficulty_step=2
        )
        assert [schedule.at(step) for step in range(1, 11)] == [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]


@pytest.mark.parametrize(
    ("settings_of_schedule", "message"),
    [
        ({"kind": "cubic"}, "kind is 'cubic': give constant, linear, root or discrete"),
        ({"kind": "linear", "num_steps": 0}, "num_steps is 0"),
        ({"kind": "root", "degree": 0}, "degree is 0"),
        ({"kind": "discrete", "levels": (1, 2)}, "2 levels have 0 boundaries"),
        ({"kind": "discrete", "levels": (1, 2, 3), "boundaries": (4, 4)}, "boundaries are"),
    ],
)
def test_invalid_schedules(settings_of_schedule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DifficultySchedule(**settings_of_schedule)


def test_example_of_the_sampler() -> None:
    schedule = DifficultySchedule("discrete", levels=(2, 4, 8), boundaries=(1, 2))
    sampler = CurriculumSampler(np.arange(1, 9), schedule)
    steps = [sorted(sampler.take(2).tolist()) for _ in range(4)]
    assert steps[:2] == [[0, 1], [2, 3]]
    assert sorted(steps[2] + steps[3]) == [4, 5, 6, 7]
    assert sampler.num_early_raises == 0


def test_the_difficulty_is_raised_early_if_rows_run_out(caplog: pytest.LogCaptureFixture) -> None:
    sampler = CurriculumSampler(np.array([1, 1, 2, 2, 2, 3]), DifficultySchedule("constant", end=1))
    with caplog.at_level(logging.WARNING):
        first = sampler.take(3).tolist()
    assert len(set(first)) == 3
    assert set(first) <= {0, 1, 2, 3, 4}
    assert "step 0 raised the difficulty from 1 to 2" in caplog.text
    assert sampler.num_early_raises == 1
    assert sorted(first + sampler.take(2).tolist()) == [0, 1, 2, 3, 4]
    assert sampler.num_early_raises == 1
    assert sampler.take(9).tolist() == [5]
    assert sampler.num_early_raises == 2
    with pytest.raises(ValueError, match="epoch 0 has no more rows: call start_epoch first"):
        sampler.take(1)


@settings(max_examples=150, deadline=None)
@given(
    DIFFICULTIES, SCHEDULES, st.integers(0, 5), st.lists(st.integers(1, 9), min_size=1, max_size=9)
)
def test_each_row_once_per_epoch_and_within_the_difficulty(
    difficulty: np.ndarray, schedule: DifficultySchedule, seed: int, sizes: list[int]
) -> None:
    sampler = CurriculumSampler(difficulty, schedule, seed=seed)
    for epoch in range(2):
        left = set(range(len(difficulty)))
        reached = -math.inf
        while sampler.num_left:
            num_rows = sizes[sampler.step % len(sizes)]
            raises_before = sampler.num_early_raises
            reached = max(reached, schedule.at(sampler.step))
            rows = sampler.take(num_rows).tolist()
            assert set(rows) <= left
            assert len(rows) == min(num_rows, len(left)) == len(set(rows))
            num_eligible = sum(difficulty[row] <= reached for row in left)
            is_raised = num_eligible < min(num_rows, len(left))
            assert sampler.num_early_raises - raises_before == is_raised
            if is_raised:
                needed = sorted(difficulty[row] for row in left)[len(rows) - 1]
                reached = max(reached, needed)
            assert max(difficulty[rows]) <= reached
            left -= set(rows)
        assert left == set()
        assert sampler.epoch == epoch
        sampler.start_epoch()


@settings(max_examples=100, deadline=None)
@given(DIFFICULTIES, SCHEDULES, st.integers(1, 7), st.integers(0, 12))
def test_a_state_restores_it_exactly(
    difficulty: np.ndarray, schedule: DifficultySchedule, num_rows: int, stopped: int
) -> None:
    def advance(sampler: CurriculumSampler) -> list[int]:
        if sampler.num_left == 0:
            sampler.start_epoch()
        return sampler.take(num_rows).tolist()

    first = CurriculumSampler(difficulty, schedule, seed=3)
    for _ in range(stopped):
        advance(first)
    state = json.loads(json.dumps(first.state_dict()))
    second = CurriculumSampler(difficulty, schedule, seed=3)
    advance(second)
    second.load_state_dict(state)
    assert second.state_dict() == state
    for _ in range(20):
        assert advance(first) == advance(second)
    assert first.state_dict() == second.state_dict()


def test_errors() -> None:
    sampler = CurriculumSampler(np.arange(4), DifficultySchedule("constant", end=9))
    state = sampler.state_dict()
    with pytest.raises(ValueError, match="num_rows is 0"):
        sampler.take(0)
    with pytest.raises(ValueError, match="epoch 0 has 4 rows left: draw them first"):
        sampler.start_epoch()
    with pytest.raises(ValueError, match="the state has num_rows=5, this sampler 4"):
        sampler.load_state_dict({**state, "num_rows": 5})
    with pytest.raises(ValueError, match="the state has seed=5, this sampler 0"):
        sampler.load_state_dict({**state, "seed": 5})
    with pytest.raises(ValueError, match="rank 2 of 2"):
        rank_rows(np.arange(4), 2, 2)
    with pytest.raises(ValueError, match=r"difficulty has shape \(2, 2\)"):
        CurriculumSampler(np.zeros((2, 2)), DifficultySchedule("constant"))


def test_a_schedule_without_finite_difficulties_is_an_error() -> None:
    with pytest.raises(ValueError, match="end is nan: give finite numbers"):
        DifficultySchedule("linear", end=math.nan)


def test_a_difficulty_step_rounds_down_and_reaches_the_end() -> None:
    """DeepSpeed's fixed_linear from 8 to 100 in 10 steps, in multiples of 8, but with the end."""
    schedule = DifficultySchedule("linear", start=8, end=100, num_steps=10, difficulty_step=8)
    values = [schedule.at(step) for step in range(12)]
    exact = [8 + 92 * step / 10 for step in range(10)]
    assert values == [8 * math.floor(value / 8) for value in exact] + [100, 100]
    # Another example: 2 + step, rounded down to even numbers.
    schedule = DifficultySchedule("linear", start=2, end=10, num_steps=8, difficulty_step=2)
    assert [schedule.at(step) for step in range(1, 10)] == [2, 4, 4, 6, 6, 8, 8, 10, 10]
    # Not below the start.
    schedule = DifficultySchedule("root", start=5, end=30, num_steps=4, difficulty_step=8)
    assert [schedule.at(step) for step in range(5)] == [5, 16, 16, 24, 30]
    with pytest.raises(ValueError, match="difficulty_step is 0: give a number above 0"):
        DifficultySchedule("linear", end=1, difficulty_step=0)
