"""`load_config`: compose a YAML file and overrides into a checked config, or raise one ConfigError.

Relative paths inside a config are relative to the working directory; the files of a defaults list
are relative to the file that names them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from nemo_like.config.build import build_config, to_dict
from nemo_like.config.check import find_problems
from nemo_like.config.compose import (
    compose_plain,
    defaults_chain,
    find_layers,
    hydra_session,
    missing_file_text,
)
from nemo_like.config.errors import ConfigError, Problem, raise_problems, shown_path
from nemo_like.config.foreign import find_foreign, guess_job
from nemo_like.config.foreign_report import foreign_text
from nemo_like.config.keys import JobSchema, field_types, type_at
from nemo_like.config.overrides import (
    check_override_keys,
    parse_overrides,
    record_overrides,
    set_in_tree,
)
from nemo_like.config.schema import RunConfig
from nemo_like.config.text import is_possible_path, shown_value
from nemo_like.config.yaml_locations import (
    Sources,
    check_keys,
    merged_trees,
    plain_tree,
    read_yaml,
    record,
)

__all__ = ["JobSchema", "detect_kind", "load_config", "to_dict", "to_yaml"]

_NUMBER_LIKE = re.compile(r"[-+.0-9_]+([eE][-+]?[0-9_]*)?")


def load_config(job: JobSchema, path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Compose the file and the overrides over the schema's defaults, check and build the config.

    Overrides are Hydra's: `key=value`, `+key=value`, `~key` (back to its default), `group=file`.
    Everything is checked that needs neither data nor a model. Raises ConfigError.
    `algorithms.registry.load_config` takes the name of the job instead.
    """
    path = _config_file(path)
    # Checked before Hydra reads the files: Hydra recurses without end on a cycle, and its message
    # about a missing file has no location.
    defaults_chain(path)
    parsed = parse_overrides(overrides, path.parent)
    texts = [override.for_hydra(job) for override in parsed]
    group_choices = [override.text for override in parsed if override.chooses_file]
    sources = Sources()
    tree: dict[str, Any] = {}
    with hydra_session(job, path):
        unknown = [*check_override_keys(job, parsed)]
        for layer in find_layers(path, group_choices):
            root = read_yaml(layer.path)
            if root is not None:
                unknown += check_keys(job, root, layer.prefix, layer.path)
                record(sources, root, layer.prefix, layer.path)
                tree = merged_trees(tree, plain_tree(root, layer.prefix))
        record_overrides(sources, parsed)
        if unknown:
            set_in_tree(tree, parsed)
            _raise_foreign(job, path, tree, unknown, sources)
        raise_problems(unknown)
        plain = compose_plain(texts, sources)
    config, problems = build_config(job.run_config, plain, sources)
    raise_problems(problems)
    assert config is not None
    raise_problems([_located(problem, sources) for problem in find_problems(config)])
    return config


def detect_kind(
    jobs: Mapping[str, type[RunConfig]], path: Path, overrides: Sequence[str] = ()
) -> str:
    """Return the job that a config is for, by the keys that only one of `jobs` has.

    A config of another tool is recognized by the keys of that tool, so that `load_config` can list
    what to change. Raises ConfigError if the job is ambiguous.
    """
    path = _config_file(path)
    content: dict[str, Any] = {}
    for file in reversed(defaults_chain(path)):
        root = read_yaml(file)
        if root is not None:
            content = merged_trees(content, plain_tree(root, ""))
    keys = {override.key for override in parse_overrides(overrides, path.parent)}
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


class _QuotingDumper(yaml.SafeDumper):
    """Quotes texts that OmegaConf reads as numbers and PyYAML does not, such as `1e-5`."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if _NUMBER_LIKE.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_QuotingDumper.add_representer(str, _represent_text)


def _dumped(config: RunConfig, *, allow_unicode: bool) -> str:
    return yaml.dump(
        to_dict(config), Dumper=_QuotingDumper, sort_keys=False, allow_unicode=allow_unicode
    )


def _raise_foreign(
    job: JobSchema, path: Path, tree: dict[str, Any], unknown: Sequence[Problem], sources: Sources
) -> None:
    """Raise one ConfigError with all findings in groups if the unknown keys are another tool's."""
    findings = find_foreign(job, tree)
    if findings.are_foreign:
        others = [problem for problem in unknown if not findings.covers(problem.keys[0])]
        raise ConfigError(foreign_text(job, shown_path(path), tree, findings, others, sources))


def _config_file(path: Path) -> Path:
    path = Path(path).absolute()
    if not is_possible_path(str(path)):
        raise ConfigError(f"config file {shown_value(str(path))} does not exist")
    if not path.is_file():
        raise ConfigError(f"config file {missing_file_text(path)}")
    if path.suffix != ".yaml":
        other = "; TOML and other formats are not read" if path.suffix != ".yml" else ""
        raise ConfigError(f"config file {shown_path(path)} must be named .yaml{other}")
    return path


def _located(problem: Problem, sources: Sources) -> Problem:
    """Return the problem with the location of its first key that a file or an override sets."""
    for key in problem.keys:
        if key in sources.by_key:
            return replace(problem, location=sources.by_key[key].location)
    return problem
