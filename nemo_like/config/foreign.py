"""Keys of other tools in a config: renamed, without a counterpart, or safe to delete.

Such keys are never accepted: a config with them is refused with the list of changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from nemo_like.config.foreign_entries import (
    Entry,
    Obsolete,
    Renamed,
    Unsupported,
    are_all_off,
    canonical,
    is_off,
)
from nemo_like.config.foreign_nemo_rl import NEMO_RL, ON_WHEN_DISABLED, SAME_KEYS
from nemo_like.config.foreign_tools import has_key, other_tool, value_at
from nemo_like.config.foreign_trl import COSMOS_RL, TRL
from nemo_like.config.foreign_verl import VERL
from nemo_like.config.keys import (
    JobSchema,
    is_open_section,
    is_section,
    misspelled_key,
    type_at,
    unknown_key_text,
    without_none,
)

TOOLS: dict[str, dict[str, Entry]] = {
    "NeMo RL": NEMO_RL,
    "verl": VERL,
    "TRL": TRL,
    "Cosmos-RL": COSMOS_RL,
}
_MIN_KNOWN_SHARE = 0.75
"""Share of the keys that a table has to have, or the config is one of another tool."""
TABLE: dict[str, Entry] = {**NEMO_RL, **VERL, **TRL, **COSMOS_RL}
"""Dotted key of another tool -> its entry."""

Group = Literal["renamed", "unsupported", "deletable", "unknown"]

_REFERENCE = re.compile(r"\$\{([^:{}]+)\}")


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
    """The tool with a table that has most of the keys; empty if none has one."""

    @property
    def are_foreign(self) -> bool:
        """True if the config is one of another tool.

        At least one key is known as a key of another tool, and there are three unknown keys or a
        known section. Otherwise the keys are reported as single mistakes.
        """
        unknown = [finding for finding in self.found if finding.path not in SAME_KEYS]
        recognized = [finding.path for finding in unknown if finding.is_recognized]
        if not recognized:
            return False
        return len(unknown) >= 3 or any(
            _is_in_foreign_section(self.job, path) for path in recognized
        )

    def covers(self, path: str) -> bool:
        """Return True if the findings contain the key `path` or a part of it."""
        for finding in self.found:
            is_below = path.startswith(f"{finding.path}.")
            is_above = finding.path.startswith(f"{path}.")
            if finding.path == path or is_below or is_above:
                return True
        return False


def unknown_text(job: JobSchema, path: str) -> str:
    """Return the message for one unknown key: the counterpart of another tool's key, or a similar
    key.
    """
    entry = None if path in _inner_sections() else _entry(path, job)
    if isinstance(entry, Renamed):
        return f"unknown key {path}; did you mean {' and '.join(entry.targets)}?"
    if isinstance(entry, Unsupported):
        return f"unknown key {path}, which is not supported: {entry.reason}"
    if entry is not None:
        return f"unknown key {path}, which has no meaning here; delete it"
    return unknown_key_text(job, path)


def find_foreign(job: JobSchema, tree: Mapping[str, Any]) -> Findings:
    """Classify every unknown key of the merged content of a config, in its order."""
    found = list(_section(job, tree, tree, ""))
    targets = _renamed_targets(found)
    # A key that gets a value from a renamed one must not be deleted at the same time.
    found = [
        finding for finding in found if finding.group == "renamed" or finding.path not in targets
    ]
    counts: dict[str, int] = {}
    for name, table in TOOLS.items():
        num_known = sum(_is_in_table(finding.path, table) for finding in found)
        if num_known > 0:
            counts[name] = num_known
    # The tables have keys in common.
    similar = max(counts, key=lambda name: counts[name], default="")
    num_unknown = sum(finding.group == "unknown" for finding in found)
    is_known = num_unknown <= (1 - _MIN_KNOWN_SHARE) * len(found)
    # A config of this package with mistakes has its sections.
    num_own = sum(type_at(job.run_config, name) is not None for name in tree)
    tool = other_tool(tree) or ""
    if not tool and (is_known or num_own > len(tree) / 2):
        tool = similar
    if tool not in TOOLS:
        found = [_of_unknown_tool(tree, finding) for finding in found]
    return Findings(job, found, tool, similar)


def _of_unknown_tool(tree: Mapping[str, Any], finding: Finding) -> Finding:
    """Return the finding for a key of a tool without a table.

    That a key of the same name has no effect in a tool, or a section no counterpart, is then no
    reason to delete it.
    """
    value = value_at(tree, finding.path)
    is_section = finding.group == "unsupported" and isinstance(value, Mapping)
    if is_section or (finding.group == "deletable" and not is_off(value)):
        return Finding(finding.path, "unknown", is_recognized=finding.is_recognized)
    return finding


def _renamed_targets(found: Sequence[Finding]) -> set[str]:
    """Return the new names of all renamed keys."""
    targets: set[str] = set()
    for finding in found:
        if finding.group == "renamed":
            targets.update(finding.targets)
    return targets


def _is_in_table(path: str, table: Mapping[str, Entry]) -> bool:
    """Return True if a table has the key `path` or a key below it."""
    return path in table or any(key.startswith(f"{path}.") for key in table)


def missing_keys(job: JobSchema, tree: Mapping[str, Any], found: Sequence[Finding]) -> list[str]:
    """Return the required keys that are neither set nor the new name of a key that is set."""
    targets = _renamed_targets(found)
    needed = ["run_name", "policy.model_name", "data.train_path"]
    has_models = any(target.startswith("reward.models.") for target in targets)
    if job.kind == "grpo" and not has_models and not value_at(tree, "reward.models"):
        needed.append("reward.functions")
    # The period of validation may be set under its own or under a foreign name.
    period_key = f"{job.kind}.val_period"
    periods = [value_at(tree, period_key)]
    for finding in found:
        if period_key in finding.targets:
            periods.append(value_at(tree, finding.path))
    # 0 here and -1 in verl turn validation off.
    if any(period not in (None, "0", 0, "-1") for period in periods):
        needed.append("data.validation_path")
    missing = []
    for key in needed:
        if key not in targets and value_at(tree, key) in (None, "", {}):
            missing.append(key)
    return missing


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
        if path in SAME_KEYS and isinstance(value, SAME_KEYS[path][0]):
            _, entry = SAME_KEYS[path]
            finding = _judged(job, tree, path, value, entry)
            if not _is_unchanged(finding, entry):
                yield finding
        elif is_section(inner) or is_open_section(inner):
            if isinstance(value, Mapping):
                yield from _section(job, tree, value, path)
        elif value is None and not may_be_null:
            yield Finding(path, "deletable", is_recognized=False)


def _are_renamed(job: JobSchema, path: str, section: Mapping[str, Any]) -> bool:
    """Return True if all keys of a section have another name in this job."""
    entries = [_entry(f"{path}.{name}", job) for name in section]
    return bool(entries) and all(isinstance(entry, Renamed) for entry in entries)


def _unknown(job: JobSchema, tree: Mapping[str, Any], path: str, value: Any) -> Iterator[Finding]:
    has_inner = path in _inner_sections()
    # Hydra's instantiation, which no tool's table lists for each of its keys.
    entry = Obsolete() if path.endswith("._target_") else _entry(path, job)
    if entry is None and not has_inner:
        # A key that is off has no effect, unless it is a misspelled key of the schema.
        is_dead = is_off(value) and misspelled_key(job, path) is None
        yield Finding(path, "deletable" if is_dead else "unknown", is_recognized=False)
        return
    if is_off(value) and path not in ON_WHEN_DISABLED:
        reason = entry.null if isinstance(entry, Renamed) and value is None else ""
        yield Finding(path, "unsupported", text=reason) if reason else Finding(path, "deletable")
        return
    if isinstance(value, Mapping) and has_inner:
        inner: list[Finding] = []
        for name, item in value.items():
            inner += _unknown(job, tree, f"{path}.{name}", item)
        yield from _collapsed(path, inner)
        return
    # A section with a plain value, or a plain key with a section, is another key than that of the
    # table.
    is_plain_section = isinstance(entry, Obsolete) and has_inner
    is_nested_key = isinstance(entry, Renamed) and isinstance(value, Mapping)
    if entry is None or is_plain_section or is_nested_key:
        yield Finding(path, "unknown", is_recognized=False)
        return
    yield _judged(job, tree, path, value, entry)


def _collapsed(path: str, inner: list[Finding]) -> list[Finding]:
    """Return the findings in a section, or a single one if all keys are deleted for one reason."""
    # `dict.fromkeys` keeps the order of the file, which a set would not.
    reasons = list(dict.fromkeys(one.text for one in inner if one.group == "unsupported"))
    if any(one.group in ("renamed", "unknown") for one in inner) or len(reasons) > 1:
        return inner
    if reasons:
        return [Finding(path, "unsupported", text=reasons[0])]
    return [Finding(path, "deletable")]


def _judged(
    job: JobSchema, tree: Mapping[str, Any], path: str, value: Any, entry: Entry
) -> Finding:
    """Return the finding of a key with an entry in the table, for its value."""
    if isinstance(entry, Obsolete):
        return Finding(path, "deletable")
    if isinstance(entry, Unsupported):
        if are_all_off(value, entry.off):
            return Finding(path, "deletable")
        return Finding(path, "unsupported", text=entry.reason)
    # A key without effect needs no new name.
    if _is_without_effect(tree, entry):
        return Finding(path, "deletable")
    # The tool's default of the switch may be off, but so may the config be of another tool.
    if entry.switch is not None and not has_key(tree, entry.switch):
        targets = " and ".join(entry.targets)
        text = f"set {targets} if {entry.switch} is on, which the config does not set"
        return Finding(path, "unsupported", text=text)
    old = canonical(value)
    note = entry.note
    new = None
    if entry.values is not None:
        new = entry.values.get(old, entry.values.get("*", ""))
        if new is None:
            return Finding(path, "deletable")
        if new == "":
            known = ", ".join(
                f"{key} is {mapped}" for key, mapped in entry.values.items() if mapped is not None
            )
            about = _joined(note, f"of its values, {known}" if known else "")
            return Finding(path, "unsupported", text=f"{' and '.join(entry.targets)}: {about}")
        # `*` in a table stands for every other value, which stays as it is.
        new = None if new == "*" else new
    references = _REFERENCE.findall(str(value))
    if new is None and any(_moves(job, reference) for reference in references):
        note = _joined(note, "write the value out, it refers to a key that moves")
    return Finding(
        path, "renamed", entry.targets, old=old if new is not None else "", new=new, text=note
    )


def _is_without_effect(tree: Mapping[str, Any], entry: Renamed) -> bool:
    """Return True if another key of the config turns this one off."""
    off = ("null", "false", "0")
    switch = entry.switch
    if switch is not None and has_key(tree, switch) and canonical(value_at(tree, switch)) in off:
        return True
    return entry.unless is not None and canonical(value_at(tree, entry.unless)) not in off


def _is_unchanged(finding: Finding, entry: Entry) -> bool:
    """Return True if the value of a key with the same name means the same here."""
    if finding.group != "renamed" or not isinstance(entry, Renamed):
        return False
    is_same_value = finding.new is None or finding.new == finding.old
    # A further text is a reference that has to be written out.
    return is_same_value and finding.text == entry.note


def _joined(*notes: str) -> str:
    """Join the notes that are not empty."""
    return "; ".join(note for note in notes if note)


def _entry(path: str, job: JobSchema) -> Entry | None:
    """Return the entry of the key, or of the nearest section above it that covers all its keys."""
    entry = TABLE.get(path)
    parent = path.rpartition(".")[0]
    while entry is None and parent:
        above = TABLE.get(parent)
        # A renamed key has one value; what is below it is another key.
        entry = None if isinstance(above, Renamed) else above
        parent = parent.rpartition(".")[0]
    if not isinstance(entry, Renamed):
        return entry
    wanted = entry.targets
    if job.kind == "sft" and entry.sft is not None:
        wanted = (entry.sft,)
    targets = tuple(key for key in wanted if type_at(job.run_config, key) is not None)
    if not targets:
        return Unsupported(f"only the other job has {' or '.join(wanted)}", ())
    return replace(entry, targets=targets, sft=None)


@cache
def _inner_sections() -> frozenset[str]:
    """Return every section that has keys of the table below it."""
    sections: set[str] = set()
    for path in TABLE:
        section, _, _ = path.rpartition(".")
        while section:
            sections.add(section)
            section, _, _ = section.rpartition(".")
    return frozenset(sections)


def _is_in_foreign_section(job: JobSchema, path: str) -> bool:
    """Return True if a key of the table is, or is in, a section that the schema does not have."""
    parent = path.rpartition(".")[0]
    return path in _inner_sections() or all(
        type_at(config, parent) is None for config in job.jobs.values()
    )


def _moves(job: JobSchema, reference: str) -> bool:
    """Return True if an interpolation does not work under the new name of its key."""
    # A leading dot is relative to the section; a colon calls a resolver, as in `oc.env:NAME`.
    if reference.startswith("."):
        return True
    return ":" not in reference and type_at(job.run_config, reference) is None
