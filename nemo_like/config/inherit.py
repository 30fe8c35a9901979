"""Inheritance by path: `defaults: base.yaml` or a list of paths, as in configs of NeMo RL.

A path is absolute or relative to the file that names it. Files are merged in the order of the list,
each over those before it; the naming file comes last, or at the position of `_self_`. Lists in
Hydra's form (names in the config's folder, groups, packages) are composed by Hydra; a file that is
inherited by path may have a plain list of names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.text import is_possible_path, shown_value
from nemo_like.config.yaml_locations import read_yaml

_SELF = "_self_"
_SUFFIXES = (".yaml", ".yml")


def inherits_by_path(path: Path, root: yaml.MappingNode | None) -> bool:
    """Return True if the `defaults` of a file are a path, or a list with at least one path."""
    defaults = _defaults(root)
    if isinstance(defaults, yaml.ScalarNode):
        return True
    if not isinstance(defaults, yaml.SequenceNode):
        return False
    entries = [entry.value for entry in defaults.value if isinstance(entry, yaml.ScalarNode)]
    # Groups, packages (`@`) and keywords (`optional name`) belong to Hydra.
    has_groups = len(entries) < len(defaults.value)
    if has_groups or any("@" in entry or " " in entry for entry in entries):
        return False
    names = [entry for entry in entries if entry != _SELF]
    # Hydra can name no file outside its folder without a package.
    for name in names:
        if name.startswith("../") or _absolute(name) is not None:
            return True
    # With `_self_` the list is written for Hydra, which accepts names with a suffix as well.
    has_suffix = any(name.endswith(_SUFFIXES) for name in names)
    return has_suffix and _SELF not in entries


def inherited_files(path: Path, root: yaml.MappingNode | None) -> Iterator[tuple[Path | None, int]]:
    """Yield (file, line) of every entry of a plain `defaults`, in the order of merging.

    None stands for the file itself. Raises ConfigError for an entry that is no path: Hydra's groups
    and packages cannot be inherited by path.
    """
    defaults = _defaults(root)
    if defaults is None:
        yield None, 1
        return
    entries = defaults.value if isinstance(defaults, yaml.SequenceNode) else [defaults]
    has_self = False
    for entry in entries:
        line = entry.start_mark.line + 1
        is_path = isinstance(entry, yaml.ScalarNode)
        if not is_path or any(mark in entry.value for mark in ("@", " ", "${")):
            raise ConfigError(
                f"{shown_path(path)}:{line} defaults entry is not the path of a YAML file; a"
                " config that is inherited by path cannot choose from Hydra groups"
            )
        if entry.value == _SELF:
            has_self = True
            yield None, line
            continue
        yield resolved(path, entry.value), line
    # As in Hydra, a file overrides what it inherits unless `_self_` is elsewhere in the list.
    if not has_self:
        yield None, 1


def resolved(path: Path, name: str) -> Path:
    """Return the file that an entry `name` of the file `path` refers to; the suffix is optional."""
    file = _with_suffix(name)
    if file is None:
        raise ConfigError(
            f"{shown_path(path)}: defaults entry {shown_value(name)} is not the path of a YAML file"
        )
    return file if file.is_absolute() else path.parent / file


def merge_order(path: Path) -> list[Path]:
    """Return the files to merge for `path`, first to last.

    `defaults_chain` must have checked before that they exist and have no cycle.
    """
    files = []
    for file, _ in inherited_files(path, read_yaml(path)):
        files += [path] if file is None else merge_order(file)
    return files


def merged(files: list[Path]) -> DictConfig:
    """Merge the files, each over those before it, without `defaults`; nothing is resolved."""
    config = OmegaConf.create({})
    for file in files:
        layer = OmegaConf.load(file)
        if isinstance(layer, DictConfig):
            layer.pop("defaults", None)
            config = OmegaConf.merge(config, layer)
    assert isinstance(config, DictConfig)
    return config


def _defaults(root: yaml.MappingNode | None) -> yaml.Node | None:
    """Return the value of the key `defaults`; None if it is missing or empty."""
    for key, value in root.value if root is not None else ():
        if key.value == "defaults":
            return None if value.tag.endswith(":null") else value
    return None


def _absolute(name: str) -> Path | None:
    """Return the file of an absolute path; None for a relative one.

    None as well for Hydra's `/name`, which is relative to the config's folder.
    """
    file = _with_suffix(name)
    if file is None or not file.is_absolute():
        return None
    # A path with a suffix is meant as a file even if it is missing, so that the error names it.
    if file.is_file() or name.endswith(_SUFFIXES):
        return file
    return None


def _with_suffix(name: str) -> Path | None:
    """Return the path `name` with a YAML suffix; None if it is not possible (`/`, `~nobody`)."""
    try:
        file = Path(name).expanduser()
        if not is_possible_path(f"{file}.yaml"):
            return None
        return file if file.suffix in _SUFFIXES else file.with_name(f"{file.name}.yaml")
    except (ValueError, RuntimeError):
        # `with_name` refuses an empty name, `expanduser` an unknown user.
        return None
