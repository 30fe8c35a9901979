"""`nemo-like report`: the files of one run or of several as a page with charts."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from nemo_like.config.errors import ConfigError, error_text, shown_path
from nemo_like.console import say

logger = logging.getLogger(__name__)


def run(arguments: argparse.Namespace) -> int:
    """Write or serve the page; return the exit code. Raises ConfigError and WriteError."""
    # Imported here and below: Bokeh takes a second.
    from nemo_like.reports.run_report import report_page, write_report

    runs: list[Path] = arguments.runs
    if arguments.serve:
        return _serve(runs, arguments.port)
    if arguments.out is None and len(runs) > 1:
        raise ConfigError("--out: give the file of the comparison, for example --out report.html")
    if arguments.out is None:
        say(f"report: {shown_path(write_report(runs[0]))}")
    else:
        write_output(arguments.out, report_page(runs), "--out")
        say(f"report: {shown_path(arguments.out)}")
    return 0


def write_output(path: Path, text: str, flag: str) -> None:
    """Write the file that the option `flag` names. Raises ConfigError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag}: {str(path)!r} cannot be written: {error.strerror}") from error


def _serve(runs: list[Path], port: int) -> int:
    from nemo_like.reports.server import ReportServer

    with ReportServer(runs, port) as server:
        say(f"serving at {server.address} (ctrl-c ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def write_at_end(run: Path) -> None:
    """Write the page of a run that ended. It is an extra: a failure is a warning."""
    from nemo_like.reports.run_report import write_report

    try:
        say(f"report: {write_report(run)}")
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (the run itself has succeeded)
        logger.warning("the report of the run is not written: %s", error_text(error))
