"""Programs in a process of their own that need not import torch again.

The process is forked from the server of multiprocessing, which has imported what `tests.preload`
imports: 8 seconds of a core less than a new interpreter.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Forked:
    """A process that calls `function(*args)` and exits with what it returns, 0 for None.

    `variables` are set in its environment; its output and its errors are files in `folder`.
    """

    def __init__(
        self,
        function: Callable[..., int | None],
        *args: Any,
        folder: Path,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._files = (folder / "output", folder / "errors")
        context: Any = multiprocessing.get_context("forkserver")
        self.process = context.Process(
            target=_run, args=(function, args, dict(variables or {}), self._files), daemon=False
        )
        self.process.start()

    def wait(self, timeout_s: float = 300.0) -> int:
        """Return the exit code, that of SIGKILL after `timeout_s`."""
        self.process.join(timeout_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return self.process.exitcode

    @property
    def output(self) -> str:
        return self._files[0].read_text()

    @property
    def errors(self) -> str:
        return self._files[1].read_text()


def run_program(path: Path) -> None:
    """Run a file as the main program, in its folder."""
    os.chdir(path.parent)
    runpy.run_path(str(path), run_name="__main__")


def _run(
    function: Callable[..., int | None],
    args: tuple[Any, ...],
    variables: dict[str, str],
    files: tuple[Path, Path],
) -> None:
    os.environ.update(variables)
    for number, path in enumerate(files, 1):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    try:
        code = function(*args)
    finally:
        # multiprocessing leaves these out.
        atexit._run_exitfuncs()
    sys.exit(code)
