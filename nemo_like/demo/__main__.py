"""`nemo-like demo`: trains a tiny model on arithmetic from scratch, by SFT, then by GRPO, on Ray.

It writes under `runs/`, needs no network and no GPU, and prints the accuracies at the end. The
configs come from `examples/configs`, without `policy.parity_check`. The model and the data of
the example configs that `nemo-like init` writes come from `--prepare-only`. With `--vision` a
vision-language model learns to read digits, then to add them. `python -m nemo_like.demo` is the
same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from nemo_like.algorithms.registry import load_config
from nemo_like.cli import main
from nemo_like.commands.init import example_configs
from nemo_like.commands.train import train
from nemo_like.config.errors import shown_path
from nemo_like.config.schema import RunConfig
from nemo_like.console import lasting_console
from nemo_like.demo.task import build_demo
from nemo_like.training.run import RunResult

_ACCURACY = "validation/answer_mean"
_NUMBER_COLUMNS = ("steps", "accuracy before", "accuracy after", "packed", "padding", "seconds")


@lasting_console()
def run(arguments: argparse.Namespace) -> int:
    """Build the task, run both phases, print the table; `--prepare-only` stops after building."""
    transformers_logging.disable_progress_bar()
    started = time.monotonic()
    name = "demo_vision" if arguments.vision else "demo"
    folder = Path("runs") / name
    if arguments.vision:
        # Pillow is needed for images only.
        from nemo_like.demo.vision import build_vision_demo

        build_vision_demo(folder, arguments.seed)
        # Several threads would mostly wait for one another: the operations are tiny.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        print(f"built a tiny vision-language model and a data set of digits in {folder}")
    else:
        build_demo(folder, arguments.seed)
        print(f"built a tiny model and an arithmetic data set in {folder}")
    if arguments.prepare_only:
        return 0
    # A run refuses to overwrite results, and the demo is meant to be repeated.
    for run_name in (f"{name}_sft", f"{name}_grpo"):
        if (Path("runs") / run_name).exists():
            print(f"replacing the earlier runs/{run_name}")
            shutil.rmtree(Path("runs") / run_name)
    configs = {path.stem: path for path in example_configs()}
    # The tests of this package compare this model with transformers.
    overrides = [f"seed={arguments.seed}", "policy.parity_check=false"]
    sft_config = load_config("sft", configs[f"{name}_sft"], overrides)
    grpo_config = load_config("grpo", configs[f"{name}_grpo"], overrides)
    # GRPO starts from the model that the SFT run exports.
    sft = run_phase("sft", sft_config, arguments.seed, name)
    if isinstance(sft, int):
        return sft
    sft_done = time.monotonic()
    grpo = run_phase("grpo", grpo_config, arguments.seed, name)
    if isinstance(grpo, int):
        return grpo
    if arguments.vision:
        # Its own validation is on digits; the table has the sums.
        print(f"After SFT the model reads {sft.last[_ACCURACY]:.1%} of the held-out digits.")
        sft.first.pop(_ACCURACY, None)
    _report(sft, grpo, sft_done - started, time.monotonic() - sft_done)
    return 0


def run_phase(kind: str, config: RunConfig, seed: int, name: str = "demo") -> RunResult | int:
    """Run one phase of the demo `name`; after a failure print how to continue, and return the exit
    code.
    """
    result = train(config)
    if isinstance(result, int):
        kept = [f"the model and the data in runs/{name}"]
        if kind == "grpo":
            sft = f"runs/{name}_sft"
            kept.append(f"the finished SFT run in {sft}, with its model in {sft}/hf")
        latest = Path(config.output_dir, config.run_name, "latest")
        resume = " resume=true" if latest.exists() else ""
        if resume:
            kept.append(f"the last checkpoint of {latest.parent}")
        configs = shown_path(example_configs()[0].parent)
        command = f"nemo-like {kind} --config {configs}/{name}_{kind}.yaml seed={seed}{resume}"
        print(
            f"The demo ended in its {kind.upper()} phase. Kept: {'; '.join(kept)}."
            f" To continue, fix the error above and run: {command}",
            file=sys.stderr,
        )
    return result


def _report(sft: RunResult, grpo: RunResult, sft_s: float, grpo_s: float) -> None:
    table = Table(title="Results (held-out arithmetic, greedy answers)")
    table.add_column("phase")
    for heading in _NUMBER_COLUMNS:
        table.add_column(heading, justify="right")
    # GRPO starts from the weights after SFT, so its first validation is the result of SFT.
    before_grpo = grpo.first[_ACCURACY]
    after_grpo = grpo.last[_ACCURACY]
    for name, result, before, after, seconds in (
        ("sft", sft, sft.first.get(_ACCURACY), before_grpo, sft_s),
        ("grpo", grpo, before_grpo, after_grpo, grpo_s),
    ):
        table.add_row(
            name,
            str(result.step),
            "-" if before is None else f"{before:.1%}",
            f"{after:.1%}",
            f"{result.last['packing/utilization']:.1%}",
            f"{result.last['packing/padding_share']:.1%}",
            f"{seconds:.0f}",
        )
    console = Console()
    console.print(table)
    console.print(f"GRPO gained {100 * (after_grpo - before_grpo):+.1f} points of accuracy.")
    for result in (sft, grpo):
        console.print(
            f"{result.directory.path}: config.yaml, metrics.jsonl, tb/, rollouts/, checkpoints/;"
            f" model in {result.export}"
        )


if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
