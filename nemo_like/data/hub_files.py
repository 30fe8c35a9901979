"""Data sets of the Hugging Face hub as local files.

`hf://OWNER/NAME/PATH/TO/FILE.jsonl` is one file of a data set's repository.
`hf://OWNER/NAME?split=train` are the parquet files that the hub makes of every public data set
(branch `refs/convert/parquet`, https://huggingface.co/docs/dataset-viewer/parquet), with
`&config=CONFIG` if several configurations have the split. `&revision=COMMIT` selects a version.
Files are downloaded once, to the cache of the library; a machine that cannot reach the hub uses the
cache.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

from nemo_like.config.errors import ConfigError
from nemo_like.config.model_directory import connection_error, hub_error_text
from nemo_like.config.paths import HUB_PREFIX
from nemo_like.config.text import printable, shortened

_CONVERTED = "refs/convert/parquet"
_DEFAULT_CONFIG = "default"
_OPTIONS = ("split", "config", "revision")
_FORM = (
    f"{HUB_PREFIX}OWNER/NAME?split=SPLIT[&config=CONFIG][&revision=REVISION] or"
    f" {HUB_PREFIX}OWNER/NAME/FILE[?revision=REVISION]"
)


@dataclass(frozen=True)
class HubData:
    """A split or one file of a data set of the hub."""

    name: str
    """Owner and name. Example: `openai/gsm8k`."""
    file: str | None
    """Path in the repository; None for a split."""
    split: str | None
    config: str | None
    revision: str | None


def is_hub_data(path: str) -> bool:
    """Return True for the name of data on the hub."""
    return path.startswith(HUB_PREFIX)


def parse_hub_data(path: str, key: str) -> HubData:
    """Parse the name of data on the hub. Raises ConfigError that names `key`."""
    location, _, query = path.removeprefix(HUB_PREFIX).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    # The form of the Hugging Face libraries has the kind of the repository in front.
    parts = location.removeprefix("datasets/").split("/")
    unknown = sorted(set(options) - set(_OPTIONS))
    is_named = len(parts) >= 2 and all(re.fullmatch(r"[\w.-]+", part) for part in parts[:2])
    # Parts of `..` would leave the directory of the snapshot.
    is_inside = not any(part in ("", ".", "..") for part in parts)
    if unknown or not is_named or not is_inside or not all(options.values()):
        raise ConfigError(f"{key} is {shortened(repr(path), 300)}; give {_FORM}")
    file = "/".join(parts[2:]) or None
    split = options.get("split")
    if (file is None) == (split is None) or (file is not None and "config" in options):
        raise ConfigError(
            f"{key} is {shortened(repr(path), 300)}; name either a file or a split: {_FORM}"
        )
    return HubData(
        name="/".join(parts[:2]),
        file=file,
        split=split,
        config=options.get("config"),
        revision=options.get("revision"),
    )


def fetch_hub_data(path: str, key: str) -> Path:
    """Download the data that `path` names, unless it is in the cache; return the local path.

    A split is a directory of parquet files. Raises ConfigError that names `key` if the data does
    not exist, or cannot be reached and is not in the cache.
    """
    # On demand: its import takes half a second, and few runs need it.
    from huggingface_hub import hf_hub_download

    data = parse_hub_data(path, key)
    unreachable = connection_error(data.name, is_model=False)
    try:
        if data.file is not None:
            local = hf_hub_download(
                data.name,
                data.file,
                repo_type="dataset",
                revision=data.revision,
                local_files_only=unreachable is not None,
            )
            return Path(local)
        return _fetch_split(data, path, key, local_files_only=unreachable is not None)
    except ConfigError:
        raise
    except Exception as error:
        # They depend on the network library below huggingface_hub.
        text = hub_error_text(unreachable or error, data.name, is_model=False)
        raise ConfigError(f"{key} is {path}; {text}") from error


def _fetch_split(data: HubData, path: str, key: str, *, local_files_only: bool) -> Path:
    """Download the parquet files of a split; return their directory."""
    from huggingface_hub import snapshot_download

    revision = data.revision or _CONVERTED
    known = [] if local_files_only else _listed_splits(data.name, revision)
    configs = [config for config, split in known if split == data.split]
    config = data.config
    if config is None:
        config = configs[0] if len(configs) == 1 else _DEFAULT_CONFIG
    if known and (config, data.split) not in known:
        splits = ", ".join(f"config={config}&split={split}" for config, split in known)
        raise ConfigError(
            f"{key}: {path}: {data.name} has no split {data.split!r} of the configuration"
            f" {config!r}; it has {shortened(printable(splits), 500)}"
        )
    snapshot = snapshot_download(
        data.name,
        repo_type="dataset",
        revision=revision,
        allow_patterns=f"{config}/{data.split}/*.parquet",
        local_files_only=local_files_only,
    )
    directory = Path(snapshot) / config / str(data.split)
    if not directory.is_dir():
        raise ConfigError(
            f"{key}: {path}: the split {data.split!r} of the configuration {config!r} is not in the"
            f" cache ({snapshot}), and the hub cannot be reached; download it where it can"
        )
    return directory


def _listed_splits(name: str, revision: str) -> list[tuple[str, str]]:
    """Return (configuration, split) of the parquet files of a data set on the hub."""
    from huggingface_hub import HfApi

    files = HfApi().list_repo_files(name, repo_type="dataset", revision=revision)
    parts = [file.split("/") for file in files if file.endswith(".parquet")]
    return sorted({(part[0], part[1]) for part in parts if len(part) == 3})
