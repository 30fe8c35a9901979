"""The message for a config with keys of other tools: its findings in groups, every key once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nemo_like.config.errors import Location, Problem
from nemo_like.config.foreign import Finding, Findings, Group, missing_keys
from nemo_like.config.keys import JobSchema, child_types, misspelled_key, type_at
from nemo_like.config.text import shortened
from nemo_like.config.yaml_locations import Sources

MAX_SHOWN_KEYS = 400
"""Max keys that are listed of one group; more than any known config has."""
MAX_UNKNOWN_KEYS = 60
_MAX_PATH_CHARACTERS = 120
_MAX_LINE_CHARACTERS = 110


def foreign_text(
    job: JobSchema,
    source: str,
    tree: Mapping[str, Any],
    findings: Findings,
    others: Sequence[Problem],
    sources: Sources,
) -> str:
    """Return the text of the error for the config `source`; problems of other keys come last."""
    places = {key: _place(written.location, source) for key, written in sources.by_key.items()}
    groups: dict[Group, list[Finding]] = {
        group: [one for one in findings.found if one.group == group] for group in _HEADINGS
    }
    looks = f", as {' or '.join(findings.tools[:1])} has them" if findings.tools else ""
    lines = [f"{source} has {len(findings.found)} keys to change or delete{looks}"]
    for group, found in groups.items():
        if not found:
            continue
        lines.append(_HEADINGS[group])
        limit = MAX_UNKNOWN_KEYS if group == "unknown" else MAX_SHOWN_KEYS
        lines += [f"  {line}" for line in _group_lines(job, group, found[:limit], tree, places)]
        if len(found) > limit:
            lines.append(f"  and {len(found) - limit} more")
    missing = missing_keys(job, tree, findings.found)
    if missing:
        lines.append(f"to be set as well: {', '.join(missing)}")
    if others:
        lines.append("other problems:")
        lines += [f"  {shortened(str(problem), 300)}" for problem in others[:10]]
        lines += [f"  and {len(others) - 10} more"] if len(others) > 10 else []
    return "\n".join(lines)


_HEADINGS: dict[Group, str] = {
    "renamed": "renamed (old -> new):",
    "unsupported": "unsupported (no counterpart; delete them, or do what the reason says):",
    "unknown": "not known:",
    "deletable": (
        "safe to delete (null, off, or without a meaning here), with sections that become empty:"
    ),
}


def _group_lines(
    job: JobSchema,
    group: Group,
    found: Sequence[Finding],
    tree: Mapping[str, Any],
    places: Mapping[str, str],
) -> Iterator[str]:
    if group == "renamed":
        yield from _renamed_lines(found, tree, places)
    elif group == "unsupported":
        for reason in dict.fromkeys(one.text for one in found):
            paths = [_shown(one.path) for one in found if one.text == reason]
            yield f"{reason}:" if len(paths) > 1 else f"{reason}: {paths[0]}"
            if len(paths) > 1:
                yield from (f"  {line}" for line in _wrapped(paths))
    elif group == "unknown":
        yield from _unknown_lines(job, found, places)
    else:
        yield from _wrapped([_shown(one.path) for one in found])


def _renamed_lines(
    found: Sequence[Finding],
    tree: Mapping[str, Any],
    places: Mapping[str, str],
) -> Iterator[str]:
    """Yield one line per target; keys with the same target share it."""
    for targets in dict.fromkeys(one.targets for one in found):
        same = [one for one in found if one.targets == targets]
        olds = [
            _shown(one.path) + (f": {shortened(one.old)}" if one.new is not None else "")
            for one in same
        ]
        new = " and ".join(targets) if (same[0].path,) != targets else ""
        values = list(dict.fromkeys(one.new for one in same if one.new is not None))
        if values:
            new = f"{new}: {' or '.join(values)}" if new else values[0]
        notes = list(dict.fromkeys(one.text for one in same if one.text))
        if len(same) > 1:
            notes.append("one of them")
        if (same[0].path,) != targets:
            notes += _collision(tree, targets)
        where = " and ".join(places[one.path] for one in same if one.path in places)
        note = f" ({'; '.join(notes)})" if notes else ""
        yield f"{', '.join(olds)} -> {new}{note}" + (f"  [{where}]" if where else "")


def _unknown_lines(
    job: JobSchema, found: Sequence[Finding], places: Mapping[str, str]
) -> Iterator[str]:
    """Yield each unknown key with a similar key, then the legal keys of their sections."""
    sections = []
    for one in found:
        meant = misspelled_key(job, one.path)
        hint = f", did you mean {meant}?" if meant else ""
        yield _shown(one.path) + hint + (f"  [{places[one.path]}]" if one.path in places else "")
        parent = one.path.rpartition(".")[0]
        if not meant and parent not in sections and child_types(type_at(job.run_config, parent)):
            sections.append(parent)
    for parent in sections:
        keys = child_types(type_at(job.run_config, parent)) or {}
        yield f"({parent or 'the top level'} has {', '.join(keys)})"


def _collision(tree: Mapping[str, Any], targets: Sequence[str]) -> Iterator[str]:
    """Yield a note for each new key that the config already has."""
    for target in targets:
        value: Any = tree
        for name in target.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping):
            yield "in place of the section there"
        elif value is not None:
            yield "which is set already, keep one"


def _place(location: Location, source: str) -> str:
    """Return the location of a key, without the file if it is the config itself."""
    is_here = location.source == source and location.line is not None
    return f"line {location.line}" if is_here else str(location)


def _shown(path: str) -> str:
    return shortened(path.replace("\n", "\\n"), _MAX_PATH_CHARACTERS)


def _wrapped(names: Iterable[str]) -> Iterator[str]:
    """Yield the names, separated by commas, in lines of at most about 110 characters."""
    line = ""
    for name in names:
        if line and len(line) + len(name) > _MAX_LINE_CHARACTERS:
            yield f"{line},"
            line = ""
        line = f"{line}, {name}" if line else name
    if line:
        yield line
