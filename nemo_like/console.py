"""Messages on the console, and standard streams that cannot end a command.

Writes to the console fail after its terminal was closed, after the reader of its pipe has ended,
and on a full disk. Inside `lasting_console` such a stream is dropped, and the command continues.
What libraries print for a terminal alone, colors and progress bars, does not reach a log.
"""

from __future__ import annotations

import io
import logging
import os
import re
import select
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

from nemo_like.config.errors import printable

logger = logging.getLogger(__name__)


def say(text: str) -> None:
    """Print one message, with control characters escaped.

    Text of files, models and users must not control the terminal.
    """
    print(printable(text, sys.stdout.encoding or "utf-8"))


def say_error(text: str) -> None:
    """Print one message on stderr, escaped as by `say`."""
    print(printable(text, sys.stderr.encoding or "utf-8"), file=sys.stderr)


def quiet_libraries() -> None:
    """Hide warnings for developers of libraries, and progress bars of Hugging Face in a log.

    Call it before torch and transformers are imported. What the user has set stays in force.
    """
    # Of torch and extensions in C++, such as the CPU build of vLLM.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
    if not os.isatty(2):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


_STYLES = re.compile(rb"\x1b\[[0-9;]*m")


class _ConsoleFile(io.FileIO):
    """A descriptor of the console; after a failed write /dev/null takes its place.

    Colors, for example in Ray's prefixes, are removed unless it is a terminal.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.name = name
        self._has_styles = os.isatty(descriptor) or "FORCE_COLOR" in os.environ

    def write(self, data: bytes) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write all of `data`, or drop it."""
        rest = memoryview(data if self._has_styles else _STYLES.sub(b"", data))
        while rest:
            try:
                written = super().write(rest)
            except OSError as error:
                _discard_output(self.fileno())
                logger.warning("%s is closed from here on: %s", self.name, error.strerror)
                break
            if written is None:
                # Another process that has the descriptor open has set it to non-blocking.
                select.select([], [self], [])
            rest = rest[written or 0 :]
        return len(data)


@contextmanager
def lasting_console(*, stdout: bool = True) -> Iterator[None]:
    """Drop stderr, and with `stdout` also stdout, when a write to it fails inside the block.

    The exit of the interpreter cannot fail either, where Python flushes both once more.
    """
    _open_closed_streams()
    with ExitStack() as stack:
        if stdout:
            stack.enter_context(redirect_stdout(_lasting(sys.stdout)))
        stack.enter_context(redirect_stderr(_lasting(sys.stderr)))
        try:
            yield
        finally:
            _flush_or_discard(sys.stdout)


def _open_closed_streams() -> None:
    """Open /dev/null for standard streams that the parent process closed.

    Otherwise files that are opened later get their descriptors, and what a library prints.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _lasting(stream: TextIO) -> TextIO:
    """Return a stream to the descriptor of `stream`, or `stream` if it is not a file."""
    # Test runners and notebooks have streams of their own.
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        descriptor = stream.fileno()
    except OSError:
        return stream
    _flush_or_discard(stream)
    # Without a buffer, which would keep the data of a failed write.
    return io.TextIOWrapper(
        _ConsoleFile(descriptor, stream.name),  # pyright: ignore[reportArgumentType]
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )


def _flush_or_discard(stream: TextIO) -> None:
    try:
        stream.flush()
    except OSError:
        _discard_output(stream.fileno())


def _discard_output(descriptor: int) -> None:
    """Put /dev/null in the place of `descriptor`, also for processes that are started later."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
