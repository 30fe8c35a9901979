"""The keys of the schema: existence, type, suggestions, reference; and the tables of foreign keys.

The reference of a key is derived from the schema: type, default and constraints from the field, the
description from the string below the field in the source.

The tables `config/foreign/*.yaml` have the keys of other tools. `renamed` maps a dotted key to its
key here, or to a mapping with the fields of `Entry`. `unsupported` lists groups of keys with one
`reason`; a value of `no_effect` (by default false) is off. `obsolete` lists keys that have no
influence on training, also in groups with a `reason`. The other fields are described in `Tool`. A
section in `unsupported` or `obsolete` stands for all keys below it
that are not listed.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from nemo_like.config.constraints import joined_text
from nemo_like.config.errors import shortened
from nemo_like.config.needs import BatchNeeds
from nemo_like.config.schema import PolicyConfig, RunConfig


@dataclass(frozen=True)
class JobSchema:
    """The keys of one job. The other jobs are for messages about keys that belong to them."""

    kind: str
    """Name of the job, e.g. `grpo`."""
    jobs: Mapping[str, type[RunConfig]]
    """Every job by its name."""

    @property
    def run_config(self) -> type[RunConfig]:
        """The config dataclass of this job."""
        return self.jobs[self.kind]

    @property
    def default_batch(self) -> BatchNeeds:
        """The batch of a step with the default of every key."""
        data = type_at(self.run_config, "data")
        assert data is not None, "every job has the section"
        policy = PolicyConfig(model_name="model")
        config = self.run_config(run_name="default", policy=policy, data=data(train_path="rows"))
        return config.needs.batch


_MAX_SUGGESTIONS = 3
_MAX_PATH_CHARACTERS = 150
"""Longer keys get no suggestion: no key of the schema is as long, and the search would be slow."""


@cache
def field_types(section: type) -> dict[str, Any]:
    """Return name -> resolved type of each field of a config dataclass, in order of declaration."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


@cache
def field_constraints(section: type) -> dict[str, tuple[Any, ...]]:
    """Return name -> constraints of each field of a config dataclass, in order of declaration."""
    hints = get_type_hints(section, include_extras=True)
    constraints: dict[str, tuple[Any, ...]] = {}
    for field in dataclasses.fields(section):
        hint = hints[field.name]
        is_annotated = get_origin(hint) is Annotated
        constraints[field.name] = hint.__metadata__ if is_annotated else ()
    return constraints


def constraints_at(root: type, path: str) -> tuple[Any, ...]:
    """Return the constraints of the key `path` of the schema."""
    parent, _, name = path.rpartition(".")
    section, _ = without_none(type_at(root, parent))
    return field_constraints(section)[name] if is_section(section) else ()


def without_none(annotation: Any) -> tuple[Any, bool]:
    """Return (`X`, True) for `X | None`, else (`annotation`, False)."""
    # `X | None` and `Optional[X]` have different origins.
    if get_origin(annotation) in (Union, types.UnionType):
        others = [part for part in get_args(annotation) if part is not type(None)]
        assert len(others) == 1, f"{annotation}: the schema has no unions but X | None"
        return others[0], True
    return annotation, False


def is_section(annotation: Any) -> bool:
    """Return True if the annotation is a config dataclass."""
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def is_open_section(annotation: Any) -> bool:
    """Return True for a mapping whose keys the user chooses, such as `reward.functions`."""
    return get_origin(annotation) is dict


def child_types(annotation: Any) -> Mapping[str, Any] | None:
    """Return the field types of a section; None for any other annotation."""
    return field_types(annotation) if is_section(annotation) else None


def type_at(root: Any, path: str) -> Any | None:
    """Return the type of the dotted key `path` below `root`; None if the schema has no such key.

    The empty path is `root`.
    """
    annotation = root
    names = path.split(".") if path else []
    for name in names:
        annotation, _ = without_none(annotation)
        if annotation is Any:
            # Plain values of any depth.
            return Any
        if is_open_section(annotation):
            # Any name is legal there; all entries have one type.
            annotation = get_args(annotation)[1]
        elif is_section(annotation) and name in field_types(annotation):
            annotation = field_types(annotation)[name]
        else:
            return None
    return annotation


def all_keys(root: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of the schema with its type, sections included.

    A level that the user names is written `*`.
    """
    for name, annotation in field_types(root).items():
        path = f"{prefix}{name}"
        yield path, annotation
        inner, _ = without_none(annotation)
        if is_open_section(inner):
            if _has_sections(inner):
                yield from all_keys(get_args(inner)[1], f"{path}.*.")
        elif is_section(inner):
            yield from all_keys(inner, f"{path}.")


def _has_sections(annotation: Any) -> bool:
    """Return True for an open section whose entries are sections and not plain values."""
    return is_open_section(annotation) and is_section(get_args(annotation)[1])


def unknown_key_text(job: JobSchema, path: str) -> str:
    """Return the message for an unknown key, with similar keys or the keys of its section."""
    root = job.run_config
    if len(path) > _MAX_PATH_CHARACTERS:
        return f"unknown key {shortened(path)}"
    for other, config in job.jobs.items():
        # A similar key of this job would be a wrong suggestion for a key of another one.
        if type_at(config, path) is not None:
            return (
                f"unknown key {path} in a config for `{job.kind}`: it belongs to"
                f" `nemo-like {other}`"
            )
    unknown, rest = _split_at_unknown(root, path)
    nearest = []
    for key in suggest_keys(root, unknown):
        # Only the section may be misspelled; then the complete key can be suggested.
        full_key = key + rest
        nearest.append(full_key if type_at(root, full_key) is not None else key)
    if nearest:
        return f"unknown key {path}; did you mean {' or '.join(nearest)}?"
    parent, _, name = unknown.rpartition(".")
    for other in (name, f"{parent.rpartition('.')[2]}_{name}"):
        entry = all_entries().get(other)
        if entry is not None and entry.kind != "renamed":
            return f"unknown key {path}, which other tools have; remove it: {entry.note}"
    siblings = child_types(type_at(root, parent))
    if not siblings:
        return f"unknown key {path}"
    return f"unknown key {path}; {parent or 'the top level'} has {', '.join(siblings)}"


def _split_at_unknown(root: type, path: str) -> tuple[str, str]:
    """Split a key behind its first unknown name.

    Example: `policy.optimzer.lr` -> (`policy.optimzer`, `.lr`).
    """
    names = path.split(".")
    for end in range(1, len(names)):
        if type_at(root, ".".join(names[:end])) is None:
            return ".".join(names[:end]), "." + ".".join(names[end:])
    return path, ""


def suggest_keys(root: type, path: str) -> list[str]:
    """Return at most three existing keys for the unknown `path`, the likeliest first.

    A name of another tool comes first; then similar names in the same section and the same name in
    other sections; then keys with a similar path. Examples: `policy.seqence_packing` ->
    `policy.sequence_packing`; `policy.lr` -> `policy.optimizer.lr`.
    """
    keys = [key for key, _ in all_keys(root) if "*" not in key]
    parent, _, name = path.rpartition(".")
    siblings = [key for key in keys if key.rpartition(".")[0] == parent]
    names = {key.rpartition(".")[2]: key for key in siblings}
    # `wandb` is completed to `wandb_project`, although the ratio of the two is low.
    similar = [key for sibling, key in names.items() if sibling.startswith(f"{name}_")]
    if not similar:
        matches = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        similar = [names[match] for match in matches]
    same_name = [key for key in keys if key.rpartition(".")[2] == name]
    found = _translated(name, keys) or [*similar, *same_name]
    if not found:
        # A misspelled name of another tool, such as `lerning_rate`.
        for match in difflib.get_close_matches(name, general()["names"], n=1, cutoff=0.85):
            found = _translated(match, keys)
    if not found:
        # A long common path alone would make the ratio of two paths high, so the last names must be
        # similar as well.
        similar_names = [key for key in keys if _ratio(name, key.rpartition(".")[2]) >= 0.6]
        found = difflib.get_close_matches(path, similar_names, n=1, cutoff=0.7)
    return list(dict.fromkeys(found))[:_MAX_SUGGESTIONS]


def _translated(name: str, keys: Sequence[str]) -> list[str]:
    """Return the keys that the name of another tool stands for."""
    own = general()["names"].get(name)
    return [key for key in keys if own is not None and f".{key}".endswith(f".{own}")]


def _ratio(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


_GENERAL = "general.yaml"


@dataclass(frozen=True, slots=True)
class Entry:
    """What becomes of one key of another tool.

    Example: `Entry("renamed", ("grpo.advantage.normalize",), values={"true": "group_std"})`.
    """

    kind: Literal["renamed", "unsupported", "obsolete"]
    targets: tuple[str, ...] = ()
    """Keys of the schema; those that the job does not have are ignored. Several targets take the
    items of a list."""
    values: Mapping[str, str | None] | None = None
    """Canonical old value -> new value, None where the default has the same effect, `*` for every
    other value; None if values stay as they are."""
    note: str = ""
    """A further change of the value, or the reason why other values have no counterpart; for
    `unsupported` the reason."""
    switch: str | None = None
    """A foreign key that must be on, or this one has no effect."""
    unless: str | None = None
    """A foreign key that must be off, or this one has no effect."""
    switched: Mapping[str, Sequence[str] | Mapping[str, Any]] | None = None
    """Foreign key -> the keys in place of `targets` where that key is on, or other fields."""
    also: Mapping[str, Mapping[str, Any]] | None = None
    """Canonical old value, or `*` for every other one -> further keys with their values, `*` for
    the old one."""
    off_values: Sequence[str] = ()
    """Canonical values with which this key as a switch is off, besides null, false, 0 and no."""
    when_null: str = ""
    """Why null is not the same as leaving the key out; empty if it is."""
    sft: str | None = None
    """The key for SFT configs where it differs."""
    no_effect: tuple[str, ...] = ("false",)
    """Canonical values with which an unsupported key can be deleted."""
    form: str = ""
    """Type of the values to which an entry of `same_keys` applies: `scalar`, `list` or `dict`."""
    is_on_when_disabled: bool = False
    """True for a section whose `enabled: false` has a meaning of its own."""


@dataclass(frozen=True, eq=False)
class Tool:
    """The table of another tool."""

    name: str
    entries: Mapping[str, Entry]
    """Dotted key or section -> entry."""
    same_keys: Mapping[str, Entry]
    """The keys of the schema that the tool has too, with values of another form."""
    signs: Sequence[str] = ()
    """Keys that only this tool has, of which a config of it has at least two."""
    jobs: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    """Key of the tool -> canonical value, or `*` -> job of a config that has it; '' if it is not
    clear, or does not exist here."""
    default_job: str = ""
    computed: Mapping[str, str | list[str]] = dataclasses.field(default_factory=dict)
    """Key of the schema -> formula of keys of the tool, evaluated from left to right, or several
    of which the first one with all its keys counts."""
    defaults: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Job, or `all` -> key of the tool -> default of the tool, where the one here differs, or a
    formula."""
    advice: Sequence[str | Mapping[str, Any]] = ()
    """What differs in behavior: a text, or a `note` that applies with the keys `when` on and the
    keys `unless` off."""
    epochs: Sequence[str] = ()
    """Keys of the tool with the number of epochs."""
    ends_at_smaller: bool = False
    """True if a run with a number of steps ends earlier with its epochs."""
    undecided: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    """Key of the schema -> key of the tool -> why the user must set the first where the second is
    on."""
    hub: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """`config` and `split` of a data set of the hub -> keys beside the key of its name."""


@cache
def tools() -> tuple[Tool, ...]:
    """Return the tools with a table. The nearest one comes first."""
    # NeMo RL first: most of its sections have the same names here.
    stems = (
        *("nemo_rl", "verl", "trl", "axolotl", "llama_factory", "openrlhf", "prime_rl"),
        *("cosmos_rl", "earlier"),
    )
    return tuple(_tool(_read(f"{stem}.yaml")) for stem in stems)


def _tool(content: dict[str, Any]) -> Tool:
    table = {path: _renamed(value) for path, value in content.pop("renamed").items()}
    disabled = content.pop("on_when_disabled", ())
    for group in content.pop("unsupported"):
        no_effect = tuple(group.get("no_effect", ["false"]))
        for path in group["keys"]:
            is_on = path in disabled
            table[path] = Entry(
                "unsupported", note=group["reason"], no_effect=no_effect, is_on_when_disabled=is_on
            )
    for group in content.pop("obsolete"):
        table.update(dict.fromkeys(group["keys"], Entry("obsolete", note=group["reason"])))
    same = {path: _same_key(value) for path, value in content.pop("same_keys", {}).items()}
    return Tool(content.pop("tool"), table, same, **content)


def _same_key(value: Mapping[str, Any]) -> Entry:
    if "to" in value:
        return _renamed(value)
    return Entry("unsupported", note=value["reason"], form=value["form"])


@cache
def all_entries() -> dict[str, Entry]:
    """Return the entries of all tools, for a single key of a config of this package."""
    entries: dict[str, Entry] = {}
    for tool in reversed(tools()):
        entries.update(tool.entries)
    return entries


@cache
def general() -> dict[str, Any]:
    """Return what is known beside the tables: `names`."""
    return _read(_GENERAL)


def _renamed(value: str | Mapping[str, Any]) -> Entry:
    fields: dict[str, Any] = {"to": value} if isinstance(value, str) else dict(value)
    to = fields.pop("to")
    return Entry("renamed", (to,) if isinstance(to, str) else tuple(to), **fields)


def _read(name: str) -> dict[str, Any]:
    # Imported here, because `--help` needs the schema and no YAML.
    import yaml

    text = resources.files("nemo_like.config").joinpath("foreign", name).read_text("utf-8")
    return yaml.safe_load(text)


USER_NAME = "NAME"
"""Placeholder for a name that the user chooses, as in `reward.functions.NAME.path`."""
_TYPE_NAMES = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    Any: "any value",
}
_REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class KeyReference:
    """One key that takes a value.

    Example: `KeyReference("policy.optimizer.lr", "number", "1e-05", "above 0", "Peak learning
    rate; ...")`.
    """

    key: str
    type: str
    default: str
    """The default as YAML, or `required`."""
    constraints: str
    """In words, e.g. `at least 0 and below 1`; empty if every value of the type is legal."""
    description: str


@dataclass(frozen=True, slots=True)
class SectionReference:
    """One section with the keys directly in it; subsections are sections of their own."""

    path: str
    """The dotted path; empty for the top level."""
    description: str
    keys: tuple[KeyReference, ...]


def section_references(run_config: type[RunConfig]) -> list[SectionReference]:
    """Return every section of a job's config in the schema's order, the top level first.

    A section without keys of its own is left out.
    """
    return [section for section in _sections(run_config, "") if section.keys]


def _sections(section: type, path: str) -> Iterator[SectionReference]:
    prefix = f"{path}." if path else ""
    keys: list[KeyReference] = []
    subsections: list[tuple[type, str]] = []
    for field in dataclasses.fields(section):
        key = f"{prefix}{field.name}"
        annotation, _ = without_none(field_types(section)[field.name])
        if is_section(annotation):
            subsections.append((annotation, key))
        elif is_open_section(annotation) and is_section(get_args(annotation)[1]):
            subsections.append((get_args(annotation)[1], f"{key}.{USER_NAME}"))
        else:
            keys.append(_key_reference(section, field, key))
    # The top level of every job has the description of the base class.
    documented = RunConfig if issubclass(section, RunConfig) else section
    yield SectionReference(path, _one_line(documented.__doc__ or ""), tuple(keys))
    # After the section's own keys, so that a page has them together.
    for subsection, key in subsections:
        yield from _sections(subsection, key)


def _key_reference(section: type, field: dataclasses.Field[Any], key: str) -> KeyReference:
    return KeyReference(
        key=key,
        type=_type_name(field_types(section)[field.name]),
        default=_default_text(field),
        constraints=joined_text(field_constraints(section)[field.name]),
        description=_field_descriptions(section).get(field.name, ""),
    )


def _type_name(annotation: Any) -> str:
    """Return the type in the words of a user. Examples: `integer or null`, `keep | drop`."""
    inner, may_be_null = without_none(annotation)
    if get_origin(inner) is Literal:
        name = " | ".join(map(_value_text, get_args(inner)))
    elif get_origin(inner) is tuple:
        name = f"list of {_TYPE_NAMES[get_args(inner)[0]]}s"
    elif is_open_section(inner):
        name = f"mapping of names to {_type_name(get_args(inner)[1])}"
    else:
        name = _TYPE_NAMES[inner]
    return f"{name} or null" if may_be_null else name


def _default_text(field: dataclasses.Field[Any]) -> str:
    default = field.default
    if field.default_factory is dict:
        return "{}"
    if default is dataclasses.MISSING:
        return _REQUIRED
    if isinstance(default, tuple):
        return f"[{', '.join(map(str, default))}]"
    return _value_text(default)


def _value_text(value: Any) -> str:
    """Return a plain value as in YAML."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


@cache
def _field_descriptions(section: type) -> dict[str, str]:
    """Return field -> description of a config dataclass and its base classes.

    Python keeps no strings of fields at run time, so they are read from the source: a description
    is the string expression that follows an annotated assignment.
    """
    descriptions: dict[str, str] = {}
    # Base classes first, so that a field that is declared again has its own description; the last
    # class is `object`.
    for base in reversed(section.__mro__[:-1]):
        (class_node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(class_node, ast.ClassDef)
        for node, following in pairwise(class_node.body):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            if not isinstance(following, ast.Expr):
                continue
            constant = following.value
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                descriptions[node.target.id] = _one_line(constant.value)
    return descriptions


def _one_line(text: str) -> str:
    return " ".join(text.split())
