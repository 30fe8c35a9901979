"""`nemo-like migrate`: write a config from one of another tool, and say what became of its keys."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from nemo_like.algorithms.registry import RUN_CONFIGS
from nemo_like.config.errors import ConfigError, counted, shown_path
from nemo_like.config.foreign_report import reason_lines, shown_key
from nemo_like.config.keys import child_types, type_at
from nemo_like.config.load import YamlDumper, missing_file_text
from nemo_like.config.migrate import Migration, migrate
from nemo_like.console import say, say_error

_HELP = {
    "grpo.max_num_steps": "the number of steps",
    "data.train_path": "a file, or hf://NAME?split=SPLIT",
    "data.validation_path": "a file, or hf://NAME?split=SPLIT",
    "policy.model_name": "a directory, or a name of the Hugging Face hub",
    "reward.functions.answer.path": "your reward function, module.function",
}
_WIDTH = 32
"""Column of the comments, where the value is shorter."""


def run(arguments: argparse.Namespace) -> int:
    """Write the config and the report; return the exit code. Raises ConfigError."""
    source, target = arguments.source, arguments.out
    command = sys.stdin.read() if str(source) == "-" else None
    if command is None and not source.is_file():
        raise ConfigError(missing_file_text(source))
    result = migrate(
        RUN_CONFIGS, source, arguments.kind, text=command, num_processes=arguments.num_processes
    )
    text = config_text(result, str(source))
    if target is None:
        say(text.rstrip("\n"))
    elif target.exists():
        raise ConfigError(f"{shown_path(target)} exists already; choose another name for --out")
    else:
        target.write_text(text)
    name = "NEW.yaml" if target is None else shown_path(target)
    # Beside the YAML on the standard output the report is on the other stream.
    (say if target is not None else say_error)("\n".join(report_lines(result, str(source), name)))
    return 0


def config_text(result: Migration, source: str) -> str:
    """Return the YAML with the origin of each key, and with what is missing and left out."""
    lines = [f"# From {source}, a config of {result.tool.name} for `{result.job.kind}`."]
    sections = [
        ("Not found, so that their keys are not known", result.missing_files),
        ("What you must set", _must_set(result)),
        ("What you must change", [str(problem) for problem in result.problems]),
        ("What differs", result.notes),
    ]
    lines += [f"# {line}" for line in _groups(sections)]
    tree = result.tree()
    for key in result.missing:
        _put_missing(tree, key)
    # The section of the job identifies it.
    tree.setdefault(result.job.kind, {})
    lines += ["", *_yaml_lines(result, tree, "", "")]
    sections = [
        *_dropped(result),
        ("Unknown keys, not carried over", [shown_key(one.path) for one in result.unknown]),
    ]
    lines += ["", *(f"# {line}" for line in _groups(sections))]
    return "\n".join(lines).rstrip() + "\n"


def report_lines(result: Migration, source: str, target: str) -> Iterator[str]:
    """Yield what became of each key of the original, in groups, and what to do next."""
    yield (
        f"{source} is a config of {result.tool.name} for `{result.job.kind}`:"
        f" {counted(len(result.carried), 'key')} carried over, {len(result.dropped)} dropped,"
        f" {len(result.unknown)} unknown"
    )
    yield from _groups([("Not found, so that their keys are not known", result.missing_files)])
    carried = []
    for path, keys in result.carried.items():
        values = [f"{key}: {_shown(result.values.get(key))}" for key in dict.fromkeys(keys)]
        carried.append(f"{shown_key(path)} -> {', '.join(values)}")
    yield from _groups(
        [
            ("Carried over", carried),
            *_dropped(result),
            ("Unknown keys, not carried over", [shown_key(one.path) for one in result.unknown]),
            ("What differs", result.notes),
            ("What you must change", [str(problem) for problem in result.problems]),
            ("What you must set", _must_set(result)),
        ]
    )
    if any(one.group == "unsupported" for one in result.dropped):
        yield "docs/limits.md lists what has no counterpart at all"
    settings = "".join(f" {key}=..." for key in result.missing)
    yield f"next: nemo-like validate --config {target}{settings}"


def _must_set(result: Migration) -> list[str]:
    return [f"{key}: {result.reasons.get(key) or _HELP.get(key, '')}" for key in result.missing]


def _dropped(result: Migration) -> list[tuple[str, list[str]]]:
    """Return the keys that may change training first."""
    headings = {
        "unsupported": "Dropped, without a counterpart",
        "deletable": "Dropped, without an effect here",
    }
    return [
        (heading, list(reason_lines([one for one in result.dropped if one.group == group])))
        for group, heading in headings.items()
    ]


def _groups(groups: list[tuple[str, list[str]]]) -> Iterator[str]:
    for heading, lines in groups:
        if lines:
            yield f"{heading}:"
            yield from (f"  {line}" for line in lines)


def _put_missing(tree: dict[str, Any], key: str) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = _Missing()


class _Missing:
    """The value of a key that the user must set."""


def _yaml_lines(
    result: Migration, tree: Mapping[str, Any], prefix: str, indent: str
) -> Iterator[str]:
    """Yield the YAML of a section in the order of the schema, with a comment for each key."""
    types = child_types(type_at(result.job.run_config, prefix))
    for name in [each for each in types if each in tree] if types else tree:
        key = f"{prefix}.{name}" if prefix else name
        value = tree[name]
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from _yaml_lines(result, value, key, f"{indent}  ")
        elif isinstance(value, _Missing):
            reason = result.reasons.get(key, "you must set it")
            yield f"{indent}{name}: ???".ljust(_WIDTH) + f"  # {reason}"
        elif key in result.origins:
            yield f"{indent}{name}: {_shown(value)}".ljust(_WIDTH) + f"  # {result.origins[key]}"
        else:
            yield f"{indent}{name}: {_shown(value)}"


def _shown(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.dump(
        value, Dumper=YamlDumper, default_flow_style=True, width=10**6, allow_unicode=True
    )
    return text.removesuffix("...\n").strip()
