"""Rows that are kept in a file: the same rows as in memory, and no name in the directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.config.errors import ConfigError
from nemo_like.data import row_store
from nemo_like.data.datasets import PROMPT_ROWS
from nemo_like.data.row_loading import load_rows
from nemo_like.data.row_store import JoinedRows, RowStore

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), max_size=20)


def stored(rows: list[dict], limit: int) -> RowStore:
    store = RowStore()
    before = row_store.MAX_MEMORY_BYTES
    row_store.MAX_MEMORY_BYTES = limit
    try:
        for row in rows:
            store.append(row, 10)
    finally:
        row_store.MAX_MEMORY_BYTES = before
    return store


@settings(max_examples=50, deadline=None)
@given(ROWS, st.integers(0, 250))
def test_rows_are_read_back(rows: list[dict], limit: int) -> None:
    store = stored(rows, limit)
    assert store.is_in_file == (10 * len(rows) > limit)
    assert len(store) == len(rows)
    assert list(store) == rows
    assert list(reversed(store)) == rows[::-1]
    assert store[1:-1] == rows[1:-1]
    with pytest.raises(IndexError):
        store[len(rows)]


@given(st.lists(st.lists(st.integers(), max_size=4), max_size=5))
def test_joined_rows_are_those_of_the_parts(parts: list[list[int]]) -> None:
    rows = [[{"number": number} for number in part] for part in parts]
    joined = JoinedRows(rows)
    flat = [row for part in rows for row in part]
    assert (len(joined), list(joined), joined[1:]) == (len(flat), flat, flat[1:])
    with pytest.raises(IndexError):
        joined[len(flat)]


def test_a_large_file_is_not_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"{number} " * 50, "answer": number} for number in range(200)]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = load_rows(path, PROMPT_ROWS)
    monkeypatch.setattr(row_store, "MAX_MEMORY_BYTES", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    loaded = load_rows(path, PROMPT_ROWS)
    assert isinstance(loaded.rows, RowStore)
    assert loaded.rows.is_in_file
    assert list(loaded) == list(expected) == rows
    assert loaded.digests.tolist() == expected.digests.tolist()
    assert [each.name for each in tmp_path.iterdir()] == ["train.jsonl"]


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored([{"a": 1}], 0)
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with full.open("wb") as file:
        monkeypatch.setattr(store, "_file", file.fileno())
        with pytest.raises(ConfigError, match=r"rows cannot be kept in .*; set TMPDIR"):
            store.flush()
        # Closed by the block.
        monkeypatch.undo()
