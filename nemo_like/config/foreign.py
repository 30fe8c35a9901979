"""Keys of other tools in a config: renamed, without a counterpart, or safe to delete.

Such keys are never accepted: a config with them is refused with the list of changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from nemo_like.config.keys import (
    Entry,
    JobSchema,
    all_entries,
    general,
    is_open_section,
    is_section,
    misspelled_key,
    on_when_disabled,
    same_keys,
    tool_tables,
    type_at,
    unknown_key_text,
    without_none,
)

_MIN_KNOWN_SHARE = 0.75
"""Share of the keys that the tables must have, or the config is one of an unknown tool."""
_REFERENCE = re.compile(r"\$\{([^:{}]+)\}")
_NAMED = re.compile(r"^(reward\.(?:functions|models)\.)[^.]+\.")
_FORMS = {"scalar": str | int | float, "list": list, "dict": dict}
_OFF = ("null", "false", "0")

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
    """A note, or the reason."""
    is_recognized: bool = True


@dataclass(slots=True)
class Findings:
    """All changes that one config needs."""

    job: JobSchema
    found: list[Finding] = field(default_factory=list)
    tool: str = ""
    """The tool whose config it is; empty if no tool is known."""
    similar: str = ""
    """The tool whose table has most of the keys; empty if no table has any."""

    @property
    def are_foreign(self) -> bool:
        """True if the config is one of another tool.

        At least one key is known as a key of another tool, and there are three unknown keys or a
        known section. Otherwise the keys are reported as single mistakes.
        """
        unknown = [finding for finding in self.found if finding.path not in same_keys()]
        recognized = [finding.path for finding in unknown if finding.is_recognized]
        if not recognized:
            return False
        return len(unknown) >= 3 or any(self._is_in_foreign_section(path) for path in recognized)

    def _is_in_foreign_section(self, path: str) -> bool:
        """Return True if `path` is, or is in, a section that the schema does not have."""
        parent = path.rpartition(".")[0]
        configs = self.job.jobs.values()
        return path in _inner_sections() or all(type_at(each, parent) is None for each in configs)

    def covers(self, path: str) -> bool:
        """Return True if the findings contain the key `path` or a part of it."""
        return any(
            f"{path}.".startswith(f"{finding.path}.") or finding.path.startswith(f"{path}.")
            for finding in self.found
        )


def guess_job(tree: Mapping[str, Any]) -> str | None:
    """Return the job of a config of another tool, by keys that only one job has, or None."""
    tool = _tool_without_table(tree)
    if tool is not None:
        return general()["tools"][tool]["job"]
    policy = value_at(tree, "train.train_policy.type")
    if policy in ("sft", "grpo"):
        return policy
    if canonical(tree.get("lora_task_type")) == "seq_cls":
        return "rm"
    for job, keys in general()["jobs"].items():
        if set(keys) & set(tree):
            return job
    return None


def unknown_text(job: JobSchema, path: str) -> str:
    """Return the message for one unknown key: the counterpart of another tool's key, or a similar
    key.
    """
    entry = None if path in _inner_sections() else _entry(path, job)
    if entry is None:
        return unknown_key_text(job, path)
    if entry.kind == "renamed":
        return f"unknown key {path}; did you mean {' and '.join(entry.targets)}?"
    if entry.kind == "unsupported":
        return f"unknown key {path}, which is not supported: {entry.note}"
    return f"unknown key {path}, which has no meaning here; delete it"


def find_foreign(job: JobSchema, tree: Mapping[str, Any]) -> Findings:
    """Classify every unknown key of the merged content of a config, in its order."""
    found = list(_section(job, tree, tree, ""))
    targets = _renamed_targets(found)
    # A key that gets a value from a renamed one must not be deleted at the same time.
    found = [one for one in found if one.group == "renamed" or one.path not in targets]
    # The tables have keys in common, so the tool with most of the keys is the likeliest one.
    counts = {
        name: sum(_is_in_table(one.path, table) for one in found)
        for name, table in tool_tables().items()
    }
    similar = max(counts, key=lambda name: counts[name])
    similar = similar if counts[similar] else ""
    num_unknown = sum(one.group == "unknown" for one in found)
    is_known = num_unknown <= (1 - _MIN_KNOWN_SHARE) * len(found)
    # A config of this package with mistakes has its sections.
    num_own = sum(type_at(job.run_config, name) is not None for name in tree)
    tool = _tool_without_table(tree) or ""
    if not tool and (is_known or num_own > len(tree) / 2):
        tool = similar
    if tool not in tool_tables():
        found = [_of_unknown_tool(tree, one) for one in found]
    return Findings(job, found, tool, similar)


def missing_keys(job: JobSchema, tree: Mapping[str, Any], found: Sequence[Finding]) -> list[str]:
    """Return the required keys that are neither set nor the new name of a key that is set."""
    targets = _renamed_targets(found)
    needed = ["run_name", "policy.model_name", "data.train_path"]
    has_models = any(target.startswith("reward.models.") for target in targets)
    if job.kind == "grpo" and not has_models and not value_at(tree, "reward.models"):
        needed.append("reward.functions")
    # The period of validation may be set under its own or under a foreign name.
    period_key = f"{job.kind}.val_period"
    paths = [period_key, *(one.path for one in found if period_key in one.targets)]
    # 0 here and -1 in verl turn validation off.
    if any(canonical(value_at(tree, path)) not in ("null", "0", "-1") for path in paths):
        needed.append("data.validation_path")
    return [key for key in needed if key not in targets and value_at(tree, key) in (None, "", {})]


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


def _tool_without_table(tree: Mapping[str, Any]) -> str | None:
    """Return the tool without a table of which the config has at least two keys, or None."""
    tools = general()["tools"]
    counts = {name: len(set(tools[name]["keys"]) & set(tree)) for name in tools}
    name = max(counts, key=lambda each: counts[each])
    return name if counts[name] >= 2 else None


def _of_unknown_tool(tree: Mapping[str, Any], finding: Finding) -> Finding:
    """Return the finding for a key of a tool without a table.

    That a key of the same name has no effect in a tool, or a section no counterpart, is then no
    reason to delete it.
    """
    value = value_at(tree, finding.path)
    is_section = finding.group == "unsupported" and isinstance(value, Mapping)
    if is_section or (finding.group == "deletable" and not _is_off(value)):
        return Finding(finding.path, "unknown", is_recognized=finding.is_recognized)
    return finding


def _renamed_targets(found: Sequence[Finding]) -> set[str]:
    """Return the new names of all renamed keys."""
    return {target for one in found if one.group == "renamed" for target in one.targets}


def _is_in_table(path: str, table: Mapping[str, Entry]) -> bool:
    """Return True if a table has the key `path` or a key below it."""
    return path in table or any(key.startswith(f"{path}.") for key in table)


def _section(
    job: JobSchema, tree: Mapping[str, Any], section: Mapping[str, Any], prefix: str
) -> Iterator[Finding]:
    for name, value in section.items():
        path = f"{prefix}.{name}" if prefix else name
        annotation = type_at(job.run_config, path)
        if annotation is None:
            # A key of another job of this package is reported as that, not as a foreign one, unless
            # it is a section with keys that other tools have for this job.
            is_of_other_job = any(type_at(each, path) is not None for each in job.jobs.values())
            if not is_of_other_job:
                yield from _unknown(job, tree, path, value)
            elif isinstance(value, Mapping) and _are_renamed(job, path, value):
                for inner_name, item in value.items():
                    yield from _unknown(job, tree, f"{path}.{inner_name}", item)
            continue
        inner, may_be_null = without_none(annotation)
        same = same_keys().get(path)
        if same is not None and isinstance(value, _FORMS[same.form]):
            finding = _judged(job, tree, path, value, same)
            if not _is_unchanged(finding, same):
                yield finding
        elif is_section(inner) or is_open_section(inner):
            if isinstance(value, Mapping):
                yield from _section(job, tree, value, path)
        elif value is None and not may_be_null:
            yield Finding(path, "deletable", is_recognized=False)


def _are_renamed(job: JobSchema, path: str, section: Mapping[str, Any]) -> bool:
    """Return True if all keys of a section are another tool's, and some are renamed in this job."""
    entries = [_entry(f"{path}.{name}", job) for name in section]
    is_renamed = any(entry is not None and entry.kind == "renamed" for entry in entries)
    return is_renamed and None not in entries


def _unknown(job: JobSchema, tree: Mapping[str, Any], path: str, value: Any) -> Iterator[Finding]:
    has_inner = path in _inner_sections()
    # Hydra's instantiation, which no tool's table lists for each of its keys.
    entry = Entry("obsolete") if path.endswith("._target_") else _entry(path, job)
    if entry is None and not has_inner:
        # A key that is off has no effect, unless it is a misspelled key of the schema.
        is_dead = _is_off(value) and misspelled_key(job, path) is None
        yield Finding(path, "deletable" if is_dead else "unknown", is_recognized=False)
        return
    if _is_off(value) and path not in on_when_disabled():
        reason = entry.when_null if entry is not None and value is None else ""
        yield Finding(path, "unsupported", text=reason) if reason else Finding(path, "deletable")
        return
    if isinstance(value, Mapping) and has_inner:
        inner: list[Finding] = []
        for name, item in value.items():
            inner += _unknown(job, tree, f"{path}.{name}", item)
        yield from _collapsed(path, inner)
        return
    # A section with a plain value, or a plain key with a section, is another key than the one of
    # the table.
    is_plain_section = entry is not None and entry.kind == "obsolete" and has_inner
    is_nested_key = entry is not None and entry.kind == "renamed" and isinstance(value, Mapping)
    if entry is None or is_plain_section or is_nested_key:
        yield Finding(path, "unknown", is_recognized=False)
        return
    yield _judged(job, tree, path, value, entry)


def _collapsed(path: str, inner: list[Finding]) -> list[Finding]:
    """Return the findings in a section, or a single one if all keys are deleted for one reason."""
    reasons = {one.text for one in inner if one.group == "unsupported"}
    if any(one.group in ("renamed", "unknown") for one in inner) or len(reasons) > 1:
        return inner
    if reasons:
        return [Finding(path, "unsupported", text=reasons.pop())]
    return [Finding(path, "deletable")]


def _judged(
    job: JobSchema, tree: Mapping[str, Any], path: str, value: Any, entry: Entry
) -> Finding:
    """Return the finding of a key with an entry in the table, for its value."""
    if entry.kind == "obsolete":
        return Finding(path, "deletable")
    if entry.kind == "unsupported":
        if _are_all_off(value, entry.no_effect):
            return Finding(path, "deletable")
        return Finding(path, "unsupported", text=entry.note)
    targets = " and ".join(entry.targets)
    if entry.unless is not None and canonical(value_at(tree, entry.unless)) not in _OFF:
        return Finding(path, "deletable")
    if entry.switch is not None:
        # The tool's default of the switch may be off, but so may the config be of another tool.
        if not _has_key(tree, entry.switch):
            text = f"set {targets} if {entry.switch} is on, which the config does not set"
            return Finding(path, "unsupported", text=text)
        if canonical(value_at(tree, entry.switch)) in _OFF:
            return Finding(path, "deletable")
    old = canonical(value)
    notes = [entry.note] if entry.note else []
    new: str | None = "*"
    if entry.values is not None:
        if old not in entry.values and "*" not in entry.values:
            known = [f"{key} is {mapped}" for key, mapped in entry.values.items() if mapped]
            notes += [f"of its values, {', '.join(known)}"] if known else []
            return Finding(path, "unsupported", text=f"{targets}: {'; '.join(notes)}")
        new = entry.values.get(old, entry.values.get("*"))
        if new is None:
            return Finding(path, "deletable")
    # `*` in a table stands for every other value, which stays as it is.
    if new == "*":
        if any(_moves(job, reference) for reference in _REFERENCE.findall(str(value))):
            notes.append("write the value out, it refers to a key that moves")
        return Finding(path, "renamed", entry.targets, text="; ".join(notes))
    return Finding(path, "renamed", entry.targets, old=old, new=new, text="; ".join(notes))


def _is_unchanged(finding: Finding, entry: Entry) -> bool:
    """Return True if the value of a key with the same name means the same here."""
    if finding.group != "renamed":
        return False
    is_same_value = finding.new is None or finding.new == finding.old
    # A further text is a reference that has to be written out.
    return is_same_value and finding.text == entry.note


def _entry(path: str, job: JobSchema) -> Entry | None:
    """Return the entry of the key, or of the nearest section above it that covers all its keys."""
    # A level that the user names is NAME in the tables.
    entry = all_entries().get(path) or all_entries().get(_NAMED.sub(r"\1NAME.", path))
    parent = path.rpartition(".")[0]
    while entry is None and parent:
        above = all_entries().get(parent)
        # A renamed key has one value; what is below it is another key.
        entry = None if above is not None and above.kind == "renamed" else above
        parent = parent.rpartition(".")[0]
    if entry is None or entry.kind != "renamed":
        return entry
    wanted = (entry.sft,) if job.kind == "sft" and entry.sft is not None else entry.targets
    targets = tuple(key for key in wanted if type_at(job.run_config, key) is not None)
    if not targets:
        note = f"only the other job has {' or '.join(wanted)}"
        return Entry("unsupported", note=note, no_effect=())
    return replace(entry, targets=targets, sft=None)


@cache
def _inner_sections() -> frozenset[str]:
    """Return every section that has keys of the tables below it."""
    sections: set[str] = set()
    for path in all_entries():
        names = path.split(".")
        sections.update(".".join(names[:end]) for end in range(1, len(names)))
    return frozenset(sections)


def _moves(job: JobSchema, reference: str) -> bool:
    """Return True if an interpolation does not work under the new name of its key."""
    # A leading dot is relative to the section.
    return reference.startswith(".") or type_at(job.run_config, reference) is None


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
