"""Bad rows are listed or skipped, and columns of other names are answered with their mapping."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.config.batching import StreamableDataConfig as DataConfig
from nemo_like.config.errors import ConfigError
from nemo_like.data.encoded_rows import EncodedRows, OversizeError
from nemo_like.data.formats import PROMPT_ROWS, SFT_ROWS, RowSchema
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.preferences import PREFERENCE_ROWS
from nemo_like.data.row_files import Row
from nemo_like.data.rows import load_rows

GOOD = {"prompt": "1+1", "completion": "2"}
CHAT = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
PAIR = {"question": "1+1", "better": "2", "worse": "3"}
SHAREGPT = [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}]


def write(path: Path, rows: list[Any]) -> Path:
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text(text + "\n")
    return path


def test_bad_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    # The first row decides nothing, because it cannot be used.
    rows = [{"prompt": "a"}, GOOD, "{", GOOD, {"text": "a"}, {**GOOD, "completion": 3}]
    path = write(tmp_path / "train.jsonl", rows)
    loaded = load_rows(path, SFT_ROWS, skips_bad=True)
    assert list(loaded) == [GOOD, GOOD]
    assert loaded.bad.num_rows == 4
    shown = "\n".join(loaded.bad.lines())
    for line in (1, 3, 5, 6):
        assert f"train.jsonl:{line}" in shown
    with pytest.raises(ConfigError, match=r"4 bad rows .*data.on_bad_row=skip") as error:
        load_rows(path, SFT_ROWS)
    # The cause comes before the places.
    _, cause, places, *_ = str(error.value).splitlines()
    assert "no assistant turn to learn from" in cause and "train.jsonl:1" in places


def test_a_file_of_bad_rows_is_an_error_although_they_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", ["{", "["])
    with pytest.raises(ConfigError, match="2 bad rows") as error:
        load_rows(path, SFT_ROWS, skips_bad=True)
    # Nothing would be left.
    assert "on_bad_row" not in str(error.value)


def encode(row: Row) -> EncodedRow:
    if row["prompt"] == "refused":
        raise ConfigError("the template refuses it")
    if row["prompt"] == "long":
        raise OversizeError("the row has 9 tokens")
    return EncodedRow(np.arange(3, dtype=np.int32), np.ones(3, dtype=np.uint8))


@pytest.mark.parametrize("num_processes", [0, 1])
def test_rows_that_cannot_be_encoded_are_skipped_but_not_those_too_long(
    tmp_path: Path, num_processes: int
) -> None:
    path = write(tmp_path / "a.jsonl", ["{", GOOD, {**GOOD, "prompt": "refused"}, GOOD])
    encoded = EncodedRows(
        load_rows(path, SFT_ROWS, skips_bad=True), encode, num_processes=num_processes
    )
    encoded.encode_ahead(np.arange(3))
    assert encoded.is_kept.tolist() == [True, False, True]
    assert encoded.num_skipped == 2 and len(encoded.dropped) == 0
    assert encoded.fetch([1]) == [None]
    (line,) = encoded.skipped.lines()
    assert re.search(r"the template refuses it:\n +\S*a.jsonl:3$", line)
    path = write(tmp_path / "b.jsonl", [GOOD, {**GOOD, "prompt": "long"}])
    encoded = EncodedRows(load_rows(path, SFT_ROWS, skips_bad=True), encode)
    with pytest.raises(ConfigError, match=r"b.jsonl:2: the row has 9 tokens"):
        encoded.fetch([0, 1])


@pytest.mark.parametrize(
    ("schema", "row", "columns"),
    [
        (SFT_ROWS, {"Question": "1+1", "Reply": "2"}, "prompt: Question, completion: Reply"),
        (SFT_ROWS, {"query": "1+1", "response": "2"}, "prompt: query, completion: response"),
        (SFT_ROWS, {"Prompt": "1+1", "Output": "2"}, "prompt: Prompt, completion: Output"),
        (SFT_ROWS, {"user_in": 1, "body text": "2"}, "text: body text"),
        (SFT_ROWS, {"id": 1, "dialog": CHAT}, "messages: dialog"),
        (SFT_ROWS, {"dialog": SHAREGPT}, "conversations: dialog"),
        (SFT_ROWS, {"prompt": "1+1", "model_reply": "2"}, "completion: model_reply"),
        (PROMPT_ROWS, {"problem": "1+1", "solution": "2"}, "prompt: problem, answer: solution"),
        (
            SFT_ROWS,
            {"id": 1, "system_prompt": "s", "question": "1+1", "response": "2"},
            "prompt: question, completion: response, system: system_prompt",
        ),
        (
            SFT_ROWS,
            {"query": "1+1", "response": "2", "type": "a", "original_question": "0+1"},
            "prompt: query, completion: response",
        ),
        (
            SFT_ROWS,
            {"instruction": "1+1", "context": "sums", "response": "2", "category": "qa"},
            "completion: response, input: context",
        ),
        (PREFERENCE_ROWS, PAIR, "prompt: question, chosen: better, rejected: worse"),
    ],
)
def test_columns_of_other_names_are_answered_with_their_mapping(
    tmp_path: Path, schema: RowSchema, row: Row, columns: str
) -> None:
    path = write(tmp_path / "train.jsonl", [row])
    with pytest.raises(ConfigError) as caught:
        load_rows(path, schema)
    assert f"data.columns={{{columns}}}" in str(caught.value)
    mapping = dict(pair.split(": ") for pair in columns.split(", "))
    loaded = load_rows(path, schema, columns=mapping)
    assert loaded.format


def test_columns_that_mean_nothing_known_have_no_mapping(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_rows(write(tmp_path / "train.jsonl", [{"x": 1, "y": "2"}]), SFT_ROWS)
    assert "['x', 'y'] match no known format" in str(caught.value)
    assert "Set data.columns" not in str(caught.value)


def test_a_set_has_columns_of_its_own(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [{"q": "1+1", "a": "2"}])
    other = write(tmp_path / "other.jsonl", [GOOD])
    columns = {"prompt": "q", "completion": "a"}
    mixed = DataConfig(train_path="", columns=columns, set_columns={"validation": {}})
    assert load_rows(train, SFT_ROWS, columns=mixed.columns_of("train"))[0] == GOOD
    assert load_rows(other, SFT_ROWS, columns=mixed.columns_of(""))[0] == GOOD
    for name, key in (("code", "code"), ("", "validation")):
        with pytest.raises(ConfigError, match=rf"data.set_columns.{key}=\{{\}}"):
            load_rows(other, SFT_ROWS, columns=mixed.columns_of("code"), set_name=name)


def test_roles_of_sharegpt_in_messages_can_be_mapped(tmp_path: Path) -> None:
    turns = [{"role": "human", "content": "1+1"}, {"role": "gpt", "content": "2"}]
    path = write(tmp_path / "train.jsonl", [{"messages": turns}])
    with pytest.raises(ConfigError, match=r"data.columns=\{conversations: messages\}"):
        load_rows(path, SFT_ROWS)
    loaded = load_rows(path, SFT_ROWS, columns={"conversations": "messages"})
    assert loaded[0]["messages"] == CHAT
    tool = [*CHAT[:1], {"role": "tool", "content": "3"}, *CHAT[1:]]
    path = write(tmp_path / "tools.jsonl", [{"messages": tool}])
    assert load_rows(path, SFT_ROWS)[0]["messages"] == tool
