"""Reads configs of other tools: YAML, TOML, and scripts or commands with arguments.

Arguments are `key=value` (Hydra), or `--key value ...`, and have dots for sections. Variables that
a script sets to plain texts are replaced. The result has nested values; an item of a list of
sections has its index as name.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.foreign import with_indices
from nemo_like.config.keys import JobSchema
from nemo_like.config.load import Composition, YamlLoader, inherited_files, read_root

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARGUMENT = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_PROGRAM = re.compile(r"(?:openrlhf|verl|trl)(?:[./].+)?|recipe[./].+|.+\.py")
_SPREAD = re.compile(r"\$\{?(?:@|\w+\[@\])\}?")
_ENDS = ("&&", "||", "|", ";", "&", ">", ">>")
_JOBS = {
    "sft": "sft",
    "dpo": "dpo",
    "rm": "rm",
    "reward": "rm",
    "ppo": "grpo",
    "grpo": "grpo",
    "gspo": "grpo",
    "dapo": "grpo",
    "gkd": "distill",
}
"""Word in the name of a program -> job."""


@dataclass
class ForeignSource:
    """The content of one config of another tool."""

    tree: dict[str, Any]
    job: str | None = None
    """The job in the name of the program."""
    notes: list[str] = field(default_factory=list)
    """What is not known of it."""


def read_source(job: JobSchema, path: Path) -> ForeignSource:
    """Read a file of any of the forms. Raises ConfigError."""
    if path.suffix in (".yaml", ".yml"):
        return _read_yaml(job, path)
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".toml":
            return ForeignSource(with_indices(tomllib.loads(text)))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown_path(path)} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{shown_path(path)} is not valid TOML: {error}") from error
    return _read_script(text)


def _read_yaml(job: JobSchema, path: Path) -> ForeignSource:
    composition = Composition(job)
    notes = []
    try:
        files = list(inherited_files(path, ()))
    except ConfigError as error:
        root = read_root(path)
        files = [] if root is None else [(path, root)]
        notes.append(f"only the keys of this file are known: {error}")
    for file, root in files:
        composition.add_file(file, root)
    return ForeignSource(with_indices(composition.tree), notes=notes)


def _read_script(text: str) -> ForeignSource:
    """Return the arguments of a shell script or command."""
    source = ForeignSource({})
    variables = {"HOME": os.path.expanduser("~")}
    is_list = False
    for words in _commands(text):
        first = None if is_list else _ASSIGNMENT.fullmatch(words[0])
        if first is not None and first[2].startswith("("):
            is_list = True
            words[0] = first[2][1:]
        elif first is not None:
            # With further words it is a variable of one command, or the output of one.
            variables.update({first[1]: _replaced(first[2], variables)} if not words[1:] else {})
            del words[0]
        if is_list and words and words[-1].endswith(")"):
            is_list = False
            words[-1] = words[-1][:-1]
        replaced = [
            part
            for word in words
            if not _SPREAD.fullmatch(word)
            for part in _expanded(word, variables)
        ]
        _add_arguments(source, [word for word in replaced if word])
    return source


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each line; a line may be continued, also within quotes."""
    pending = ""
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        pending = f"{pending}\n{line}" if pending else line
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:
            # A quotation that ends in a later line.
            continue
        pending = ""
        end = next((index for index, word in enumerate(words) if word in _ENDS), len(words))
        start = 1 if words[:1] in (["export"], ["local"], ["declare"]) else 0
        if words[start:end]:
            yield words[start:end]


def _add_arguments(source: ForeignSource, words: list[str]) -> None:
    """Add the arguments of one line. A line is a list of arguments, or a command: those before the
    name of its program belong to the launcher.
    """
    start = 0
    if words and not words[0].startswith("-") and _ARGUMENT.fullmatch(words[0]) is None:
        start = len(words)
        for index, word in enumerate(words):
            is_program = _PROGRAM.fullmatch(word) or words[index - 1] in ("-m", "--module")
            # Without arguments a file may be the object of another command, such as `rm`.
            if is_program and words[index + 1 :]:
                start = index + 1
                stem = word.removesuffix(".py").rpartition("/")[2].rpartition(".")[2]
                # `trl grpo` has the job in the next word.
                names = re.split(r"[\W_]+", stem) + words[start : start + 1]
                source.job = next((_JOBS[name] for name in names if name in _JOBS), source.job)
                break
    option = ""
    values: list[str] = []
    for word in [*words[start:], "--"]:
        if not word.startswith("--"):
            match = None if option else _ARGUMENT.fullmatch(word)
            if match is not None:
                _put(source.tree, match[1], _value(match[2]))
            elif option:
                values.append(word.rstrip(",") if len(word) > 1 else word)
            continue
        if option:
            parsed = [_value(each) for each in values]
            _put(source.tree, option, True if not parsed else parsed if parsed[1:] else parsed[0])
        option, has_value, value = word[2:].partition("=")
        values = [value] if has_value else []
        if option.startswith("config-"):
            option = ""


def _replaced(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        default = match[0] if match[2] is None else match[2]
        return variables.get(match[1] or match[3], default)

    return _VARIABLE.sub(value, text)


def _expanded(word: str, variables: Mapping[str, str]) -> list[str]:
    """Return the words that the shell makes of one with variables, perhaps several arguments."""
    text = _replaced(word, variables)
    parts = text.split()
    is_list = text != word and parts[1:] and all(_ARGUMENT.fullmatch(part) for part in parts)
    return parts if is_list else [text]


def _value(text: str) -> Any:
    try:
        return yaml.load(text, Loader=YamlLoader)
    except yaml.YAMLError:
        return text


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        inner = tree.get(section)
        if not isinstance(inner, dict):
            inner = tree[section] = {}
        tree = inner
    tree[name] = value
