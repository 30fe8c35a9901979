"""Rows that are encoded once, ahead of their use, in this process or in several.

Encoded rows are kept in a file. It is unnamed and disappears with the process, or it is in the
cache (`NEMO_LIKE_CACHE`, by default `~/.cache/nemo_like`), where later runs find the rows of a data
set whose encoding took long.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from io import BufferedReader
from multiprocessing import get_context
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from nemo_like import __version__
from nemo_like.config.errors import ConfigError
from nemo_like.data.image_encoding import stored_images
from nemo_like.data.images import RowImage
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.row_files import Row
from nemo_like.data.rows import MAX_LISTED, BadRows, Rows

Out = TypeVar("Out")
Encode = Callable[[Row], EncodedRow | None]
"""Encodes a row; None drops it."""
Advance = Callable[[int], None]
"""Is called with the number of rows since its last call."""

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "NEMO_LIKE_CACHE"
_BYTES_PER_TOKEN = 5
"""An int32 token id and a uint8 mask."""
_BYTES_PER_IMAGE = 24
"""Its grid, the position of its first token and their number, in int32."""
_ROWS_PER_CHUNK = 16
_TRIAL_S = 1.0
"""Time for which rows are encoded here to estimate the total time."""
_LONG_S = 5.0
"""Estimated time from which processes and the cache are used."""
_MAX_AUTO_PROCESSES = 16
_COLLECTING_S = 5.0
"""Time for which further bad rows are sought after the first one."""
_PR_SET_PDEATHSIG = 1
# Values of `_lengths` for rows that have no tokens.
_TODO = -1
_DROPPED = -2
_SKIPPED = -3


class OversizeError(ConfigError):
    """A row is too long and `policy.oversize_rows` is error."""


class Skipped(NamedTuple):
    """A bad row under `data.on_bad_row=skip`."""

    problem: str


Result = EncodedRow | Skipped | str | None
"""An encoded row, the problem of a bad row, or None for a dropped one."""
EncodeChunk = Callable[[Sequence[int] | np.ndarray], list[tuple[int, Result]]]
"""Encodes rows; returns (row, result) of each."""

_encode_chunk: EncodeChunk | None = None
"""The encoding of an encoding process. Not an argument, which would be pickled with its rows."""


class EncodedRows:
    """The rows of a data set in encoded form, each encoded once."""

    def __init__(
        self,
        rows: Rows,
        encode: Encode,
        *,
        num_processes: int | None = 0,
        settings: Callable[[], str] | None = None,
    ) -> None:
        """Prepare to encode `rows`.

        With `num_processes=0` rows are encoded in this process; None decides by the time that the
        first rows take. `settings` describes all that the encoding depends on, for the cache; None
        uses no cache.
        """
        self.digests = rows.digests
        self.skipped = BadRows()
        """The bad rows that were left out here, without those of an earlier run's encoding."""
        self._rows = rows
        self._encode = encode
        self._num_processes = num_processes
        self._settings = settings
        self._starts = np.zeros(len(rows), dtype=np.int64)
        self._lengths = np.full(len(rows), _TODO, dtype=np.int32)
        self._num_images: np.ndarray | None = None
        """int32 [N] of each row; None: no row has any."""
        # The duplicate descriptor keeps the unnamed file open after the block.
        with tempfile.TemporaryFile() as file:
            self._file = os.dup(file.fileno())
        self._end = 0

    def __del__(self) -> None:
        os.close(self._file)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_kept(self) -> np.ndarray:
        """Mask of rows that are not known to be dropped or skipped, bool [N]."""
        return self._lengths >= _TODO

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int32 [N]; 0 for rows that are dropped or not encoded yet."""
        return np.maximum(self._lengths, 0)

    @property
    def num_kept(self) -> int:
        """Number of rows that are not known to be dropped."""
        return int(np.count_nonzero(self.is_kept))

    @property
    def dropped(self) -> np.ndarray:
        """Indices of the rows that are known to be dropped, int64 [n]."""
        return np.flatnonzero(self._lengths == _DROPPED)

    @property
    def num_skipped(self) -> int:
        """Number of bad rows that `data.on_bad_row=skip` left out, of the file and so far here."""
        return self._rows.bad.num_rows + int(np.count_nonzero(self._lengths == _SKIPPED))

    @property
    def num_encoded(self) -> int:
        """Number of rows encoded so far, dropped ones included."""
        return int(np.count_nonzero(self._lengths != _TODO))

    def location(self, row: int) -> str:
        """Return the location of a row. Example: `data/train.jsonl:17`."""
        return self._rows.location(row)

    def fetch(self, rows: Sequence[int]) -> list[EncodedRow | None]:
        """Return the encoded rows, None for a dropped row; rows that are missing are encoded.

        Raises ConfigError for bad rows.
        """
        missing = [row for row in rows if self._lengths[row] == _TODO]
        if missing:
            self._store_all(map(self._encode_chunk, [missing]), lambda count: None)
        return [self._read(row) for row in rows]

    def encode_ahead(self, rows: np.ndarray, advance: Advance = lambda count: None) -> None:
        """Encode `rows` int64 [n], each of which may be encoded already.

        Raises ConfigError for bad rows: the first of them with their number.
        """
        missing = self._missing(rows)
        here = map(self._encode_chunk, _chunks(missing))
        num_processes = self._num_processes
        if num_processes is None:
            started = time.monotonic()
            self._store_all(here, advance, limit_s=_TRIAL_S)
            spent_s = time.monotonic() - started
            num_tried = len(missing)
            missing = self._missing(missing)
            num_tried -= len(missing)
            is_long = spent_s * len(missing) >= _LONG_S * num_tried
            num_processes = min(_MAX_AUTO_PROCESSES, len(os.sched_getaffinity(0))) if is_long else 0
        if num_processes == 0:
            # After a trial these are the chunks behind it.
            self._store_all(here, advance)
        elif len(missing):
            with self._cached(advance, num_processes) as is_cached:
                if not is_cached:
                    with _encoding_pool(num_processes, self._encode_chunk) as pool:
                        self._store_all(pool.map(_encode_in_process, _chunks(missing)), advance)

    def _missing(self, rows: np.ndarray) -> np.ndarray:
        """Return those of `rows` int64 [n] that are not encoded yet, int64 [at most n]."""
        return rows[self._lengths[rows] == _TODO]

    def _encode_chunk(self, rows: Sequence[int] | np.ndarray) -> list[tuple[int, Result]]:
        """Encode rows, in any process; returns (row, result) of each."""
        results: list[tuple[int, Result]] = []
        for row in map(int, rows):
            try:
                results.append((row, self._encode(self._rows[row])))
            # A tokenizer may raise any exception, also the base class.
            except Exception as error:  # noqa: BLE001
                text = row_error_text(error)
                is_skipped = self._rows.skips_bad and not isinstance(error, OversizeError)
                results.append((row, Skipped(text) if is_skipped else text))
        return results

    def _store_all(
        self,
        results: Iterator[list[tuple[int, Result]]],
        advance: Advance,
        limit_s: float | None = None,
    ) -> None:
        """Store the results of chunks until they end or `limit_s` has passed.

        Raises ConfigError for bad rows: at the end, or earlier if they are many.
        """
        deadline = math.inf if limit_s is None else time.monotonic() + limit_s
        bad = BadRows()
        for chunk in results:
            for row, result in chunk:
                if isinstance(result, str):
                    if not bad.num_rows:
                        deadline = min(deadline, time.monotonic() + _COLLECTING_S)
                    bad.add(self.location(row), result)
                elif isinstance(result, Skipped):
                    self.skipped.add(self.location(row), result.problem)
                    self._lengths[row] = _SKIPPED
                else:
                    self._store(row, result)
            advance(len(chunk))
            if bad.num_rows >= MAX_LISTED or time.monotonic() > deadline:
                break
        if bad.num_rows:
            scope = f" among {self.num_encoded + bad.num_rows:,} encoded"
            raise ConfigError(bad.text(scope, are_all=self.num_encoded == 0))

    def _store(self, row: int, encoded: EncodedRow | None) -> None:
        """Write an encoded row to the file. Raises ConfigError if it cannot be written."""
        if encoded is None:
            self._lengths[row] = _DROPPED
            return
        ids = np.asarray(encoded.input_ids, dtype=np.int32)
        mask = np.asarray(encoded.token_mask, dtype=np.uint8)
        data = ids.tobytes() + mask.tobytes()
        if encoded.images:
            if self._num_images is None:
                self._num_images = np.zeros(len(self), dtype=np.int32)
            self._num_images[row] = len(encoded.images)
            # The end of a row may be cut off, and the rows of a pair have the same images.
            number_of = {image: n for n, image in enumerate(stored_images(self._rows[row]))}
            values = [
                (*image.grid, image.start, image.num_tokens, number_of[image.image])
                for image in encoded.images
            ]
            data += np.array(values, dtype=np.int32).tobytes()
        try:
            num_written = os.pwrite(self._file, data, self._end)
        except OSError as error:
            raise ConfigError(_no_space_text(str(error))) from error
        if num_written < len(data):
            raise ConfigError(_no_space_text("no space left on device"))
        self._starts[row] = self._end
        self._lengths[row] = len(ids)
        self._end += len(data)

    def _read(self, row: int) -> EncodedRow | None:
        """Return a row that was stored, or None for a dropped one."""
        length = int(self._lengths[row])
        if length < _TODO:
            return None
        # Not mapped: mapped pages of a shuffled order would count as memory of the process.
        num_images = 0 if self._num_images is None else int(self._num_images[row])
        num_bytes = _BYTES_PER_TOKEN * length + _BYTES_PER_IMAGE * num_images
        data = os.pread(self._file, num_bytes, int(self._starts[row]))
        ids = np.frombuffer(data, np.int32, length)
        mask = np.frombuffer(data, np.uint8, length, offset=4 * length)
        if not num_images:
            return EncodedRow(ids, mask)
        # A copy: the offset is no multiple of the size of an item.
        values = np.frombuffer(data[_BYTES_PER_TOKEN * length :], np.int32).reshape(-1, 6).tolist()
        references = stored_images(self._rows[row])
        images = [
            RowImage(references[number], (frames, rows, columns), start, num_tokens)
            for frames, rows, columns, start, num_tokens, number in values
        ]
        return EncodedRow(ids, mask, tuple(images))

    @contextmanager
    def _cached(self, advance: Advance, num_processes: int) -> Iterator[bool]:
        """Use the rows of an earlier run; else keep those that the block encodes, if they are all
        and took long.

        Yields True if the rows are known.
        """
        if self._settings is None:
            yield False
            return
        folder = cache_directory()
        key = hashlib.blake2b(digest_size=16)
        key.update(repr((self.digests, __version__, _source_digest(), self._settings())).encode())
        data, index = (folder / f"{key.hexdigest()}.{kind}" for kind in ("tokens", "npz"))
        num_before = self.num_encoded
        if index.exists() and data.exists() and self._open_cached(data, index):
            advance(len(self) - num_before)
            yield True
            return
        started = time.monotonic()
        yield False
        spent_s = num_processes * (time.monotonic() - started)
        if self.num_encoded < len(self) or spent_s + _TRIAL_S < _LONG_S:
            return
        try:
            data.parent.mkdir(parents=True, exist_ok=True)
            partial = data.with_name(f"{data.name}.{os.getpid()}")
            with open(self._file, "rb", closefd=False) as own, partial.open("wb") as copied:
                shutil.copyfileobj(own, copied)
            with partial.open("rb") as copied:
                checksum = _checksum(copied)
            partial.replace(data)
            # Written last: the cache has the rows if it has the index.
            partial = index.with_name(f"{index.name}.{os.getpid()}.npz")
            arrays = {"starts": self._starts, "lengths": self._lengths}
            if self._num_images is not None:
                arrays["images"] = self._num_images
            np.savez(partial, **arrays, checksum=np.frombuffer(checksum, np.uint8))
            partial.replace(index)
        except OSError:
            # The run has its rows; only a later one encodes them again.
            data.unlink(missing_ok=True)

    def _open_cached(self, data: Path, index: Path) -> bool:
        """Use the rows of an earlier run; False, with a warning, if the files are damaged."""
        try:
            # The archive has checksums of its own arrays.
            with np.load(index) as arrays:
                starts, lengths = arrays["starts"], arrays["lengths"]
                expected = arrays["checksum"].tobytes()
                num_images = arrays.get("images")
            with data.open("rb") as file:
                if len(starts) != len(self) or _checksum(file) != expected:
                    raise ValueError("its checksum differs")
                own = os.dup(file.fileno())
        # A damaged archive raises exceptions of several libraries.
        except Exception as error:  # noqa: BLE001
            logger.warning("cache of encoded rows %s: %s; the rows are encoded again", data, error)
            return False
        os.close(self._file)
        self._file, self._starts, self._lengths = own, starts, lengths
        self._num_images = num_images
        return True


class Examples(Generic[Out]):
    """Encoded rows as the examples of a job, such as prompts or pairs."""

    def __init__(self, encoded: EncodedRows, example: Callable[[int, EncodedRow], Out]) -> None:
        """Initialize with the function that makes the example of row i from i and its tokens."""
        self.digests = encoded.digests
        self._encoded = encoded
        self._example = example

    def __len__(self) -> int:
        return len(self._encoded)

    @property
    def num_skipped(self) -> int:
        """See `EncodedRows.num_skipped`."""
        return self._encoded.num_skipped

    def fetch(self, rows: Sequence[int]) -> list[Out | None]:
        """Return the examples of `rows`, None for a dropped row; see `EncodedRows.fetch`."""
        examples = []
        for row, encoded in zip(rows, self._encoded.fetch(rows), strict=True):
            examples.append(None if encoded is None else self._example(row, encoded))
        return examples

    def location(self, row: int) -> str:
        """Return the location of a row. Example: `data/train.jsonl:17`."""
        return self._encoded.location(row)

    def batches(self, batch_size: int) -> Iterator[list[Out]]:
        """Yield every row once, without the dropped ones."""
        for start in range(0, len(self), batch_size):
            fetched = self.fetch(range(start, min(start + batch_size, len(self))))
            batch = [example for example in fetched if example is not None]
            if batch:
                yield batch


def row_error_text(error: Exception) -> str:
    """Describe the problem of a row whose encoding raised `error`."""
    if isinstance(error, ConfigError):
        return str(error)
    reason = " ".join(str(error).split())[:200]
    return f"the row cannot be encoded ({type(error).__name__}: {reason}); correct or remove it"


def cache_directory(kind: str = "rows") -> Path:
    """Return the directory of what runs share, such as encoded rows."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/nemo_like").expanduser() / kind


def _checksum(file: BufferedReader) -> bytes:
    """Return a hash of the rest of a file. It also differs for another size."""
    return hashlib.file_digest(file, "sha256").digest()


def _no_space_text(reason: str) -> str:
    return f"encoded rows cannot be kept in {tempfile.gettempdir()}: {reason}; set TMPDIR"


def _chunks(rows: np.ndarray) -> list[np.ndarray]:
    """Split `rows` int64 [n] into the parts that a process encodes at once."""
    return np.split(rows, range(_ROWS_PER_CHUNK, len(rows), _ROWS_PER_CHUNK))


def _source_digest() -> str:
    """Return a hash of the modules of this package, some of which encode rows."""
    hashed = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()


@contextmanager
def _encoding_pool(num_processes: int, encode: EncodeChunk) -> Iterator[ProcessPoolExecutor]:
    """Start processes that encode rows; they end with the block, or with this process.

    Raises ConfigError if one of them ends.
    """
    # Tokenizers would warn in every process, and use as many threads in each as there are cores.
    variable = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(variable)
    os.environ[variable] = "false"
    # Forked: the rows and the tokenizer are not copied. The processes use neither threads nor
    # devices of this one.
    pool = ProcessPoolExecutor(num_processes, get_context("fork"), _begin_process, (encode,))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise ConfigError(
            "a process that encodes rows ended, possibly for lack of memory; see its output above,"
            " or set data.num_encoding_workers=0 to encode in the driver"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before


def _begin_process(encode: EncodeChunk) -> None:
    """Prepare an encoding process: it ends with the driver, which handles Ctrl-C."""
    global _encode_chunk
    _encode_chunk = encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Output of a library must not be mixed with the results of the driver.
    os.dup2(2, 1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _encode_in_process(rows: np.ndarray) -> list[tuple[int, Result]]:
    """Encode rows in an encoding process."""
    assert _encode_chunk is not None, "the process has begun"
    return _encode_chunk(rows)
