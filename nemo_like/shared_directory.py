"""Checks that all processes of a run share a directory: each reads and writes a file in it."""

from __future__ import annotations

import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nemo_like.config.errors import ConfigError
from nemo_like.files import reporting_write_errors

_VISIBLE_WITHIN_S = 5.0
"""A network file system may show a file that another node wrote only after a short time."""


def check_shared(
    directory: Path, call_workers: Callable[[str, str], Sequence[str]], nodes: Sequence[str]
) -> None:
    """Raise ConfigError unless the driver and every worker read and write the same `directory`.

    `call_workers(path, token)` calls `answer(path, token, rank)` in every worker and returns the
    answers in rank order. `nodes` are the nodes' addresses by rank; it may be empty.
    """
    problems: dict[int, str] = {}
    with _probe_directory(directory) as (probe, token):
        answers = call_workers(str(probe.resolve()), token)
        for rank, answered in enumerate(answers):
            problem = answered or _missing_answer(probe, token, rank)
            if problem:
                problems[rank] = problem
    if not problems:
        return
    rank = min(problems)
    node = f"node {nodes[rank]}" if rank < len(nodes) else "its node"
    others = ""
    if len(problems) > 1:
        others = f" (and {len(problems) - 1} of the {len(answers)} workers more)"
    raise ConfigError(
        f"output_dir: policy worker {rank} on {node} and the driver on {socket.gethostname()} do"
        f" not share {directory.resolve()}: {problems[rank]}{others}. Checkpoints and the exported"
        " model need a directory that the driver and all policy workers read and write; set"
        " output_dir to one on a file system that all nodes mount at the same path"
    )


def answer(probe: str, token: str, rank: int) -> str:
    """Read the driver's file and write one, in a worker; return the problem, or an empty text."""
    path = Path(probe) / "driver"
    text = _read_soon(path, token)
    if text != token:
        return (
            f"the worker on {socket.gethostname()} does not see the file {path} that the driver"
            " wrote"
        )
    try:
        (Path(probe) / f"rank_{rank}").write_text(token, encoding="ascii")
    except OSError as error:
        return f"the worker on {socket.gethostname()} cannot write to it ({error.strerror})"
    return ""


@contextmanager
def _probe_directory(directory: Path) -> Iterator[tuple[Path, str]]:
    token = secrets.token_hex(8)
    # A new name each time: an old file of an earlier check proves nothing.
    probe = directory / "logs" / f".probe_{token}"
    try:
        with reporting_write_errors(probe):
            probe.mkdir()
            (probe / "driver").write_text(token, encoding="ascii")
        yield probe, token
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _missing_answer(probe: Path, token: str, rank: int) -> str:
    path = probe / f"rank_{rank}"
    if _read_soon(path, token) == token:
        return ""
    return f"the driver does not see the file {path} that the worker wrote"


def _read_soon(path: Path, expected: str) -> str | None:
    """Wait up to 5 s for the expected text; return the text of the file, or None."""
    # Network file systems cache directories and attributes for some seconds.
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while True:
        try:
            text = path.read_text(encoding="ascii", errors="replace")
        except OSError:
            text = None
        if text == expected or time.monotonic() >= deadline:
            return text
        time.sleep(0.1)
