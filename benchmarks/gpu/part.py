"""The process of one part: `python -m benchmarks.gpu.part B1 --out DIR ...`, started by the report.

Exit code 3: the device was lost, and a new process with --resume can measure the other cells.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.arguments import add_arguments, part_arguments
from benchmarks.gpu.cells import Budget, DeviceLostError, Recorder, run_cells
from benchmarks.gpu.machine import describe

MODULES = {
    "A": ("benchmarks.gpu.correctness", "correctness"),
    "S": ("benchmarks.gpu.short", "short measurement"),
    "S3": ("benchmarks.gpu.short", "short measurement with FlashAttention 3"),
    "B1": ("benchmarks.gpu.step_matrix", "training steps by model, budget and checkpointing"),
    "B2": ("benchmarks.gpu.options", "options one by one, profile, loops of transformers"),
    "C": ("benchmarks.gpu.movement", "transfers, checkpoints, generation, a GRPO step"),
    "D": ("benchmarks.gpu.experts", "Megatron-Core and mixture-of-experts layers"),
}
"""Part -> title, and module with `make_cells(arguments) -> (cells, free)`."""

DEVICE_LOST = 3


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=tuple(MODULES))
    parser.add_argument("--seconds", type=float, required=True, help="time budget")
    parser.add_argument("--work", type=Path, required=True, help="folder of models")
    parser.add_argument("--resume", action="store_true")
    add_arguments(parser)
    parsed = parser.parse_args(argv)
    arguments = part_arguments(parsed)
    # Before the imports, which count as time of the part.
    budget = Budget(arguments.seconds)
    module, title = MODULES[parsed.part]
    header = {
        "part": parsed.part,
        "title": title,
        "size": arguments.size.name,
        "lengths": str(arguments.lengths or "lognormal"),
        "machine": describe(arguments.device),
    }
    path = arguments.out / f"{parsed.part}.json"
    recorder = Recorder(path, header, resume=arguments.resume)
    make = "make_fa3_cells" if parsed.part == "S3" else "make_cells"
    cells, free = getattr(importlib.import_module(module), make)(arguments)
    wanted = arguments.cells or ("",)
    cells = (cell for cell in cells if any(text in cell.name for text in wanted))
    try:
        run_cells(recorder, cells, budget, free=free)
    except DeviceLostError as error:
        print(f"the device is lost: {error}", file=sys.stderr)
        return DEVICE_LOST
    free()
    recorder.finish(seconds=round(arguments.seconds - budget.left, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
