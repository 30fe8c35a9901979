"""`nemo-like sft | grpo | dpo | rm | distill`: run the job of a config."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nemo_like.algorithms.registry import ALGORITHMS, load_config
from nemo_like.commands.failures import report_failure
from nemo_like.config.schema import RunConfig
from nemo_like.console import lasting_console

if TYPE_CHECKING:
    from nemo_like.training.run import RunResult


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
        with stop_requests(config):
            return ALGORITHMS[config.kind].import_run()(config)
    except (Exception, KeyboardInterrupt, RunStopped) as error:  # noqa: BLE001 (one message each)
        return report_failure(error, config)
