"""The command line `nemo-like COMMAND`; `nemo_like.commands.arguments` lists the commands.

Exit codes: 0 done, 1 the run failed, 2 the input is wrong, 75 the run was stopped by SIGTERM,
SIGHUP or `cluster.time_limit` and can be resumed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_like import __version__
from nemo_like.commands.arguments import COMMANDS, REPLACED_OPTIONS, CommandParser
from nemo_like.commands.failures import FAILED, WRONG_INPUT, report_failure, say_error
from nemo_like.console import lasting_console

_EPILOG = """examples:
  nemo-like validate --config examples/configs/demo_grpo.yaml
  nemo-like sft --config examples/configs/demo_sft.yaml policy.optimizer.lr=1e-3
  nemo-like grpo --config examples/configs/demo_grpo.yaml policy.optimizer.lr=1e-6
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="nemo-like",
        description="Post-training of language models on a Ray cluster.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nemo-like {__version__}")
    parsers = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=CommandParser
    )
    for command in COMMANDS:
        command_parser = parsers.add_parser(
            command.name,
            help=command.summary,
            description=command.summary,
            epilog=command.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(command_parser)
        command_parser.set_defaults(run=command.run)
    return parser


@lasting_console(stdout=False)
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Every user error is one message, no traceback.

    Without `argv` the arguments are those of this process, which ends with the command.
    """
    _log_to_console()
    # argparse does not accept options and trailing positionals in every order; `parse_known_args`
    # returns the rest, and the message for it names the form of an override.
    arguments, unknown = build_parser().parse_known_args(argv)
    if unknown:
        option = unknown[0].partition("=")[0]
        fix = "overrides are written KEY=VALUE, see nemo-like --help"
        if arguments.command in ("generate", "chat", "eval") and option in REPLACED_OPTIONS:
            fix = f"write {REPLACED_OPTIONS[option]}"
        say_error(f"error: unknown argument {unknown[0]!r}; {fix}")
        return WRONG_INPUT
    # A process that ends with the command may be changed for good, e.g. import transformers without
    # torch.
    arguments.owns_process = argv is None
    try:
        Path.cwd()
    except FileNotFoundError:
        say_error("error: the working directory was removed; change to another one with cd")
        return WRONG_INPUT
    try:
        code = arguments.run(arguments)
        # Output that is still in the buffer must fail here and not while the interpreter exits.
        sys.stdout.flush()
        return code
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (one message for each)
        if isinstance(error, BrokenPipeError) and _is_stdout_closed():
            return FAILED
        return report_failure(error)


def _is_stdout_closed() -> bool:
    """Return whether the reader of stdout, such as `head`, has ended."""
    # A pipe without a reader is in the error state; other broken pipes belong to workers.
    poller = select.poll()
    poller.register(sys.stdout.fileno(), select.POLLOUT)
    return any(events & select.POLLERR for _, events in poller.poll(0))


def _log_to_console() -> None:
    """Send warnings to the console; a run adds a handler for details, `logs/driver.log`."""
    console = logging.StreamHandler()
    console.setLevel(os.environ.get("NEMO_LIKE_LOG_LEVEL", "WARNING"))
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", handlers=[console]
    )
    logging.getLogger("nemo_like").setLevel(logging.INFO)
