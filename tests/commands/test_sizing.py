"""The table of docs/sizing.md is what `nemo-like plan` recommends."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from nemo_like.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "sizing.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and "GB" in line
]
EXTRA = {
    "all weights": (),
    "LoRA": ("policy.lora.enabled=true",),
    "LoRA, `nf4`": ("policy.lora.enabled=true", "policy.lora.quantization=nf4"),
}


def table_row(
    model: str, training: str, gpus: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """Plan the lengths of the page, and return the cells."""
    lengths = folder / "rows.txt"
    generator = random.Random(0)
    values = [min(int(generator.lognormvariate(6.8, 0.9)) + 1, 8192) for _ in range(2048)]
    lengths.write_text("\n".join(map(str, values)))
    number, _, memory = gpus.removesuffix(" GB").partition(" x ")
    options = ["--lengths", str(lengths), "--gpus", number, "--memory-gb", memory, "--json", "-"]
    keys = [f"policy.model_name={model}", *EXTRA[training]]
    assert main(["plan", *options, *keys]) == 0
    record = json.loads(capsys.readouterr().out)
    best = dict(text.split("=") for text in record["search"][0]["overrides"].split())
    sizes = [best[f"parallel.{axis}"] for axis in ("tensor", "context", "pipeline")]
    speed = record["rows"]["num_tokens"] / 4 / record["seconds_per_step"]
    return [
        *(model, training, gpus),
        best["policy.activation_checkpointing"],
        " x ".join(sizes),
        f"{int(best['policy.sequence_packing.train_mb_tokens']):,}",
        f"{record['search'][0]['peak_gib']:.0f}",
        # The assumed rates are of H100.
        f"{round(speed, -2):,.0f}" if memory == "80" else "-",
    ]


@pytest.mark.parametrize(
    "row",
    [
        row
        if row[2] == "8 x 80 GB" and row[0] == "8b"
        else pytest.param(row, marks=pytest.mark.exhaustive)
        for row in ROWS
    ],
    ids=lambda row: ", ".join(row[:3]),
)
def test_the_row_is_recommended(
    row: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, training, gpus, *_ = row
    assert table_row(model, training, gpus, tmp_path, capsys) == row
