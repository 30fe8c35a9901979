"""Model types in every layout: each cell of docs/models.md is what the check finds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from nemo_like.cli import main
from nemo_like.commands.check_model_type import COLUMNS, check_type, opened_pool
from nemo_like.commands.model_table import page, read_table, update_table
from tests.exhaustive import usually

TABLE = Path(__file__).parents[2] / "docs" / "models.json"
TYPES = read_table(TABLE)["types"]
USUAL = (
    "cohere2",
    "deepseek_v3",
    "gemma2",
    "glm4",
    "gpt_neox",
    "gpt_oss",
    "mixtral",
    "olmo2",
    "qwen3_next",
    "smollm3",
)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with opened_pool() as processes:
        yield processes


@pytest.mark.parametrize("model_type", usually(TYPES, *USUAL))
def test_a_type_does_as_in_the_table(model_type, pool):
    found = check_type(model_type, pool)
    assert _verdicts(found) == _verdicts(TYPES[model_type]), found


def _verdicts(cells: dict[str, str]) -> dict[str, str]:
    return {column: text.partition(":")[0] for column, text in cells.items()}


def test_the_table_has_every_column_of_every_type():
    for model_type, cells in TYPES.items():
        # Models without experts have no column of expert parallelism.
        columns = [column for column in COLUMNS if column != "ep 2" or column in cells]
        assert list(cells) == columns, model_type
    assert sum(cells.get("ep 2") == "yes" for cells in TYPES.values()) >= 8
    assert sum(cells["packed"] == cells["padded"] == "yes" for cells in TYPES.values()) >= 24


def test_the_page_is_made_of_the_table(tmp_path):
    assert TABLE.with_suffix(".md").read_text() == page(read_table(TABLE))
    results = {"b": {"packed": "yes", "tp 2": "no: it has no plan"}}
    update_table(tmp_path / "own.json", results, {"transformers": "5.0", "torch": "2.13"})
    update_table(
        tmp_path / "own.json", {"a": {"packed": "yes"}}, {"transformers": "5.1", "torch": "3"}
    )
    assert list(json.loads((tmp_path / "own.json").read_text())["types"]) == ["a", "b"]
    text = (tmp_path / "own.md").read_text()
    assert "transformers 5.1 and PyTorch 3" in text
    assert "| `b` | yes | no |\n" in text
    assert "* `b`: it has no plan (tp 2)\n" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--model", "llama0"),
            "--model llama0: the installed transformers has no model of this type",
        ),
        (("--model", "bert_japanese_x"), "no model of this type"),
        (("--model", "vit"), "no causal language model of this type"),
        ((), "needs --config FILE, or --model TYPE"),
    ],
)
def test_an_unknown_type_is_one_clear_message(arguments, message, capsys):
    assert main(["check", "parity", *arguments]) == 2
    assert message in capsys.readouterr().err
