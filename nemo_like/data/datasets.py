"""Rows of text from a file, taken as they are: the format is recognised from the columns, and a bad
row is named.

Understood: `messages` (optionally `answer`), `prompt` with `completion` or `answer` or neither,
GSM8K's `question` and `answer` with `####`; each optionally with `tools`, the functions that the
model may call. Two shapes come out: `conversation` (what SFT learns) and `question` (what a rollout
starts from). Nothing is tokenised here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.text import is_possible_path, printable, shortened, shown_value
from nemo_like.data.tools import (
    Message,
    Tool,
    calls_problem,
    clean_message,
    row_tools,
    tools_problem,
    without_nulls,
)

Row = dict[str, Any]
Numbered = tuple[str, Row, bytes]
"""Where a row stands, the row, and its content as bytes."""

UNDERSTOOD = "messages [+ answer]; prompt + completion; prompt + answer; question + answer with '#### result' (GSM8K)"
_SURROGATE = re.compile("[\\ud800-\\udfff]")
_MAX_LISTED = 10_000
# pyarrow's own errors derive from these; conversions to Python add OverflowError and
# UnicodeDecodeError (a ValueError).
_ARROW_ERRORS = (
    ValueError,
    OSError,
    LookupError,
    TypeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
)
_FORMATS = (
    ("messages",),
    ("prompt", "completion"),
    ("prompt", "answer"),
    ("prompt",),
    ("question", "answer"),
)
_ROWS_PER_ADVANCE = 1000
_SUFFIXES = ".jsonl, .json, .parquet, or a directory with an Arrow dataset (datasets.save_to_disk) or parquet files"


@dataclass(frozen=True, slots=True)
class Question:
    """What a rollout starts from.

    Example: the row `{"prompt": "2+2=?", "answer": "4"}` is `Question(messages=[{"role": "user",
    "content": "2+2=?"}], text="2+2=?", answer="4", row=...)`.
    """

    messages: list[Message]
    text: str
    """The last user turn, as the file has it."""
    answer: str | None
    row: Row
    tools: list[Tool] | None = None


@dataclass(frozen=True)
class Rows(Sequence[Row]):
    """The rows of one file or directory; all have the same format."""

    rows: list[Row]
    locations: Sequence[str]
    """Where each row stands. Example: `data/train.jsonl:17`."""
    format: tuple[str, ...]
    """The columns the format was recognised by."""
    digests: np.ndarray
    """uint64 [N]: a hash of the content of each row, which identifies it in a file that has
    changed.
    """

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self.rows[index]


def load_rows(
    path: str | Path,
    *,
    purpose: Literal["sft", "rl"] = "sft",
    max_rows: int | None = None,
    key: str = "data.train_path",
    advance: Callable[[int], None] | None = None,
) -> Rows:
    """The first `max_rows` rows (default all), each checked for its format and for what `purpose`
    needs.

    `advance` is called with the number of rows read since its last call. Raises ConfigError that
    names `key` and the path, or the file, the line and what is wrong with it.
    """
    path = Path(path).expanduser()
    if not is_possible_path(str(path)) or not path.exists():
        raise ConfigError(f"{key}: there is no {shortened(repr(str(path)), 300)}; give {_SUFFIXES}")
    rows: list[Row] = []
    locations: list[str] = []
    digests: list[int] = []
    columns: tuple[str, ...] = ()
    for place, row, content in islice(_reader(path, key)(path), max_rows):
        columns = columns or _recognise(row, place)
        problem = _problem(row, columns, purpose)
        if problem:
            raise ConfigError(f"{place}: {problem}")
        rows.append(row)
        locations.append(place)
        digests.append(row_digest(content))
        if advance is not None and len(rows) % _ROWS_PER_ADVANCE == 0:
            advance(_ROWS_PER_ADVANCE)
    if not rows:
        raise ConfigError(
            f"{key}: {shown_path(path)} has no rows"
            + ("" if max_rows is None else f" (the first {max_rows} were asked for)")
        )
    if advance is not None:
        advance(len(rows) % _ROWS_PER_ADVANCE)
    return Rows(rows, locations, columns, np.array(digests, np.uint64))


def row_digest(content: bytes) -> int:
    """A 64-bit hash of a row's content."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def conversation(row: Row) -> list[Message]:
    """The turns SFT learns from; the last is an assistant's where the row gives a completion or an
    answer.
    """
    columns = _recognise(row, "row")
    if columns == ("messages",):
        return [clean_message(message) for message in row["messages"]]
    if columns == ("question", "answer"):
        return [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
    turns = _turns(row["prompt"], "user")
    return turns if len(columns) == 1 else turns + _turns(row[columns[1]], "assistant")


def question(row: Row) -> Question:
    """The turns before the last answer, and the answer. GSM8K: the text behind `####`, without
    thousands separators.
    """
    columns = _recognise(row, "row")
    answer = row.get("answer")
    if columns == ("question", "answer"):
        messages = [{"role": "user", "content": row["question"]}]
        answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
    elif columns == ("messages",):
        messages = _before_last_answer(conversation(row))
    else:
        messages = _turns(row["prompt"], "user")
    text = next(
        (message.get("content", "") for message in reversed(messages) if message["role"] == "user"),
        "",
    )
    return Question(messages, text, None if answer is None else str(answer), row, row_tools(row))


def _recognise(row: Row, place: str) -> tuple[str, ...]:
    for columns in _FORMATS:
        if all(row.get(column) is not None for column in columns):
            return columns
    raise ConfigError(
        f"{place}: columns {_names(row)} are no format that is understood. Understood: {UNDERSTOOD}"
    )


def _problem(row: Row, columns: tuple[str, ...], purpose: str) -> str | None:
    """What is wrong with a row of this format, or None."""
    for column in columns:
        if row.get(column) is None:
            return f"column {column!r} is missing; the rows before have {' + '.join(columns)}, this one has {_names(row)}"
        problem = _text_problem(row[column], column) or surrogate_problem(row[column], column)
        if problem:
            return problem
    problem = tools_problem(row.get("tools")) or surrogate_problem(row.get("tools"), "tools")
    if problem:
        return problem
    if _recognise(row, "row") != columns:
        return f"columns {_names(row)} are another format than {' + '.join(columns)}, which the rows before have"
    if columns == ("question", "answer"):
        if not isinstance(row["answer"], str) or "####" not in row["answer"]:
            return "the answer has no '#### result'; for plain answers name the columns prompt and answer"
        return None
    if purpose == "sft" and not any(
        message["role"] == "assistant" for message in conversation(row)
    ):
        return f"there is no assistant turn to learn from in {' + '.join(columns)}; SFT needs {UNDERSTOOD}"
    if purpose == "rl" and not question(row).messages:
        return "there is no turn before the assistant's, so nothing to ask the model"
    return None


def _text_problem(value: Any, column: str) -> str | None:
    if isinstance(value, str) and column != "messages":
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and column == "answer":
        return None
    if column not in ("messages", "prompt", "completion"):
        return f"column {column!r} is {_shown(value)}, not a text"
    if not isinstance(value, list) or not value:
        wanted = "a list of messages" if column == "messages" else "a text or a list of messages"
        return f"column {column!r} is {_shown(value)}, not {wanted}"
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"{column}[{index}] is {_shown(message)}, not an object with role and content"
        problem = calls_problem(message)
        if problem:
            return f"{column}[{index}].{problem}"
        is_text = isinstance(message.get("content"), str)
        if not is_text and not (message.get("content") is None and message.get("tool_calls")):
            return f"{column}[{index}].content is {_shown(message.get('content'))}, not a text"
    return None


def _shown(value: Any) -> str:
    try:
        text = printable(json.dumps(value, ensure_ascii=False, default=str))
    except (ValueError, TypeError, RecursionError):
        text = shown_value(value)
    return (
        f"{text[:60]}... ({type(value).__name__})"
        if len(text) > 60
        else f"{text} ({type(value).__name__})"
    )


def _names(row: Row) -> str:
    """The columns of a row for a message."""
    return shortened(printable(str(sorted(map(str, row)))), 300)


def surrogate_problem(value: Any, name: str) -> str | None:
    """Where a text of a nested value has a surrogate without its pair, which no tokenizer encodes;
    None if none has.
    """
    if isinstance(value, str):
        match = None if value.isascii() else _SURROGATE.search(value)
        return (
            match
            and f"{name} has half of a surrogate pair at character {match.start() + 1}, which is no text; remove it"
        )
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return next(
        filter(None, (surrogate_problem(part, f"{name}[{key}]") for key, part in inner)), None
    )


def _turns(value: Any, role: str) -> list[Message]:
    """A text as one turn of `role`; a list of messages as it is."""
    return (
        [clean_message(message) for message in value]
        if isinstance(value, list)
        else [{"role": role, "content": str(value)}]
    )


def _before_last_answer(messages: list[Message]) -> list[Message]:
    last = messages[-1]["role"] == "assistant"
    return messages[:-1] if last else messages


def _reader(path: Path, key: str) -> Callable[[Path], Iterator[Numbered]]:
    if path.is_dir():
        return _read_directory
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ConfigError(f"{key}: {shown_path(path)} ends in {path.suffix!r}; give {_SUFFIXES}")
    return readers[path.suffix]


def _read_jsonl(path: Path) -> Iterator[Numbered]:
    shown = shown_path(path)  # takes longer than parsing a short line
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                place = f"{shown}:{number}"
                yield place, _object(_parse(line, place), place), line.strip()


def _read_json(path: Path) -> Iterator[Numbered]:
    rows = _parse(path.read_bytes(), shown_path(path))
    if not isinstance(rows, list):
        raise ConfigError(
            f"{shown_path(path)}: holds {_shown(rows)}, not a list of objects; one object per line"
            f" is a .jsonl file"
        )
    shown = shown_path(path)
    for number, row in enumerate(rows):
        place = f"{shown} row {number}"
        yield place, _object(row, place), _content(row)


def _parse(data: bytes, place: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{place}: not UTF-8 text at byte {error.start + 1}: {error.reason}"
        ) from error
    except json.JSONDecodeError as error:
        at = (
            f"column {error.colno}"
            if error.lineno == 1
            else f"line {error.lineno} column {error.colno}"
        )
        near = error.doc[max(error.pos - 20, 0) : error.pos + 20]
        raise ConfigError(f"{place}: not valid JSON at {at}: {error.msg}, near {near!r}") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # an integer of thousands of digits, or deep nesting
        reason = (
            "too deeply nested" if isinstance(error, RecursionError) else "a number is too long"
        )
        raise ConfigError(f"{place}: not readable as JSON: {reason}") from error


def _object(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(
            f"{place}: {_shown(value)} is not an object with columns. Understood: {UNDERSTOOD}"
        )
    return value


def _read_parquet(path: Path) -> Iterator[Numbered]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            batches = file.iter_batches()
            yield from _batch_rows(batches, shown_path(path))
    except (pyarrow.ArrowException, *_ARROW_ERRORS) as error:
        raise ConfigError(
            f"{shown_path(path)}: not a parquet file: {_first_line(error)}"
        ) from error


def _read_directory(path: Path) -> Iterator[Numbered]:
    """What `datasets.save_to_disk` writes (Arrow streams listed in state.json), or parquet files in
    order of name.
    """
    if (path / "dataset_dict.json").exists():
        splits = _listed(path / "dataset_dict.json", "splits")
        raise ConfigError(
            f"{shown_path(path)} holds several splits; name one: "
            + ", ".join(shown_path(path / split) for split in splits)
        )
    if (path / "state.json").exists():
        for file in _listed(path / "state.json", "_data_files"):
            yield from _read_arrow(path / file)
        return
    files = sorted(path.glob("*.parquet"))
    if not files:
        raise ConfigError(
            f"{shown_path(path)} is a directory without state.json (datasets.save_to_disk) or"
            f" parquet files"
        )
    for file in files:
        yield from _read_parquet(file)


def _listed(path: Path, key: str) -> list[str]:
    """Names of files or folders in the same directory that a JSON file of `datasets` lists under
    `key`.
    """
    content = _parse(path.read_bytes(), shown_path(path))
    entries = content.get(key) if isinstance(content, dict) else None
    names = (
        [entry.get("filename") if isinstance(entry, dict) else entry for entry in entries or ()]
        if isinstance(entries, list)
        else [None]
    )
    if not all(
        isinstance(name, str) and name == Path(name).name and name.isprintable() for name in names
    ):
        raise ConfigError(
            f"{shown_path(path)}: {key} is not a list of names in this directory; write it with"
            f" datasets.save_to_disk"
        )
    return [str(name) for name in names][:_MAX_LISTED]


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return shortened(printable(lines[0] if lines else type(error).__name__), 300)


def _read_arrow(path: Path) -> Iterator[Numbered]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as batches:
            yield from _batch_rows(batches, shown_path(path))
    except (pyarrow.ArrowException, *_ARROW_ERRORS) as error:
        raise ConfigError(
            f"{shown_path(path)}: not an Arrow stream: {_first_line(error)}"
        ) from error


def _batch_rows(batches: Any, shown: str) -> Iterator[Numbered]:
    number = 0
    for batch in batches:
        batch.validate(
            full=True
        )  # a damaged file could make the conversion read outside of its buffers
        for row in batch.to_pylist():
            clean = {key: without_nulls(value) for key, value in row.items()}
            yield f"{shown} row {number}", clean, _content(clean)
            number += 1


def _content(row: Any) -> bytes:
    """A row of a file that has no lines, as bytes that depend on its values only."""
    return json.dumps(row, sort_keys=True, default=str).encode()
