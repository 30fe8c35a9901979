"""The command line that the report passes to the process of a part."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.gpu.rows import file_lengths, lognormal_lengths
from benchmarks.gpu.sizes import SIZES, Size


@dataclass(frozen=True, kw_only=True)
class PartArguments:
    """What a part measures on."""

    out: Path
    """Folder of the results."""
    work: Path
    """Folder of models and checkpoints; all parts share it."""
    device: str
    size: Size
    seconds: float
    """Time budget of the part."""
    resume: bool = False
    """Keep the recorded cells and measure the others."""
    lengths: Path | None = None
    columns: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    """Measure only cells whose name has one of these texts; empty is all."""

    @property
    def is_cuda(self) -> bool:
        """True if the part runs on a GPU."""
        return self.device.startswith("cuda")

    def draw_lengths(self, num_tokens: int, longest: int) -> np.ndarray:
        """Return row lengths, int64 [B], with at least `num_tokens` in total."""
        if self.lengths is not None:
            return file_lengths(self.lengths, self.columns, num_tokens, longest=longest)
        return lognormal_lengths(num_tokens, mean=self.size.mean_length, longest=longest)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that the report and its parts share."""
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--device", default="cuda:0", help="cuda:0 (default) or cpu")
    parser.add_argument("--size", choices=tuple(SIZES), default="full")
    parser.add_argument("--lengths", type=Path, help="CSV file of row lengths; default lognormal")
    parser.add_argument(
        "--cells", default="", help="measure only cells whose name has one of these texts, by ;"
    )
    parser.add_argument("--columns", default="", help="columns of --lengths, added up, by comma")


def part_arguments(parsed: argparse.Namespace) -> PartArguments:
    """Return the arguments of a part from parsed options."""
    columns: Sequence[str] = parsed.columns.split(",") if parsed.columns else ()
    return PartArguments(
        out=parsed.out,
        work=parsed.work,
        device=parsed.device,
        size=SIZES[parsed.size],
        seconds=parsed.seconds,
        resume=parsed.resume,
        lengths=parsed.lengths,
        columns=tuple(columns),
        cells=tuple(parsed.cells.split(";")) if parsed.cells else (),
    )
