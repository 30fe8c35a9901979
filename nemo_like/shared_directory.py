"""Whether all processes of a run see the same directory: each reads what the driver wrote and
writes what it reads.
"""

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
    directory: Path, ask_workers: Callable[[str, str], Sequence[str]], nodes: Sequence[str]
) -> None:
    """Raise ConfigError unless the driver and every worker read and write the same `directory`.

    `ask_workers(folder, token)` calls `answer(folder, token, rank)` in every worker and returns the
    answers in rank order. `nodes` are the nodes' addresses by rank; it may be empty.
    """
    with _probe_folder(directory) as (folder, token):
        answers = ask_workers(str(folder.resolve()), token)
        found = [
            problem or _missing_answer(folder, token, rank) for rank, problem in enumerate(answers)
        ]
    problems = [(rank, problem) for rank, problem in enumerate(found) if problem]
    if not problems:
        return
    rank, problem = problems[0]
    node = f"node {nodes[rank]}" if rank < len(nodes) else "its node"
    others = (
        ""
        if len(problems) == 1
        else f" (and {len(problems) - 1} of the {len(answers)} workers more)"
    )
    raise ConfigError(
        f"output_dir: policy worker {rank} on {node} and the driver on {socket.gethostname()} do"
        f" not share"
        f" {directory.resolve()}: {problem}{others}. Checkpoints and the exported model need a"
        f" directory that the driver and"
        " all policy workers read and write; set output_dir to one on a file system that all nodes"
        " mount at the same path"
    )


def answer(folder: str, token: str, rank: int) -> str:
    """A worker's part of `check_shared`: read the driver's file and write one; returns the problem,
    empty if there is none.
    """
    path = Path(folder) / "driver"
    text = _read_soon(path, token)
    if text != token:
        return f"the worker on {socket.gethostname()} does not see the file {path} that the driver wrote"
    try:
        (Path(folder) / f"rank_{rank}").write_text(token, encoding="ascii")
    except OSError as error:
        return f"the worker on {socket.gethostname()} cannot write to it ({error.strerror})"
    return ""


@contextmanager
def _probe_folder(directory: Path) -> Iterator[tuple[Path, str]]:
    token = secrets.token_hex(8)
    folder = directory / "logs" / f".probe_{token}"
    try:
        with reporting_write_errors(folder):
            folder.mkdir()
            (folder / "driver").write_text(token, encoding="ascii")
        yield folder, token
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _missing_answer(folder: Path, token: str, rank: int) -> str:
    path = folder / f"rank_{rank}"
    return (
        ""
        if _read_soon(path, token) == token
        else f"the driver does not see the file {path} that the worker wrote"
    )


def _read_soon(path: Path, expected: str) -> str | None:
    """The file's text, as soon as it is the expected one; after a short time whatever is there."""
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while True:
        try:
            text = path.read_text(encoding="ascii", errors="replace")
        except OSError:
            text = None
        if text == expected or time.monotonic() >= deadline:
            return text
        time.sleep(0.1)
