"""Worker processes that encode rows, and their message protocol over pipes.

`RowPool` is what `EncodedRows` needs of them; another pool encodes with Ray Data.

A message is two lengths, JSON and bytes. The first message to a process is its setup, the others
are lists of rows. The answer to a list has the lengths of the encoded rows, or the problem of a
row, and their ids and masks. The processes are started with `subprocess`, not forked, so they share
no thread, lock or device with this one. They end when their input ends, which also happens when
this process is killed.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from nemo_like.data.collate import EncodedRow
from nemo_like.data.datasets import Row

Receive = Callable[[int, EncodedRow | None, str | None], None]
"""Callback with (row index, encoded row or None, problem or None), called from a thread. Index -1
is a problem of the pool.
"""

Encode = Callable[[Row], tuple[EncodedRow | None, str | None]]
"""Maps a row to (encoded row or None, problem or None)."""

_HEADER = struct.Struct("<QQ")
_ROWS_PER_MESSAGE = 16
# Values in the list of lengths for rows that are not encoded.
_DROPPED = -1
_BAD = -2
_MAX_MEMORY_BYTES = 8 << 30
"""Address space that an encoding process may add after its start, for imports, the tokenizer and
its rows.
"""


class RowPool(Protocol):
    """Encodes rows in the background and passes each result to a `Receive` callback."""

    @property
    def is_idle(self) -> bool:
        """True if every submitted row is encoded."""
        ...

    def submit(self, indices: Sequence[int] | np.ndarray, *, first: bool = False) -> None:
        """Queue rows (int64 [n] if an array); with `first` ahead of all queued rows."""
        ...

    def close(self) -> None:
        """Stop at once; queued rows are not encoded."""
        ...


StartPool = Callable[[Sequence[Row], Receive], RowPool]
"""Starts a pool for these rows."""


class EncodingPool:
    """Worker processes that run `module` and encode rows of `rows` in the order of submission."""

    def __init__(
        self,
        module: str,
        setup: dict[str, Any],
        num_processes: int,
        rows: Sequence[Row],
        receive: Receive,
    ) -> None:
        self._rows = rows
        self._receive = receive
        # Row indices. Guarded by `_changed`, like everything up to `_is_closed`. The queue may have
        # millions of rows, so it is arrays, and rows that moved ahead are skipped in it later.
        self._waiting: deque[np.ndarray] = deque()
        self._urgent: deque[list[int]] = deque()
        self._moved: set[int] = set()
        self._num_running = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._processes = [_start_process(module) for _ in range(num_processes)]
        for process in self._processes:
            thread = threading.Thread(
                target=self._serve, args=(process, setup), name="encoding", daemon=True
            )
            thread.start()

    @property
    def is_idle(self) -> bool:
        """True if every submitted row is encoded."""
        with self._changed:
            return not self._urgent and not self._waiting and not self._num_running

    def submit(self, indices: Sequence[int] | np.ndarray, *, first: bool = False) -> None:
        """Queue rows (int64 [n] if an array); with `first` ahead of all queued rows."""
        rows = np.asarray(indices, dtype=np.int64)
        with self._changed:
            if not first:
                self._waiting.append(rows)
            else:
                # So that they are not encoded twice.
                self._moved.update(rows.tolist())
                chunks = []
                for start in range(0, len(rows), _ROWS_PER_MESSAGE):
                    chunks.append(rows[start : start + _ROWS_PER_MESSAGE].tolist())
                self._urgent.extendleft(reversed(chunks))
            self._changed.notify_all()

    def close(self) -> None:
        """Kill the processes; queued rows are not encoded."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._urgent.clear()
            self._changed.notify_all()
        for process in self._processes:
            # The processes write no files, so nothing can be left incomplete.
            process.kill()
        for process in self._processes:
            process.wait()

    def _serve(self, process: subprocess.Popen[bytes], setup: dict[str, Any]) -> None:
        """Send rows to a process and receive its answers; runs in one thread per process."""
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
            reason = str(error)
            if isinstance(error, OSError | EOFError):
                # The pipe is closed, so the exit code is the cause.
                reason = f"ended with code {process.wait(5)}"
            problem = (
                f"a process that encodes rows failed: {reason}; see its output above, or set"
                " data.num_encoding_workers=0 to encode in the driver"
            )
            self._receive(-1, None, problem)

    def _next_chunk(self) -> list[int] | None:
        """Wait for the next chunk of row indices; None after `close`."""
        with self._changed:
            while not self._is_closed:
                chunk = self._pop_chunk()
                if chunk:
                    self._num_running += 1
                    return chunk
                self._changed.wait()
            return None

    def _pop_chunk(self) -> list[int]:
        """Return the next rows without those that moved ahead; empty if none waits."""
        if self._urgent:
            return self._urgent.popleft()
        chunk: list[int] = []
        while self._waiting and not chunk:
            rows = self._waiting[0]
            if len(rows) > _ROWS_PER_MESSAGE:
                self._waiting[0] = rows[_ROWS_PER_MESSAGE:]
            else:
                self._waiting.popleft()
            for row in rows[:_ROWS_PER_MESSAGE].tolist():
                if row in self._moved:
                    self._moved.remove(row)
                else:
                    chunk.append(row)
        return chunk

    def _take(self, chunk: list[int], values: dict[str, Any], data: bytes) -> None:
        """Pass the answer for a chunk to the callback, row by row."""
        for row, (encoded, problem) in zip(chunk, unpack_rows(values, data), strict=True):
            self._receive(row, encoded, problem)
        with self._changed:
            self._num_running -= 1


def serve(open_encode: Callable[[dict[str, Any]], Encode]) -> None:
    """Run the loop of a worker process: read from standard input, answer on standard output.

    `open_encode` converts the setup to a function that maps a row to (encoded row or None, problem
    or None).
    """
    # The driver handles Ctrl-C and closes the pipes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory()
    source = os.fdopen(os.dup(0), "rb")
    target = os.fdopen(os.dup(1), "wb")
    # Output that a library prints must not corrupt the messages, so it goes to standard error.
    os.dup2(2, 1)
    setup = read_message(source)
    encode = None
    while (message := read_message(source)) is not None:
        if encode is None:
            assert setup is not None
            encode = open_encode(setup[0])
        values, data = pack_rows(message[0], encode)
        try:
            write_message(target, values, data)
        except BrokenPipeError:
            # The driver has ended. Exit without a traceback on the terminal.
            sys.stderr.close()
            os._exit(0)


def pack_rows(rows: list[Row], encode: Encode) -> tuple[dict[str, Any], bytes]:
    """Encode rows into the answer to a message: (lengths and problems, ids and masks)."""
    lengths = []
    problems = {}
    data = []
    for position, row in enumerate(rows):
        encoded, problem = encode(row)
        if problem is not None and encoded is None:
            lengths.append(_BAD)
            problems[str(position)] = problem
        elif encoded is None:
            lengths.append(_DROPPED)
        else:
            lengths.append(len(encoded.input_ids))
            data.append(encoded.input_ids.astype(np.int32).tobytes())
            data.append(encoded.token_mask.astype(np.uint8).tobytes())
    return {"lengths": lengths, "problems": problems}, b"".join(data)


def unpack_rows(
    values: dict[str, Any], data: bytes
) -> Iterator[tuple[EncodedRow | None, str | None]]:
    """Yield (encoded row or None, problem or None) of each row from the result of `pack_rows`."""
    offset = 0
    for position, length in enumerate(values["lengths"]):
        if length == _DROPPED:
            yield None, None
            continue
        if length == _BAD:
            yield None, values["problems"][str(position)]
            continue
        ids = np.frombuffer(data, np.int32, length, offset)
        mask = np.frombuffer(data, np.uint8, length, offset + 4 * length)
        # Copies, because a view would keep the data of the entire message in memory.
        yield EncodedRow(ids.copy(), mask.copy()), None
        offset += 5 * length


def _start_process(module: str) -> subprocess.Popen[bytes]:
    """Start a process that runs `module` with pipes for input and output."""
    return subprocess.Popen(
        # -P: do not import modules from the working directory.
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(),
        # In a process group of its own it does not receive Ctrl-C from the terminal.
        process_group=0,
    )


def _limit_memory() -> None:
    """Limit the address space of this process.

    A chat template that multiplies a text then raises MemoryError instead of invoking the OOM
    killer.
    """
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        # Only Linux has this file.
        return
    limit = num_pages * os.sysconf("SC_PAGE_SIZE") + _MAX_MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _environment() -> dict[str, str]:
    """Return the environment of a worker process: this copy of the package first in the path, one
    thread, and no accelerator.
    """
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths)}


def write_message(stream: IO[bytes], value: Any, data: bytes = b"") -> None:
    """Write one message. Raises TypeError or ValueError for a value without a JSON form."""
    text = json.dumps(value, default=str).encode()
    stream.write(_HEADER.pack(len(text), len(data)) + text + data)
    stream.flush()


def read_message(stream: IO[bytes]) -> tuple[Any, bytes] | None:
    """Read one message: (JSON value, bytes), or None at the end of the stream.

    A stream that ends within a message also gives None.
    """
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    num_text, num_data = _HEADER.unpack(header)
    text = stream.read(num_text)
    data = stream.read(num_data)
    if len(text) < num_text or len(data) < num_data:
        return None
    return json.loads(text), data
