"""Keys of other tools in a config: renamed, without a counterpart, or safe to delete.

Such keys are never accepted: a config with them is refused with the list of changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from nemo_like.config.foreign_entries import Entry, Obsolete, Renamed, Unsupported
from nemo_like.config.foreign_nemo_rl import NEMO_RL, ON_WHEN_DISABLED, SAME_KEYS
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
TABLE: dict[str, Entry] = {path: entry for table in TOOLS.values() for path, entry in table.items()}
"""Dotted key of another tool -> its entry."""

Group = Literal["renamed", "unsupported", "deletable", "unknown"]

_REFERENCE = re.compile(r"\$\{([^:{}]+)\}")
_OFF_SWITCHES = ("enabled", "enable")


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
    tools: tuple[str, ...] = ()
    """The tools whose keys they are, the likeliest first."""

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
        return any(
            finding.path == path
            or path.startswith(f"{finding.path}.")
            or finding.path.startswith(f"{path}.")
            for finding in self.found
        )


def guess_kind(tree: Mapping[str, Any]) -> str | None:
    """Return the job of a config of verl, TRL or Cosmos-RL, by keys that only one job has.

    None if there are none.
    """
    grpo = {
        "actor_rollout_ref",
        "algorithm",
        "critic",
        "rollout",
        "num_generations",
        "max_completion_length",
        "reward_funcs",
    }
    sft = {
        "optim",
        "packing",
        "assistant_only_loss",
        "completion_only_loss",
        "max_length",
        "max_seq_length",
    }
    policy = _value_at(tree, "train.train_policy.type")
    if policy in ("sft", "grpo"):
        return policy
    if grpo & set(tree):
        return "grpo"
    return "sft" if sft & set(tree) else None


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
    found = [*_section(job, tree, tree, "")]
    targets = {
        target for finding in found for target in finding.targets if finding.group == "renamed"
    }
    found = [
        finding for finding in found if finding.group == "renamed" or finding.path not in targets
    ]
    paths = [finding.path for finding in found]
    counts = {
        name: sum(
            path in table or any(key.startswith(f"{path}.") for key in table) for path in paths
        )
        for name, table in TOOLS.items()
    }
    tools = sorted((name for name in counts if counts[name]), key=lambda name: -counts[name])
    return Findings(job, found, tuple(tools))


def missing_keys(job: JobSchema, tree: Mapping[str, Any], found: Sequence[Finding]) -> list[str]:
    """Return the required keys that are neither set nor the new name of a key that is set."""
    targets = {
        target for finding in found if finding.group == "renamed" for target in finding.targets
    }
    needed = ["run_name", "policy.model_name", "data.train_path"]
    if job.kind == "grpo":
        needed.append("reward.functions")
    periods = [_value_at(tree, f"{job.kind}.val_period")]
    periods += [
        _value_at(tree, finding.path)
        for finding in found
        if f"{job.kind}.val_period" in finding.targets
    ]
    if any(period not in (None, "0", 0, "-1") for period in periods):
        needed.append("data.validation_path")
    return [key for key in needed if key not in targets and _value_at(tree, key) in (None, "", {})]


def _section(
    job: JobSchema, tree: Mapping[str, Any], section: Mapping[str, Any], prefix: str
) -> Iterator[Finding]:
    for name, value in section.items():
        path = f"{prefix}.{name}" if prefix else name
        annotation = type_at(job.run_config, path)
        if annotation is None:
            if not any(type_at(config, path) is not None for config in job.jobs.values()):
                yield from _unknown(job, tree, path, value)
            continue
        inner, may_be_null = without_none(annotation)
        if path in SAME_KEYS and isinstance(value, SAME_KEYS[path][0]):
            finding = _judged(job, tree, path, value, SAME_KEYS[path][1])
            if finding.group != "renamed" or finding.old != finding.new:
                yield finding
        elif is_section(inner) or is_open_section(inner):
            if isinstance(value, Mapping):
                yield from _section(job, tree, value, path)
        elif value is None and not may_be_null:
            yield Finding(path, "deletable", is_recognized=False)


def _unknown(job: JobSchema, tree: Mapping[str, Any], path: str, value: Any) -> Iterator[Finding]:
    has_inner = path in _inner_sections()
    entry = Obsolete() if path.endswith("._target_") else _entry(path, job)
    if entry is None and not has_inner:
        is_dead = _is_off(value) and misspelled_key(job, path) is None
        yield Finding(path, "deletable" if is_dead else "unknown", is_recognized=False)
    elif _is_off(value) and path not in ON_WHEN_DISABLED:
        reason = entry.null if isinstance(entry, Renamed) and value is None else ""
        yield Finding(path, "unsupported", text=reason) if reason else Finding(path, "deletable")
    elif isinstance(value, Mapping) and has_inner:
        inner = [
            one
            for name, item in value.items()
            for one in _unknown(job, tree, f"{path}.{name}", item)
        ]
        yield from _collapsed(path, inner)
    elif (
        entry is None
        or (isinstance(entry, Obsolete) and has_inner)
        or (isinstance(entry, Renamed) and isinstance(value, Mapping))
    ):
        # A section with a plain value, or a plain key with a section, is another key than that of
        # the table.
        yield Finding(path, "unknown", is_recognized=False)
    else:
        yield _judged(job, tree, path, value, entry)


def _collapsed(path: str, inner: list[Finding]) -> list[Finding]:
    """Return the findings in a section, or a single one if all keys are deleted for one reason."""
    reasons = list(dict.fromkeys(one.text for one in inner if one.group == "unsupported"))
    if any(one.group in ("renamed", "unknown") for one in inner) or len(reasons) > 1:
        return inner
    return [
        Finding(path, "unsupported", text=reasons[0]) if reasons else Finding(path, "deletable")
    ]


def _judged(
    job: JobSchema, tree: Mapping[str, Any], path: str, value: Any, entry: Entry
) -> Finding:
    """Return the finding of a key with an entry in the table, for its value."""
    if isinstance(entry, Obsolete):
        return Finding(path, "deletable")
    if isinstance(entry, Unsupported):
        if _all_in(value, entry.off):
            return Finding(path, "deletable")
        return Finding(path, "unsupported", text=entry.reason)
    if entry.switch is not None and canonical(_value_at(tree, entry.switch)) in ("null", "false"):
        return Finding(path, "deletable")
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
            about = "; ".join(filter(None, (note, f"of its values, {known}")))
            return Finding(path, "unsupported", text=f"{' and '.join(entry.targets)}: {about}")
        new = None if new == "*" else new
    if new is None and any(_moves(job, reference) for reference in _REFERENCE.findall(str(value))):
        note = "; ".join(filter(None, (note, "write the value out, it refers to a key that moves")))
    return Finding(
        path,
        "renamed",
        entry.targets,
        old if new is not None else "",
        new,
        note,
    )


def _entry(path: str, job: JobSchema) -> Entry | None:
    """Return the entry of the key, or of the nearest section above it that covers all its keys."""
    entry = TABLE.get(path)
    parent = path.rpartition(".")[0]
    while entry is None and parent:
        above = TABLE.get(parent)
        entry = None if isinstance(above, Renamed) else above
        parent = parent.rpartition(".")[0]
    if not isinstance(entry, Renamed):
        return entry
    wanted = (entry.sft,) if job.kind == "sft" and entry.sft is not None else entry.targets
    targets = tuple(key for key in wanted if type_at(job.run_config, key) is not None)
    if not targets:
        return Unsupported(f"only the other job has {' or '.join(wanted)}", ())
    return Renamed(targets, entry.values, entry.note, entry.switch, entry.null)


@cache
def _inner_sections() -> frozenset[str]:
    """Return every section that has keys of the table below it."""
    parts = [path.split(".") for path in TABLE]
    return frozenset(".".join(names[:end]) for names in parts for end in range(1, len(names)))


def _is_in_foreign_section(job: JobSchema, path: str) -> bool:
    """Return True if a key of the table is, or is in, a section that the schema does not have."""
    parent = path.rpartition(".")[0]
    return path in _inner_sections() or all(
        type_at(config, parent) is None for config in job.jobs.values()
    )


def canonical(value: Any) -> str:
    """Return a value in the notation of the tables.

    Examples: True -> `true`, `0.0` -> `0`, `GRPO` -> `grpo`.
    """
    if value is None:
        return "null"
    text = str(value).strip().lower()
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def _is_off(value: Any) -> bool:
    if isinstance(value, Mapping) and any(value.get(name) is False for name in _OFF_SWITCHES):
        return True
    return value is None or (isinstance(value, Mapping | list | str) and not value)


def _all_in(value: Any, off: tuple[str, ...]) -> bool:
    """Return True if the value, or every value in it, is one of `off` or null."""
    if isinstance(value, Mapping):
        return all(_is_off(inner) or _all_in(inner, off) for inner in value.values())
    return _is_off(value) or canonical(value) in off


def _moves(job: JobSchema, reference: str) -> bool:
    """Return True if an interpolation does not work under the new name of its key."""
    return reference.startswith(".") or (
        ":" not in reference and type_at(job.run_config, reference) is None
    )


def _value_at(tree: Mapping[str, Any], path: str) -> Any:
    value: Any = tree
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
