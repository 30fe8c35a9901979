"""Rows encoded ahead: the same with and without processes, once each, and nothing left behind when
something fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.data import encoded_rows
from nemo_like.data.encoded_rows import CACHE_VARIABLE, EncodedRows, cache_directory
from nemo_like.data.formats import PROMPT_ROWS
from nemo_like.data.rows import Rows, load_rows
from tests.data.echo_encoding import encode

_REPOSITORY = Path(__file__).parents[2]


def rows_of(folder: Path, texts: Sequence[str]) -> Rows:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return load_rows(path, PROMPT_ROWS)


def opened(rows: Rows, num_processes: int | None) -> EncodedRows:
    return EncodedRows(rows, encode, num_processes=num_processes)


def children() -> set[int]:
    """Return the pids of this process's children, by the parent pid in `/proc/*/stat`.

    A listing by thread (`task/*/children`) would race with threads that end.
    """
    pids = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            pids.add(int(path.parent.name))
    return pids


@pytest.mark.parametrize("num_processes", [0, 2, None])
def test_rows_are_those_of_one_process_and_encoded_once(
    tmp_path: Path, num_processes: int | None
) -> None:
    texts = [f"row {index} ä€" * (1 + index % 5) if index % 7 else "drop" for index in range(300)]
    encoded = opened(rows_of(tmp_path, texts), num_processes)
    before = children()
    first = encoded.fetch([5, 0, 299, 5])
    assert [row is None for row in first] == [False, True, False, False]
    advanced: list[int] = []
    encoded.encode_ahead(np.arange(300)[::-1], advanced.append)
    assert sum(advanced) == 297
    assert encoded.num_encoded == 300
    assert children() == before
    assert np.array_equal(encoded.is_kept, [text != "drop" for text in texts])
    for index, row in enumerate(encoded.fetch(range(300))):
        expected = encode({"prompt": texts[index]})
        if expected is None:
            assert row is None
            continue
        assert row is not None
        assert np.array_equal(row.input_ids, expected.input_ids)
        assert np.array_equal(row.token_mask, expected.token_mask)
        assert (row.input_ids.dtype, row.token_mask.dtype) == (np.int32, np.uint8)


def test_encoded_rows_are_in_an_unnamed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    texts = [f"row {index}" * (index % 4 + 1) for index in range(50)]
    encoded = opened(rows_of(tmp_path, texts), 0)
    encoded.encode_ahead(np.arange(50))
    for text, row in zip(texts, encoded.fetch(range(50)), strict=True):
        assert row is not None and "".join(map(chr, row.input_ids)) == text
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"], "the file has no name"


def test_rows_whose_encoding_took_long_are_found_by_a_later_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    rows = rows_of(tmp_path, ["slow"] * 140 + ["drop", "fine"])

    def encoded_by_a_run() -> EncodedRows:
        encoded = EncodedRows(rows, encode, num_processes=None, settings=lambda: "a")
        encoded.encode_ahead(np.arange(len(rows)))
        return encoded

    first = encoded_by_a_run()
    kept = sorted(path.suffix for path in cache_directory().iterdir())
    assert kept == [".npz", ".tokens"]
    monkeypatch.setenv("TEST_ENCODED", str(tmp_path / "encoded"))
    second = encoded_by_a_run()
    num_encoded = len((tmp_path / "encoded").read_text())
    assert num_encoded < 70, "only the trial of one second is encoded again"
    for own, other in zip(first.fetch(range(142)), second.fetch(range(142)), strict=True):
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            assert np.array_equal(own.input_ids, other.input_ids)
            assert np.array_equal(own.token_mask, other.token_mask)
    assert second.num_kept == 141


@pytest.mark.parametrize("damage", ["zeros", "other ids", "half", "longer", "index", "none"])
def test_rows_of_a_damaged_cache_are_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(encoded_rows, "_LONG_S", 0.0)
    texts = [f"row {index}" for index in range(40)]
    rows = rows_of(tmp_path, texts)

    def texts_of_a_run() -> list[str]:
        encoded = EncodedRows(rows, encode, num_processes=1, settings=lambda: "a")
        encoded.encode_ahead(np.arange(len(rows)))
        found = encoded.fetch(range(len(rows)))
        return ["".join(map(chr, row.input_ids)) for row in found if row is not None]

    assert texts_of_a_run() == texts
    index, data = sorted(cache_directory().iterdir())
    content = data.read_bytes()
    damaged = {
        "zeros": bytes(len(content)),
        "other ids": b"\xff" * len(content),
        "half": content[: len(content) // 2],
        "longer": content + b"x",
    }
    data.write_bytes(damaged.get(damage, content))
    if damage == "index":
        index.write_bytes(index.read_bytes()[:100])
    assert texts_of_a_run() == texts
    assert (str(data) in caplog.text) == (damage != "none")
    assert data.read_bytes() == content, "the cache is repaired"


@pytest.mark.parametrize("num_processes", [0, 1])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bad", r"rows\.jsonl:41: this row is bad"),
        ("type", r"rows\.jsonl:41: the row cannot be encoded \(TypeError: TextEnc"),
    ],
)
def test_a_bad_row_is_reported_with_its_line_before_it_is_reached(
    tmp_path: Path, num_processes: int, text: str, message: str
) -> None:
    encoded = opened(rows_of(tmp_path, ["fine"] * 40 + [text]), num_processes)
    before = children()
    with pytest.raises(ConfigError, match=message):
        encoded.encode_ahead(np.arange(41))
    with pytest.raises(ConfigError, match=message):
        encoded.fetch([40])
    assert children() == before


@pytest.mark.parametrize("num_processes", [0, 1])
def test_the_first_bad_rows_are_listed_together(tmp_path: Path, num_processes: int) -> None:
    texts = ["fine"] * 60
    for index in (5, 40, 12):
        texts[index] = "bad"
    encoded = opened(rows_of(tmp_path, texts), num_processes)
    with pytest.raises(ConfigError, match="3 bad rows among 60 encoded") as error:
        encoded.encode_ahead(np.arange(60))
    listed = [line for line in str(error.value).split() if "rows.jsonl:" in line]
    assert [line.strip(",:").rpartition(":")[2] for line in listed] == ["6", "13", "41"]
    encoded = opened(rows_of(tmp_path, ["bad"] * 1000), 0)
    with pytest.raises(ConfigError, match="32 bad rows among 32 encoded") as error:
        encoded.encode_ahead(np.arange(1000))
    assert str(error.value).count("rows.jsonl:") == 20


def test_only_requested_rows_are_encoded(tmp_path: Path) -> None:
    encoded = opened(rows_of(tmp_path, ["fine", "bad", "fine"]), 0)
    encoded.encode_ahead(np.array([0, 2]))
    assert encoded.num_encoded == 2


def test_a_process_that_ends_is_one_clear_error(tmp_path: Path) -> None:
    encoded = opened(rows_of(tmp_path, ["fine"] * 20 + ["crash"] + ["fine"] * 20), 1)
    with pytest.raises(ConfigError, match=r"a process that encodes .*data\.num_encoding_workers=0"):
        encoded.encode_ahead(np.arange(41))


def test_processes_end_when_the_driver_is_killed(tmp_path: Path) -> None:
    script = f"""
import threading, time, numpy as np
from pathlib import Path
from tests.data.test_encoded_rows import opened, rows_of, children
encoded = opened(rows_of(Path({str(tmp_path)!r}), ["slow"] * 20000), 2)
def report():
    while len(children()) < 2:
        time.sleep(0.1)
    print(*children(), flush=True)
threading.Thread(target=report, daemon=True).start()
encoded.encode_ahead(np.arange(20000))
"""
    driver = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=_REPOSITORY
    )
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 30
    while any(_is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "an encoding process outlived the driver"
        time.sleep(0.1)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
