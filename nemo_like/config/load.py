"""`load_config`: compose a YAML file and overrides into a checked config, or raise one ConfigError.

Relative paths inside a config are relative to the working directory; the files of a defaults list
are relative to the file that names them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import yaml

from nemo_like.config.build import build_config, to_dict
from nemo_like.config.check import find_problems
from nemo_like.config.errors import ConfigError, Problem, raise_problems, shown_path
from nemo_like.config.foreign import find_foreign, guess_job
from nemo_like.config.foreign_report import foreign_text
from nemo_like.config.interpolation import resolve_interpolations
from nemo_like.config.keys import JobSchema, field_types, is_section, type_at
from nemo_like.config.schema import RunConfig
from nemo_like.config.text import is_possible_path
from nemo_like.config.yaml_files import (
    Composition,
    YamlDumper,
    compose_files,
    merged,
    missing_file_text,
)

__all__ = ["JobSchema", "detect_kind", "load_config", "to_dict", "to_yaml"]


def load_config(job: JobSchema, path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Compose the file and the overrides over the schema's defaults, check and build the config.

    Overrides are `key=value` with a value in YAML, and `~key` (back to its default). Everything is
    checked that needs neither data nor a model. Raises ConfigError.
    `algorithms.registry.load_config` takes the name of the job instead.
    """
    path = _config_file(path)
    composition = compose_files(job, path, overrides)
    unknown = list(composition.problems())
    if unknown:
        _raise_foreign(composition, path, unknown)
    raise_problems(unknown)
    values = merged(schema_defaults(job.run_config), composition.tree)
    plain = resolve_interpolations(values, composition.locate)
    config, problems = build_config(job.run_config, plain, composition.locate)
    raise_problems(problems)
    assert config is not None
    raise_problems([_located(problem, composition) for problem in find_problems(config)])
    return config


def schema_defaults(section: type) -> dict[str, Any]:
    """Return the defaults of a config dataclass as plain nested values, without required keys."""
    plain: dict[str, Any] = {}
    types = field_types(section)
    for field in fields(section):
        if is_section(types[field.name]):
            plain[field.name] = schema_defaults(types[field.name])
        elif isinstance(field.default, tuple):
            plain[field.name] = list(field.default)
        elif field.default is not MISSING:
            plain[field.name] = field.default
        elif field.default_factory is not MISSING:
            plain[field.name] = field.default_factory()
    return plain


def detect_kind(
    jobs: Mapping[str, type[RunConfig]], path: Path, overrides: Sequence[str] = ()
) -> str:
    """Return the job that a config is for, by the keys that only one of `jobs` has.

    A config of another tool is recognized by the keys of that tool, so that `load_config` can list
    what to change. Raises ConfigError if the job is ambiguous.
    """
    # The types of the values do not matter here, so any job will do.
    any_job = JobSchema(next(iter(jobs)), jobs)
    content = compose_files(any_job, _config_file(path), ()).tree
    keys = {text.lstrip("+~").partition("=")[0] for text in overrides}
    for section, value in content.items():
        keys.add(section)
        if isinstance(value, Mapping):
            keys.update(f"{section}.{name}" for name in value)
    found = []
    for kind, config in jobs.items():
        others = [other for name, other in jobs.items() if name != kind]
        own_keys = [key for key in keys if type_at(config, key) is not None]
        if any(all(type_at(other, key) is None for other in others) for key in own_keys):
            found.append(kind)
    if len(found) == 1:
        return found[0]
    guess = None if found else guess_job(content)
    if guess is not None:
        return guess
    sections = "; ".join(f"`{kind}` has {names}" for kind, names in _own_sections(jobs).items())
    problem = "has no section that only one job has"
    fix = "add the section of its job"
    if found:
        problem = "has sections of several jobs"
        fix = "remove the sections of the other jobs"
    raise ConfigError(f"{shown_path(path)} {problem} ({sections}); {fix}, or pass --kind")


def _own_sections(jobs: Mapping[str, type[RunConfig]]) -> dict[str, str]:
    """Return job -> the top-level sections that are not in every config."""
    shared = field_types(RunConfig)
    own = {}
    for kind, config in jobs.items():
        own[kind] = ", ".join(name for name in field_types(config) if name not in shared)
    return own


def to_yaml(config: RunConfig) -> str:
    """Return the complete resolved config as YAML; loading the text gives an equal config."""
    text = _dumped(config, allow_unicode=True)
    # YAML reads these line breaks as spaces unless they are escaped.
    if re.search("[\x85\u2028\u2029]", text):
        text = _dumped(config, allow_unicode=False)
    return text


def _dumped(config: RunConfig, *, allow_unicode: bool) -> str:
    return yaml.dump(
        to_dict(config), Dumper=YamlDumper, sort_keys=False, allow_unicode=allow_unicode
    )


def _raise_foreign(composition: Composition, path: Path, unknown: Sequence[Problem]) -> None:
    """Raise one ConfigError with all findings in groups if the unknown keys are another tool's."""
    findings = find_foreign(composition.job, composition.tree)
    if findings.are_foreign:
        others = [problem for problem in unknown if not findings.covers(problem.keys[0])]
        text = foreign_text(
            shown_path(path), composition.tree, findings, others, composition.locations
        )
        raise ConfigError(text)


def _config_file(path: Path) -> Path:
    path = Path(path).absolute()
    if not is_possible_path(str(path)) or not path.is_file():
        raise ConfigError(f"config file {missing_file_text(path)}")
    if path.suffix != ".yaml":
        other = "; TOML and other formats are not read" if path.suffix != ".yml" else ""
        raise ConfigError(f"config file {shown_path(path)} must be named .yaml{other}")
    return path


def _located(problem: Problem, composition: Composition) -> Problem:
    """Return the problem with the location of its first key that a file or an override sets."""
    for key in problem.keys:
        if key in composition.locations:
            return replace(problem, location=composition.locations[key])
    return problem
