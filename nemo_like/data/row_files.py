"""Readers of data files: JSON lines, JSON, CSV, parquet, and Arrow data sets.

They read one row at a time, and a bad row is an error with its place.

Data sets of the Hugging Face hub are local files as well. `hf://OWNER/NAME/PATH/TO/FILE.jsonl` is
one file of a data set's repository. `hf://OWNER/NAME?split=train` are the parquet files that the
hub makes of every public data set (branch `refs/convert/parquet`,
https://huggingface.co/docs/dataset-viewer/parquet), with `&config=CONFIG` if several configurations
have the split. `&revision=COMMIT` selects a version. Files are downloaded once, to the cache of the
library; a machine that cannot reach the hub uses the cache.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from glob import glob, has_magic
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import parse_qsl

from nemo_like.config.errors import ConfigError, printable, shortened, shown_path, shown_value
from nemo_like.config.paths import HUB_PREFIX, connection_error, hub_error_text

Row = dict[str, Any]


class Location(NamedTuple):
    """Location of one row. Example: `Location("data/train.jsonl:", 17)`."""

    prefix: str
    """The file and a separator, the same object for all rows of a file."""
    number: int

    def __str__(self) -> str:
        return f"{self.prefix}{self.number}"


LocatedRow = tuple[Location, Row | ConfigError, bytes | None]
"""(location of the row, the row or why it cannot be used, its JSON if the file has it)"""

SUPPORTED_FILES = (
    ".jsonl, .ndjson, .csv (each also as .gz or .zst), .json, .parquet, a pattern such as"
    " data/train-*.jsonl, or a directory with an Arrow dataset (datasets.save_to_disk) or files of"
    " one of these formats"
)
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_LINES = (".jsonl", ".ndjson", ".csv")
"""Formats that may be compressed."""
_IN_DIRECTORIES = ((".parquet",), (".jsonl", ".ndjson"), (".csv",))
"""Formats of the files of a directory. A .json file may be a description of the data set."""
_SPLITS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}
"""Word in the name of a file -> the split, by the names that `datasets` recognizes
(https://huggingface.co/docs/hub/datasets-file-names-and-splits).
"""
_MAX_SHOWN_CHARACTERS = 60
_ROWS_PER_BATCH = 1000
"""Rows of a parquet or Arrow file that are converted to Python objects at once."""
_READ_BYTES = 2**20
_MAX_FIELD_CHARACTERS = 2**31 - 1
"""The csv module refuses longer fields; its default of 131,072 is too short for long texts."""

_CONVERTED = "refs/convert/parquet"
_DEFAULT_CONFIG = "default"
_FORM = (
    f"{HUB_PREFIX}OWNER/NAME?split=SPLIT[&config=CONFIG][&revision=REVISION] or"
    f" {HUB_PREFIX}OWNER/NAME/FILE[?revision=REVISION]"
)


def read_rows(path: Path, key: str) -> Iterator[LocatedRow]:
    """Read the rows of a file in order, or of the files of a directory or pattern, by name.

    Raises ConfigError that names `key` for an unsupported suffix, and the file for unreadable data.
    """
    readers = {
        ".jsonl": _read_jsonl,
        ".ndjson": _read_jsonl,
        ".csv": _read_csv,
        ".json": _read_json,
        ".parquet": _read_table,
        ".arrow": _read_table,
    }
    for file in data_files(path, key):
        plain = _plain_suffix(file)
        suffix = format_suffix(file)
        is_readable = plain in readers and (plain == suffix or plain in _LINES)
        if not is_readable or (plain == ".arrow" and not path.is_dir()):
            raise ConfigError(
                f"{key}: {shown_path(file)} ends in {suffix!r}; give {SUPPORTED_FILES}"
            )
        yield from readers[plain](file)


def is_pattern(path: Path) -> bool:
    """Return True for a pattern of file names: `*`, `?` and `[...]`, and no file of that name."""
    return has_magic(str(path)) and not path.exists()


def data_files(path: Path, key: str) -> list[Path]:
    """Return the file `path`, or the files of a directory or pattern, by name.

    Raises ConfigError if there are none, or they are of several splits or formats.
    """
    if path.is_dir():
        return _directory_files(path, key)
    if not is_pattern(path):
        return [path]
    found = (Path(name) for name in sorted(glob(str(path), recursive=True)))
    files = [file for file in found if file.is_file()]
    if not files:
        raise ConfigError(f"{key}: no file matches {shown_path(path)}; correct the pattern")
    return files


def _plain_suffix(path: Path) -> str:
    """Return the suffix that names the format, without the suffix of a compression."""
    return Path(path.stem).suffix if path.suffix in _COMPRESSIONS else path.suffix


def format_suffix(path: Path) -> str:
    """Return the suffix that names the format, with the suffix of a compression.

    Example: `.jsonl.gz` for `train.v2.jsonl.gz`, `.parquet` for `train.parquet`.
    """
    return Path(path.stem).suffix + path.suffix if path.suffix in _COMPRESSIONS else path.suffix


def shown_json(value: Any) -> str:
    """Format a value as short JSON with its type, for an error message."""
    try:
        text = printable(json.dumps(value, ensure_ascii=False, default=str))
    except (ValueError, TypeError, RecursionError):
        text = shown_value(value)
    if len(text) > _MAX_SHOWN_CHARACTERS:
        text = f"{text[:_MAX_SHOWN_CHARACTERS]}..."
    return f"{text} ({type(value).__name__})"


@contextmanager
def _open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed if its name ends in one of `_COMPRESSIONS`.

    Raises ConfigError, also within the block, if the compressed data is damaged or incomplete, and
    for UTF-16.
    """
    if path.suffix not in _COMPRESSIONS:
        with path.open("rb") as file:
            if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                shown = shown_path(path)
                raise ConfigError(
                    f"{shown} is UTF-16 text, not UTF-8; convert it with `iconv -f UTF-16 -t UTF-8"
                    f" {shown}`"
                )
            yield file
        return
    import pyarrow

    try:
        compression = _COMPRESSIONS[path.suffix]
        with io.BufferedReader(pyarrow.input_stream(str(path), compression=compression)) as file:
            yield file
    except OSError as error:
        raise ConfigError(
            f"{shown_path(path)}: cannot be decompressed: {_first_line(error)}; compress the file"
            " again, or copy it again if it is incomplete"
        ) from error


def _read_jsonl(path: Path) -> Iterator[LocatedRow]:
    # Once for all lines: `shown_path` takes longer than parsing a short line.
    prefix = f"{shown_path(path)}:"
    with _open_decompressed(path) as lines:
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text:
                continue
            location = Location(prefix, number)
            if number == 1 and text.removeprefix(b"\xef\xbb\xbf").startswith(b"["):
                raise ConfigError(
                    f"{location}: the file begins with '[', so it is a list and not one object per"
                    f" line; give it as {path.name.partition('.')[0]}.json"
                )
            row: Row | ConfigError
            try:
                row = _object(_parse(line, location), location)
            except ConfigError as error:
                row = error
            yield location, row, text.removeprefix(b"\xef\xbb\xbf")


def _read_json(path: Path) -> Iterator[LocatedRow]:
    with _open_decompressed(path) as file:
        rows = _parse(file.read(), shown_path(path))
    if not isinstance(rows, list):
        raise ConfigError(
            f"{shown_path(path)}: contains {shown_json(rows)}, not a list of objects; one object"
            f" per line is a .jsonl file"
        )
    prefix = f"{shown_path(path)} row "
    for number, row in enumerate(rows):
        location = Location(prefix, number)
        yield location, _object(row, location), None


def _parse(data: bytes, location: str | Location) -> Any:
    """Parse UTF-8 JSON. Raises ConfigError that names the position of an error."""
    try:
        # utf-8-sig also accepts a byte order mark.
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{location}: not UTF-8 text at byte {error.start + 1}: {error.reason}"
        ) from error
    except json.JSONDecodeError as error:
        place = f"column {error.colno}"
        hint = ""
        if error.lineno > 1:
            place = f"line {error.lineno} {place}"
            hint = "; one object per line is a .jsonl file"
        if re.match(r"\s*[}\]]", error.doc[error.doc.rfind(",", 0, error.pos + 1) + 1 :]):
            hint += "; remove the comma before the bracket"
        near = error.doc[max(error.pos - 20, 0) : error.pos + 20]
        raise ConfigError(
            f"{location}: not valid JSON at {place}: {error.msg}, near {near!r}{hint}"
        ) from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or thousands of nested lists.
        raise ConfigError(f"{location}: not readable as JSON: {error}") from error


def _object(value: Any, location: Location) -> Row:
    """Return `value` if it is an object; raises ConfigError otherwise."""
    if not isinstance(value, dict):
        raise ConfigError(
            f"{location}: {shown_json(value)} is not an object with columns, such as"
            ' {"prompt": "2+2=?", "answer": "4"}'
        )
    return value


def _read_csv(path: Path) -> Iterator[LocatedRow]:
    """Read the rows of a CSV file whose first line has the names of the columns.

    Every value is a text. A row's location is its first line. Raises ConfigError for a bad row.
    """
    shown = shown_path(path)
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    with (
        _open_decompressed(path) as file,
        # utf-8-sig also accepts a byte order mark; the csv module needs the original line ends.
        io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text,
    ):
        reader = csv.reader(text, strict=True)
        names: list[str] | None = None
        while True:
            location = Location(f"{shown}:", reader.line_num + 1)
            try:
                values = next(reader, None)
            except csv.Error as error:
                raise ConfigError(f"{location}: not valid CSV: {error}") from error
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{location}: not UTF-8 text in this or a later line: {error.reason}"
                ) from error
            if values is None:
                return
            if not values:
                continue
            if names is None:
                names = values
                if len(names) == 1 and (marks := re.search("[;\t]", names[0])):
                    raise ConfigError(
                        f"{location}: the only column is {names[0]!r}; columns are separated by"
                        f" commas, not by {marks[0]!r}: write the file with commas"
                    )
                continue
            if len(values) != len(names):
                raise ConfigError(
                    f"{location}: {len(values)} values for {len(names)} columns; a value with a"
                    ' comma or a line break is written in quotes ("), and a quote in it twice'
                )
            yield location, dict(zip(names, values, strict=True)), None


def _directory_files(path: Path, key: str) -> list[Path]:
    """Return the files of `datasets.save_to_disk`, or all files of a format, by name."""
    shown = f"{key}: {shown_path(path)}"
    if (path / "dataset_dict.json").exists():
        # A DatasetDict: the run must not choose a split by itself.
        splits = sorted(file.parent for file in path.glob("*/state.json"))
        raise ConfigError(
            f"{shown} has several splits; name one: " + ", ".join(map(shown_path, splits))
        )
    if (path / "state.json").exists():
        # The directory may have files of the cache of `map` as well.
        state = _parse((path / "state.json").read_bytes(), shown_path(path / "state.json"))
        try:
            return [path / str(file["filename"]) for file in state["_data_files"]]
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{shown_path(path / 'state.json')}: has no list of data files; write the data set"
                " again with datasets.save_to_disk"
            ) from error
    visible = sorted(file for file in path.glob("*") if not file.name.startswith("."))
    groups = [[file for file in visible if file.suffix == ".arrow"]]
    for suffixes in _IN_DIRECTORIES:
        groups.append([file for file in visible if _plain_suffix(file) in suffixes])
    groups = [files for files in groups if files]
    if not groups:
        raise ConfigError(
            f"{shown} is a directory without Arrow files (datasets.save_to_disk), .parquet, .jsonl,"
            " .ndjson or .csv files"
        )
    if len(groups) > 1:
        suffixes = ", ".join(sorted({f"*{format_suffix(files[0])}" for files in groups}))
        raise ConfigError(f"{shown} has files of several formats; name one: {suffixes}")
    splits = {_split(file): file for file in reversed(groups[0])}
    if len(splits) > 1 and splits.keys() - {"", "train"}:
        examples = ", ".join(splits[split].name for split in sorted(splits))
        raise ConfigError(
            f"{shown} has files of several splits ({examples}); name the file of one, such as"
            f" {shown_path(splits.get('train', groups[0][0]))}, or those of one by a pattern"
        )
    return groups[0]


def _split(path: Path) -> str:
    """Return the split that the name of a file has; empty without one."""
    words = re.split(r"[^a-z]+", path.name.lower())
    return next((_SPLITS[word] for word in words if word in _SPLITS), "")


def _read_table(path: Path) -> Iterator[LocatedRow]:
    """Read a parquet file or an Arrow stream."""
    import pyarrow
    import pyarrow.parquet

    is_parquet = path.suffix == ".parquet"
    try:
        with ExitStack() as stack:
            if is_parquet:
                # Buffered, because a row group may be as large as the file.
                file = pyarrow.parquet.ParquetFile(path, buffer_size=_READ_BYTES)
                stack.enter_context(file)
                batches = file.iter_batches(batch_size=_ROWS_PER_BATCH)
            else:
                source = stack.enter_context(pyarrow.OSFile(str(path)))
                batches = stack.enter_context(pyarrow.ipc.open_stream(source))
            yield from _batch_rows(batches, shown_path(path))
    except ConfigError:
        raise
    except Exception as error:
        # Damaged data raises pyarrow's own exceptions, and any of Python in conversions.
        kind = "a parquet file" if is_parquet else "an Arrow stream"
        raise ConfigError(f"{shown_path(path)}: not {kind}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type."""
    lines = str(error).splitlines()
    return shortened(printable(lines[0] if lines else type(error).__name__), 300)


def _batch_rows(batches: Any, shown: str) -> Iterator[LocatedRow]:
    """Convert Arrow record batches to rows. Columns and keys keep the order of the file."""
    prefix = f"{shown} row "
    number = 0
    for batch in batches:
        _check_columns(batch.schema.names, shown)
        # The conversion of a damaged file could otherwise read outside of its buffers.
        batch.validate(full=True)
        nested = [field.name for field in batch.schema if field.type.num_fields]
        for start in range(0, batch.num_rows, _ROWS_PER_BATCH):
            # A part at a time: Python objects need several times the memory of the batch.
            for row in batch.slice(start, _ROWS_PER_BATCH).to_pylist():
                for name in nested:
                    row[name] = _without_nulls(row[name])
                # Values that JSON does not have, such as dates, are texts.
                text = json.dumps(row, default=_json_value)
                yield Location(prefix, number), json.loads(text), text.encode()
                number += 1


def _without_nulls(value: Any) -> Any:
    """Remove null entries of objects at any depth: columnar files fill every key that any row has.

    An item of a list is kept even if it is null: its position may matter.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def _check_columns(names: list[str], shown: str) -> None:
    """Raise ConfigError for a column that a table has twice: one of them would be lost."""
    if len(set(names)) == len(names):
        return
    repeated = next(name for name in names if names.count(name) > 1)
    raise ConfigError(f"{shown}: has the column {repeated!r} twice; rename or remove one")


def _json_value(value: Any) -> Any:
    """Return a value that JSON does not have, such as a date, as a text.

    Bytes are text where they are UTF-8: some writers of Parquet do not mark texts as such. Other
    bytes are an object, so that a column that should be a text is refused.
    """
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return {"bytes": value.hex()}


def is_hub_data(path: str) -> bool:
    """Return True for the name of data on the hub."""
    return path.startswith(HUB_PREFIX)


def parse_hub_data(path: str, key: str) -> tuple[str, str, dict[str, str]]:
    """Return the repository, the file in it (empty for a split) and the options of the name of data
    on the hub. Raises ConfigError that names `key`.
    """
    location, _, query = path.removeprefix(HUB_PREFIX).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    # The form of the Hugging Face libraries has the kind of the repository in front.
    parts = location.removeprefix("datasets/").split("/")
    file = "/".join(parts[2:])
    is_named = len(parts) >= 2 and all(re.fullmatch(r"[\w.-]+", part) for part in parts[:2])
    # Parts of `..` would leave the directory of the snapshot.
    is_inside = not any(part in ("", ".", "..") for part in parts)
    possible = {"revision"} if file else {"split", "config", "revision"}
    is_complete = all(options.values()) and (file or "split" in options)
    if not (is_named and is_inside and is_complete and possible.issuperset(options)):
        raise ConfigError(f"{key} is {shortened(repr(path), 300)}; give {_FORM}")
    return "/".join(parts[:2]), file, options


def fetch_hub_data(path: str, key: str) -> Path:
    """Download the data that `path` names, unless it is in the cache; return the local path.

    A split is a directory of parquet files. Raises ConfigError that names `key` if the data does
    not exist, or cannot be reached and is not in the cache.
    """
    # On demand: its import takes half a second, and few runs need it.
    from huggingface_hub import hf_hub_download

    name, file, options = parse_hub_data(path, key)
    unreachable = connection_error(name, is_model=False)
    try:
        if not file:
            return _fetch_split(name, options, path, key, is_offline=unreachable is not None)
        local = hf_hub_download(
            name,
            file,
            repo_type="dataset",
            revision=options.get("revision"),
            local_files_only=unreachable is not None,
        )
        return Path(local)
    except ConfigError:
        raise
    except Exception as error:
        # They depend on the network library below huggingface_hub.
        text = hub_error_text(unreachable or error, name, is_model=False)
        raise ConfigError(f"{key} is {path}; {text}") from error


def _fetch_split(
    name: str, options: Mapping[str, str], path: str, key: str, *, is_offline: bool
) -> Path:
    """Download the parquet files of a split; return their directory."""
    from huggingface_hub import HfApi, snapshot_download

    revision = options.get("revision", _CONVERTED)
    split = options["split"]
    known: list[tuple[str, str]] = []
    if not is_offline:
        files = HfApi().list_repo_files(name, repo_type="dataset", revision=revision)
        parts = [file.split("/") for file in files if file.endswith(".parquet")]
        known = sorted({(part[0], part[1]) for part in parts if len(part) == 3})
    configs = [config for config, each in known if each == split]
    config = options.get("config", configs[0] if len(configs) == 1 else _DEFAULT_CONFIG)
    if known and (config, split) not in known:
        splits = ", ".join(f"config={config}&split={split}" for config, split in known)
        raise ConfigError(
            f"{key}: {path}: {name} has no split {split!r} of the configuration {config!r}; it has"
            f" {shortened(printable(splits), 500)}"
        )
    snapshot = snapshot_download(
        name,
        repo_type="dataset",
        revision=revision,
        allow_patterns=f"{config}/{split}/*.parquet",
        local_files_only=is_offline,
    )
    directory = Path(snapshot) / config / split
    if not directory.is_dir():
        raise ConfigError(
            f"{key}: {path}: the split {split!r} of the configuration {config!r} is not in the"
            f" cache ({snapshot}), and the hub cannot be reached; download it where it can"
        )
    return directory
