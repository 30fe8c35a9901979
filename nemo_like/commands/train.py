"""`nemo-like sft | grpo | dpo | rm | distill`: run the job of a config.

Every command reports its failure here: one message and an exit code.
"""

from __future__ import annotations

import argparse
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_like.algorithms.registry import ALGORITHMS, load_config
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import RunConfig
from nemo_like.config.text import shortened
from nemo_like.console import lasting_console, say_error
from nemo_like.distributed.errors import ClusterError, WorkerError, WorkerFailure
from nemo_like.run.checkpoint import CheckpointError
from nemo_like.run.files import WriteError

if TYPE_CHECKING:
    from nemo_like.training.run import RunResult

FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130
_MAX_REASON = 500


def run(arguments: argparse.Namespace) -> int:
    """Train and return the exit code. Raises ConfigError for a wrong config."""
    result = train(load_config(arguments.command, arguments.config, arguments.overrides))
    return result if isinstance(result, int) else 0


@lasting_console()
def train(config: RunConfig) -> RunResult | int:
    """Run the job of a config; return the result, or the exit code after a failure.

    The message of a failure is printed.
    """
    # Imported here: it imports torch, which takes seconds, and the config is checked before.
    from nemo_like.training.stopping import RunStopped, stop_requests

    try:
        with stop_requests(config.cluster.time_limit):
            return ALGORITHMS[config.kind].import_run()(config)
    except (Exception, KeyboardInterrupt, RunStopped) as error:  # noqa: BLE001 (one message each)
        return report_failure(error, config)


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
    from nemo_like.environments.reward import RewardError
    from nemo_like.policy.optim import NonFiniteError
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
        text = f"{cause}.{continuation}"
    elif isinstance(cause, (WriteError, CheckpointError)):
        text = str(cause)
    elif isinstance(error, WorkerFailure):
        text = f"{error}{continuation}"
    else:
        text = _bug_text(error, config)
    say_error("\n".join([f"error: {text}", *getattr(cause, "__notes__", ())]))
    return FAILED


def _bug_text(error: BaseException, config: RunConfig | None) -> str:
    """Return the message for an unexpected exception, after writing its traceback."""
    if isinstance(error, WorkerError):
        reason = str(error).strip()
        trace = error.traceback_text
    else:
        first_line = str(error).strip().partition("\n")[0]
        reason = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
        trace = "".join(traceback.format_exception(error))
    place = _write_traceback(trace, _driver_log(config))
    return f"{shortened(reason, _MAX_REASON)}. The traceback is in {place}"


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
