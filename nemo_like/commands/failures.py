"""What a command prints, and how it reports a failure: one message and an exit code."""

from __future__ import annotations

import sys
import tempfile
import traceback
from pathlib import Path

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import RunConfig
from nemo_like.config.text import printable, shortened
from nemo_like.run.files import WriteError

FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130
_MAX_REASON = 500


def say(text: str) -> None:
    """Print one message, with control characters escaped.

    Text of files, models and users must not control the terminal.
    """
    print(printable(text, sys.stdout.encoding or "utf-8"))


def say_error(text: str) -> None:
    """Print one message on stderr, escaped as by `say`."""
    print(printable(text, sys.stderr.encoding or "utf-8"), file=sys.stderr)


def report_failure(error: BaseException, config: RunConfig | None = None) -> int:
    """Print the message for an exception that ended a command; return the exit code.

    With the `config` of a run the message states whether the run can be resumed, and the traceback
    of an unexpected exception goes to the run's log.
    """
    if isinstance(error, ConfigError):
        say_error(f"error: {error}")
        return WRONG_INPUT
    if isinstance(error, KeyboardInterrupt):
        say_error("interrupted" if config is None else f"interrupted. {_how_to_continue(config)}")
        return INTERRUPTED
    # These import torch, and the exceptions above need a message at once.
    from nemo_like.distributed.errors import ClusterError, WorkerError, WorkerFailure
    from nemo_like.environments.reward import RewardError
    from nemo_like.policy.optim import NonFiniteError
    from nemo_like.run.checkpoint import CheckpointError
    from nemo_like.training.stopping import RunStopped

    if isinstance(error, RunStopped):
        say_error(str(error))
        return error.exit_code
    cause = error.cause if isinstance(error, WorkerError) else error
    if isinstance(cause, (ConfigError, ClusterError, RewardError)):
        say_error(f"error: {cause}")
        return WRONG_INPUT
    continuation = "" if config is None else f" {_how_to_continue(config)}"
    if isinstance(cause, NonFiniteError):
        say_error(f"error: {cause}.{continuation}")
    elif isinstance(cause, (WriteError, CheckpointError)):
        say_error(f"error: {cause}")
        _say_notes(cause)
    elif isinstance(error, WorkerError):
        place = _write_traceback(error.traceback_text, _driver_log(config))
        reason = shortened(str(error).strip(), _MAX_REASON)
        say_error(f"error: {reason}. The traceback is in {place}")
    elif isinstance(error, WorkerFailure):
        say_error(f"error: {error}{continuation}")
        _say_notes(error)
    else:
        say_error(_bug_text(error, _driver_log(config)))
    return FAILED


def _say_notes(error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        say_error(note)


def _bug_text(error: BaseException, log: Path | None) -> str:
    """Return the message for an unexpected exception, after writing its traceback."""
    lines = str(error).strip().splitlines()
    reason = type(error).__name__
    if lines:
        reason += f": {shortened(lines[0], _MAX_REASON)}"
    place = _write_traceback("".join(traceback.format_exception(error)), log)
    return f"error: {reason}. The traceback is in {place}"


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


def _driver_log(config: RunConfig | None) -> Path | None:
    """Return the log of the run; None without a run or if it failed before it opened the log."""
    if config is None:
        return None
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
