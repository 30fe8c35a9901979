"""Selection of rows by their pass rate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.data.formats import PROMPT_ROWS
from nemo_like.data.rows import PassRateFilter, load_rows


def write(path: Path, rates: list) -> Path:
    rows = [{"prompt": str(index), "pass_rate": rate} for index, rate in enumerate(rates)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_between_two_pass_rates_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [0, 0.25, 0.5, "0.75", 1])
    chosen = PassRateFilter(minimum=0.25, maximum=0.75)
    rows = load_rows(path, PROMPT_ROWS, selection=chosen)
    assert [row["prompt"] for row in rows] == ["1", "2", "3"]
    assert rows.num_left_out == 2
    locations = [rows.location(index) for index in range(len(rows))]
    assert [location.rpartition(":")[2] for location in locations] == ["2", "3", "4"]
    # The digest is one of the kept rows.
    assert rows.digests != load_rows(path, PROMPT_ROWS).digests
    first = load_rows(path, PROMPT_ROWS, selection=chosen, max_rows=2)
    assert [row["prompt"] for row in first] == ["1"]


def test_a_column_of_another_name(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "a", "solved": 0.5}\n')
    rows = load_rows(
        path, PROMPT_ROWS, columns={"pass_rate": "solved"}, selection=PassRateFilter(minimum=0.5)
    )
    assert len(rows) == 1


@pytest.mark.parametrize("rate", [None, "often", 1.5, -0.1, True, "nan"])
def test_a_row_without_a_pass_rate_is_named(tmp_path: Path, rate: object) -> None:
    path = write(tmp_path / "train.jsonl", [0.5, rate])
    with pytest.raises(
        ConfigError, match=r"jsonl:2: column 'pass_rate' is .*, not a number from 0 to 1"
    ):
        load_rows(path, PROMPT_ROWS, selection=PassRateFilter(minimum=0.1))


def test_no_row_left_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [0, 1])
    with pytest.raises(ConfigError, match=r"has no rows with a pass rate in .*, of 2 rows"):
        load_rows(path, PROMPT_ROWS, selection=PassRateFilter(minimum=0.2, maximum=0.8))
