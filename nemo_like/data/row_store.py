"""Rows of text that need little memory: above a limit they are in an unnamed file.

The file is in the directory for temporary files (`TMPDIR`) and disappears with the process. It is
read with `pread`, not mapped: mapped pages that a shuffled order has visited count as memory of the
process until the system takes them back.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from array import array
from collections.abc import Sequence
from typing import overload

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.row_files import Row

MAX_MEMORY_BYTES = 2**22
"""Size of the rows in their files above which they are stored in a file. As Python objects rows
need about ten times as much.
"""
_MAX_BUFFERED_BYTES = 2**20


class RowStore(Sequence[Row]):
    """Rows in the order in which they were appended. Their values are those of JSON."""

    def __init__(self) -> None:
        self._in_memory: list[Row] = []
        self._num_bytes = 0
        self._file: int | None = None
        # Row i is at the bytes [ends[i], ends[i + 1]) of the file.
        self._ends = array("q", [0])
        self._buffer = bytearray()

    @property
    def is_in_file(self) -> bool:
        """True if the rows are in a file."""
        return self._file is not None

    def append(self, row: Row, num_bytes: int, text: bytes | None = None) -> None:
        """Add a row that has `num_bytes` in its own file. `text` is its JSON, if it is known.

        Raises ConfigError if the file for the rows cannot be written.
        """
        if self._file is not None:
            self._write(json.dumps(row).encode() if text is None else text)
            return
        self._in_memory.append(row)
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_MEMORY_BYTES:
            # The duplicate descriptor keeps the unnamed file open after the block.
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
            for each in self._in_memory:
                self._write(json.dumps(each).encode())
            self._in_memory = []

    def flush(self) -> None:
        """Write the rows that are still buffered. Raises ConfigError as `append` does."""
        try:
            while self._buffer:
                assert self._file is not None, "only rows for the file are buffered"
                num_written = os.write(self._file, self._buffer)
                del self._buffer[:num_written]
        except OSError as error:
            raise ConfigError(
                f"the rows cannot be kept in {tempfile.gettempdir()}: {error}; set TMPDIR to a"
                " directory with more space"
            ) from error

    def _write(self, text: bytes) -> None:
        self._buffer += text
        self._ends.append(self._ends[-1] + len(text))
        if len(self._buffer) >= _MAX_BUFFERED_BYTES:
            self.flush()

    def __len__(self) -> int:
        return len(self._ends) - 1 if self.is_in_file else len(self._in_memory)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        if self._file is None:
            return self._in_memory[index]
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            raise IndexError(f"row {index} of {len(self)} rows")
        if self._buffer:
            self.flush()
        start = self._ends[row]
        length = self._ends[row + 1] - start
        data = os.pread(self._file, length, start)
        if len(data) < length:
            raise OSError(f"row {row} could not be read from the file of rows")
        return json.loads(data)

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


class JoinedRows(Sequence[Row]):
    """The rows of several sequences, one after the other, without a copy."""

    def __init__(self, parts: Sequence[Sequence[Row]]) -> None:
        self._parts = parts
        self._starts = [0, *itertools.accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            raise IndexError(f"row {index} of {len(self)} rows")
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._parts[part][row - self._starts[part]]
