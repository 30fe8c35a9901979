"""`load_config`: compose YAML files and overrides into a checked config, or raise one ConfigError.

A file inherits others with `defaults`: a path, or a list of paths, each relative to the file that
names it, with or without the suffix. Files are merged in the order of the list, each over those
before it; the naming file comes last, or at the position of `_self_`. Overrides have the syntax of
Hydra. The place of each key is kept for messages. Other relative paths inside a config are relative
to the working directory.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from nemo_like.config.build import build_config, resolve_interpolations, shown_yaml
from nemo_like.config.check import find_problems
from nemo_like.config.errors import (
    ConfigError,
    Location,
    Problem,
    UnknownJobError,
    is_possible_path,
    raise_problems,
    shortened,
    shown_path,
    shown_value,
)
from nemo_like.config.foreign import (
    find_foreign,
    guess_job,
    recognized_tool,
    unknown_text,
    with_indices,
)
from nemo_like.config.foreign_report import refusal_text, shown_key
from nemo_like.config.keys import (
    JobSchema,
    field_types,
    is_open_section,
    is_section,
    tools,
    type_at,
    without_none,
)
from nemo_like.config.plain import to_dict
from nemo_like.config.schema import RunConfig

COMMAND_LINE = Location("the command line")
_Files = Iterator[tuple[Path, yaml.MappingNode]]
_SELF = "_self_"
_MIN_UNKNOWN = 5
"""Unknown keys from which a config without sections of this package is one of another tool."""
_MISSING = "???"
"""OmegaConf's value of a key that another file must set."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(r"([-+]?((\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?|\.inf)|\.nan)$", re.IGNORECASE)
_FLOAT_START = list("-+.0123456789")


class YamlLoader(yaml.SafeLoader):
    """Reads `1e-5` as a number, which YAML 1.1 does not, and dates as texts."""


YamlLoader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0] not in (f"{_TAG}timestamp", f"{_TAG}float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
YamlLoader.add_implicit_resolver(f"{_TAG}float", _FLOAT, _FLOAT_START)


class YamlDumper(yaml.SafeDumper):
    """Quotes texts that `YamlLoader` would read as numbers."""


YamlDumper.add_implicit_resolver(f"{_TAG}float", _FLOAT, _FLOAT_START)


@dataclass
class Composition:
    """The keys that files and overrides set. Example: `{"policy": {"optimizer": {"lr": 1e-4}}}`."""

    job: JobSchema
    tree: dict[str, Any] = field(default_factory=dict)
    """Nested values; interpolations are not resolved."""
    locations: dict[str, Location] = field(default_factory=dict)
    """Dotted key -> the last place that sets it."""

    def locate(self, path: str) -> Location | None:
        """Return the place that sets `path`, or the nearest section above it."""
        # The list item `a.b[2]` is set with the list `a.b`.
        path = path.partition("[")[0]
        while path and path not in self.locations:
            path = path.rpartition(".")[0]
        return self.locations.get(path)

    def add_file(self, path: Path, root: yaml.MappingNode) -> None:
        """Merge the content of one file over the present one."""
        content = self._content(root, self.job.run_config, "", shown_path(path))
        content.pop("defaults", None)
        self.tree = merged(self.tree, content)

    def add_override(self, text: str) -> None:
        """Apply `key=value`, or `~key`, which goes back to the default. Raises ConfigError."""
        key, separator, value = text.lstrip("+").partition("=")
        if text.startswith("~"):
            if type_at(self.job.run_config, text[1:]) is None:
                raise ConfigError(f"{unknown_text(self.job, text[1:])} ({COMMAND_LINE})")
            _remove(self.tree, text[1:])
            return
        if not (key and separator):
            raise ConfigError(f"override {shown_value(text)} does not parse: write {text}=VALUE")
        content = self._override_value(key, value.strip(), text)
        self.locations[key] = COMMAND_LINE
        self.tree = merged(self.tree, nested(key, content))

    def problems(self) -> Iterator[Problem]:
        """Yield unknown keys, and names that a user must not choose."""
        yield from self._problems(self.tree, "")

    def _problems(self, section: Mapping[str, Any], prefix: str) -> Iterator[Problem]:
        parent = without_none(type_at(self.job.run_config, prefix))[0]
        for name, value in section.items():
            path = f"{prefix}.{name}" if prefix else name
            annotation = type_at(self.job.run_config, path)
            if is_open_section(parent) and not _NAME.fullmatch(name):
                # A dot would make the name two levels of a key; metric names contain it as well.
                rule = "names start with a letter and go on with letters, digits, '_' and '-'"
                text = f"{prefix} has the name {shown_value(name)}; {rule}"
                yield Problem((prefix,), text, self.locate(path))
            elif "." in name and annotation is not None:
                fix = "in YAML write nested sections, dots are for overrides"
                text = f"{name} is one key with dots in it; {fix}"
                yield Problem((path,), text, self.locations.get(path))
            elif annotation is None:
                path = self._assigned(path)
                yield Problem((path,), unknown_text(self.job, path), self.locate(path))
                continue
            inner, _ = without_none(annotation)
            if isinstance(value, bool) and inner in (int, float):
                # Python and pydantic take it for 0 or 1.
                text = f"{path} is {shown_yaml(value)}; it must be a number"
                yield Problem((path,), text, self.locate(path))
            elif isinstance(value, dict) and (is_section(inner) or is_open_section(inner)):
                yield from self._problems(value, path)

    def _assigned(self, path: str) -> str:
        """Return `path`, or the key below it that an override sets: it has no place of its own."""
        if path in self.locations:
            return path
        return next((key for key in self.locations if key.startswith(f"{path}.")), path)

    def _override_value(self, key: str, value: str, text: str) -> Any:
        annotation = type_at(self.job.run_config, key)
        is_quoted = value[:1] in ("'", '"')
        # A text needs no quotes, whatever YAML would make of it.
        if value == "" or (_is_text(annotation) and not is_quoted and value != "null"):
            return value
        # Loaded on demand: a run without overrides, and `--help`, do not need the parser.
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        try:
            override = OverridesParser.create().parse_override(f"key={value}")
        # Besides its own errors Hydra's parser raises these for unusual text.
        except (HydraException, ValueError, RecursionError) as error:
            raise ConfigError(
                f"override {shown_value(text)} does not parse; quote texts twice, once for the"
                f" shell: {key}=\"'...'\""
            ) from error
        if override.is_sweep_override():
            raise ConfigError(
                f"override {shown_value(text)} has several values; write {key}=[a,b] for a list,"
                f" {key}=\"'a,b'\" for one text"
            )
        content = override.value()
        self._record(key, content)
        return content

    def _record(self, path: str, content: Any) -> None:
        """Record that the command line sets the keys of a mapping."""
        if isinstance(content, dict):
            for name, value in content.items():
                self.locations[f"{path}.{name}"] = COMMAND_LINE
                self._record(f"{path}.{name}", value)

    def _content(self, node: yaml.Node | None, annotation: Any, path: str, source: str) -> Any:
        """Return the value of a node of the type `annotation`, and record the places of keys."""
        if isinstance(node, yaml.MappingNode):
            content = {}
            YamlLoader("").flatten_mapping(node)
            for key, value in node.value:
                if value.value == _MISSING:
                    continue
                inner_path = f"{path}.{key.value}" if path else key.value
                self.locations[inner_path] = Location(source, key.start_mark.line + 1)
                inner = type_at(self.job.run_config, inner_path)
                content[key.value] = self._content(value, inner, inner_path, source)
            return content
        if isinstance(node, yaml.SequenceNode):
            inner, _ = without_none(annotation)
            item = get_args(inner)[0] if get_origin(inner) is tuple else None
            return [self._content(each, item, path, source) for each in node.value]
        assert isinstance(node, yaml.ScalarNode)
        if _is_text(annotation) and node.tag != f"{_TAG}null":
            # As it is written: YAML would make numbers of `007` and `1e-3`, and a boolean of `no`.
            return node.value
        try:
            return YamlLoader("").construct_object(node)
        except (ValueError, LookupError) as error:
            place = Location(source, node.start_mark.line + 1)
            raise ConfigError(f"{place} has the value {node.value!r}: {error}") from error


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `above` over `below`: mappings are merged, every other value is replaced."""
    result = dict(below)
    for name, value in above.items():
        existing = result.get(name)
        if isinstance(existing, dict) and isinstance(value, dict):
            result[name] = merged(existing, value)
        else:
            result[name] = value
    return result


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return the sections of a dotted key around its value. Example: `a.b`, 1 -> `{a: {b: 1}}`."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def compose_files(job: JobSchema, path: Path, overrides: Sequence[str]) -> Composition:
    """Merge a file, the files that it inherits and overrides. Raises ConfigError."""
    composition = Composition(job)
    for file, root in inherited_files(path, ()):
        try:
            composition.add_file(file, root)
        except yaml.YAMLError as error:
            raise ConfigError(_yaml_error_text(error, file)) from error
        except RecursionError:
            raise ConfigError(f"{shown_path(file)} contains itself through an alias") from None
    return with_overrides(composition, overrides)


def missing_file_text(path: Path) -> str:
    """Return the message about a missing config file, with the nearest name in its folder."""
    if not is_possible_path(str(path)):
        return f"{shown_value(str(path))} does not exist"
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


def inherited_files(path: Path, trail: tuple[Path, ...], absent: list[str] | None = None) -> _Files:
    """Yield `path` and the files that it inherits, in the order of merging.

    The names of those that do not exist are added to `absent`; without it they are an error.
    """
    # Resolved, so that a cycle through a symbolic link is found as well.
    resolved = path.resolve()
    if resolved in trail:
        circle = " -> ".join(map(shown_path, (*trail[trail.index(resolved) :], resolved)))
        raise ConfigError(f"defaults name each other in a circle: {circle}")
    root = read_root(path)
    if root is None:
        return
    entries = list(_defaults(path, root))
    if _SELF not in [name for name, _ in entries]:
        entries.append((_SELF, ""))
    for name, place in entries:
        if name == _SELF:
            yield path, root
            continue
        file = path.parent / Path(name).expanduser()
        file = file if file.suffix in (".yaml", ".yml") else file.with_name(f"{file.name}.yaml")
        if not is_possible_path(str(file)) or not file.is_file():
            if absent is not None:
                absent.append(shown_path(file))
                continue
            raise ConfigError(f"{place} defaults entry {name}: {missing_file_text(file)}")
        yield from inherited_files(file, (*trail, resolved), absent)


def _defaults(path: Path, root: yaml.MappingNode) -> Iterator[tuple[str, str]]:
    """Yield (name, place) of every entry of `defaults`. Raises ConfigError for another form."""
    for key, value in root.value:
        if key.value != "defaults" or value.tag == f"{_TAG}null":
            continue
        for entry in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            place = f"{shown_path(path)}:{entry.start_mark.line + 1}"
            is_path = isinstance(entry, yaml.ScalarNode) and entry.value not in ("", "/")
            if not is_path or any(mark in entry.value for mark in ("@", " ", "${")):
                raise ConfigError(
                    f"{place} defaults entry is not the path of a YAML file: write `defaults:"
                    " base.yaml` or `defaults: [base, _self_]`; there are no config groups and"
                    " packages"
                )
            yield entry.value, place


def read_root(path: Path) -> yaml.MappingNode | None:
    """Return the root of a YAML file; None if the file is empty. Raises ConfigError."""
    name = shown_path(path)
    try:
        # Without the mark of the byte order that some editors write.
        root = yaml.compose(path.read_text("utf-8-sig"), Loader=YamlLoader)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        text = f"{name} is not UTF-8 text at byte {error.start + 1}: {error.reason}"
        raise ConfigError(text) from error
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_error_text(error, path)) from error
    if root is None or root.tag == f"{_TAG}null":
        return None
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else f"the text {root.value!r}"
        raise ConfigError(f"{name} is {kind}; a config is a mapping of sections, such as `policy:`")
    _refuse_duplicates(root, name)
    return root


def _refuse_duplicates(node: yaml.Node, name: str) -> None:
    """Raise ConfigError for a duplicate key and for a key that is not a scalar."""
    if not isinstance(node, yaml.MappingNode):
        return
    first_lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{name}:{line} has a list or mapping as a key; keys are plain words")
        if key.value in first_lines and key.tag != f"{_TAG}merge":
            raise ConfigError(
                f"{name}:{line} has the key {shortened(key.value)} again; it is in line"
                f" {first_lines[key.value]} already: keep one of both"
            )
        first_lines[key.value] = line
        # An alias is a node that was checked before.
        if value.start_mark.index >= key.start_mark.index:
            _refuse_duplicates(value, name)


def _yaml_error_text(error: yaml.YAMLError, path: Path) -> str:
    """Return one line for a YAML error, with line and column where the parser knows them."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is None:
        return f"{shown_path(path)} is not valid YAML: {' '.join(str(error).split())}"
    assert isinstance(error, yaml.MarkedYAMLError)
    problem = str(error.problem)
    if error.context:
        problem += f" ({error.context})"
    # YAML forbids tabs for indentation, and its own message does not mention spaces.
    hint = "; indent with spaces" if "'\\t'" in problem else ""
    if problem.startswith("mapping values"):
        hint = "; write `key: value` with a space after the colon, and a text with ': ' in quotes"
    location = f"{shown_path(path)}:{mark.line + 1}"
    return f"{location} is not valid YAML: {problem} in column {mark.column + 1}{hint}"


def _is_text(annotation: Any) -> bool:
    inner, _ = without_none(annotation)
    # `auto | true | false` has booleans.
    is_choice = get_origin(inner) is Literal and bool not in map(type, get_args(inner))
    return inner is str or is_choice


def _remove(tree: dict[str, Any], path: str) -> None:
    *sections, name = path.split(".")
    inner: Any = tree
    for section in sections:
        inner = inner.get(section) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        inner.pop(name, None)


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
        _raise_foreign(composition.tree, job, path, len(unknown))
    return _checked(composition, unknown)


def load_values(job: JobSchema, values: Mapping[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Check and build the config of nested values instead of a file; see `load_config`."""
    composition = with_overrides(Composition(job, dict(values)), overrides)
    return _checked(composition, list(composition.problems()))


def with_overrides(composition: Composition, overrides: Sequence[str]) -> Composition:
    """Apply overrides to a composition, and return it. Raises ConfigError."""
    for text in overrides:
        composition.add_override(text)
    return composition


def _checked(composition: Composition, unknown: Sequence[Problem]) -> RunConfig:
    """Return the checked config. Raises ConfigError, also for the `unknown` keys."""
    raise_problems(unknown)
    job = composition.job
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
    for each in fields(section):
        if is_section(types[each.name]):
            plain[each.name] = schema_defaults(types[each.name])
        elif isinstance(each.default, tuple):
            plain[each.name] = list(each.default)
        elif each.default is not MISSING:
            plain[each.name] = each.default
        elif each.default_factory is not MISSING:
            plain[each.name] = each.default_factory()
    return plain


def detect_kind(
    jobs: Mapping[str, type[RunConfig]], path: Path, overrides: Sequence[str] = ()
) -> str:
    """Return the job that a config is for, by the keys that only one of `jobs` has.

    A config of another tool is recognized by the keys of that tool, so that `load_config` can list
    what to change. Raises ConfigError if the job is ambiguous, UnknownJobError if no key tells it.
    """
    # The types of the values do not matter here, so any job will do.
    any_job = JobSchema(next(iter(jobs)), jobs)
    content = compose_files(any_job, _config_file(path), ()).tree
    keys = {text.lstrip("+~").partition("=")[0] for text in overrides}
    for section, value in content.items():
        keys.add(section)
        if isinstance(value, Mapping):
            keys.update(f"{section}.{name}" for name in value)
    found: dict[str, str] = {}
    for key in sorted(keys, reverse=True):
        kinds = [kind for kind, config in jobs.items() if type_at(config, key) is not None]
        if len(kinds) == 1:
            found[kinds[0]] = key
    if len(found) == 1:
        return next(iter(found))
    if found:
        shown = " and ".join(f"{key} of `{kind}`" for kind, key in found.items())
        raise ConfigError(
            f"{shown_path(path)} and the command line have keys of several jobs: {shown}; remove"
            " those of the other jobs"
        )
    guess = guess_job(content)
    if guess:
        return guess
    shared = field_types(RunConfig)
    own = {
        kind: ", ".join(name for name in field_types(config) if name not in shared)
        for kind, config in jobs.items()
    }
    sections = "; ".join(f"`{kind}` has {names}" for kind, names in own.items())
    raise UnknownJobError(
        f"{shown_path(path)} has no section that only one job has ({sections}); add the section of"
        " its job, or pass --kind"
    )


def to_yaml(config: RunConfig) -> str:
    """Return the complete resolved config as YAML; loading the text gives an equal config."""
    plain = to_dict(config)
    text = _dumped(plain, allow_unicode=True)
    # YAML reads these line breaks as spaces unless they are escaped.
    if re.search("[\x85\u2028\u2029]", text):
        text = _dumped(plain, allow_unicode=False)
    return text


def _dumped(plain: dict[str, Any], *, allow_unicode: bool) -> str:
    return yaml.dump(plain, Dumper=YamlDumper, sort_keys=False, allow_unicode=allow_unicode)


def _raise_foreign(tree: Mapping[str, Any], job: JobSchema, path: Path, num_unknown: int) -> None:
    """Raise ConfigError if the config is one of another tool."""
    tree = with_indices(tree)
    tool = recognized_tool(tree)
    if tool is not None:
        raise ConfigError(refusal_text(shown_path(path), tool.name, find_foreign(job, tree, tool)))
    num_own = sum(type_at(job.run_config, name) is not None for name in tree)
    if num_unknown >= _MIN_UNKNOWN and num_own <= len(tree) / 2:
        names = ", ".join(map(shown_key, list(tree)[:_MIN_UNKNOWN]))
        known = ", ".join(each.name for each in tools() if each.signs)
        raise ConfigError(
            f"{shown_path(path)} is not a config of this package, and of no tool that `nemo-like"
            f" migrate` knows ({known}); it begins with the keys {names}"
        )


def _config_file(path: Path) -> Path:
    path = Path(path).absolute()
    if not is_possible_path(str(path)) or not path.is_file():
        raise ConfigError(f"config file {missing_file_text(path)}")
    if path.suffix != ".yaml":
        other = "" if path.suffix == ".yml" else "; `nemo-like migrate` reads files of other tools"
        raise ConfigError(f"config file {shown_path(path)} must be named .yaml{other}")
    return path


def _located(problem: Problem, composition: Composition) -> Problem:
    """Return the problem with the location of its first key that a file or an override sets."""
    for key in problem.keys:
        if key in composition.locations:
            return replace(problem, location=composition.locations[key])
    return problem
