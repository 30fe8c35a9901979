"""Formats of other tools: columns of ShareGPT and Alpaca, renamed columns, CSV, compressed files,
raw text and rows of token ids.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.config.errors import ConfigError
from nemo_like.data.column_names import KNOWN_COLUMNS, check_columns
from nemo_like.data.formats import PROMPT_ROWS, SFT_ROWS, RowSchema, conversation, question
from nemo_like.data.known_rows import known_row
from nemo_like.data.messages import row_tools
from nemo_like.data.preferences import PREFERENCE_ROWS, preference
from nemo_like.data.rows import load_rows

USER = {"role": "user", "content": "2+2=?"}
ASSISTANT = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
GOOD = {"prompt": "a", "answer": "1"}


def load_one(
    tmp_path: Path,
    row: Mapping[str, Any],
    schema: RowSchema = SFT_ROWS,
    columns: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return load_rows(path, schema, columns=columns)[0]


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        (
            {
                "conversations": [
                    {"from": "human", "value": "2+2=?"},
                    {"from": "gpt", "value": "4"},
                ],
                "system": "Be brief.",
            },
            [SYSTEM, USER, ASSISTANT],
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "user", "value": "2+2=?"},
                    {"from": "assistant", "value": "4"},
                ]
            },
            [SYSTEM, USER, ASSISTANT],
        ),
        ({"conversations": [USER, ASSISTANT]}, [USER, ASSISTANT]),
        ({"instruction": "2+2=?", "input": "", "output": "4"}, [USER, ASSISTANT]),
        (
            {"instruction": "Add.", "input": "2+2", "output": "4", "text": "All in one."},
            [{"role": "user", "content": "Add.\n2+2"}, ASSISTANT],
        ),
        (
            {
                "instruction": "2+2=?",
                "output": "4",
                "system": "Be brief.",
                "history": [["1+1=?", "2"]],
            },
            [
                SYSTEM,
                {"role": "user", "content": "1+1=?"},
                {"role": "assistant", "content": "2"},
                USER,
                ASSISTANT,
            ],
        ),
        # The columns of this project come first.
        ({"messages": [USER, ASSISTANT], "conversations": "a title"}, [USER, ASSISTANT]),
        ({"prompt": "2+2=?", "completion": "4", "instruction": "x"}, [USER, ASSISTANT]),
    ],
)
def test_columns_of_other_tools(tmp_path: Path, row: dict, turns: list[dict]) -> None:
    assert conversation(load_one(tmp_path, row)) == turns


def test_a_function_call_of_sharegpt_is_a_tool_call(tmp_path: Path) -> None:
    call = {"name": "add", "arguments": {"a": 2, "b": 2}}
    row = {
        "conversations": [
            {"from": "human", "value": "2+2=?"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "4"},
        ]
    }
    messages = conversation(load_one(tmp_path, row))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"] == [{"type": "function", "function": call}]


def test_prompts_of_other_tools(tmp_path: Path) -> None:
    row = {"instruction": "2+2=?", "answer": "4"}
    prompt = question(load_one(tmp_path, row, PROMPT_ROWS))
    assert (prompt.messages, prompt.answer) == ([USER], "4")
    row = {"conversations": [{"from": "human", "value": "2+2=?"}], "answer": 4}
    prompt = question(load_one(tmp_path, row, PROMPT_ROWS))
    assert (prompt.messages, prompt.answer) == ([USER], "4")


def test_preferences_of_other_tools(tmp_path: Path) -> None:
    other = {"role": "assistant", "content": "5"}
    rows = [
        {
            "conversations": [{"from": "human", "value": "2+2=?"}],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": {"from": "gpt", "value": "5"},
        },
        {"instruction": "2+2=?", "input": "", "chosen": "4", "rejected": "5"},
    ]
    for row in rows:
        texts = preference(load_one(tmp_path, row, PREFERENCE_ROWS))
        assert (texts.prompt, texts.chosen, texts.rejected) == ([USER], [ASSISTANT], [other])


@pytest.mark.parametrize("prompt", ["2+2=?", [USER]])
@pytest.mark.parametrize("start", [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER]])
def test_conversations_beside_their_prompt_have_it_once(
    tmp_path: Path, prompt: str | list[dict], start: list[dict]
) -> None:
    # As HuggingFaceH4/ultrafeedback_binarized.
    other = {"role": "assistant", "content": "5"}
    row = {"prompt": prompt, "chosen": [*start, ASSISTANT], "rejected": [*start, other]}
    texts = preference(load_one(tmp_path, row, PREFERENCE_ROWS))
    assert (texts.prompt, texts.chosen, texts.rejected) == (start, [ASSISTANT], [other])


def test_conversations_of_another_prompt_are_refused(tmp_path: Path) -> None:
    row = {"prompt": "3+3=?", "chosen": [USER, ASSISTANT], "rejected": "5"}
    message = "jsonl:1: column 'chosen' begins with a turn of the user, which does not follow"
    with pytest.raises(ConfigError, match=message):
        load_one(tmp_path, row, PREFERENCE_ROWS)


def test_a_flag_of_a_preference_is_refused(tmp_path: Path) -> None:
    row = {"prompt": "a", "chosen": [{**ASSISTANT, "train": False}], "rejected": "5"}
    with pytest.raises(ConfigError, match="jsonl:1: a message of 'chosen' has a flag"):
        load_one(tmp_path, row, PREFERENCE_ROWS)


def test_renamed_columns(tmp_path: Path) -> None:
    row = {"problem": "2+2=?", "solution": 4, "level": "easy"}
    columns = {"prompt": "problem", "answer": "solution"}
    prompt = question(load_one(tmp_path, row, PROMPT_ROWS, columns))
    assert (prompt.messages, prompt.answer) == ([USER], "4")
    assert prompt.row == {"prompt": "2+2=?", "answer": 4, "level": "easy"}
    dialog = {"dialog": [{"from": "human", "value": "2+2=?"}, {"from": "gpt", "value": "4"}]}
    renamed = load_one(tmp_path, dialog, columns={"conversations": "dialog"})
    assert conversation(renamed) == [USER, ASSISTANT]
    # Two columns may exchange their names.
    swapped = load_one(tmp_path, GOOD, PROMPT_ROWS, {"prompt": "answer", "answer": "prompt"})
    assert swapped == {"prompt": "1", "answer": "a"}


def test_renamed_columns_are_other_rows_to_a_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({**GOOD, "hint": "b"}) + "\n")
    own = load_rows(path, PROMPT_ROWS)
    renamed = load_rows(path, PROMPT_ROWS, columns={"prompt": "hint"})
    assert own.digests != renamed.digests


@given(st.dictionaries(st.sampled_from(KNOWN_COLUMNS), st.text(alphabet="ab", max_size=5)))
def test_rows_with_own_columns_are_not_changed(values: dict[str, str]) -> None:
    row = {**values, "prompt": "a"}
    # They become the first turns of the conversation.
    row.pop("system", None)
    row.pop("history", None)
    assert known_row(row, {}) == row


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        (
            {"conversations": [{"from": "alien", "value": "x"}]},
            {},
            r"conversations\[0\]\.from is .alien. \(str\); understood: ai, assistant, bot",
        ),
        (
            {"conversations": [{"from": "gpt", "value": 3}]},
            {},
            r"conversations\[0\]\.value is 3 \(int\), not a text",
        ),
        (
            {"conversations": "hello"},
            {},
            r"'conversations' is .hello. \(str\), not a list of turns with 'from' and 'value'",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "add(2, 2)"}]},
            {},
            r"conversations\[0\]\.value is a function_call that is not JSON",
        ),
        (
            {"instruction": "a", "input": 3, "output": "b"},
            {},
            r"column 'input' is 3 \(int\), not a text",
        ),
        (
            {"instruction": "a", "output": "b", "history": [["a"]]},
            {},
            r"history\[0\] is .* not a list \[instruction, output\]",
        ),
        (
            {"problem": "a"},
            {"prompt": "question"},
            (
                r"data\.columns gives 'question' as the column of 'prompt', but the row has"
                r" \['problem'\]; correct the name"
            ),
        ),
        (
            {"messages": [{**USER, "train": True}, ASSISTANT]},
            {},
            r"messages\[0\]\.the loss is on the assistant's turns only",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "weight": 0.5}]},
            {},
            r"messages\[1\]\.weight is 0\.5; give 1 \(loss on this turn\) or 0",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "train": "no"}]},
            {},
            r"messages\[1\]\.train is 'no'; give true or false",
        ),
    ],
)
def test_a_bad_row_is_named(
    tmp_path: Path, row: dict, columns: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"train\.jsonl:1: .*{message}"):
        load_one(tmp_path, row, columns=columns)


def test_a_renamed_column_may_be_in_an_object(tmp_path: Path) -> None:
    # As verl's parquet files.
    row = {"prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "4"}}
    columns = {"answer": "reward_model.ground_truth"}
    loaded = load_one(tmp_path, row, PROMPT_ROWS, columns)
    assert (question(loaded).messages, question(loaded).answer) == ([USER], "4")
    assert question(loaded).row["reward_model"] == row["reward_model"]
    with pytest.raises(ConfigError, match=r"'reward_model\.truth' as the column of 'answer'"):
        load_one(tmp_path, row, PROMPT_ROWS, {"answer": "reward_model.truth"})


def test_a_renamed_column_needs_a_meaning() -> None:
    check_columns({"prompt": "problem"})
    with pytest.raises(ConfigError, match=r"data\.columns: 'prompts' is not a known meaning"):
        check_columns({"prompts": "problem"})


TOKENS = {"input_ids": [5, 6, 7]}


@pytest.mark.parametrize(
    "row",
    [
        TOKENS,
        {**TOKENS, "attention_mask": [1, 1, 1], "completion_mask": [1, 1, 1]},
        {**TOKENS, "labels": [-100, 6, 7], "completion_mask": [0, 1, 1]},
        {**TOKENS, "labels": [-100, 6, 7]},
        {**TOKENS, "token_mask": [0, 0, 1]},
        {"text": "Once upon a time"},
    ],
)
def test_rows_without_turns_are_for_sft_only(tmp_path: Path, row: dict) -> None:
    assert load_one(tmp_path, row) == row
    with pytest.raises(ConfigError, match="match no known format"):
        load_one(tmp_path, row, PROMPT_ROWS)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [5, -1]}, r"input_ids\[1\] is -1 \(int\), not a token id"),
        ({"input_ids": [5, 2**31]}, r"input_ids\[1\] is 2147483648 \(int\), not a token id"),
        ({"input_ids": [5, True]}, r"input_ids\[1\] is true \(bool\), not a token id"),
        ({**TOKENS, "labels": [5, 6]}, "'labels' is .*, not a list of 3 numbers"),
        (
            {**TOKENS, "labels": [6, 7, -100]},
            r"labels\[0\] is 6 \(int\), neither the token id 5 at the same position nor -100",
        ),
        ({**TOKENS, "token_mask": [0, 2, 1]}, r"token_mask\[1\] is 2 \(int\), not 0 or 1"),
        ({**TOKENS, "labels": [-100] * 3}, "no token of 'input_ids' after the first has a loss"),
        ({**TOKENS, "labels": [5, -100, -100]}, "no token of 'input_ids' after the first has"),
        ({"input_ids": [5]}, "no token of 'input_ids' after the first has a loss"),
        (
            {**TOKENS, "attention_mask": [1, 1, 0]},
            r"attention_mask\[2\] is 0, so 'input_ids' has padding; remove it",
        ),
        (
            {**TOKENS, "attention_mask": [1, 1, 1], "assistant_masks": [0, 1, 1]},
            "'assistant_masks' has tokens without loss, .* data.columns.token_mask",
        ),
        (
            {**TOKENS, "labels": [5, 6, 7], "token_mask": [1, 1, 1]},
            "both 'labels' and 'token_mask'",
        ),
        ({"text": 3}, r"column 'text' is 3 \(int\), not a text"),
        ({"input_ids": []}, "column 'input_ids' is an empty list, without a token"),
        ({"text": ""}, "column 'text' is empty, .* remove the row"),
    ],
)
def test_bad_tokens_are_named(tmp_path: Path, row: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.jsonl:1: .*{message}"):
        load_one(tmp_path, row)


def write_csv(path: Path, rows: Sequence[Sequence[str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


def test_csv(tmp_path: Path) -> None:
    header = ["prompt", "answer"]
    long_text = "x" * 200_000
    rows = [["ä, b", "1"], ['two\nlines "quoted"', "2"], [long_text, ""]]
    path = write_csv(tmp_path / "train.csv", [header, *rows])
    loaded = load_rows(path, PROMPT_ROWS)
    assert [[row["prompt"], row["answer"]] for row in loaded] == rows
    # A row of two lines counts as two, so the number is the line at which an editor opens it.
    assert [loaded.location(row).rpartition(":")[2] for row in range(3)] == ["2", "3", "5"]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert list(load_rows(path, PROMPT_ROWS)) == list(loaded)


def test_messages_of_a_csv_file_are_json(tmp_path: Path) -> None:
    text = json.dumps([USER, ASSISTANT])
    path = write_csv(tmp_path / "train.csv", [["messages"], [text]])
    assert conversation(load_rows(path, SFT_ROWS)[0]) == [USER, ASSISTANT]
    header = ["prompt", "chosen", "rejected"]
    other = {"role": "assistant", "content": "[no]"}
    values = [json.dumps([turn]) for turn in (USER, ASSISTANT, other)]
    path = write_csv(tmp_path / "pairs.csv", [header, values, ["[a]", "[1, 2]", "[]"]])
    of_messages, of_texts = load_rows(path, PREFERENCE_ROWS)
    assert preference(of_messages) == ([USER], [ASSISTANT], [other])
    assert [of_texts[name] for name in header] == ["[a]", "[1, 2]", "[]"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"prompt,answer\na\n", "csv:2: 1 values for 2 columns; a value with a comma"),
        (b'prompt,answer\n"a"b,c\n', "csv:2: not valid CSV: "),
        (b'prompt,answer\n"a', "csv:2: not valid CSV: "),
        (b"prompt,answer\n\xff,b\n", "csv:.* not UTF-8 text"),
        (b"prompt,answer\n", "csv has no rows"),
    ],
)
def test_a_bad_csv_file_is_named(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "train.csv"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        load_rows(path, PROMPT_ROWS)


def compressed(path: Path, data: bytes) -> None:
    """Write `data` in two parts, as tools that append or compress in parallel do."""
    half = len(data) // 2
    codec = pyarrow.Codec("zstd")
    parts = []
    for part in (data[:half], data[half:]):
        if path.suffix == ".gz":
            parts.append(gzip.compress(part))
        else:
            parts.append(codec.compress(part, asbytes=True))
    path.write_bytes(b"".join(parts))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_have_the_rows_of_the_plain_one(tmp_path: Path, suffix: str) -> None:
    lines = tmp_path / "train.jsonl"
    rows = [{"prompt": f"ä{number}" * 50, "answer": number} for number in range(3000)]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = load_rows(lines, PROMPT_ROWS)
    compressed(tmp_path / f"train.jsonl{suffix}", lines.read_bytes())
    loaded = load_rows(tmp_path / f"train.jsonl{suffix}", PROMPT_ROWS)
    assert list(loaded) == list(plain)
    # The same rows to a resumed run.
    assert loaded.digests == plain.digests
    assert loaded.location(-1).endswith(f"train.jsonl{suffix}:3000")
    table = write_csv(tmp_path / "train.csv", [["prompt", "answer"], ["a", "1"]])
    compressed(tmp_path / f"train.csv{suffix}", table.read_bytes())
    assert list(load_rows(tmp_path / f"train.csv{suffix}", PROMPT_ROWS)) == [GOOD]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["truncated", "other data"])
def test_a_damaged_compressed_file_is_named(tmp_path: Path, suffix: str, damage: str) -> None:
    path = tmp_path / f"train.jsonl{suffix}"
    text = "".join(json.dumps({**GOOD, "number": number**5}) + "\n" for number in range(2000))
    compressed(path, text.encode())
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 100] if damage == "truncated" else text.encode())
    with pytest.raises(ConfigError, match=rf"train\.jsonl{suffix}: cannot be decompressed: "):
        load_rows(path, PROMPT_ROWS)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.jsonl", b"", "has no rows"),
        ("empty.csv", b"", "has no rows"),
        ("blank.jsonl", b"\n  \n", "has no rows"),
        ("nan.csv", b"prompt,answer\na,1\nb,NaN\n", "csv:3: column 'answer' is 'NaN', as tables"),
        (
            "nan.jsonl",
            b'{"prompt": "a", "answer": NaN}\n',
            "'answer' is NaN .float., not a text or",
        ),
        ("latin.jsonl", b'{"prompt": "\xe4"}\n', "jsonl:1: not UTF-8 text at byte 13"),
        (
            "mixed.jsonl",
            b'{"prompt": "a", "answer": "1"}\n{"messages": [{"role": "user", "content": "b"}]}\n',
            "jsonl:2: column 'prompt' is missing; the rows before have prompt . answer, this one",
        ),
        (
            "null.jsonl",
            b'{"prompt": "a", "answer": "1"}\n{"prompt": "a", "answer": null}\n',
            "jsonl:2: column 'answer' is null; the rows before have prompt . answer",
        ),
        ("none.jsonl", b'{"messages": []}\n', "column 'messages' is an empty list"),
        (
            "mixed.jsonl",
            b'{"prompt": "a"}\n{"prompt": "a", "answer": "1"}\n',
            "jsonl:2: columns .* are another format than prompt, which the rows before have",
        ),
        ("rows.txt", b"text\n", r"data\.train_path: .*ends in '\.txt'; give \.jsonl"),
        ("rows.json.gz", gzip.compress(b"[]", mtime=0), r"ends in '\.json\.gz'; give \.jsonl"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, text: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        load_rows(path, PROMPT_ROWS)


def test_bytes_of_a_table_are_texts_if_they_are_utf_8(tmp_path: Path) -> None:
    """Parquet files of some tools do not mark texts as such."""
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"prompt": ["ä".encode()], "answer": ["1"], "image": [b"\xff"]})
    pyarrow.parquet.write_table(table, path)
    assert load_rows(path, PROMPT_ROWS)[0]["prompt"] == "ä"
    pyarrow.parquet.write_table(table.rename_columns(["image", "answer", "prompt"]), path)
    with pytest.raises(ConfigError, match=r"row 0: column 'prompt' is .*\(dict\), not a text"):
        load_rows(path, PROMPT_ROWS)


def test_a_missing_value_is_an_error_only_in_the_columns_of_the_format(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [["prompt", "answer", "level"], ["nan?", "1", "nan"]])
    assert load_rows(path, PROMPT_ROWS)[0]["level"] == "nan"


def test_a_column_that_a_table_has_twice_is_named(tmp_path: Path) -> None:
    table = pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet: has the column 'prompt' twice; rename"):
        load_rows(tmp_path / "a.parquet", PROMPT_ROWS)


def test_large_batches_of_tables_are_read_in_parts(tmp_path: Path) -> None:
    prompts = [f"row {number}" for number in range(2500)]
    table = pyarrow.table({"prompt": prompts, "answer": list(range(2500))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    with pyarrow.ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    for path in (tmp_path / "a.parquet", folder):
        loaded = load_rows(path, PROMPT_ROWS)
        assert [row["prompt"] for row in loaded] == prompts
        assert loaded.location(2400).endswith(" row 2400")


def test_tables_keep_the_order_of_keys_and_have_only_values_of_json(tmp_path: Path) -> None:
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "a": None}}
    row = {
        "prompt": "a",
        "answer": "1",
        "tools": [{"type": "function", "function": function}],
        "level": 0.5,
        "is_new": True,
    }
    plain = pyarrow.Table.from_pylist([row])
    dates = pyarrow.array([datetime.date(2026, 1, 2)])
    halves = pyarrow.array([1.5], pyarrow.float32()).cast(pyarrow.float16())
    table = plain.append_column("day", dates).append_column("half", halves)
    pyarrow.parquet.write_table(plain, tmp_path / "plain.parquet")
    pyarrow.parquet.write_table(table, tmp_path / "table.parquet")
    del function["parameters"]["a"]
    # As text: dictionaries with other orders are equal.
    expected = json.dumps(row)
    first = dict(load_rows(tmp_path / "plain.parquet", PROMPT_ROWS)[0])
    second = dict(load_rows(tmp_path / "table.parquet", PROMPT_ROWS)[0])
    assert json.dumps(first) == expected
    assert second.pop("day") == "2026-01-02"
    assert float(second.pop("half")) == 1.5
    assert json.dumps(second) == expected


FIRST = [SYSTEM, {"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}]
BEFORE = {"system": "Be brief.", "history": [["1+1=?", "2"]]}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"prompt": "2+2=?", "completion": "4"},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": [SYSTEM, USER], "answer": "4"},
        {"instruction": "2+2=?", "input": "", "output": "4"},
        {"conversations": [{"from": "human", "value": "2+2=?"}, {"from": "gpt", "value": "4"}]},
    ],
)
def test_system_and_history_come_first_in_every_format(tmp_path: Path, row: dict) -> None:
    assert conversation(load_one(tmp_path, {**row, **BEFORE})) == [*FIRST, USER, ASSISTANT]
    prompts = load_one(tmp_path, {**row, **BEFORE}, PROMPT_ROWS)
    assert question(prompts).messages == [*FIRST, USER]


def test_system_of_other_names_and_jobs(tmp_path: Path) -> None:
    gsm8k = {"question": "2+2=?", "answer": "2+2 is #### 4", **BEFORE}
    assert question(load_one(tmp_path, gsm8k, PROMPT_ROWS)).messages == [*FIRST, USER]
    assert question(load_one(tmp_path, gsm8k, PROMPT_ROWS)).answer == "4"
    columns = {"prompt": "question", "completion": "response", "system": "system_prompt"}
    orca = {"system_prompt": "Be brief.", "question": "2+2=?", "response": "4"}
    assert conversation(load_one(tmp_path, orca, columns=columns)) == [SYSTEM, USER, ASSISTANT]
    other = {"role": "assistant", "content": "5"}
    pair = {"system": "Be brief.", "question": "2+2=?", "chosen": "4", "rejected": "5"}
    texts = preference(load_one(tmp_path, pair, PREFERENCE_ROWS, {"prompt": "question"}))
    assert texts == ([SYSTEM, USER], [ASSISTANT], [other])
    for extra in ({}, {"prompt": "2+2=?"}):
        pair = {**BEFORE, **extra, "chosen": [USER, ASSISTANT], "rejected": [USER, other]}
        texts = preference(load_one(tmp_path, pair, PREFERENCE_ROWS))
        assert texts == ([*FIRST, USER], [ASSISTANT], [other])


def test_no_text_of_a_mapped_column_is_lost(tmp_path: Path) -> None:
    row = {"prompt": "Sum?", "context": "2 and 2", "completion": "4"}
    prompt = {"role": "user", "content": "Sum?\n2 and 2"}
    loaded = load_one(tmp_path, row, columns={"input": "context"})
    assert conversation(loaded) == [prompt, ASSISTANT]
    row = {"text": "2+2=4", "about": "Be brief."}
    with pytest.raises(ConfigError, match=r"maps 'system', but rows of the format text do not use"):
        load_one(tmp_path, row, columns={"system": "about"})
    two = {"system": "Be long.", "messages": [SYSTEM, USER, ASSISTANT]}
    with pytest.raises(ConfigError, match=r"'messages' begins with a system turn, and column 'sys"):
        load_one(tmp_path, two)


def test_pairs_of_dialogue_texts_have_their_common_turns_as_prompt(tmp_path: Path) -> None:
    start = "\n\nHuman: 1+1=?\n\nAssistant: 2\n\nHuman: 2+2=?\n\nAssistant: "
    row = {"chosen": f"{start}It is 4", "rejected": f"{start}It is 5"}
    prompt, chosen, rejected = preference(load_one(tmp_path, row, PREFERENCE_ROWS))
    assert prompt == [*FIRST[1:], USER]
    assert chosen == [{"role": "assistant", "content": "It is 4"}]
    assert rejected == [{"role": "assistant", "content": "It is 5"}]
    row = {"question": "2+2=?", "chosen": "It is 4", "rejected": "It is 5"}
    with pytest.raises(ConfigError, match=r"no column 'prompt'; set data.columns=\{prompt: quest"):
        load_one(tmp_path, row, PREFERENCE_ROWS)


def test_rows_of_one_completion_and_a_label_are_not_sent_to_sft(tmp_path: Path) -> None:
    row = {"prompt": "2+2=?", "completion": "5", "label": False}
    with pytest.raises(ConfigError, match=r"a label \(KTO\) have no loss here; write pairs"):
        load_one(tmp_path, row, PREFERENCE_ROWS)
    messages = [USER, {"role": "assistant", "content": "5"}]
    for undesirable in (row, {"messages": messages, "label": "False"}):
        with pytest.raises(ConfigError, match=r"label is false.*\(KTO\).*data\.on_bad_row=skip"):
            load_one(tmp_path, undesirable, SFT_ROWS)
    for value in (True, None, "false positive", 0):
        load_one(tmp_path, {**row, "label": value}, SFT_ROWS)


def test_messages_and_tools_may_be_lists_of_json_texts(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    as_texts = {"messages": list(map(json.dumps, messages)), "tools": list(map(json.dumps, tools))}
    row = load_one(tmp_path, as_texts)
    assert conversation(row) == messages
    assert row_tools(row) == tools
    calls = [USER, {"role": "assistant", "tool_calls": [json.dumps(call)]}]
    assert conversation(load_one(tmp_path, {"messages": calls})) == messages


def test_content_may_be_a_list_of_text_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "2+2"}, {"type": "text", "text": "=?", "image_url": None}]
    row = {"messages": [{"role": "user", "content": parts}, ASSISTANT]}
    assert conversation(load_one(tmp_path, row)) == [USER, ASSISTANT]
    parts.append({"type": "image_url", "image_url": "x"})
    with pytest.raises(
        ConfigError, match=r"messages\[0\]\.content\[2\] is .*not a part with a text"
    ):
        load_one(tmp_path, row)


def test_a_system_turn_precedes_a_conversation_that_begins_with_the_assistant() -> None:
    turns = [{"from": "gpt", "value": "hello"}, {"from": "human", "value": "a"}]
    row = known_row({"system": "s", "conversations": [*turns, {"from": "gpt", "value": "b"}]}, {})
    roles = [turn["role"] for turn in row["messages"]]
    assert roles == ["system", "assistant", "user", "assistant"]


def test_a_completion_that_continues_the_prompt_has_no_system_turn() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": []}
    tool = {"role": "tool", "content": "4"}
    answers = [[tool, {"role": "assistant", "content": text}] for text in "bc"]
    prompt = [{"role": "user", "content": "a"}, call]
    row = {"system": "s", "prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
    changed = known_row(row, {})
    assert changed["prompt"] == [{"role": "system", "content": "s"}, *prompt]
    assert (changed["chosen"], changed["rejected"]) == tuple(answers)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**BEFORE, "messages": [USER, {"role": "assistant"}]}, r"messages\[1\]\.content is null"),
        ({**BEFORE, "prompt": [USER, 5], "completion": "4"}, r"prompt\[1\] is 5 .*, not an object"),
        ({"system": 5, "prompt": "a", "completion": "b"}, r" system is 5 .*, not a text"),
        (
            {"system": [{"type": "image"}], "prompt": "a", "completion": "b"},
            r" system\[0\] is .*not a part with a text",
        ),
        (
            {"history": [["a", "b"], ["a", 5]], "prompt": "a", "completion": "b"},
            r" history\[1\]\.content is 5 .*, not a text",
        ),
        (
            {"history": [["a", "b"], {"from": "x", "value": "a"}], "prompt": "a", "answer": "b"},
            r" history\[1\]\.from is \"x\"",
        ),
        (
            {"history": "User: 1+1=?", "prompt": "a", "completion": "b"},
            r"'history' is .*write a list of \[instruction, output\] or of messages, or rename",
        ),
    ],
)
def test_errors_have_the_places_of_the_file(tmp_path: Path, row: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_one(tmp_path, row)


def test_a_system_text_may_have_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    row: dict[str, Any] = {"system": parts, "messages": [USER, ASSISTANT]}
    assert conversation(load_one(tmp_path, row)) == [SYSTEM, USER, ASSISTANT]
    row = {"system": "Be brief.", "messages": [{**SYSTEM, "content": parts}, USER, ASSISTANT]}
    assert conversation(load_one(tmp_path, row)) == [SYSTEM, USER, ASSISTANT]
