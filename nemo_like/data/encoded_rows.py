"""Rows encoded once, ahead of their use: in this process, or in processes of their own where that
takes long.

`start` begins to encode the rows in the order of their first visit; `finish` waits for the end or
for a time limit and raises for a bad row; `fetch` gives encoded rows and has those that are missing
encoded next. Encoded rows stay: in memory, and above a limit in a file without a name, which
disappears with the process.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.collate import EncodedRow
from nemo_like.data.datasets import Row, Rows
from nemo_like.data.encoding_pool import EncodingPool
from nemo_like.data.template_limits import RenderingLimitError

Encode = Callable[[Row], EncodedRow | None]

ROW_ERRORS = (
    ConfigError,
    RenderingLimitError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
"""What a row can make an encoding raise. A tokenizer refuses text that is no Unicode (a lone
surrogate) with a TypeError.
"""
MAX_MEMORY_BYTES = 2**30
_TRIAL_S = 1.0
_WORTH_PROCESSES_S = 5.0
"""Rows that take less than this to encode here do so: starting processes takes about as long."""
_MAX_AUTO_PROCESSES = 8
_TODO, _DONE, _DROPPED = 0, 1, 2


class EncodedRows:
    """All rows of a file in their encoded form, each encoded once. `close` stops what is still
    going on.
    """

    def __init__(
        self,
        rows: Rows,
        encode: Encode,
        *,
        module: str | None = None,
        setup: dict[str, Any] | None = None,
        num_processes: int | None = None,
    ) -> None:
        """`module` serves `encoding_pool` in a process of its own, which is given `setup`.

        Without it, and with `num_processes=0`, rows are encoded in this process.
        `num_processes=None` decides by the time that the first rows take.
        """
        self.digests = rows.digests
        self._rows, self._encode = rows, encode
        self._module, self._setup = module, setup or {}
        self._num_processes = 0 if module is None else num_processes
        self._state = np.zeros(len(rows), dtype=np.uint8)
        self._cache = _Cache(len(rows))
        self._pool: EncodingPool | None = None
        self._changed = threading.Condition()
        self._queue: list[int] = []
        self._problem: tuple[int, str] | None = None
        self.num_started = 0
        """Rows that `start` was given."""
        self.is_finished = True
        """Whether all of them are encoded, and `finish` has returned."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_encoded(self) -> int:
        """Rows that have been encoded so far."""
        return int(np.count_nonzero(self._state))

    @property
    def is_kept(self) -> np.ndarray:
        """bool [N]: rows that are not known to be left out."""
        return self._state != _DROPPED

    @property
    def num_kept(self) -> int:
        """Rows that are not known to be left out."""
        return int(np.count_nonzero(self.is_kept))

    def start(self, order: np.ndarray) -> None:
        """Begin to encode the rows `order`. Raises ConfigError for a bad row that is found at
        once.
        """
        self._queue = order.tolist()
        self.num_started = len(self._queue)
        self.is_finished = False
        num_processes = self._num_processes
        if num_processes is None:
            began, at = time.perf_counter(), 0
            while at < len(self._queue) and time.perf_counter() - began < _TRIAL_S:
                self._encode_here(self._queue[at : at + 16])
                at += 16
            spent, self._queue = time.perf_counter() - began, self._queue[at:]
            is_short = spent * len(self._queue) / max(at, 1) < _WORTH_PROCESSES_S
            num_processes = 0 if is_short else min(_MAX_AUTO_PROCESSES, max(_num_cpus() // 2, 1))
        if num_processes and self._queue and self._module is not None:
            self._pool = EncodingPool(
                self._module, self._setup, num_processes, self._rows.rows, self._receive
            )
            self._pool.submit(self._queue)
            self._queue = []

    def finish(
        self, advance: Callable[[int], None] = lambda count: None, timeout_s: float | None = None
    ) -> bool:
        """Wait until the rows given to `start` are encoded, at most `timeout_s`; whether they are.

        `advance` is called with the number of rows encoded since its last call. Raises ConfigError
        for a bad row.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        reported = 0
        while True:
            if self._queue:
                self._encode_here(self._queue[:16])
                self._queue = self._queue[16:]
            elif self._pool is not None:
                with self._changed:
                    self._changed.wait(0.2)
            self._raise_problem()
            advance(self.num_encoded - reported)
            reported = self.num_encoded
            if not self._queue and (self._pool is None or self._pool.is_idle):
                self.close()
                self.is_finished = True
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def fetch(self, rows: Sequence[int]) -> list[EncodedRow | None]:
        """The encoded rows of the given indices; None for one that is left out. Raises ConfigError
        for a bad row.

        A bad row that was found in the background is an error here too, before its turn comes.
        """
        self._raise_problem()
        missing = [row for row in rows if self._state[row] == _TODO]
        if missing and self._pool is not None and not self._pool.is_idle:
            self._pool.submit(missing, first=True)
            with self._changed:
                while self._problem is None and any(self._state[row] == _TODO for row in missing):
                    self._changed.wait(1.0)
                    if self._pool is None or self._pool.is_idle:
                        break
            self._raise_problem()
            missing = [row for row in missing if self._state[row] == _TODO]
        self._encode_here(missing)
        return [self._cache.get(row) if self._state[row] == _DONE else None for row in rows]

    def location(self, row: int) -> str:
        """Where the row stands. Example: `data/train.jsonl:17`."""
        return self._rows.locations[row]

    def close(self) -> None:
        """Stop the processes; rows that are missing are then encoded in this one."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _encode_here(self, rows: Sequence[int]) -> None:
        for row in rows:
            if self._state[row] == _TODO:
                encoded, problem = encode_row(self._encode, self._rows[row])
                self._receive(row, encoded, problem)
                self._raise_problem()

    def _receive(self, row: int, encoded: EncodedRow | None, problem: str | None) -> None:
        """One row's result, from any thread. A negative row stands for the pool itself."""
        with self._changed:
            if problem is not None:
                if self._problem is None or row < self._problem[0]:
                    self._problem = (row, problem)
            elif row >= 0 and self._state[row] == _TODO:
                try:
                    if encoded is not None:
                        self._cache.put(row, encoded)
                    self._state[row] = _DROPPED if encoded is None else _DONE
                except OSError as error:
                    self._problem = (
                        -1,
                        f"encoded rows cannot be kept in {tempfile.gettempdir()}: {error}; set"
                        f" TMPDIR",
                    )
            self._changed.notify_all()

    def _raise_problem(self) -> None:
        with self._changed:
            problem = self._problem
        if problem is not None:
            self.close()
            row, text = problem
            raise ConfigError(text if row < 0 else f"{self.location(row)}: {text}")


def encode_row(encode: Encode, row: Row) -> tuple[EncodedRow | None, str | None]:
    """(the encoded row or None, what is wrong with it or None)."""
    try:
        return encode(row), None
    except ROW_ERRORS as error:
        return None, row_error_text(error)


def row_error_text(error: Exception) -> str:
    """What is wrong with a row whose encoding raised one of `ROW_ERRORS`."""
    if isinstance(error, ConfigError | RenderingLimitError):
        return str(error)
    reason = " ".join(str(error).split())[:200]
    return f"the row cannot be encoded ({type(error).__name__}: {reason}); correct or remove it"


class _Cache:
    """Encoded rows by index; the first `MAX_MEMORY_BYTES` in memory, the others in a file without a
    name.
    """

    def __init__(self, num_rows: int) -> None:
        self._in_memory: dict[int, EncodedRow] = {}
        self._num_bytes = 0
        self._file: int | None = None
        self._end = 0
        self._offsets = np.zeros(num_rows, dtype=np.int64)
        self._lengths = np.zeros(num_rows, dtype=np.int32)

    def put(self, row: int, encoded: EncodedRow) -> None:
        """Raises OSError if the file cannot be written."""
        ids = np.asarray(encoded.input_ids, dtype=np.int32)
        mask = np.asarray(encoded.token_mask, dtype=np.uint8)
        if self._num_bytes + 5 * len(ids) <= MAX_MEMORY_BYTES:
            self._in_memory[row] = EncodedRow(ids, mask)
            self._num_bytes += 5 * len(ids)
            return
        if self._file is None:
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        data = ids.tobytes() + mask.tobytes()
        written = os.pwrite(self._file, data, self._end)
        if written < len(data):
            raise OSError(28, "no space left on device")
        self._offsets[row], self._lengths[row] = self._end, len(ids)
        self._end += len(data)

    def get(self, row: int) -> EncodedRow:
        if row in self._in_memory:
            return self._in_memory[row]
        assert self._file is not None, "a row that was put is in memory or in the file"
        length = int(self._lengths[row])
        data = os.pread(self._file, 5 * length, int(self._offsets[row]))
        return EncodedRow(
            np.frombuffer(data, np.int32, length), np.frombuffer(data, np.uint8, offset=4 * length)
        )

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))
