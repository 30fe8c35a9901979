"""Rows that are encoded once, ahead of their use, in this process or by a pool of others.

`start` begins to encode the rows in the order of their first visit; `finish` waits for the end or
for a time limit and raises for a bad row; `fetch` returns encoded rows and encodes missing ones
next. Encoded rows are kept in memory and, above a limit, in an unnamed file that disappears with
the process.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.bad_rows import MAX_LISTED, BadRows
from nemo_like.data.collate import EncodedRow
from nemo_like.data.datasets import Row, Rows
from nemo_like.data.encoding_pool import EncodingPool, RowPool, StartPool

Encode = Callable[[Row], EncodedRow | None]

ROW_ERRORS = (
    ConfigError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
"""Exceptions that a row can cause in an encoding. A tokenizer refuses text that is not Unicode (a
lone surrogate) with a TypeError.
"""
MAX_MEMORY_BYTES = 2**25
"""Size of encoded rows above which further ones are written to the file."""
_BYTES_PER_TOKEN = 5
"""An int32 token id and a uint8 mask."""
_BYTES_PER_ROW = 400
"""Size of the objects around the tokens of a row in memory."""
_ROWS_PER_CHUNK = 16
"""Rows encoded in this process between two checks of the time."""
_TRIAL_S = 1.0
"""Time for which rows are encoded here to estimate the total time."""
_MIN_POOL_S = 5.0
"""Estimated time from which worker processes are used: starting them takes about as long."""
_MAX_AUTO_PROCESSES = 8
_COLLECTING_S = 5.0
"""Time for which further bad rows are sought after the first one."""
_TODO = 0
_DONE = 1
_DROPPED = 2


class EncodedRows:
    """The rows of a file in encoded form, each encoded once. `close` stops the pool."""

    def __init__(
        self,
        rows: Rows,
        encode: Encode,
        *,
        module: str | None = None,
        setup: dict[str, Any] | None = None,
        num_processes: int | None = None,
        start_pool: StartPool | None = None,
    ) -> None:
        """Prepare to encode `rows`.

        `start_pool` starts the pool that encodes the rows given to `start`; the other arguments
        describe the default, worker processes of this machine.

        `module` is the module that worker processes run (see `encoding_pool.serve`) and `setup` its
        input. Without a module, and with `num_processes=0`, rows are encoded in this process.
        `num_processes=None` decides by the time that the first rows take.
        """
        self.digests = rows.digests
        self._rows = rows
        self._encode = encode
        self._module = module
        self._setup = setup or {}
        self._num_processes = 0 if module is None else num_processes
        self._start_pool = start_pool
        self._state = np.zeros(len(rows), dtype=np.uint8)
        self._cache = _Cache(len(rows))
        self._pool: RowPool | None = None
        # Guards `_state`, `_cache`, `_problems` and `_failure`, which threads of the pool change.
        self._changed = threading.Condition()
        # int64; a view of the order, because a list of a million indices needs 40 MB.
        self._queue = np.empty(0, np.int64)
        self._failure: str | None = None
        """Problem of the pool or of the file of encoded rows."""
        self._problems: dict[int, str] = {}
        """Bad row -> its problem."""
        self._found_s = 0.0
        """Time at which the first bad row was found."""
        self.num_started = 0
        """Number of rows given to `start`."""
        self.is_finished = True
        """True if all of them are encoded and `finish` has returned."""
        self._num_before = 0
        """Rows that were encoded before `start`."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_encoded(self) -> int:
        """Number of rows encoded so far."""
        return int(np.count_nonzero(self._state))

    @property
    def is_kept(self) -> np.ndarray:
        """Mask of rows that are not known to be dropped, bool [N]."""
        return self._state != _DROPPED

    @property
    def num_kept(self) -> int:
        """Number of rows that are not known to be dropped."""
        return int(np.count_nonzero(self.is_kept))

    def start(self, order: np.ndarray) -> None:
        """Begin to encode the rows `order` int64 [n]."""
        # Rows can be encoded already, for example because a curriculum needed their lengths.
        is_missing = self._state[order] == _TODO
        self._queue = order if is_missing.all() else order[is_missing]
        self.num_started = len(self._queue)
        self._num_before = self.num_encoded
        self.is_finished = False
        if self._start_pool is not None and len(self._queue):
            self._submit_to(self._start_pool(self._rows.rows, self._receive))
            return
        num_processes = self._num_processes
        if num_processes is None:
            num_processes = self._choose_num_processes()
        if num_processes and len(self._queue) and self._module is not None:
            self._submit_to(
                EncodingPool(
                    self._module, self._setup, num_processes, self._rows.rows, self._receive
                )
            )

    def _submit_to(self, pool: RowPool) -> None:
        """Give the queued rows to a new pool."""
        self._pool = pool
        pool.submit(self._queue)
        # Not a slice, which would keep the array.
        self._queue = np.empty(0, np.int64)

    def _choose_num_processes(self) -> int:
        """Encode rows of the queue for a short time and estimate the time of the rest."""
        began = time.perf_counter()
        num_tried = 0
        while num_tried < len(self._queue) and time.perf_counter() - began < _TRIAL_S:
            self._encode_here(self._queue[num_tried : num_tried + _ROWS_PER_CHUNK].tolist())
            num_tried += _ROWS_PER_CHUNK
        spent_s = time.perf_counter() - began
        self._queue = self._queue[num_tried:]
        remaining_s = spent_s * len(self._queue) / max(num_tried, 1)
        if remaining_s < _MIN_POOL_S:
            return 0
        return min(_MAX_AUTO_PROCESSES, max(_num_cpus() // 2, 1))

    def finish(
        self, advance: Callable[[int], None] = lambda count: None, timeout_s: float | None = None
    ) -> bool:
        """Wait until the rows given to `start` are encoded, at most `timeout_s` seconds.

        Returns True if they are. `advance` is called with the number of rows encoded since its last
        call. Raises ConfigError for bad rows: at the end, or earlier if they are many.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        num_reported = self._num_before
        while True:
            if len(self._queue):
                self._encode_here(self._queue[:_ROWS_PER_CHUNK].tolist())
                self._queue = self._queue[_ROWS_PER_CHUNK:]
            elif self._pool is not None:
                with self._changed:
                    self._changed.wait(0.2)
            is_idle = not len(self._queue) and (self._pool is None or self._pool.is_idle)
            if is_idle or self._has_enough_problems:
                self._raise_problem()
            advance(self.num_encoded - num_reported)
            num_reported = self.num_encoded
            if is_idle:
                self.close()
                self.is_finished = True
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def fetch(self, rows: Sequence[int]) -> list[EncodedRow | None]:
        """Return the encoded rows, None for a dropped row. Raises ConfigError for a bad row.

        A bad row that was found in the background raises here too, even if it was not requested.
        """
        self._raise_problem()
        missing = [row for row in rows if self._state[row] == _TODO]
        if missing and self._pool is not None and not self._pool.is_idle:
            self._pool.submit(missing, first=True)
            self._wait_for(missing)
            self._raise_problem()
            missing = [row for row in missing if self._state[row] == _TODO]
        # The pool may have ended without these rows; then they are encoded here.
        self._encode_here(missing)
        self._raise_problem()
        return [self._cache.get(row) if self._state[row] == _DONE else None for row in rows]

    def _wait_for(self, rows: list[int]) -> None:
        """Wait until the pool has encoded `rows`, has a problem, or is idle."""
        with self._changed:
            while not self._has_problem and any(self._state[row] == _TODO for row in rows):
                # The timeout covers a pool that ends without a notification.
                self._changed.wait(1.0)
                if self._pool is None or self._pool.is_idle:
                    break

    def location(self, row: int) -> str:
        """Return the location of a row. Example: `data/train.jsonl:17`."""
        return self._rows.locations[row]

    def close(self) -> None:
        """Stop the pool; missing rows are then encoded in this process."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _encode_here(self, rows: Sequence[int]) -> None:
        """Encode `rows` in this process, except those that are encoded already."""
        for row in rows:
            if self._has_enough_problems:
                return
            if self._state[row] == _TODO:
                encoded, problem = encode_row(self._encode, self._rows[row])
                self._receive(row, encoded, problem)

    def _receive(self, row: int, encoded: EncodedRow | None, problem: str | None) -> None:
        """Store the result of one row, from any thread. Row -1 is a problem of the pool itself."""
        with self._changed:
            if problem is not None and row < 0:
                self._failure = self._failure or problem
            elif problem is not None:
                if not self._problems:
                    self._found_s = time.monotonic()
                if len(self._problems) < MAX_LISTED:
                    self._problems[row] = problem
            elif row >= 0 and self._state[row] == _TODO:
                self._store(row, encoded)
            self._changed.notify_all()

    def _store(self, row: int, encoded: EncodedRow | None) -> None:
        """Put an encoded row into the cache; a write error becomes the problem to raise."""
        if encoded is None:
            self._state[row] = _DROPPED
            return
        try:
            self._cache.put(row, encoded)
        except OSError as error:
            folder = tempfile.gettempdir()
            self._failure = f"encoded rows cannot be kept in {folder}: {error}; set TMPDIR"
            return
        self._state[row] = _DONE

    @property
    def _has_problem(self) -> bool:
        return bool(self._problems) or self._failure is not None

    @property
    def _has_enough_problems(self) -> bool:
        """True if no further bad rows are sought."""
        is_late = time.monotonic() - self._found_s >= _COLLECTING_S
        has_many = is_late or len(self._problems) >= MAX_LISTED
        return self._failure is not None or (bool(self._problems) and has_many)

    def _raise_problem(self) -> None:
        """Raise ConfigError if a problem was received."""
        with self._changed:
            failure = self._failure
            problems = sorted(self._problems.items())
        if failure is None and not problems:
            return
        self.close()
        if failure is not None:
            raise ConfigError(failure)
        bad = BadRows()
        for row, problem in problems:
            bad.add(self.location(row), problem)
        raise ConfigError(bad.text(f" among {self.num_encoded + len(problems):,} encoded"))


def encode_row(encode: Encode, row: Row) -> tuple[EncodedRow | None, str | None]:
    """Encode a row: (encoded row or None, problem or None)."""
    try:
        return encode(row), None
    except ROW_ERRORS as error:
        return None, row_error_text(error)


def row_error_text(error: Exception) -> str:
    """Describe the problem of a row whose encoding raised one of `ROW_ERRORS`."""
    if isinstance(error, ConfigError):
        return str(error)
    reason = " ".join(str(error).split())[:200]
    return f"the row cannot be encoded ({type(error).__name__}: {reason}); correct or remove it"


class _Cache:
    """Encoded rows by index: in memory up to `MAX_MEMORY_BYTES`, then in an unnamed file."""

    def __init__(self, num_rows: int) -> None:
        self._in_memory: dict[int, EncodedRow] = {}
        self._num_bytes = 0
        self._file: int | None = None
        self._end = 0
        self._offsets = np.zeros(num_rows, dtype=np.int64)
        self._lengths = np.zeros(num_rows, dtype=np.int32)

    def put(self, row: int, encoded: EncodedRow) -> None:
        """Store a row. Raises OSError if the file cannot be written."""
        ids = np.asarray(encoded.input_ids, dtype=np.int32)
        mask = np.asarray(encoded.token_mask, dtype=np.uint8)
        num_bytes = _BYTES_PER_TOKEN * len(ids)
        in_memory = num_bytes + _BYTES_PER_ROW
        if self._num_bytes + in_memory <= MAX_MEMORY_BYTES:
            self._in_memory[row] = EncodedRow(ids, mask)
            self._num_bytes += in_memory
            return
        if self._file is None:
            # The duplicate descriptor keeps the unnamed file open after the block.
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        data = ids.tobytes() + mask.tobytes()
        num_written = os.pwrite(self._file, data, self._end)
        if num_written < len(data):
            raise OSError(errno.ENOSPC, "no space left on device")
        self._offsets[row] = self._end
        self._lengths[row] = len(ids)
        self._end += len(data)

    def get(self, row: int) -> EncodedRow:
        """Return a row that was stored."""
        if row in self._in_memory:
            return self._in_memory[row]
        assert self._file is not None, "a stored row is in memory or in the file"
        length = int(self._lengths[row])
        data = os.pread(self._file, _BYTES_PER_TOKEN * length, int(self._offsets[row]))
        ids = np.frombuffer(data, np.int32, length)
        mask = np.frombuffer(data, np.uint8, offset=4 * length)
        return EncodedRow(ids, mask)

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _num_cpus() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))
