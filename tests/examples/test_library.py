"""The programs that use the package as a library run, and check their own results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def output_of(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, f"examples/library/{program}", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pack_lengths_compares_packers_and_plans() -> None:
    text = output_of("pack_lengths.py", "--rows", "300", "--capacity", "4096", "--ranks", "4")
    bins = {line.split()[0]: line for line in text.splitlines() if " bins, " in line}
    assert {"best_fit_decreasing", "concatenative", "balanced"} <= bins.keys()

    def slowest(name: str) -> float:
        (line,) = [line for line in text.splitlines() if line.strip().startswith(name)]
        return float(line.split("slowest rank")[1].split()[0])

    assert 1.0 <= slowest("packed and balanced") <= slowest("bins assigned round-robin")


def test_shard_batch_restores_the_order() -> None:
    text = output_of("shard_batch.py", "--rows", "20", "--ranks", "3")
    assert text.count("microbatches of up to") == 3
    assert "back in the order of the input" in text
