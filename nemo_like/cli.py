"""The command line: `nemo-like sft | grpo | dpo | rm | validate | explain | check | plan | config |
init | show | replay | generate | chat | eval | export | convert`.

Exit codes: 0 done, 1 the run failed, 2 the input is wrong, 75 the run was stopped by SIGTERM,
SIGHUP or `cluster.time_limit` and can be resumed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_like import __version__
from nemo_like.algorithms.registry import ALGORITHMS, load_any_config, load_config
from nemo_like.commands import (
    answer_arguments,
    config_reference,
    conversion_arguments,
    record_arguments,
)
from nemo_like.commands import plan as plan_command
from nemo_like.commands.argument_parser import CommandParser
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import RunConfig
from nemo_like.config.text import printable, shortened
from nemo_like.console import lasting_console
from nemo_like.run.files import WriteError

if TYPE_CHECKING:
    from nemo_like.training.run import RunResult

_MAX_REASON = 500
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
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=CommandParser
    )
    for kind, algorithm in ALGORITHMS.items():
        _add_config_command(commands, kind, algorithm.summary)
    text = "check a config, its data and its batches without starting Ray; takes seconds"
    _add_config_command(commands, "validate", text, has_kind=True)
    text = "checks of the system on a config's own model and layout"
    checks = commands.add_parser("check", help=text, description=text).add_subparsers(
        dest="what", required=True, metavar="WHAT"
    )
    text = "compare engine and parallel layout with plain transformers, on a tiny copy of the model"
    _add_config_command(checks, "parity", text, has_kind=True)
    text = "print the formula of a config's loss, an example, and keys without effect"
    explain = commands.add_parser("explain", help=text, description=text)
    topics = explain.add_subparsers(dest="what", required=True, metavar="WHAT")
    _add_config_command(topics, "loss", text, has_kind=True)
    text = "predict padding, rank balance, step time and memory from row lengths alone, in seconds"
    plan = commands.add_parser(
        "plan",
        help=text,
        description=text,
        epilog=plan_command.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan_command.add_arguments(plan)
    text = "print the keys of a config: types, defaults, bounds and descriptions"
    reference = commands.add_parser(
        "config",
        help=text,
        description=text,
        epilog=config_reference.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    config_reference.add_arguments(reference)
    text = "write the example configs into a directory"
    init = commands.add_parser("init", help=text, description=text)
    init.add_argument("directory", type=Path, metavar="DIR")
    record_arguments.add_commands(commands)
    answer_arguments.add_commands(commands)
    conversion_arguments.add_commands(commands)
    return parser


def _add_config_command(commands: Any, name: str, text: str, *, has_kind: bool = False) -> None:
    """Add a command that takes a config; with `has_kind` it has a flag for the job."""
    command = commands.add_parser(name, help=text, description=text)
    command.add_argument(
        "--config",
        required=True,
        type=Path,
        metavar="FILE",
        help="a YAML file; `nemo-like init DIR` writes examples",
    )
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="keys to set (a.b=1), add (+a.b=1) or put back (~a.b)",
    )
    if has_kind:
        command.add_argument(
            "--kind",
            choices=tuple(ALGORITHMS),
            help="the job of the config; default: detected from its keys",
        )


@lasting_console(stdout=False)
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Every user error is one message, no traceback.

    Without `argv` the arguments are those of this process, which ends with the command.
    """
    _log_to_console()
    # argparse accepts positionals in one place only; `parse_known_args` returns the others.
    arguments, unknown = build_parser().parse_known_args(argv)
    if hasattr(arguments, "overrides") and not any(text.startswith("-") for text in unknown):
        arguments.overrides += unknown
    elif unknown:
        say_error(
            f"error: unknown argument {unknown[0]!r}; overrides are written KEY=VALUE, see"
            " nemo-like --help"
        )
        return 2
    # A process that ends with the command may be changed for good, e.g. import transformers without
    # torch.
    arguments.owns_process = argv is None
    try:
        Path.cwd()
    except FileNotFoundError:
        say_error("error: the working directory was removed; change to another one with cd")
        return 2
    try:
        code = _run(arguments)
        # Output that is still in the buffer must fail here and not while the interpreter exits.
        sys.stdout.flush()
        return code
    except ConfigError as error:
        say_error(f"error: {error}")
        return 2
    except WriteError as error:
        say_error(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say_error("interrupted")
        return 130
    except Exception as error:  # noqa: BLE001 (a bug: one message, the traceback in a file)
        if isinstance(error, BrokenPipeError) and _is_stdout_closed():
            return 1
        say_error(_failure_text(error, "".join(traceback.format_exception(error)), None))
        return 1


def _is_stdout_closed() -> bool:
    """Return whether the reader of stdout, such as `head`, has ended."""
    # A pipe without a reader is in the error state; other broken pipes are those of workers.
    poller = select.poll()
    poller.register(sys.stdout.fileno(), select.POLLOUT)
    return any(events & select.POLLERR for _, events in poller.poll(0))


def _run(arguments: argparse.Namespace) -> int:
    # Imports are local to each command, so that `validate` does not wait for Ray and torch.
    if arguments.command in conversion_arguments.COMMANDS:
        say(conversion_arguments.run(arguments))
        return 0
    if arguments.command in answer_arguments.COMMANDS:
        return answer_arguments.run(arguments)
    if arguments.command == "plan":
        return plan_command.run(arguments)
    if arguments.command in ("show", "replay"):
        return record_arguments.run(arguments)
    if arguments.command == "config":
        say(
            config_reference.reference_text(
                arguments.kind, arguments.key, markdown=arguments.markdown
            )
        )
        return 0
    if arguments.command == "init":
        from nemo_like.commands.init import write_examples

        written = write_examples(arguments.directory)
        say(f"wrote {len(written)} example configs to {arguments.directory}")
        return 0
    if arguments.command == "check":
        from nemo_like.commands.check_parity import check_parity

        config = load_any_config(arguments.config, arguments.overrides, arguments.kind)
        parity = check_parity(config)
        say(str(parity))
        return 0 if parity.is_equal else 1
    if arguments.command == "explain":
        from nemo_like.commands.explain_loss import explain_loss

        say(explain_loss(load_any_config(arguments.config, arguments.overrides, arguments.kind)))
        return 0
    if arguments.command == "validate":
        from nemo_like.commands.validate import validate
        from nemo_like.run.progress import Progress

        config = load_any_config(arguments.config, arguments.overrides, arguments.kind)
        report = validate(config, without_torch=arguments.owns_process)
        report.show(Progress())
        return 2 if report.problems else 0
    return _train(load_config(arguments.command, arguments.config, arguments.overrides))


def _train(config: RunConfig) -> int:
    result = train(config)
    return result if isinstance(result, int) else 0


@lasting_console()
def train(config: RunConfig) -> RunResult | int:
    """Run the job of a config; return the result, or the exit code after a failure.

    The message of a failure is printed. Raises ConfigError for wrong input.
    """
    from nemo_like.distributed.errors import ClusterError, WorkerError, WorkerFailure
    from nemo_like.environments.reward import RewardError
    from nemo_like.policy.optim import NonFiniteError
    from nemo_like.run.checkpoint import CheckpointError
    from nemo_like.training.stopping import EXIT_INTERRUPTED, RunStopped, stop_requests

    try:
        with stop_requests(config):
            run = ALGORITHMS[config.kind].import_run()
            return run(config)
    except RunStopped as stopped:
        say_error(str(stopped))
        return stopped.exit_code
    except KeyboardInterrupt:
        say_error(f"interrupted. {_how_to_continue(config)}")
        return EXIT_INTERRUPTED
    except WorkerError as error:
        if isinstance(error.cause, (ConfigError, RewardError)):
            raise ConfigError(str(error.cause)) from error
        if isinstance(error.cause, NonFiniteError):
            say_error(f"error: {error.cause}. {_how_to_continue(config)}")
            return 1
        if isinstance(error.cause, (WriteError, CheckpointError)):
            say_error(f"error: {error.cause}")
            return 1
        place = _write_traceback(error.traceback_text, _driver_log(config))
        say_error(
            f"error: {shortened(str(error).strip(), _MAX_REASON)}. The traceback is in {place}"
        )
        return 1
    except (ClusterError, RewardError) as error:
        raise ConfigError(str(error)) from error
    except WorkerFailure as error:
        say_error(f"error: {error} {_how_to_continue(config)}")
        for note in getattr(error, "__notes__", ()):
            say_error(note)
        return 1
    except NonFiniteError as error:
        say_error(f"error: {error}. {_how_to_continue(config)}")
        return 1
    except CheckpointError as error:
        say_error(f"error: {error}")
        for note in getattr(error, "__notes__", ()):
            say_error(note)
        return 1
    except (ConfigError, WriteError):
        raise
    except Exception as error:  # noqa: BLE001 (a bug: the traceback goes to the run's log)
        say_error(
            _failure_text(error, "".join(traceback.format_exception(error)), _driver_log(config))
        )
        return 1


def say(text: str) -> None:
    """Print one message, with control characters escaped.

    Text of files, models and users must not control the terminal.
    """
    print(printable(text, sys.stdout.encoding or "utf-8"))


def say_error(text: str) -> None:
    """Print one message on stderr, escaped as by `say`."""
    print(printable(text, sys.stderr.encoding or "utf-8"), file=sys.stderr)


def _failure_text(error: BaseException, traceback_text: str, log: Path | None) -> str:
    """Return the message for an unexpected exception, after writing its traceback.

    The traceback goes to `log`, or to a new file if that cannot be written.
    """
    lines = str(error).strip().splitlines()
    reason = type(error).__name__
    if lines:
        reason += f": {shortened(lines[0], _MAX_REASON)}"
    return f"error: {reason}. The traceback is in {_write_traceback(traceback_text, log)}"


def _write_traceback(text: str, log: Path | None) -> str:
    """Append the traceback to `log`, or write it to a new temporary file; return the path."""
    data = f"\n{text}\n".encode("utf-8", "backslashreplace")
    if log is not None:
        try:
            with log.open("ab") as file:
                file.write(data)
            return str(log)
        except OSError:  # the run's directory is gone or full
            pass
    with tempfile.NamedTemporaryFile(
        "wb", prefix="nemo_like_", suffix=".log", delete=False
    ) as file:
        file.write(data)
        return file.name


def _driver_log(config: RunConfig) -> Path | None:
    """Return the log of the run; None if the run failed before it opened the log."""
    log = Path(config.output_dir) / config.run_name / "logs" / "driver.log"
    return log if log.is_file() else None


def _how_to_continue(config: RunConfig) -> str:
    """Return the sentence about the checkpoint that a resume continues from."""
    latest = Path(config.output_dir) / config.run_name / "latest"
    try:
        named = latest.read_text(encoding="utf-8").strip()
    except OSError:
        return "The run has no checkpoint; start it again from step 0."
    return f"resume=true continues from {latest.parent / named}."


def _log_to_console() -> None:
    """Send warnings to the console; a run adds a handler for details, `logs/driver.log`."""
    console = logging.StreamHandler()
    console.setLevel(os.environ.get("NEMO_LIKE_LOG_LEVEL", "WARNING"))
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", handlers=[console]
    )
    logging.getLogger("nemo_like").setLevel(logging.INFO)
