"""The log file of the driver, `logs/driver.log`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_like.files import AppendedFile, WriteError

logger = logging.getLogger(__name__)


class RunLog(logging.Handler):
    """A log file. A failed write is raised by `check`, because logging must not raise."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = AppendedFile(path)
        self._failure: WriteError | None = None
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Append one record; do nothing after a failed write."""
        if self._failure is not None:
            return
        try:
            text = self.format(record) + "\n"
            self._file.append(text.encode("utf-8", errors="backslashreplace"))
        except WriteError as error:
            self._failure = error
        except Exception:  # noqa: BLE001
            # A message whose arguments do not fit its format.
            self.handleError(record)

    def check(self) -> None:
        """Raise WriteError if a record could not be written, or if the file was removed."""
        if self._failure is not None:
            raise self._failure
        self._file.check()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


@contextmanager
def run_log(path: Path) -> Iterator[RunLog]:
    """Write all log records of the block, and the exception that ends it, to `path` as well.

    Raises WriteError.
    """
    log = RunLog(path)
    # Warnings of libraries belong to the log too.
    logging.captureWarnings(True)
    logging.getLogger().addHandler(log)
    try:
        yield log
    except BaseException as error:
        # The console, where its message is printed, may be closed.
        logger.info("ended by %s: %s", type(error).__name__, error)
        raise
    finally:
        logging.getLogger().removeHandler(log)
        log.close()
