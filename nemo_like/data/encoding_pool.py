"""Processes that encode rows, and what they and this process say to each other through pipes.

A message is two lengths, JSON and bytes. First the setup, then lists of rows; the answer to a list
is the lengths of the encoded rows, or why one has none, and their ids and masks. The processes are
started anew, so they share no thread, no lock and no device with this one, and they end when their
input does, which is also when this process is killed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from nemo_like.data.collate import EncodedRow
from nemo_like.data.datasets import Row

Receive = Callable[[int, EncodedRow | None, str | None], None]
"""Called with (row index, encoded row or None, problem or None), from a thread; index -1 is a
problem of the pool.
"""

_HEADER = struct.Struct("<QQ")
_ROWS_PER_MESSAGE = 16
_DROPPED, _BAD = -1, -2
_MAX_MEMORY_BYTES = 8 << 30
"""Address space that an encoding process may add to what it has at its start: imports, a tokenizer,
and its rows.
"""


class EncodingPool:
    """Encodes rows of `rows` by their index, in the order of submission, in processes that run
    `module`.
    """

    def __init__(
        self,
        module: str,
        setup: dict[str, Any],
        num_processes: int,
        rows: Sequence[Row],
        receive: Receive,
    ) -> None:
        self._rows, self._receive = rows, receive
        self._waiting: deque[list[int]] = deque()
        self._num_running = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
                process_group=0,  # so that Ctrl-C in the terminal is this process's business alone
            )
            for _ in range(num_processes)
        ]
        for process in self._processes:
            threading.Thread(
                target=self._serve, args=(process, setup), name="encoding", daemon=True
            ).start()

    @property
    def is_idle(self) -> bool:
        """Whether every submitted row is encoded."""
        with self._changed:
            return not self._waiting and not self._num_running

    def submit(self, indices: Sequence[int], *, first: bool = False) -> None:
        """Have the rows encoded; with `first` before all that wait."""
        with self._changed:
            if first:
                wanted = set(indices)
                self._waiting = deque(
                    [
                        kept
                        for chunk in self._waiting
                        if (kept := [i for i in chunk if i not in wanted])
                    ]
                )
            chunks = [
                list(indices[at : at + _ROWS_PER_MESSAGE])
                for at in range(0, len(indices), _ROWS_PER_MESSAGE)
            ]
            if first:
                self._waiting.extendleft(reversed(chunks))
            else:
                self._waiting.extend(chunks)
            self._changed.notify_all()

    def close(self) -> None:
        """End the processes; what was not encoded stays so."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()
        for process in self._processes:
            process.kill()  # it holds nothing that could be left half-written
        for process in self._processes:
            process.wait()

    def _serve(self, process: subprocess.Popen[bytes], setup: dict[str, Any]) -> None:
        """One thread per process: give it rows, and take what it returns."""
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin, process.stdout:
                write_message(process.stdin, setup)
                while (chunk := self._next_chunk()) is not None:
                    write_message(process.stdin, [self._rows[row] for row in chunk])
                    answer = read_message(process.stdout)
                    if answer is None:
                        raise EOFError
                    self._take(chunk, *answer)
        except (OSError, EOFError, ValueError, TypeError) as error:
            if self._is_closed:
                return
            reason = (
                f"ended with code {process.wait(5)}"
                if isinstance(error, OSError | EOFError)
                else f"{error}"
            )
            self._receive(-1, None, f"a process that encodes rows failed: {reason}; see its output above, or set"
                          " data.num_encoding_workers=0 to encode in the driver")  # fmt: skip

    def _next_chunk(self) -> list[int] | None:
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            self._num_running += 1
            return self._waiting.popleft()

    def _take(self, chunk: list[int], values: dict[str, Any], data: bytes) -> None:
        at = 0
        for position, (row, length) in enumerate(zip(chunk, values["lengths"], strict=True)):
            if length < 0:
                self._receive(
                    row, None, values["problems"][str(position)] if length == _BAD else None
                )
                continue
            ids = np.frombuffer(data, np.int32, length, at)
            mask = np.frombuffer(data, np.uint8, length, at + 4 * length)
            self._receive(row, EncodedRow(ids.copy(), mask.copy()), None)
            at += 5 * length
        with self._changed:
            self._num_running -= 1


def serve(
    open_encode: Callable[[dict[str, Any]], Callable[[Row], tuple[EncodedRow | None, str | None]]],
) -> None:
    """The other end: read the setup and lists of rows from standard input until it ends, answer on
    standard output.

    `open_encode` makes of the setup a function from a row to (encoded row or None, problem or
    None).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory()
    source = os.fdopen(os.dup(0), "rb")
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not come between two messages
    setup = read_message(source)
    encode = None
    while (message := read_message(source)) is not None:
        if encode is None:
            assert setup is not None
            encode = open_encode(setup[0])
        lengths, problems, parts = [], {}, []
        for position, row in enumerate(message[0]):
            encoded, problem = encode(row)
            if encoded is None:
                lengths.append(_DROPPED if problem is None else _BAD)
                problems |= {} if problem is None else {str(position): problem}
                continue
            lengths.append(len(encoded.input_ids))
            parts += [
                encoded.input_ids.astype(np.int32).tobytes(),
                encoded.token_mask.astype(np.uint8).tobytes(),
            ]
        try:
            write_message(target, {"lengths": lengths, "problems": problems}, b"".join(parts))
        except BrokenPipeError:
            sys.stderr.close()
            os._exit(0)  # nobody is there any more


def _limit_memory() -> None:
    """Bound the address space, so that a template that multiplies a text ends in a MemoryError, not
    in the OOM killer.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # only Linux has it
        return
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _MAX_MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _environment() -> dict[str, str]:
    """This process's, with its own copy of the package first, one thread, and no accelerator."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths)}


def write_message(stream: IO[bytes], value: Any, data: bytes = b"") -> None:
    """Raises TypeError or ValueError for a value without a JSON form."""
    text = json.dumps(value, default=str).encode()
    stream.write(_HEADER.pack(len(text), len(data)) + text + data)
    stream.flush()


def read_message(stream: IO[bytes]) -> tuple[Any, bytes] | None:
    """(JSON value, bytes); None at the end of the stream, also in the middle of a message."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    num_text, num_data = _HEADER.unpack(header)
    text, data = stream.read(num_text), stream.read(num_data)
    return None if len(data) < num_data or len(text) < num_text else (json.loads(text), data)
