"""Result files of the commands that sample answers: one JSON object per prompt.

Each object is appended as a complete line when its prompt is finished, so that a killed command
loses none of them. The settings are in a file beside it, and a resume with others is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.run.files import AppendedFile, reporting_write_errors, write_json, write_json_lines

Record = dict[str, Any]
Key = tuple[str, int]
"""Name of the file of prompts, and the row in it."""


def record_key(record: Mapping[str, Any]) -> Key:
    """Return the file of prompts and the row of a record."""
    return str(record.get("data", "")), int(record["row"])


class AnswerFile:
    """A JSON-lines file that grows while a command runs and is sorted at its end."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        """Open a new file, or with `resume` one that an earlier command began.

        Raises ConfigError if the file exists without `resume`, was written with other settings, or
        is not one of this class, and WriteError.
        """
        self.path = path
        self.records: dict[Key, Record] = {}
        """The finished prompts."""
        settings_path = path.with_name(f"{path.name}.settings.json")
        # As in the file: JSON has no tuples.
        plain = json.loads(json.dumps(settings))
        if path.exists():
            if not resume:
                raise ConfigError(
                    f"{shown_path(path)} exists already; continue it with --resume, choose another"
                    " --out, or remove it"
                )
            _check_settings(settings_path, plain)
            self.records = _read(path)
        else:
            with reporting_write_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
        write_json(settings_path, plain)
        self._file = AppendedFile(path)

    def is_finished(self, key: Key, digest: str) -> bool:
        """Return True if the prompt has a record.

        Raises ConfigError if its row had another content, `digest`.
        """
        record = self.records.get(key)
        if record is None:
            return False
        if record.get("digest") != digest:
            name, row = key
            raise ConfigError(
                f"row {row} of {name or 'the prompts'} has changed since {shown_path(self.path)}"
                " was written; choose another --out"
            )
        return True

    def add(self, record: Record) -> None:
        """Append the record of a finished prompt. Raises WriteError."""
        self.records[record_key(record)] = record
        self._file.append_json(record)

    def finish(self, order: Sequence[Key]) -> list[Record]:
        """Sort the file by `order`, and return the records of it.

        Records of other prompts, which a resume with fewer rows did not ask for, stay at the end of
        the file. Raises WriteError.
        """
        self.close()
        records = [self.records[key] for key in order]
        others = sorted(set(self.records) - set(order))
        write_json_lines(self.path, [*records, *(self.records[key] for key in others)])
        return records

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the file has the same settings."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--resume needs {shown_path(path)}, which cannot be read: {error}; choose another"
            " --out"
        ) from error
    if before == settings:
        return
    names = []
    for name in {**before, **settings}:
        if before.get(name) != settings.get(name):
            names.append(name)
    raise ConfigError(
        f"--resume: {shown_path(path)} has other values of {', '.join(names)}; use the same ones,"
        " or choose another --out"
    )


def _read(path: Path) -> dict[Key, Record]:
    """Read the records, and remove an incomplete last line. Raises ConfigError for a bad line."""
    with reporting_write_errors(path):
        content = path.read_bytes()
        complete, _, rest = content.rpartition(b"\n")
        if rest:
            os.truncate(path, len(content) - len(rest))
    records = {}
    for number, line in enumerate(complete.split(b"\n") if complete else [], 1):
        try:
            record = json.loads(line)
            records[record_key(record)] = record
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"--resume: {shown_path(path)}:{number} is not a record of this command ({error});"
                " choose another --out"
            ) from error
    return records
