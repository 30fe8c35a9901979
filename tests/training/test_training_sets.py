"""Training rows of several files: their order, locations and weights."""

from __future__ import annotations

import json
from pathlib import Path

from nemo_like.data.formats import SFT_ROWS
from nemo_like.data.rows import Rows, load_rows
from nemo_like.training.run_data import mixed_rows


def load(tmp_path: Path, name: str, num_rows: int) -> Rows:
    rows = [{"prompt": f"{name} {number}", "completion": "x"} for number in range(num_rows)]
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(path, SFT_ROWS)


def test_sets_follow_each_other(tmp_path: Path) -> None:
    sets = {name: load(tmp_path, name, size) for name, size in (("train", 3), ("code", 2))}
    rows = mixed_rows(sets, {"code": 0.25, "train": 0.75})
    assert [row["prompt"] for row in rows] == ["train 0", "train 1", "train 2", "code 0", "code 1"]
    assert rows.location(3).endswith("code.jsonl:1")
    assert rows.digests == (*sets["train"].digests, *sets["code"].digests)
    assert rows.digest(3) == sets["code"].digest(0)
    assert rows.mixture is not None
    assert (rows.mixture.sizes, rows.mixture.weights) == ((3, 2), (0.75, 0.25))
    by_size = mixed_rows(sets, {}).mixture
    assert by_size is not None
    assert by_size.weights == (3.0, 2.0)


def test_a_single_set_is_no_mixture(tmp_path: Path) -> None:
    rows = load(tmp_path, "train", 3)
    assert mixed_rows({"train": rows}, {}) is rows
