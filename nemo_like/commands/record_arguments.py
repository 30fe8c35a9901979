"""Arguments of `nemo-like show` and `nemo-like replay`, which read the recorded rollouts of a run.

The commands themselves are imported when they run: they need NumPy, and `replay` needs torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nemo_like.commands.argument_parser import CommandParser

DEFAULT_ROWS = "0-9"
SORT_KEYS = ("reward", "length", "difference")
_SHOW = """examples:
  nemo-like show runs/demo_grpo --step 20
  nemo-like show runs/demo_grpo --step 20 --sort reward --rows 0-4
  nemo-like show runs/demo_grpo --step 20 --sort difference --rows 0 --tokens
"""
_REPLAY = """examples:
  nemo-like replay runs/demo_grpo --step 1
  nemo-like replay runs/demo_grpo --step 1 loss_fn.ratio_clip_max=0.28
  nemo-like replay runs/demo_grpo --step 1 policy.sequence_packing.algorithm=first_fit_decreasing
"""


def add_commands(commands: Any) -> None:
    """Add both commands to the parser of `nemo-like`."""
    text = "print the rollouts of one step of a GRPO run"
    _add_show(_add_command(commands, "show", text, _SHOW))
    text = (
        "repeat an optimizer step of a GRPO run from its record, also with another loss or packer,"
        " and compare loss and gradient norm"
    )
    _add_replay(_add_command(commands, "replay", text, _REPLAY))


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code. Raises ConfigError for wrong input."""
    if arguments.command == "show":
        from nemo_like.commands import show

        return show.run(arguments)
    from nemo_like.commands import replay

    return replay.run(arguments)


def _add_command(commands: Any, name: str, text: str, epilog: str) -> CommandParser:
    """Add a command that reads the rollout of one step of a run."""
    command = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--step", required=True, type=int, metavar="N", help="the step, counted from 1"
    )
    command.add_argument("source", type=Path, metavar="RUN", help="the directory of a GRPO run")
    return command


def _add_show(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--rows",
        default=DEFAULT_ROWS,
        metavar="ROWS",
        help=f"rows to print, counted from 0 after sorting, e.g. 0-3,8; default {DEFAULT_ROWS}",
    )
    command.add_argument(
        "--sort",
        choices=SORT_KEYS,
        help="largest first; `difference` is the max log-prob difference of a token between"
        " generator and training engine; default: in the order of the batch",
    )
    command.add_argument(
        "--tokens",
        action="store_true",
        help="decode the recorded token ids: special tokens and every trained span are visible",
    )


def _add_replay(command: CommandParser) -> None:
    command.is_intermixed = True
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="keys of the run's config to change on the second side of the comparison",
    )
