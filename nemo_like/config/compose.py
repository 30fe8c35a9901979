"""Composition with Hydra: defaults lists, overrides and interpolation become one plain nested dict.

The layers are, in this order, the defaults of the schema, the files of the defaults list and the
user's file, and the command line. Types are checked later, in `build`. Hydra's working directory,
output directory and logging are not used.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_like.config.arithmetic import register_arithmetic
from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.inherit import inherited_files, inherits_by_path, merge_order, merged
from nemo_like.config.keys import JobSchema, field_types, is_section
from nemo_like.config.text import is_possible_path, shortened, shown_value
from nemo_like.config.yaml_locations import Sources, read_yaml

_DEFAULTS_NAME = "_nemo_like_schema_defaults"
_PRIMARY_NAME = "_nemo_like_primary"
_MERGED_NAME = "_nemo_like_merged"
_ENTRY = re.compile(
    r"^(?P<keywords>(?:(?:optional|override)\s+)*)(?P<name>[^@]+)(?P<package>@.*)?$"
)
_ARITHMETIC = re.compile(r"\$\{(add|mul|div):")
MAX_FILES = 50
MISSING = "???"
"""OmegaConf's value of a required key that is not set."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """One file of the composition.

    Example: `policy/qwen.yaml`, named as `policy: qwen`, has the prefix `policy`.
    """

    path: Path
    prefix: str


def schema_defaults(section: type) -> dict[str, Any]:
    """Return the defaults of a config dataclass as plain nested values; `???` for required keys."""
    plain: dict[str, Any] = {}
    types = field_types(section)
    for field in dataclasses.fields(section):
        if is_section(types[field.name]):
            plain[field.name] = schema_defaults(types[field.name])
        elif isinstance(field.default, tuple):
            plain[field.name] = list(field.default)
        elif field.default is not dataclasses.MISSING:
            plain[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            plain[field.name] = field.default_factory()
        else:
            plain[field.name] = MISSING
    return plain


def defaults_chain(path: Path) -> list[Path]:
    """Return `path` and every file that its defaults lists name, depth first.

    Files chosen by interpolation are left out. Raises ConfigError for a file that is missing or
    invalid, and for a cycle.
    """
    return _chain(path, path.parent, ())


@contextmanager
def hydra_session(job: JobSchema, path: Path) -> Iterator[None]:
    """Initialize Hydra for one config file; every Hydra error inside becomes a ConfigError."""
    store = ConfigStore.instance()
    store.store(name=_DEFAULTS_NAME, node=schema_defaults(job.run_config))
    primary = path.name.removesuffix(".yaml")
    register_arithmetic()
    if inherits_by_path(path, read_yaml(path)):
        # Hydra finds files by name in one folder only, so inherited files are merged before.
        primary = _MERGED_NAME
        with _hydra_errors(path):
            store.store(name=_MERGED_NAME, node=merged(merge_order(path)))
    # Later entries override earlier ones: the file overrides the defaults of the schema.
    store.store(name=_PRIMARY_NAME, node={"defaults": [_DEFAULTS_NAME, primary, "_self_"]})
    # Hydra is a singleton, which a caller of this library may have initialized.
    GlobalHydra.instance().clear()
    config_dir = str(path.parent)
    try:
        with initialize_config_dir(config_dir, job_name="nemo_like", version_base="1.3"):
            yield
    except (HydraException, OmegaConfBaseException) as error:
        text = shortened(_first_paragraph(error), 500)
        raise ConfigError(f"{shown_path(path)}: {text}") from error


@contextmanager
def _hydra_errors(path: Path | None) -> Iterator[None]:
    """Turn every other exception into a ConfigError.

    For unusual input Hydra lets exceptions of YAML, ANTLR and Python pass.
    """
    try:
        yield
    except (ConfigError, HydraException, OmegaConfBaseException):
        raise
    except Exception as error:
        name = "the config" if path is None else shown_path(path)
        text = shortened(_first_paragraph(error), 500)
        raise ConfigError(f"{name} cannot be composed: {text}") from error


def find_layers(path: Path, overrides: Sequence[str]) -> list[Layer]:
    """Return the files in the order in which they are merged. Call it inside `hydra_session`."""
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoader)
    with _hydra_errors(path):
        found = loader.compute_defaults_list(_PRIMARY_NAME, list(overrides), RunMode.RUN)
    layers = []
    if inherits_by_path(path, read_yaml(path)):
        layers += [Layer(file, "") for file in merge_order(path)]
    for default in found.defaults:
        file = path.parent / f"{default.config_path.removesuffix('.yaml')}.yaml"
        # Entries of the config store, such as the schema's defaults, are not files.
        if file.is_file():
            package = default.package or ""
            layers.append(Layer(file, package.replace("_global_", "").strip(".")))
    return layers


def compose_plain(overrides: Sequence[str], sources: Sources) -> dict[str, Any]:
    """Return the merged and resolved config as plain values. Call it inside `hydra_session`.

    Raises ConfigError for an interpolation that fails.
    """
    with _hydra_errors(None):
        config = compose(_PRIMARY_NAME, list(overrides))
    try:
        with _hydra_errors(None):
            plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ConfigError(_interpolation_text(error, sources)) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _interpolation_text(error: OmegaConfBaseException, sources: Sources) -> str:
    key = str(error.full_key or "the config")
    place = sources.locate(key)
    prefix = r"^(Key|Value)Error raised while resolving interpolation: "
    problem = re.sub(prefix, "", _first_paragraph(error)).strip('"')
    hint = ""
    if problem.startswith("Environment variable"):
        hint = "; set it, or write ${oc.env:NAME,default}"
    elif not _ARITHMETIC.match(problem):
        hint = "; for a literal ${ write \\${"
    location = f" ({place})" if place else ""
    return f"{key} cannot be resolved: {problem}{hint}{location}"


def _first_paragraph(error: Exception) -> str:
    """Return the message and that of its cause, without Hydra's search paths, links and keys."""
    lines = []
    for text in (str(error), str(error.__cause__ or "")):
        paragraph, *_ = re.split(r"\n\s*\n|\n\s+full_key:", text.strip())
        for line in paragraph.splitlines():
            # The cause often repeats the message; links lead to documentation of Hydra.
            if line.strip() not in lines and "https://" not in line:
                lines.append(line.strip())
    return ": ".join(lines) or type(error).__name__


def _chain(
    path: Path, config_dir: Path, trail: tuple[Path, ...], *, by_path: bool = False
) -> list[Path]:
    # Resolved, so that a cycle through a symbolic link is found as well.
    path = path.resolve()
    if path in trail:
        cycle = (*trail[trail.index(path) :], path)
        circle = " -> ".join(shown_path(file) for file in cycle)
        raise ConfigError(f"defaults lists name each other in a circle: {circle}")
    root = read_yaml(path)
    files = [path]
    if by_path or inherits_by_path(path, root):
        for target, line in inherited_files(path, root):
            # None is the file itself, which is in the list already.
            if target is None:
                continue
            if not target.is_file():
                raise ConfigError(
                    f"{shown_path(path)}:{line} defaults: {missing_file_text(target)}"
                )
            files += _chain(target, config_dir, (*trail, path), by_path=True)
            _check_num_files(files)
        return files
    for key, value in root.value if root is not None else ():
        if key.value == "defaults":
            for target in _targets(value, path, config_dir):
                files += _chain(target, config_dir, (*trail, path))
                _check_num_files(files)
    return files


def _check_num_files(files: Sequence[Path]) -> None:
    """Raise ConfigError for too many files.

    Files that each name the next one twice would be read exponentially often.
    """
    if len(files) > MAX_FILES:
        raise ConfigError(
            f"the defaults of {shown_path(files[0])} name more than {MAX_FILES} files"
        )


def _targets(defaults: yaml.Node, path: Path, config_dir: Path) -> Iterator[Path]:
    """Yield the files that one defaults list names."""
    if not isinstance(defaults, yaml.SequenceNode):
        place = f"{shown_path(path)}:{defaults.start_mark.line + 1}"
        forms = "`defaults: base.yaml` or `defaults: [name, _self_]`"
        raise ConfigError(f"{place} defaults is neither a file nor a list of files; write {forms}")
    for entry in defaults.value:
        place = f"{shown_path(path)}:{entry.start_mark.line + 1}"
        for keywords, name, package in _names(entry, place):
            # An override changes the choice of another list, and an interpolation is only known
            # after composition; neither names a file here.
            if name == "_self_" or "override" in keywords or "${" in name:
                continue
            if name.startswith("../") and not package:
                raise ConfigError(
                    f"{place} defaults entry {name}: for a file outside the folder write"
                    f" {name}@_global_"
                )
            # In Hydra a leading slash is the folder of the primary config, not the root.
            folder = config_dir if name.startswith("/") else path.parent
            target = folder / f"{name.lstrip('/').removesuffix('.yaml')}.yaml"
            if target.is_file():
                yield target
            elif "optional" not in keywords:
                raise ConfigError(f"{place} defaults entry {name}: {missing_file_text(target)}")


def _names(entry: yaml.Node, place: str) -> Iterator[tuple[str, str, str]]:
    """Yield (keywords, name, package) of an entry `name`, `group: option` or `group: [options]`."""
    if isinstance(entry, yaml.ScalarNode):
        pairs = [(entry.value, "")]
    elif isinstance(entry, yaml.MappingNode) and len(entry.value) == 1:
        group, options = entry.value[0]
        chosen = options.value if isinstance(options, yaml.SequenceNode) else [options]
        pairs = []
        for option in chosen:
            # A null option of a group chooses no file.
            if option.value not in ("null", "~", ""):
                pairs.append((group.value, f"/{option.value}"))
    else:
        raise ConfigError(f"{place} defaults entry is neither `name` nor `group: name`")
    for text, suffix in pairs:
        match = _ENTRY.match(text)
        if match is None or not is_possible_path(f"{text}{suffix}.yaml"):
            raise ConfigError(f"{place} defaults entry {shown_value(text)} names no file")
        yield match["keywords"], match["name"].strip() + suffix, match["package"] or ""


def missing_file_text(path: Path) -> str:
    """Return the message about a missing config file, with the nearest name in its folder."""
    if path.is_dir():
        return f"{shown_path(path)} is a directory; name a YAML file in it"
    # Sorted, so that the suggestion does not depend on the file system.
    stems = sorted(file.stem for file in path.parent.glob("*.yaml"))
    nearest = difflib.get_close_matches(path.stem, stems, n=1, cutoff=0.6)
    if nearest:
        suggestion = shown_path(path.with_name(f"{nearest[0]}.yaml"))
        return f"{shown_path(path)} does not exist; did you mean {suggestion}?"
    folder = "" if path.parent.is_dir() else f", nor does the folder {shown_path(path.parent)}"
    return f"{shown_path(path)} does not exist{folder}"
