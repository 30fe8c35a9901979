"""Dotted keys of the schema: existence, type, constraints, and suggestions for unknown keys."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from nemo_like.config.foreign_tables import general
from nemo_like.config.schema import RunConfig
from nemo_like.config.text import shortened


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
    parent = unknown.rpartition(".")[0]
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


def misspelled_key(job: JobSchema, path: str) -> str | None:
    """Return the key of the same section whose name is almost equal to the name of `path`.

    The similarity ratio of `difflib` is at least 0.85; None if there is no such key.
    """
    parent, _, name = path.rpartition(".")
    siblings = child_types(type_at(job.run_config, parent))
    if not siblings or len(path) > _MAX_PATH_CHARACTERS:
        return None
    nearest = difflib.get_close_matches(name, siblings, n=1, cutoff=0.85)
    if not nearest:
        return None
    return f"{parent}.{nearest[0]}" if parent else nearest[0]


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
