"""Arguments of `nemo-like export` and `nemo-like convert`, which convert model files.

The commands themselves are imported when they run: they need torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

COMMANDS = ("export", "convert")


def add_commands(commands: Any) -> None:
    """Add both commands to the parser of `nemo-like`."""
    export = commands.add_parser(
        "export",
        help="write a checkpoint of a run, of any engine and layout, as a Hugging Face model",
    )
    export.is_intermixed = True
    export.add_argument(
        "source",
        type=Path,
        metavar="RUN",
        help="a run directory (its latest checkpoint) or a step folder",
    )
    export.add_argument(
        "--step",
        metavar="N",
        help="the step of a run directory to export, or `best` (checkpointing.keep_best)",
    )
    export.add_argument(
        "--ema", action="store_true", help="export the averaged weights (policy.ema)"
    )
    export.add_argument(
        "--adapter",
        action="store_true",
        help="write the LoRA adapter alone, in the format of PEFT, and not the merged model",
    )
    export.add_argument("--out", required=True, type=Path, metavar="DIR")
    export.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="keys of the run's config to change"
    )
    convert = commands.add_parser(
        "convert", help="turn a GGUF file into a Hugging Face model directory"
    )
    convert.add_argument("source", type=Path, metavar="FILE.gguf")
    convert.add_argument("--out", required=True, type=Path, metavar="DIR")


def run(arguments: argparse.Namespace) -> str:
    """Run the command and return its message. Raises ConfigError for wrong input."""
    if arguments.command == "convert":
        from nemo_like.policy.checkpoint.hf_reader import convert_gguf

        return f"wrote {convert_gguf(arguments.source, arguments.out)}"
    from nemo_like.commands.export import export_checkpoint

    step_folder = export_checkpoint(
        arguments.source,
        arguments.out,
        arguments.overrides,
        arguments.step,
        ema=arguments.ema,
        adapter_only=arguments.adapter,
    )
    return f"wrote {arguments.out} from {step_folder}"
