"""Selecting rows of rollouts, and concatenating rollouts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.grpo.config import GrpoConfig
from nemo_like.algorithms.grpo.loop import dropped_records
from nemo_like.algorithms.grpo.rollouts import KeptGroups
from nemo_like.demo.task import build_tokenizer
from nemo_like.generation.requests import Completions
from nemo_like.rollout.conversations import ConversationRow, Prompt
from nemo_like.rollout.rows import Rollout, build_rollout, concat_rollouts, select_rows


def rollout_of(first: int, lengths: list[int]) -> Rollout:
    """Groups of two completions; row i has prompt, tokens and reward of its number from `first`."""
    numbers = [first + index for index in range(len(lengths))]
    rows = []
    for number, length in zip(numbers, lengths, strict=True):
        tokens = np.full(length, number, dtype=np.int32)
        prompt = Prompt(token_ids=tokens[:1], text=str(number), answer=None)
        row = ConversationRow.start(prompt, 0)
        row.segments.append(tokens)
        row.logprobs.append(np.full(length, -1.0, dtype=np.float32))
        row.weight_versions.append(np.zeros(length, dtype=np.int32))
        rows.append(row)
    rewards = np.array(numbers, dtype=np.float32)
    rollout = build_rollout(rows, 2, rewards, {"value": rewards * 2})
    rollout.batch["group"] += first // 2
    return rollout


def check_rows(rollout: Rollout, numbers: list[int]) -> None:
    """Every column of each row belongs to its number."""
    assert rollout.batch.size == len(numbers)
    assert rollout.batch["reward"].tolist() == numbers
    assert rollout.components["value"].tolist() == [2 * number for number in numbers]
    assert [record["prompt"] for record in rollout.records()] == list(map(str, numbers))
    for row, number in enumerate(numbers):
        assert set(rollout.batch["input_ids"][row].tolist()) == {number}
        assert set(rollout.conversations[row].model_token_ids.tolist()) <= {number}


SIZES = st.lists(st.integers(1, 3), min_size=2, max_size=6).map(
    lambda sizes: sizes[: len(sizes) // 2 * 2]
)


@given(st.lists(SIZES, min_size=1, max_size=3), st.data())
def test_rows_keep_their_columns_and_groups_stay_apart(parts, data) -> None:
    rollouts = []
    numbers = []
    for lengths in parts:
        rollouts.append(rollout_of(len(numbers), lengths))
        numbers += range(len(numbers), len(numbers) + len(lengths))
    joined = concat_rollouts(rollouts)
    check_rows(joined, numbers)
    assert joined.batch["group"].tolist() == [number // 2 for number in numbers]
    rows = data.draw(st.lists(st.sampled_from(numbers), unique=True))
    selected = select_rows(joined, np.array(rows, dtype=np.int64))
    check_rows(selected, rows)
    assert selected.batch["group"].tolist() == [row // 2 for row in rows]


def test_no_rollouts_are_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        concat_rollouts([])


@given(num_groups=st.integers(1, 12), max_rows=st.one_of(st.none(), st.integers(1, 30)))
def test_a_record_has_complete_groups_spread_over_the_rollout(
    num_groups: int, max_rows: int | None
) -> None:
    num_rows = 2 * num_groups
    rows = rollout_of(0, [1] * num_rows).recorded_rows(max_rows).tolist()
    if max_rows is None or max_rows >= num_rows:
        assert rows == list(range(num_rows))
        return
    assert rows == sorted(set(rows)) and len(rows) == max(max_rows - max_rows % 2, 2)
    firsts = rows[::2]
    assert [row + 1 for row in firsts] == rows[1::2]
    assert all(row % 2 == 0 for row in firsts)
    if max_rows >= 4:
        assert rows[0] == 0 and rows[-1] == num_rows - 1


def test_only_the_text_of_selected_rows_is_decoded() -> None:
    tokenizer = build_tokenizer()
    token_ids = np.array(tokenizer("12+7", add_special_tokens=False)["input_ids"], np.int32)
    ended = np.append(token_ids, np.array([tokenizer.eos_token_id], np.int32))
    prompt = Prompt(token_ids=token_ids[:1], text="1", answer=None)
    rows = []
    for row_tokenizer in (None, tokenizer):
        row = ConversationRow.start(prompt, 0, tokenizer=row_tokenizer)
        size = len(ended)
        row.add_turn(Completions.from_rows([ended], [[-1.0] * size], [[3] * size], ["stop"]), 0)
        rows.append(row)
    rollout = build_rollout(rows, 1, np.zeros(2, np.float32), {})
    (record,) = rollout.records(rows=[1])
    assert record["completion"] == "12+7"
    assert (record["completion_tokens"], record["weight_versions"]) == (size, [3])
    # The tokens of a row are not stored beside the columns.
    for row in rollout.conversations:
        assert np.shares_memory(row.last_turn, rollout.batch["input_ids"].values)
        assert np.shares_memory(row.logprobs[0], rollout.batch["generation_logprobs"].values)


def test_dropped_groups_are_recorded_with_their_number_in_the_step() -> None:
    """Prompts 1 and 2 of four have unequal rewards, prompt 3 is of a refill."""
    first, refill = rollout_of(0, [1] * 6), rollout_of(0, [1] * 2)
    first.batch["reward"] = np.array([5.0, 5.0, 0.0, 1.0, 1.0, 0.0])
    refill.batch["reward"] = np.array([2.0, 2.0])
    kept = KeptGroups(SimpleNamespace(grpo=GrpoConfig()))  # type: ignore[arg-type]
    kept.add(first, ["a:1", "a:2", "a:3"])
    kept.add(refill, ["a:4"])
    taken = kept.result()
    assert taken.rollout.batch["group"].tolist() == [1, 1, 2, 2]
    assert taken.locations == ["a:2", "a:3"]
    for max_rows, groups in ((None, [0, 0, 3, 3]), (6, [0, 0]), (5, []), (4, [])):
        records = dropped_records(taken, max_rows, 4)
        assert [record["group"] for record in records] == groups
        assert [record["source"] for record in records] == [f"a:{group + 1}" for group in groups]
        assert not any(record["kept"] for record in records)
    assert [record["group"] for record in dropped_records(taken, 1, 0)] == [0, 0]
