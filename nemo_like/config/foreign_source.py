"""Reads configs of other tools: YAML, TOML, and scripts or commands with arguments.

Arguments are `key=value` (Hydra), or `--key value ...`, and have dots for sections. Variables that
a script sets to plain texts are replaced, and `$(( ))` of numbers is computed. A config that a
command names is read, and the arguments replace its values. The result has nested values; an item
of a list of sections has its index as name.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.foreign import value_at, with_indices
from nemo_like.config.keys import JobSchema, general
from nemo_like.config.load import Composition, YamlLoader, inherited_files, merged, read_root

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARGUMENT = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^}]*))?\}|(\w+))")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1.*?\n\s*\2\s*$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"^\s*#.*\n?", re.MULTILINE)
_POSITIONAL = re.compile(r"\$\{?[\d@*].*")
_PROGRAM = re.compile(
    r"(?:openrlhf|verl|trl|axolotl)(?:[./].+)?|llamafactory-cli|recipe[./].+|.+\.py"
)
_LAUNCHER = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|uv|srun|ray|nohup)")
_CONFIG = re.compile(r"[^=]+\.(?:ya?ml|toml)")
_SPREAD = re.compile(r"\$\{?(?:@|\w+\[@\])\}?")
_ENDS = ("&&", "||", "|", ";", "&", ">", ">>")
_OPENED = ("if", "case", "for", "while", "until")
_CLOSED = ("fi", "esac", "done")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass
class ForeignSource:
    """The content of one config of another tool."""

    tree: dict[str, Any]
    job: str | None = None
    """The job in the name of the program."""
    notes: list[str] = field(default_factory=list)
    """What is not known of it."""
    missing_files: list[str] = field(default_factory=list)
    """Configs that it names and that are not found."""
    num_processes: int | None = None
    """Processes that the command starts; None if they are not known."""


def read_source(job: JobSchema, path: Path, text: str | None = None) -> ForeignSource:
    """Read a file of any of the forms, or the command `text`. Raises ConfigError."""
    if text is not None:
        return _read_script(job, path, text)
    if path.suffix in (".yaml", ".yml"):
        return _read_yaml(job, path)
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".toml":
            return _one_part(ForeignSource(with_indices(tomllib.loads(text))))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown_path(path)} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{shown_path(path)} is not valid TOML: {error}") from error
    return _read_script(job, path, text)


def _read_yaml(job: JobSchema, path: Path) -> ForeignSource:
    composition = Composition(job)
    source = ForeignSource({})
    try:
        files = list(inherited_files(path, (), source.missing_files))
    except ConfigError as error:
        root = read_root(path)
        files = [] if root is None else [(path, root)]
        source.notes.append(f"only the keys of this file are known: {error}")
    for file, root in files:
        composition.add_file(file, root)
    source.tree = with_indices(composition.tree)
    return source


def _one_part(source: ForeignSource) -> ForeignSource:
    """Put the keys of a single file of prime-rl into its section of a config of all parts."""
    tree = source.tree
    is_sft = isinstance(tree.get("data"), dict) and not tree["data"].keys() <= {"fake"}
    if is_sft or not tree.keys().isdisjoint((*general()["parts"], "inference", "deployment")):
        return source
    for part, signs in general()["parts"].items():
        if any(value_at(tree, sign) is not None for sign in signs):
            return _nested_part(source, part)
    return source


def _nested_part(source: ForeignSource, part: str) -> ForeignSource:
    shared = {
        name: source.tree.pop(name) for name in general()["shared_keys"] if name in source.tree
    }
    source.tree = {**shared, part: source.tree}
    source.missing_files += [_part_text(other) for other in general()["parts"] if other != part]
    return source


def _part_text(part: str) -> str:
    return f"the file of the {part} of prime-rl"


def _read_script(job: JobSchema, path: Path, text: str) -> ForeignSource:
    """Return the arguments of a shell script or command."""
    reader = _ScriptReader(job, path)
    for words in _commands(path, text):
        reader.add_line(words)
    source = reader.source
    tree: dict[str, Any] = {}
    for config in reader.configs:
        tree = merged(tree, config)
    source.tree = merged(tree, source.tree)
    if general()["parts"].keys() <= source.tree.keys():
        texts = [_part_text(part) for part in general()["parts"]]
        source.missing_files = [name for name in source.missing_files if name not in texts]
    return source


def _commands(path: Path, text: str) -> Iterator[list[str]]:
    """Yield the words of each line; a line may be continued, also within quotes.

    Raises ConfigError for a quotation without an end.
    """
    # A text between the lines of a script may be one with arguments.
    text = _HEREDOC.sub(lambda match: match[0] if "--" in match[0] else "", text)
    text = _COMMENT.sub("", text)
    # One word each, as in the shell.
    text = _ARITHMETIC.sub(lambda match: re.sub(r"\s", "", match[0]), text)
    pending = ""
    for line in re.sub(r"\\\s*(\n|$)", " ", text).splitlines():
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
    if pending:
        first = pending.splitlines()[0].strip()
        raise ConfigError(f"{source_name(path)}: the quotation that begins in {first!r} has no end")


class _ScriptReader:
    """Collects the arguments of the lines of a script."""

    def __init__(self, job: JobSchema, path: Path) -> None:
        self.source = ForeignSource({})
        self.configs: list[dict[str, Any]] = []
        """The content of the configs that the commands name."""
        self._job = job
        self._path = path
        self._variables = {"HOME": os.path.expanduser("~")}
        self._is_list = False
        self._depth = 0
        """Number of open conditions and loops."""

    def add_line(self, words: list[str]) -> None:
        """Add the words of one line."""
        if not self._is_list and words[0].endswith(")") and "(" not in words[0]:
            # A label of `case`, whose commands depend on the arguments of the script.
            return
        is_one_line = words[-1].rstrip(";") in _CLOSED
        self._depth += (words[0] in _OPENED and not is_one_line) - (words[0] in _CLOSED)
        environment: dict[str, str] = {}
        first = None if self._is_list else _ASSIGNMENT.fullmatch(words[0])
        if first is not None and first[2].startswith("("):
            self._is_list = True
            words[0] = first[2][1:]
        elif first is not None and not words[1:]:
            self._assign(first[1], first[2])
            return
        elif first is not None:
            # Variables of one command, or the output of one.
            while words and (match := _ASSIGNMENT.fullmatch(words[0])) is not None:
                environment[match[1]] = self._replaced(match[2])
                del words[0]
        if self._is_list and words and words[-1].endswith(")"):
            self._is_list = False
            words[-1] = words[-1][:-1]
        replaced = [
            part for word in words if not _SPREAD.fullmatch(word) for part in self._expanded(word)
        ]
        self._add_arguments([word for word in replaced if word], environment)

    def _assign(self, name: str, text: str) -> None:
        known = self._variables.get(name)
        if _POSITIONAL.fullmatch(text) and known is not None:
            # An argument of the script replaces the value only where one is given.
            return
        self._variables[name] = self._replaced(text)
        if self._depth and known not in (None, self._variables[name]):
            # The condition decides which of the two values it has.
            del self._variables[name]

    def _add_arguments(self, words: list[str], environment: Mapping[str, str]) -> None:
        """Add the arguments of one line. A line is a list of arguments, or a command: those before
        the name of its program belong to the launcher.
        """
        start = 0
        if words and not words[0].startswith("-") and _ARGUMENT.fullmatch(words[0]) is None:
            start = _program_end(words)
            for tool, signs in general()["unread"].items():
                if not set(signs["programs"]).isdisjoint(words[:3]):
                    raise ConfigError(unread_text(source_name(self._path), tool))
            if start < len(words):
                self._add_program(words[:start], words[start:], environment)
        option = ""
        values: list[str] = []
        for word in [*words[start:], "--"]:
            if not word.startswith("--"):
                match = None if option else _ARGUMENT.fullmatch(word)
                if match is not None:
                    _put(self.source.tree, match[1], _value(match[2]))
                elif option:
                    values.append(word.rstrip(",") if len(word) > 1 else word)
                continue
            if option and option != "config" and values[:1] != ["@"]:
                parsed = [_value(each) for each in values]
                value = True if not parsed else parsed if parsed[1:] else parsed[0]
                _put(self.source.tree, option, value)
            option, has_value, text = word[2:].partition("=")
            option = option if option.startswith("config-") else option.replace("-", "_")
            values = [text] if has_value else []
            if option.startswith("config-"):
                option = ""

    def _add_program(
        self, launcher: list[str], arguments: list[str], environment: Mapping[str, str]
    ) -> None:
        """Add what the name of a program, its launcher and its config determine."""
        stem = launcher[-1].removesuffix(".py").rpartition("/")[2].rpartition(".")[2]
        # `trl grpo` has the job in the next word.
        names = re.split(r"[\W_]+", stem) + arguments[:1]
        jobs = general()["jobs"]
        self.source.job = next((jobs[name] for name in names if name in jobs), self.source.job)
        number = _num_processes(launcher, {**self._variables, **environment}, self._content)
        self.source.num_processes = number or self.source.num_processes
        for section, name in _config_names(arguments):
            file = self._found(name)
            if file is None:
                self.source.missing_files.append(name)
                continue
            config = read_source(self._job, file)
            if section and section not in config.tree:
                config = _nested_part(config, section)
            self.configs.append(config.tree)
            self.source.missing_files += config.missing_files

    def _content(self, name: str) -> dict[str, Any]:
        file = self._found(name)
        return {} if file is None else read_source(self._job, file).tree

    def _found(self, name: str) -> Path | None:
        """Return the path of a file that the script names relative to a folder of its project."""
        folders = (Path.cwd(), *self._path.resolve().parents[:4])
        return next((each / name for each in folders if (each / name).is_file()), None)

    def _replaced(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            default = match[0] if match[2] is None else match[2]
            return self._variables.get(match[1] or match[3], default)

        def computed(match: re.Match[str]) -> str:
            text = _NAME.sub(lambda name: self._variables.get(name[1], name[0]), match[1])
            try:
                return str(_number(ast.parse(text, mode="eval").body))
            except (SyntaxError, KeyError, ZeroDivisionError):
                return match[0]

        return _VARIABLE.sub(value, _ARITHMETIC.sub(computed, text))

    def _expanded(self, word: str) -> list[str]:
        """Return the words that the shell makes of one with variables, perhaps of a list."""
        text = self._replaced(word)
        parts = text.split()
        is_list = text != word and parts[1:] and all(_ARGUMENT.fullmatch(part) for part in parts)
        return parts if is_list else [text]


def source_name(path: Path) -> str:
    """Return a file for a message; `-` is the standard input."""
    return "the standard input" if str(path) == "-" else shown_path(path)


def unread_text(source: str, tool: str) -> str:
    """Return the text of the error for a config of a tool that has no table."""
    return (
        f"{source} is a config of {tool}, which `nemo-like migrate` does not read; start from one"
        " of `nemo-like init DIR`, and carry the keys over by hand"
    )


def _program_end(words: list[str]) -> int:
    """Return the index behind the name of the program; without one, the index of the last word."""
    is_launched = _LAUNCHER.fullmatch(words[0]) is not None
    for index, word in enumerate(words):
        is_module = words[index - 1] in ("-m", "--module") and not word.startswith("torch.")
        is_program = _PROGRAM.fullmatch(word) or is_module
        is_program = is_program or (word in general()["part_programs"] and "@" in words)
        # The value of an option is the file of another command's plug-in.
        is_value = not is_launched and index > 0 and words[index - 1].startswith("--")
        # Without arguments a file may be the object of another command, such as `rm`.
        if is_program and not is_value and words[index + 1 :]:
            return index + 1
    return len(words)


def _config_names(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (section, name) of the configs that the arguments of a program name."""
    folder = ""
    before = ["", ""]
    for word in arguments:
        option, has_value, value = word.partition("=")
        if not has_value:
            option, value = before[1], word
        is_file = _CONFIG.fullmatch(value) is not None
        # Not the value of another option or key.
        is_named = (
            option == "--config" if has_value else option in ("--config", "@") or option[:2] != "--"
        )
        if option == "--config-path":
            folder = f"{value.rstrip('/')}/"
        elif option == "--config-name" and Path(value).stem not in general()["own_configs"]:
            yield "", f"{folder}{value.removesuffix('.yaml')}.yaml"
        elif is_file and option == "@":
            yield before[0].removeprefix("--") if before[0].startswith("--") else "", value
        elif is_file and is_named:
            yield "", value
        before = [before[1], word]


def _num_processes(
    launcher: list[str], variables: Mapping[str, str], content: Callable[[str], dict[str, Any]]
) -> int | None:
    """Return the number of processes that a launcher starts; None if it is not known."""
    options = {"nproc_per_node": variables.get("NPROC_PER_NODE"), "nnodes": variables.get("NNODES")}
    for word, following in zip(launcher, [*launcher[1:], ""], strict=True):
        name, has_value, value = word.lstrip("-").replace("-", "_").partition("=")
        if word.startswith("-"):
            options[name] = value if has_value else following
    number = options.get("num_processes")
    if number is None and "config_file" in options:
        number = content(str(options["config_file"])).get("num_processes")
    per_node = options.get("nproc_per_node") or options.get("num_gpus")
    if number is None and per_node is not None:
        number = f"{per_node}*{options.get('nnodes') or options.get('num_nodes') or 1}"
    devices = variables.get("CUDA_VISIBLE_DEVICES")
    if number is None and devices and re.search("python|llamafactory", launcher[0]):
        # Without a launcher one process has a batch for each device.
        number = devices.count(",") + 1
    try:
        return _number(ast.parse(str(number), mode="eval").body)
    except (SyntaxError, KeyError, ZeroDivisionError):
        return None


def _number(node: ast.expr) -> int:
    """Return the value of an expression of integers. Raises KeyError for another one."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    raise KeyError(ast.dump(node))


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
