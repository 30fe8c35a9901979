"""What `nemo-like plan --memory-gb` proposes where the longest row does not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nemo_like.cli import main

LONGEST = 30_000
MODEL = ("policy.model_name=8b", "policy.train_global_batch_size=64")


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    """127 rows of 1,000 tokens and one of 30,000."""
    path = tmp_path / "lengths.txt"
    path.write_text("1000\n" * 127 + f"{LONGEST}\n")
    return path


def plan(capsys: pytest.CaptureFixture[str], lengths: Path, *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", "--lengths", str(lengths), "--json", "-", *MODEL, *options]) == 0
    return json.loads(capsys.readouterr().out)


def proposed(record: dict[str, Any]) -> list[str]:
    """The keys of the note."""
    (note,) = [each for each in record["notes"] if "does not fit" in each]
    assert f"{LONGEST:,} tokens" in note
    return re.findall(r"[a-z_.]+=[a-z0-9]+", note.partition(", use more GPUs")[0])


@pytest.mark.parametrize("options", [("cluster.gpus_per_node=8",), ("policy.lora.enabled=true",)])
def test_the_row_fits_with_the_proposed_keys(
    options: tuple[str, ...], lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--memory-gb", "80", *options)
    before = plan(capsys, lengths, *options)
    assert before["memory"]["recommended_max_tokens"] < LONGEST
    keys = proposed(before)
    # One GPU has no context parallelism.
    expected = ["parallel.context"] if "gpus" in options[2] else ["policy.activation_checkpointing"]
    assert [key.partition("=")[0] for key in keys] == expected
    after = plan(capsys, lengths, *options, *keys)
    assert after["memory"]["recommended_max_tokens"] >= LONGEST
    assert not any("does not fit" in note for note in after["notes"])


def test_rows_are_truncated_where_nothing_else_helps(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--memory-gb", "24", "cluster.gpus_per_node=8")
    keys = proposed(plan(capsys, lengths, *options))
    values = dict(key.split("=") for key in keys)
    limit = int(values["policy.max_total_sequence_length"])
    assert values["policy.oversize_rows"] == "truncate"
    # The row is truncated; 256 tokens more would not fit.
    record = plan(capsys, lengths, *options, *keys)
    assert record["rows"]["max"] == limit == record["memory"]["recommended_max_tokens"]
    longer = [key.replace(str(limit), str(limit + 256)) for key in keys]
    record = plan(capsys, lengths, *options, *longer)
    assert record["memory"]["recommended_max_tokens"] < record["rows"]["max"]


def test_weights_that_do_not_fit_have_no_remedy(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = plan(capsys, lengths, "--memory-gb", "8")
    (note,) = [each for each in record["notes"] if "does not fit" in each]
    assert note.endswith("use more GPUs, or policy.lora.enabled=true") and "set" not in note


def test_auto_takes_the_checkpointing_that_fits(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "policy.activation_checkpointing"
    modes = set()
    for memory_gb in ("24", "140", "200"):
        options = ("--memory-gb", memory_gb, "policy.lora.enabled=true")
        record = plan(capsys, lengths, *options, f"{key}=auto")
        mode = record["setting"]["activation_checkpointing"]
        modes.add(mode)
        # The budget is the longest row, rounded up; a faster mode does not fit.
        assert record["memory"]["peak_bytes"] <= record["memory"]["usable_bytes"] or mode == "full"
        faster = {"none": [], "selective": ["none"], "full": ["none", "selective"]}[mode]
        for other in faster:
            memory = plan(capsys, lengths, *options, f"{key}={other}")["memory"]
            assert memory["peak_bytes"] > memory["usable_bytes"]
    assert len(modes) > 1
