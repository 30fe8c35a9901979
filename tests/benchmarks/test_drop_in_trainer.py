"""The benchmark of Trainers with a token budget: equal work, and what it reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.drop_in_trainer import VARIANTS, Run, main, summarize
from tests.torch_data.adapter_ranks import save_model


@pytest.mark.filterwarnings("ignore")
def test_all_variants_train_the_same_rows_within_the_limit(tmp_path: Path) -> None:
    save_model(tmp_path / "model", num_layers=2)
    rows = [{"question": "the quick " * (1 + i % 5), "answer": "brown fox"} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "lengths.csv").write_text("time,context,answer\na,200,9\n")
    options = {
        "--model": tmp_path / "model",
        "--data": tmp_path / "rows.jsonl",
        "--lengths": tmp_path / "lengths.csv",
        "--json": tmp_path / "result.json",
        "--layers": 1,
        "--rows": 16,
        "--long-rows": 8,
        "--validation-rows": 4,
        "--max-length": 100,
        "--max-tokens": 256,
        "--rounds": 1,
    }
    assert main([str(part) for pair in options.items() for part in pair]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    for name, num_rows in (("GSM8K", 16), ("long tail", 8)):
        lengths = result[name]["lengths"]
        assert len(lengths) == num_rows
        records = result[name]["variants"]
        assert [record["variant"] for record in records] == list(VARIANTS)
        for record in records:
            assert record["tokens"] == sum(lengths) <= record["positions"]
            assert record["largest"] <= 256
            assert record["steps"] <= record["microbatches"]
        assert records[3]["padding"] == 0
        losses = [record["validation_loss"] for record in records]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=0.01)
    # A quarter of the rows has the length of the file, cut to the limit of a row.
    assert 1 <= result["long tail"]["lengths"].count(100) <= 3


def test_ratios_are_those_of_all_rounds() -> None:
    def run(variant: str, seconds: float) -> Run:
        return Run(variant, 100, 200, 2, 100, 1, seconds, 2 * seconds, 1.0)

    seconds = {"random": 4.0, "group_by_length": 2.0, "online padded": 1.0, "online packed": 0.5}
    runs = [run(name, value * scale) for scale in (1, 3) for name, value in seconds.items()]
    padded = summarize(runs)[2]
    assert padded["padding"] == 0.5
    assert padded["tokens_per_s"] == 200 / 4.0
    assert padded["tokens_per_cpu_s"] == 200 / 8.0
    assert padded["tokens_per_s_over_random"] == 4.0
    assert padded["tokens_per_cpu_s_over_group_by_length"] == 2.0
