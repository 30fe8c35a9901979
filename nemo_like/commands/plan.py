"""`nemo-like plan`: padding, rank balance, step time and memory, predicted from row lengths alone.

Modules that are needed for one source of lengths only are imported in functions: a file of lengths
needs neither torch nor transformers, which take seconds to import; rows of text do.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from nemo_like.commands.plan_arguments import EPILOG, add_arguments
from nemo_like.config.text import printable

__all__ = ["EPILOG", "add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Make the plan, print or write it, and return the exit code. Raises ConfigError for wrong
    input.
    """
    from nemo_like.commands.plan_request import plan_request
    from nemo_like.prediction.plan_report import make_plan
    from nemo_like.reports.plan_page import plan_page
    from nemo_like.reports.record import to_record
    from nemo_like.reports.terminal import show

    report = make_plan(plan_request(arguments))
    if arguments.html is not None:
        _write(arguments.html, plan_page(report), "--html")
    # JSON on the standard output must not be mixed with the table.
    if arguments.json == "-":
        print(json.dumps(to_record(report), indent=1))
        return 0
    if arguments.json is not None:
        text = json.dumps(to_record(report), indent=1)
        _write(Path(arguments.json), f"{text}\n", "--json")
    show(report)
    for name, path in (("page", arguments.html), ("JSON", arguments.json)):
        if path is not None:
            print(printable(f"{name}: {path}"))
    return 0


def _write(path: Path, text: str, flag: str) -> None:
    from nemo_like.config.errors import ConfigError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag}: {str(path)!r} cannot be written: {error.strerror}") from error
