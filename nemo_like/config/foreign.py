"""Keys of other tools in a config: renamed, without a counterpart, or without an effect here.

Such keys are never accepted: a config with them is refused, and `config.migrate` translates it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from nemo_like.config.keys import (
    Entry,
    JobSchema,
    Tool,
    all_entries,
    is_open_section,
    is_section,
    tools,
    type_at,
    unknown_key_text,
    without_none,
)

_MIN_SIGNS = 2
_MIN_KNOWN_SHARE = 0.75
"""Share of the keys that a table must have if the config has too few keys of one tool alone."""
_SECTIONS = ("policy", "cluster", "checkpointing", "logger")
"""Sections of this package; a config that has one belongs to no other tool."""
_NAMED = re.compile(r"^(reward\.(?:functions|models)\.)[^.]+\.")
_INDEX = re.compile(r"\.\d+(?=\.|$)")
_FORMS = {"scalar": str | int | float, "list": list, "dict": dict}
_OFF = ("null", "false", "0", "no")
_NULL = "null or empty: not set"
_OFF_SECTION = "a section that is switched off"
NO_EFFECT = "with this value it is off, or does what is always done here"
_REFERENCE = "a reference to a key that is listed itself"
_CLASS = "the class that Hydra creates"

Group = Literal["renamed", "unsupported", "deletable", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The change that one key or section of the config needs."""

    path: str
    group: Group
    targets: tuple[str, ...] = ()
    """New keys of a renamed key."""
    old: str = ""
    new: str | None = None
    """The new value; None if the value does not change."""
    text: str = ""
    """A note, or the reason; empty for an unknown key."""
    also: Mapping[str, Any] = field(default_factory=dict)
    """Further keys with their values."""


@dataclass(frozen=True)
class _Source:
    """A config of another tool, with the table of that tool."""

    job: JobSchema
    tree: Mapping[str, Any]
    entries: Mapping[str, Entry]
    same: Mapping[str, Entry] = field(default_factory=dict)
    """Keys of the schema with values of another form."""

    @cached_property
    def sections(self) -> frozenset[str]:
        """Every section that has keys of the table below it."""
        return _sections_of(self.entries)


def recognized_tool(tree: Mapping[str, Any], *, is_fragment: bool = False) -> Tool | None:
    """Return the tool whose config it is, by keys that only one tool has; None if none is known.

    With `is_fragment` a part of a config is enough: one such key, or else most keys in a table.
    """
    signs = {each: sum(_has_key(tree, sign) for sign in each.signs) for each in tools()}
    likeliest = max(signs, key=lambda each: signs[each])
    if signs[likeliest] >= _MIN_SIGNS:
        return likeliest
    keys = list(key_paths(tree))
    if is_fragment:
        counts = {each: sum(in_table(key) in each.entries for key in keys) for each in tools()}
        likeliest = max(counts, key=lambda each: (signs[each], counts[each]))
        return likeliest if signs[likeliest] + counts[likeliest] else None
    if len(keys) <= _MIN_SIGNS or not set(_SECTIONS).isdisjoint(tree):
        return None
    shares = {
        each: sum(in_table(key) in each.entries for key in keys) / len(keys) for each in tools()
    }
    likeliest = max(shares, key=lambda each: shares[each])
    return likeliest if shares[likeliest] >= _MIN_KNOWN_SHARE else None


def guess_job(tree: Mapping[str, Any]) -> str | None:
    """Return the job of a config of another tool, or None; empty if it is not clear."""
    tool = recognized_tool(tree)
    if tool is None:
        return None
    for key, jobs in tool.jobs.items():
        value = value_at(tree, key)
        job = jobs.get(canonical(value), jobs.get("*"))
        if value is not None and job is not None:
            return job
    return tool.default_job


def unknown_text(job: JobSchema, path: str) -> str:
    """Return the message for one unknown key: the counterpart of another tool's key, or a similar
    key.
    """
    source = _Source(job, {}, all_entries())
    entry = None if path in source.sections else _entry(source, path)
    if entry is None:
        return unknown_key_text(job, path)
    if entry.kind == "renamed":
        return f"unknown key {path}; did you mean {' and '.join(entry.targets)}?"
    if entry.kind == "unsupported":
        return f"unknown key {path}, which is not supported: {entry.note}"
    return f"unknown key {path}, which has no effect here; delete it ({entry.note})"


def find_foreign(job: JobSchema, tree: Mapping[str, Any], tool: Tool) -> list[Finding]:
    """Classify every key of the merged content of a tool's config that differs here, in its order.

    A list of sections has its indices as names.
    """
    return list(_section(_Source(job, tree, tool.entries, tool.same_keys), tree, ""))


def missing_keys(job: JobSchema, tree: Mapping[str, Any]) -> list[str]:
    """Return the keys without a value in `tree` that a run of the job needs."""
    needed = ["run_name", "policy.model_name", "data.train_path"]
    if job.kind == "grpo" and not value_at(tree, "reward.models"):
        needed.append("reward.functions")
    if value_at(tree, f"{job.kind}.val_period"):
        needed.append("data.validation_path")
    if job.kind == "distill":
        needed.append("distill.teacher")
    return [key for key in needed if value_at(tree, key) in (None, "", {})]


def canonical(value: Any) -> str:
    """Return a value in the notation of the tables.

    Examples: True -> `true`, `0.0` -> `0`, `GRPO` -> `grpo`.
    """
    if value is None:
        return "null"
    text = str(value).strip().lower()
    try:
        # 0.0, 0 and `0` are one value of a table.
        return f"{float(text):g}"
    except ValueError:
        return text


def value_at(tree: Mapping[str, Any], path: str) -> Any:
    """Return the value of a dotted key; None if it is not set."""
    value: Any = tree
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def with_indices(value: Any) -> Any:
    """Return the value with texts as keys, and lists of sections as sections."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return {str(index): with_indices(item) for index, item in enumerate(value)}
    if isinstance(value, Mapping):
        return {str(name): with_indices(item) for name, item in value.items()}
    return value


def key_paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys that have values."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from key_paths(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}"


def _section(source: _Source, section: Mapping[str, Any], prefix: str) -> Iterator[Finding]:
    job = source.job
    for name, value in section.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        annotation = type_at(job.run_config, path)
        if annotation is None:
            yield from _unknown(source, path, value)
            continue
        inner, may_be_null = without_none(annotation)
        same = source.same.get(path)
        if same is not None and isinstance(value, _FORMS[same.form]):
            finding = _judged(source, path, value, same)
            if not _is_unchanged(finding, same):
                yield finding
        elif is_section(inner) or is_open_section(inner):
            if isinstance(value, Mapping):
                yield from _section(source, value, path)
        elif value is None and not may_be_null:
            yield Finding(path, "deletable", text=_NULL)


def _unknown(source: _Source, path: str, value: Any) -> Iterator[Finding]:
    has_inner = in_table(path) in source.sections
    # Hydra's instantiation, which no tool's table lists for each of its keys.
    is_class = path.endswith("._target_")
    entry = Entry("obsolete", note=_CLASS) if is_class else _entry(source, path)
    if entry is None and not has_inner:
        yield Finding(path, "unknown")
        return
    if _is_off(value) and not (entry is not None and entry.is_on_when_disabled):
        reason = entry.when_null if entry is not None and value is None else ""
        if reason:
            yield Finding(path, "unsupported", text=reason)
        else:
            yield Finding(path, "deletable", text=_OFF_SECTION if value else _NULL)
        return
    if isinstance(value, Mapping) and has_inner:
        inner: list[Finding] = []
        for name, item in value.items():
            inner += _unknown(source, f"{path}.{name}", item)
        yield from _collapsed(path, inner)
        return
    # A section with a plain value, or a plain key with a section, is another key than the one of
    # the table.
    is_plain_section = entry is not None and entry.kind == "obsolete" and has_inner
    is_nested_key = (
        entry is not None
        and entry.kind == "renamed"
        and isinstance(value, Mapping)
        and not is_open_section(type_at(source.job.run_config, entry.targets[0]))
    )
    if entry is None or is_plain_section or is_nested_key:
        yield Finding(path, "unknown")
        return
    yield _judged(source, path, value, entry)


def _collapsed(path: str, inner: list[Finding]) -> list[Finding]:
    """Return the findings in a section, or a single one if all keys are dropped for one reason."""
    reasons = {(one.group, one.text) for one in inner}
    if len(reasons) != 1 or inner[0].group in ("renamed", "unknown"):
        return inner
    return [replace(inner[0], path=path)]


def _judged(source: _Source, path: str, value: Any, entry: Entry) -> Finding:
    """Return the finding of a key with an entry in the table, for its value."""
    tree = source.tree
    if entry.kind == "obsolete":
        return Finding(path, "deletable", text=entry.note)
    if entry.kind == "unsupported":
        if _are_all_off(value, entry.no_effect):
            return Finding(path, "deletable", text=NO_EFFECT)
        return Finding(path, "unsupported", text=entry.note)
    targets = " and ".join(entry.targets)
    if entry.unless is not None and not _is_switched_off(source, entry.unless):
        return Finding(path, "deletable", text=f"{entry.unless} is on")
    if entry.switch is not None:
        # The tool's default of the switch may be off, but so may the config be of another tool.
        if not _has_key(tree, entry.switch):
            text = f"set {targets} if {entry.switch} is on, which the config does not set"
            return Finding(path, "unsupported", text=text)
        if _is_switched_off(source, entry.switch):
            return Finding(path, "deletable", text=f"{entry.switch} is off")
    for key, switched in (entry.switched or {}).items():
        if not _is_switched_off(source, key):
            is_fields = isinstance(switched, Mapping)
            entry = replace(entry, **(switched if is_fields else {"targets": tuple(switched)}))
    old = canonical(value)
    also = (entry.also or {}).get(old, (entry.also or {}).get("*", {}))
    notes = [entry.note] if entry.note else []
    new: str | None = "*"
    if entry.values is not None:
        if old not in entry.values and "*" not in entry.values:
            known = [f"{key} is {mapped}" for key, mapped in entry.values.items() if mapped]
            notes += [f"of its values, {', '.join(known)}"] if known else []
            text = f"{targets}: {'; '.join(notes)}"
            return Finding(path, "unsupported", entry.targets, text=text)
        new = entry.values.get(old, entry.values.get("*"))
        if new is None:
            text = f"the default of {targets} has the same effect"
            if "${" in old or old.startswith("-"):
                text = _REFERENCE if "${" in old else NO_EFFECT
            return Finding(path, "deletable", text=text)
    # `*` in a table stands for every other value, which stays as it is.
    if new == "*":
        return Finding(path, "renamed", entry.targets, text="; ".join(notes), also=also)
    return Finding(
        path, "renamed", entry.targets, old=old, new=new, text="; ".join(notes), also=also
    )


def _is_switched_off(source: _Source, key: str) -> bool:
    value = canonical(value_at(source.tree, key))
    entry = source.entries.get(key)
    return value in _OFF or (entry is not None and value in entry.off_values)


def _is_unchanged(finding: Finding, entry: Entry) -> bool:
    """Return True if the value of a key with the same name means the same here."""
    if finding.group != "renamed":
        return False
    is_same_value = finding.new is None or finding.new == finding.old
    # A further text is a reference that has to be written out.
    return is_same_value and finding.text == entry.note


def _entry(source: _Source, path: str) -> Entry | None:
    """Return the entry of the key, or of the nearest section above it that covers all its keys."""
    entries = source.entries
    path = in_table(path)
    entry = entries.get(path)
    parent = path.rpartition(".")[0]
    while entry is None and parent:
        above = entries.get(parent)
        # A renamed key has one value; what is below it is another key.
        entry = None if above is not None and above.kind == "renamed" else above
        parent = parent.rpartition(".")[0]
    if entry is None or entry.kind != "renamed":
        return entry
    job = source.job
    wanted = (entry.sft,) if job.kind == "sft" and entry.sft is not None else entry.targets
    targets = tuple(key for key in wanted if type_at(job.run_config, key) is not None)
    if not targets:
        note = entry.note or f"`nemo-like {job.kind}` has no such key"
        return Entry("unsupported", note=note, no_effect=())
    return replace(entry, targets=targets, sft=None)


def in_table(path: str) -> str:
    """Return a key as the tables have it: NAME for a name of the user and for an index."""
    return _INDEX.sub(".NAME", _NAMED.sub(r"\1NAME.", path))


def _sections_of(entries: Mapping[str, Entry]) -> frozenset[str]:
    sections: set[str] = set()
    for path in entries:
        names = path.split(".")
        sections.update(".".join(names[:end]) for end in range(1, len(names)))
    return frozenset(sections)


def _has_key(tree: Mapping[str, Any], path: str) -> bool:
    """Return True if the key is set, also to null."""
    parent, _, name = path.rpartition(".")
    section = value_at(tree, parent) if parent else tree
    return isinstance(section, Mapping) and name in section


def _is_off(value: Any) -> bool:
    """Return True for null, an empty value, and a section that is switched off."""
    # Such a section has no effect, whatever else is in it.
    if isinstance(value, Mapping) and False in (value.get("enabled"), value.get("enable")):
        return True
    return value is None or (isinstance(value, Mapping | list | str) and not value)


def _are_all_off(value: Any, off: tuple[str, ...]) -> bool:
    """Return True if the value, or every value in it, is one of `off` or null."""
    if isinstance(value, Mapping):
        return all(_are_all_off(inner, off) for inner in value.values()) or _is_off(value)
    return _is_off(value) or canonical(value) in off
