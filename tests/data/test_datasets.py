"""Data files: every promised format and file type, and one clear message for everything that is
wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.data.formats import PROMPT_ROWS, SFT_ROWS, RowSchema, conversation, question
from nemo_like.data.rows import load_rows

USER, ASSISTANT = {"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
GSM8K = {"question": "How many?", "answer": "1,000 + 80 = <<1000+80=1080>>1,080\n#### 1,080"}


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


@pytest.mark.parametrize(
    ("row", "turns", "prompt", "answer"),
    [
        ({"messages": [SYSTEM, USER, ASSISTANT]}, [SYSTEM, USER, ASSISTANT], [SYSTEM, USER], None),
        ({"messages": [USER, ASSISTANT], "answer": "4"}, [USER, ASSISTANT], [USER], "4"),
        ({"prompt": "2+2=?", "completion": "4"}, [USER, ASSISTANT], [USER], None),
        (
            {"prompt": [SYSTEM, USER], "completion": [ASSISTANT]},
            [SYSTEM, USER, ASSISTANT],
            [SYSTEM, USER],
            None,
        ),
        ({"prompt": "2+2=?", "answer": 4, "level": "easy"}, [USER, ASSISTANT], [USER], "4"),
        (
            GSM8K,
            [
                {"role": "user", "content": "How many?"},
                {"role": "assistant", "content": GSM8K["answer"]},
            ],
            [{"role": "user", "content": "How many?"}],
            "1080",
        ),
    ],
)
def test_formats(
    tmp_path: Path, row: dict, turns: list[dict], prompt: list[dict], answer: str | None
) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", [row, row])
    rows = load_rows(path, SFT_ROWS)
    assert len(rows) == 2
    assert conversation(rows[1]) == turns
    asking = question(load_rows(path, PROMPT_ROWS)[0])
    assert (asking.messages, asking.answer, asking.row) == (prompt, answer, row)
    assert asking.text == prompt[-1]["content"]


def test_a_prompt_alone_is_enough_for_rollouts(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", [{"prompt": "Say something."}])
    assert question(load_rows(path, PROMPT_ROWS)[0]).answer is None
    with pytest.raises(
        ConfigError,
        match=r"train.jsonl:1: there is no assistant turn to learn from in prompt. SFT needs",
    ):
        load_rows(path, SFT_ROWS)


def test_jsonl_skips_blank_lines_and_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "\xc3\xa4", "answer": "1"}\n\n{"prompt": "b", "answer": "2"}'
    )
    rows = load_rows(path, SFT_ROWS)
    assert [row["prompt"] for row in rows] == ["ä", "b"]
    assert rows.location(1).endswith("train.jsonl:3")
    assert rows[0:1] == [rows[0]]


def test_max_rows_stops_reading(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", [{"prompt": "a", "answer": "1"}] * 3 + ["{broken"])
    assert len(load_rows(path, SFT_ROWS, max_rows=3)) == 3


def test_json_parquet_and_saved_directories_hold_the_same(tmp_path: Path) -> None:
    rows = [
        {"messages": [SYSTEM, USER, ASSISTANT]},
        {"messages": [USER, {**ASSISTANT, "name": "bot"}]},
    ]
    (tmp_path / "train.json").write_text(json.dumps(rows, indent=1))
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet", row_group_size=1)
    (tmp_path / "many").mkdir()
    for part in range(2):
        pyarrow.parquet.write_table(
            table.slice(part, 1), tmp_path / "many" / f"part-{part}.parquet"
        )
    expected = [conversation(row) for row in rows]
    for name in ("train.json", "train.parquet", "many"):
        loaded = load_rows(tmp_path / name, SFT_ROWS)
        assert [conversation(row) for row in loaded] == expected, name
    assert (
        load_rows(tmp_path / "train.parquet", SFT_ROWS).location(1).endswith("train.parquet row 1")
    )


def test_a_directory_of_save_to_disk(tmp_path: Path) -> None:
    """Written by the datasets library itself where it is installed."""
    datasets = pytest.importorskip(
        "datasets", reason="the datasets library is not installed; reading does not need it"
    )
    rows = [{"prompt": str(number), "completion": "x"} for number in range(5)]
    full = datasets.Dataset.from_list(rows)
    full.save_to_disk(tmp_path / "full", num_shards=2)
    assert list(load_rows(tmp_path / "full", SFT_ROWS)) == rows
    datasets.DatasetDict(train=full, test=full).save_to_disk(tmp_path / "splits")
    with pytest.raises(
        ConfigError, match=r"splits has several splits; name one: .*splits/test, .*splits/train"
    ):
        load_rows(tmp_path / "splits", SFT_ROWS)
    assert len(load_rows(tmp_path / "splits" / "train", SFT_ROWS)) == 5


GOOD = {"prompt": "a", "answer": "1"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [GOOD, '{"prompt": "a", "answer" "1"}'],
            r"jsonl:2: not valid JSON at column 26: Expecting ':' delimiter, near ",
        ),
        ([GOOD, "", "[1, 2]"], r"jsonl:3: \[1, 2\] \(list\) is not an object with columns"),
        (
            [{"body": "x", "label": 1}],
            (
                r"jsonl:1: columns \['body', 'label'\] match no known format."
                r" Set data.columns=\{text: body\} if that is what they mean. Understood: messages"
            ),
        ),
        (
            [GOOD, {"prompt": "a"}],
            (
                r"jsonl:2: column 'answer' is missing; the rows before have prompt \+ answer,"
                r" this one"
                r" has \['prompt'\]"
            ),
        ),
        (
            [GOOD, {"prompt": 7, "answer": "1"}],
            r"jsonl:2: column 'prompt' is 7 \(int\), not a text or a list of messages",
        ),
        (
            [{"prompt": "a", "answer": ["1"]}],
            r"jsonl:1: column 'answer' is \[\"1\"\] \(list\), not a text",
        ),
        (
            [{"messages": "hello"}],
            r"jsonl:1: column 'messages' is .hello. \(str\), not a list of messages",
        ),
        (
            [{"messages": [USER, {"from": "gpt"}]}],
            r"messages\[1\] is .*, not an object with role and content",
        ),
        (
            [{"messages": [{"role": "user", "content": 3}]}],
            r"messages\[0\].content is 3 \(int\), not a text",
        ),
        (
            [{"question": "a", "answer": "b"}],
            r"no '#### result'; for plain answers set data.columns=\{prompt: question",
        ),
        (
            [GOOD, {**GOOD, "messages": [USER]}],
            r"jsonl:2: columns .* are another format than prompt \+ answer",
        ),
        ([{"messages": [USER]}], "jsonl:1: there is no assistant turn to learn from"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_rows(write_jsonl(tmp_path / "train.jsonl", lines), SFT_ROWS)


def test_rollouts_need_something_to_ask(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", [{"messages": [ASSISTANT]}])
    with pytest.raises(ConfigError, match="nothing to ask the model"):
        load_rows(path, PROMPT_ROWS)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"train.jsonl:1: not UTF-8 text at byte 13"):
        load_rows(tmp_path / "train.jsonl", SFT_ROWS)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"\n", "data.validation_path: .*empty.jsonl has no rows"),
        ("rows.tsv", b"a\tb\n", "data.validation_path: .*rows.tsv ends in '.tsv'; give .jsonl"),
        ("one.json", b'{"a": 1}', "not a list of objects; one object per line is a .jsonl file"),
        ("lines.json", b'{"a": 1}\n{"a": 2}', r"JSON at line 2 column 1: .*a \.jsonl file"),
        ("bad.parquet", b"PAR1", "bad.parquet: not a parquet file"),
        ("folder", None, "data.validation_path: .*folder is a directory without Arrow files"),
        ("missing.jsonl", None, "data.validation_path: there is no .*missing.jsonl"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    elif name == "folder":
        path.mkdir()
    with pytest.raises(ConfigError, match=message):
        load_rows(path, SFT_ROWS, key="data.validation_path")


@pytest.mark.parametrize("schema", [SFT_ROWS, PROMPT_ROWS])
def test_real_gsm8k(schema: RowSchema) -> None:
    folder = os.environ.get("NEMO_LIKE_DATA")
    if folder is None:
        pytest.skip("NEMO_LIKE_DATA is not set, so there is no GSM8K here")
    rows = load_rows(Path(folder) / "gsm8k" / "train.jsonl", schema)
    assert len(rows) == 7473
    answers = [question(row).answer for row in rows]
    assert answers[0] == "72"
    assert all(answer and float(answer) is not None for answer in answers)


def test_a_large_file_is_kept_in_an_unnamed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"{number} \u2028\x85" * 50, "answer": number} for number in range(2500)]
    path = write_jsonl(
        tmp_path / "train.jsonl", [json.dumps(row, ensure_ascii=False) for row in rows]
    )
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    loaded = load_rows(path, PROMPT_ROWS)
    assert list(loaded) == rows
    assert loaded[1:-1] == rows[1:-1]
    assert loaded.location(-1).endswith("train.jsonl:2500")
    assert loaded.places.nbytes <= 32 * len(rows)
    assert [each.name for each in tmp_path.iterdir()] == ["train.jsonl"]
    with pytest.raises(IndexError):
        loaded[2500]


def test_a_changed_row_is_another_digest(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", [{"prompt": "a", "answer": "1"}] * 3)
    before = load_rows(path, PROMPT_ROWS)
    assert load_rows(path, PROMPT_ROWS).digests == before.digests
    write_jsonl(path, [{"prompt": "a", "answer": "1"}] * 2 + [{"prompt": "b", "answer": "1"}])
    after = load_rows(path, PROMPT_ROWS)
    assert after.digests != before.digests
    assert [after.digest(row) == before.digest(row) for row in range(3)] == [True, True, False]


def test_cache_files_of_map_are_no_rows_of_a_directory(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": str(number), "completion": "4"} for number in range(10)]
    saved = tmp_path / "saved"
    datasets.Dataset.from_list(rows).save_to_disk(str(saved))
    datasets.load_from_disk(str(saved)).map(lambda row: {"completion": row["prompt"]})
    datasets.load_from_disk(str(saved)).shuffle(seed=0)
    assert len(list(saved.glob("*.arrow"))) > 1
    assert list(load_rows(saved, SFT_ROWS)) == rows


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".parquet", ".csv"])
def test_files_of_a_directory_or_pattern_are_read_by_name(tmp_path: Path, suffix: str) -> None:
    directory = tmp_path / "data"
    directory.mkdir()

    def write(name: str, prompt: str) -> None:
        path = directory / f"{name}{suffix}"
        if suffix == ".parquet":
            table = pyarrow.table({"prompt": [prompt], "completion": ["4"]})
            pyarrow.parquet.write_table(table, path)
        elif suffix == ".csv":
            path.write_text(f"prompt,completion\n{prompt},4\n")
        else:
            write_jsonl(path, [{"prompt": prompt, "completion": "4"}])

    write("train-00001", "b")
    write("train-00000", "a")
    write(".hidden", "c")
    (directory / "README.md").write_text("About")
    for source in (directory, f"{directory}/train-*{suffix}", f"{tmp_path}/**/*[0-9]{suffix}"):
        loaded = load_rows(source, SFT_ROWS)
        assert [row["prompt"] for row in loaded] == ["a", "b"]
    # Two splits are never mixed.
    write("test-00000", "t")
    with pytest.raises(ConfigError, match=rf"several splits .*data/train-.*\{suffix}, or"):
        load_rows(directory, SFT_ROWS)
    assert len(load_rows(f"{directory}/train-*{suffix}", SFT_ROWS)) == 2
    with pytest.raises(ConfigError, match=r"data\.train_path: no file matches .*valid-\*"):
        load_rows(f"{directory}/valid-*", SFT_ROWS)


def test_a_directory_of_several_formats_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])
    (tmp_path / "b.csv").write_text("prompt,completion\na,b\n")
    with pytest.raises(ConfigError, match=r"several formats; name one: \*\.csv, \*\.jsonl"):
        load_rows(tmp_path, SFT_ROWS)


def test_a_name_with_brackets_is_a_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a[1].jsonl", [{"prompt": "a", "completion": "b"}])
    assert len(load_rows(path, SFT_ROWS)) == 1
