"""Rows by increasing difficulty: lengths, a column, a function; resume; errors of a row."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.sft.data import open_loader, open_source
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.config.errors import ConfigError
from nemo_like.data.row_order import Curriculum, RowOrder
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.recipe import Recipe

floats = st.floats(-(2.0**100), 2.0**100, width=32)


def question_length(row: dict[str, Any]) -> float:
    return -float(len(json.dumps(row)))


@given(
    difficulty=st.lists(floats, min_size=1, max_size=40),
    shuffle=st.booleans(),
    epoch=st.integers(0, 2),
)
def test_every_epoch_is_sorted_by_difficulty(
    difficulty: list[float], shuffle: bool, epoch: int
) -> None:
    values = np.array(difficulty)
    num_rows = len(values)
    order = RowOrder(num_rows, shuffle=shuffle, curriculum=Curriculum("length", values))
    for _ in range(epoch):
        order.start_epoch()
    rows = order.take(len(values))
    assert sorted(rows.tolist()) == list(range(len(values)))
    assert (np.diff(values[rows]) >= 0).all()
    if not shuffle:
        assert rows.tolist() == np.argsort(values, kind="stable").tolist()


def test_rows_of_equal_difficulty_are_shuffled_in_every_epoch() -> None:
    num_rows = 64
    curriculum = Curriculum("column:level", np.repeat([2.0, 1.0], 32))
    order = RowOrder(num_rows, curriculum=curriculum)
    first = order.take(64).tolist()
    order.start_epoch()
    second = order.take(64).tolist()
    assert set(first[:32]) == set(second[:32]) == set(range(32, 64))
    assert first != second


def test_another_difficulty_cannot_resume() -> None:
    num_rows = 8
    order = RowOrder(num_rows, curriculum=Curriculum("length", np.arange(8.0)))
    order.take(3)
    state = json.loads(json.dumps(order.state_dict()))
    for other in (None, Curriculum("column:level", np.arange(8.0))):
        with pytest.raises(ConfigError, match=r"data\.curriculum=length"):
            RowOrder(num_rows, curriculum=other).load_state_dict(state)
    resumed = RowOrder(num_rows, curriculum=Curriculum("length", np.arange(8.0)))
    resumed.load_state_dict(state)
    assert resumed.take(9).tolist() == order.take(9).tolist()


def lengths_of_steps(path: Path) -> list[list[int]]:
    return [json.loads(line)["lengths"] for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("kind", ["fixed", "token_budget"])
def test_a_run_by_length_resumes_exactly(recipe: Recipe, kind: str) -> None:
    changes = (
        "data.curriculum=length",
        "data.max_train_rows=120",
        f"data.batching.kind={kind}",
        "sft.val_at_start=false",
        "checkpointing.export_hf=false",
        "checkpointing.keep_latest=9",
    )
    run = run_sft(recipe.sft(*changes)).directory
    steps = lengths_of_steps(run.lengths)
    # Bins are ordered by rank and work, so rows are sorted between steps, not within one.
    for before, after in pairwise(steps):
        assert max(before) <= min(after)
    expected = read_metrics(run.path)
    interrupt_at(run.path, 2)
    assert read_metrics(run_sft(recipe.sft(*changes, "resume=true")).directory.path) == expected


def test_the_order_does_not_depend_on_the_number_of_workers(recipe: Recipe) -> None:
    taken = []
    for workers in (1, 4):
        config = recipe.sft(
            "data.curriculum=tests.training.test_curriculum.question_length",
            "data.max_train_rows=64",
            "data.batching.kind=token_budget",
            "cluster.backend=ray",
            f"cluster.workers_per_node={workers}",
            "sft.max_num_epochs=1",
        )
        loader = open_loader(config, open_source(config), None)
        rows: list[str] = []
        for _ in range(4 // workers):
            next(loader)
            rows += loader.batch_locations()
        taken.append(sorted(rows))
    assert taken[0] == taken[1]


def test_bad_difficulties_name_the_row_and_the_key(recipe: Recipe) -> None:
    for curriculum, message in (
        ("column:level", r"sft_train\.jsonl:1: data\.curriculum column:level is None"),
        ("json.dumps", r"sft_train\.jsonl:1: data\.curriculum json\.dumps is '"),
        ("math.sqrt", r"sft_train\.jsonl:1: data\.curriculum math\.sqrt failed with TypeError"),
        ("no_such_module.f", r"importing 'no_such_module' failed"),
    ):
        config = recipe.sft(f"data.curriculum={curriculum}", "data.max_train_rows=8")
        with pytest.raises(ConfigError, match=message):
            open_loader(config, open_source(config), None)
    with pytest.raises(ConfigError, match=r"write length, column:NAME"):
        recipe.sft("data.curriculum=hard")


@given(
    levels=st.lists(st.integers(0, 3), min_size=2, max_size=40),
    taken=st.integers(1, 40),
    epoch=st.integers(0, 2),
    shuffle=st.booleans(),
)
def test_a_resumed_epoch_visits_the_remaining_rows_in_order(
    levels: list[int], taken: int, epoch: int, shuffle: bool
) -> None:
    """In later epochs too, where every row was visited before."""
    num_rows = len(levels)
    # Levels that float32 cannot tell apart.
    curriculum = Curriculum("column:level", 2.0**30 + np.array(levels, dtype=np.float64))
    order = RowOrder(num_rows, shuffle=shuffle, curriculum=curriculum)
    for _ in range(epoch):
        order.take(len(levels))
        order.start_epoch()
    order.take(taken)
    resumed = RowOrder(num_rows, shuffle=shuffle, curriculum=curriculum)
    resumed.load_state_dict(json.loads(json.dumps(order.state_dict())))
    assert resumed.left.tolist() == order.left.tolist()
