"""`nemo-like sft | grpo | dpo | rm | distill`: run the job of a config.

Every command reports its failure here: one message and an exit code.
"""

from __future__ import annotations

import argparse
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_like.algorithms.registry import ALGORITHMS
from nemo_like.commands.report import write_at_end
from nemo_like.config.errors import ConfigError, shortened, shown_path
from nemo_like.config.schema import RunConfig
from nemo_like.console import lasting_console, say, say_error
from nemo_like.distributed.activity import process_age_s
from nemo_like.distributed.errors import ClusterError, WorkerError, WorkerFailure
from nemo_like.metrics import start_timers
from nemo_like.run.checkpoint import CheckpointError
from nemo_like.run.files import WriteError

if TYPE_CHECKING:
    from nemo_like.training.run import RunResult

FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130
_age_at_last_end_s = 0.0
"""Age of this process at the end of its last run; 0 before."""
_MAX_REASON = 500


def run(arguments: argparse.Namespace) -> int:
    """Train and return the exit code. Raises ConfigError for a wrong config."""
    # Imported here: it imports NumPy, which the other users of this module do not need.
    from nemo_like.commands.start import open_config

    config = open_config(arguments, arguments.command)
    result = train(config)
    if isinstance(result, int):
        return result
    say("next: " + "\n      ".join(next_commands(config, result)))
    return 0


def next_commands(config: RunConfig, result: RunResult) -> Iterator[str]:
    """Yield commands that use the run and work as they are, except for DIR and FILE."""
    run = shown_path(result.directory.path)
    yield f"nemo-like report {run}"
    needs = config.needs
    if result.export is None:
        yield f"nemo-like export {run} --out DIR"
        return
    if needs.head == "scores":
        model = f"reward.models.quality.model_name={shown_path(result.export)}"
        yield f"nemo-like grpo --model DIR --data FILE {model}"
        return
    yield f"nemo-like chat --model {run}"
    has_rewards = bool(config.reward.weights) or config.environment.path is not None
    if not config.data.validation_files or needs.batch.rows_per_example > 1:
        return
    if has_rewards:
        yield f"nemo-like eval --model {run}"
    elif needs.rollouts is None:
        yield f"nemo-like eval --model {run} --perplexity"


@lasting_console()
def train(config: RunConfig) -> RunResult | int:
    """Run the job of a config; return the result, or the exit code after a failure.

    The message of a failure is printed.
    """
    # Imported here: it imports torch, which takes seconds, and the config is checked before.
    from nemo_like.algorithms.restart import run_with_restarts
    from nemo_like.training.stopping import RunStopped, stop_requests

    global _age_at_last_end_s
    directory = Path(config.output_dir) / config.run_name
    try:
        with stop_requests(config.cluster.time_limit) as stop:
            run_job = ALGORITHMS[config.kind].import_run()
            # Of an earlier run of this process that failed.
            start_timers.pop()
            start_timers.add("start_imports", process_age_s() - _age_at_last_end_s)
            result = run_with_restarts(run_job, config, stop)
    except (Exception, KeyboardInterrupt, RunStopped) as error:  # noqa: BLE001 (one message each)
        return report_failure(error, directory)
    finally:
        _age_at_last_end_s = process_age_s()
    write_at_end(directory)
    return result


def report_failure(error: BaseException, run: Path | None = None) -> int:
    """Print the message for an exception that ended a command; return the exit code.

    With the directory of a run the message states whether the run can be resumed, and the traceback
    of an unexpected exception goes to the run's log.
    """
    if isinstance(error, ConfigError):
        say_error(f"error: {error}")
        return WRONG_INPUT
    if isinstance(error, KeyboardInterrupt):
        say_error("interrupted" if run is None else f"interrupted. {_how_to_continue(run)}")
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
    continuation = "" if run is None else f" {_how_to_continue(run)}"
    if isinstance(cause, NonFiniteError):
        text = f"{cause}.{continuation}"
    elif isinstance(cause, (WriteError, CheckpointError)):
        text = str(cause)
    elif isinstance(error, WorkerFailure):
        text = f"{error}{continuation}"
    else:
        text = _bug_text(error, run)
    say_error("\n".join([f"error: {text}", *getattr(cause, "__notes__", ())]))
    return FAILED


def _bug_text(error: BaseException, run: Path | None) -> str:
    """Return the message for an unexpected exception, after writing its traceback."""
    if isinstance(error, WorkerError):
        reason = str(error).strip()
        trace = error.traceback_text
    else:
        first_line = str(error).strip().partition("\n")[0]
        reason = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
        trace = "".join(traceback.format_exception(error))
    place = _write_traceback(trace, run)
    return f"{shortened(reason, _MAX_REASON)}. The traceback is in {place}"


def _write_traceback(text: str, run: Path | None) -> str:
    """Append the traceback to the log of the run, or write it to a new file; return the path."""
    data = f"\n{text}\n".encode("utf-8", "backslashreplace")
    log = None if run is None else run / "logs" / "driver.log"
    # A run that failed early has not opened its log.
    if log is not None and log.is_file():
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


def _how_to_continue(run: Path) -> str:
    """Return the sentence about the checkpoint that a resume continues from."""
    try:
        named = (run / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        return "The run has no checkpoint; start it again from step 0."
    return f"resume=true continues from {run / named}."
