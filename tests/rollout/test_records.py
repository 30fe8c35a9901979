"""Token files of rollouts: what is written is read again, and damage is one message."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.config.errors import ConfigError
from nemo_like.data.jagged import Jagged
from nemo_like.rollout.records import (
    Column,
    RolloutRecord,
    recorded_steps,
    remove_old_tokens,
    row_values,
)


def columns_of(lengths: list[int], seed: int = 0) -> dict[str, Column]:
    """Rows of several spans of trained tokens, as a conversation has them."""
    generator = np.random.default_rng(seed)
    size = sum(lengths)

    def jagged(values: np.ndarray) -> Jagged:
        return Jagged.from_lengths(values, np.asarray(lengths))

    return {
        "input_ids": jagged(generator.integers(0, 99, size).astype(np.int32)),
        "token_mask": jagged((generator.random(size) < 0.5).astype(np.uint8)),
        "generation_logprobs": jagged(generator.normal(size=size).astype(np.float32)),
        "prev_logprobs": jagged(generator.normal(size=size).astype(np.float32)),
        "row_mask": np.arange(len(lengths)) != 1,
        "advantages": generator.normal(size=len(lengths)).astype(np.float32),
        "length": np.asarray(lengths, dtype=np.int64),
    }


def record_of(columns: dict[str, Column]) -> RolloutRecord:
    return RolloutRecord(
        step=3,
        weights_version=2,
        config={"seed": 42, "loss_fn": {"ratio_clip_c": None}},
        optimizer_steps=[{"policy/loss": 0.5, "policy/grad_norm": None}],
        columns=columns,
    )


@given(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6))
def test_a_record_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int]
) -> None:
    path = tmp_path_factory.mktemp("records") / "step_3.safetensors"
    written = record_of(columns_of(lengths))
    written.save(path)
    read = RolloutRecord.load(path)
    assert (read.step, read.weights_version) == (3, 2)
    assert read.config == written.config and read.optimizer_steps == written.optimizer_steps
    assert read.columns.keys() == written.columns.keys()
    for name, column in written.columns.items():
        found = read.columns[name]
        assert found.dtype == column.dtype
        if isinstance(column, Jagged):
            assert isinstance(found, Jagged)
            assert np.array_equal(found.offsets, column.offsets)
            assert np.array_equal(found.values, column.values)
        else:
            assert np.array_equal(np.asarray(found), column)


def test_a_damaged_record_is_one_message(tmp_path: Path) -> None:
    path = tmp_path / "step_3.safetensors"
    record_of(columns_of([4, 2])).save(path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ConfigError, match="is not the record of a rollout, or is damaged"):
        RolloutRecord.load(path)


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_differences_are_those_of_trained_tokens(lengths: list[int], seed: int) -> None:
    columns = columns_of(lengths, seed)
    locations = [f"data.jsonl:{row}" for row in range(len(lengths))]
    rows = row_values(columns, locations)
    for row, values in enumerate(rows):
        differences = []
        for position in range(1, lengths[row]):
            if row != 1 and columns["token_mask"][row][position]:
                engine = columns["prev_logprobs"][row][position]
                generation = columns["generation_logprobs"][row][position]
                differences.append(abs(float(engine) - float(generation)))
        assert values["source"] == locations[row]
        assert (values["num_tokens"], values["num_trained_tokens"]) == (
            lengths[row],
            len(differences),
        )
        if differences:
            mean = sum(differences) / len(differences)
            assert values["logprob_difference_mean"] == pytest.approx(mean, rel=1e-5)
            assert values["logprob_difference_max"] == pytest.approx(max(differences), rel=1e-5)
        else:
            assert values["logprob_difference_mean"] is None
            assert values["logprob_difference_max"] is None


def test_the_newest_files_and_those_with_weights_are_kept(tmp_path: Path) -> None:
    for step in range(1, 10):
        (tmp_path / f"step_{step}.safetensors").touch()
        (tmp_path / f"step_{step}.jsonl").touch()
    remove_old_tokens(tmp_path, 2, [4, 6])
    assert recorded_steps(tmp_path, ".safetensors") == [1, 5, 7, 8, 9]
    assert recorded_steps(tmp_path, ".jsonl") == list(range(1, 10))
