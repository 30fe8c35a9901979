"""The message for a config with keys of other tools: its findings in groups, every key once."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_like.config.errors import Location, Problem, shortened
from nemo_like.config.foreign import Finding, Findings, Group, missing_keys, value_at
from nemo_like.config.keys import JobSchema, child_types, misspelled_key, tool_tables, type_at

MAX_SHOWN_KEYS = 400
"""Max keys that are listed of one group; more than any known config has."""
MAX_UNKNOWN_KEYS = 60
_MAX_PATH_CHARACTERS = 120
_MAX_LINE_CHARACTERS = 110
_MAX_OTHERS = 10
"""Max problems of keys that are not foreign; they are listed again once the others are solved."""


def foreign_text(
    source: str,
    tree: Mapping[str, Any],
    findings: Findings,
    others: Sequence[Problem],
    locations: Mapping[str, Location],
) -> str:
    """Return the text of the error for the config `source`; problems of other keys come last."""
    job = findings.job
    places = {key: _place(location, source) for key, location in locations.items()}
    looks = f", as {findings.tool} has them" if findings.tool else ""
    if findings.tool not in tool_tables():
        tool = f"{findings.tool}," if findings.tool else "a tool"
        looks = f", of {tool} whose keys are not known"
        if findings.similar:
            looks += f" (the others have the names of {findings.similar}; check their meaning)"
    lines = [f"{source} has {len(findings.found)} keys to change or delete{looks}"]
    # The order of the headings: what must be decided comes before what can be deleted.
    for group, heading in _HEADINGS.items():
        found = [one for one in findings.found if one.group == group]
        if not found:
            continue
        lines.append(heading)
        limit = MAX_UNKNOWN_KEYS if group == "unknown" else MAX_SHOWN_KEYS
        shown = found[:limit]
        lines += [f"  {line}" for line in _group_lines(job, group, shown, tree, places)]
        if len(found) > limit:
            lines.append(f"  and {len(found) - limit} more")
    missing = missing_keys(job, tree, findings.found)
    if missing:
        lines.append(f"to be set as well: {', '.join(missing)}")
    if others:
        lines.append("other problems:")
        lines += [f"  {shortened(str(problem), 300)}" for problem in others[:_MAX_OTHERS]]
        if len(others) > _MAX_OTHERS:
            lines.append(f"  and {len(others) - _MAX_OTHERS} more")
    return "\n".join(lines)


_HEADINGS: dict[Group, str] = {
    "renamed": "renamed (old -> new):",
    "unsupported": "unsupported (no counterpart; delete them, or follow the reason):",
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
        # Keys with one reason are listed together, so that the reason is read once.
        for reason in dict.fromkeys(one.text for one in found):
            paths = [_shown(one.path) for one in found if one.text == reason]
            if len(paths) == 1:
                yield f"{reason}: {paths[0]}"
                continue
            yield f"{reason}:"
            yield from (f"  {line}" for line in _wrapped(paths))
    elif group == "unknown":
        yield from _unknown_lines(job, found, places)
    else:
        yield from _wrapped([_shown(one.path) for one in found])


def _renamed_lines(
    found: Sequence[Finding], tree: Mapping[str, Any], places: Mapping[str, str]
) -> Iterator[str]:
    """Yield one line per target; keys with the same target share it."""
    for targets in dict.fromkeys(one.targets for one in found):
        same = [one for one in found if one.targets == targets]
        # A key may keep its name and only change its value.
        keeps_name = (same[0].path,) == targets
        olds = []
        for one in same:
            old_value = "" if one.new is None else f": {shortened(one.old)}"
            olds.append(f"{_shown(one.path)}{old_value}")
        new = "" if keeps_name else " and ".join(targets)
        values = list(dict.fromkeys(one.new for one in same if one.new is not None))
        if values:
            new = f"{new}: {' or '.join(values)}" if new else values[0]
        notes = list(dict.fromkeys(one.text for one in same if one.text))
        if len(same) > 1:
            notes.append("one of them")
        if not keeps_name:
            notes += _collision(tree, targets)
        line = f"{', '.join(olds)} -> {new}"
        if notes:
            line += f" ({'; '.join(notes)})"
        # Keys from a defaults file of Hydra have no recorded line.
        where = " and ".join(places[one.path] for one in same if one.path in places)
        if where:
            line += f"  [{where}]"
        yield line


def _unknown_lines(
    job: JobSchema, found: Sequence[Finding], places: Mapping[str, str]
) -> Iterator[str]:
    """Yield each unknown key with a similar key, then the legal keys of their sections."""
    sections = []
    for one in found:
        meant = misspelled_key(job, one.path)
        line = _shown(one.path)
        if meant:
            line += f", did you mean {meant}?"
        if one.path in places:
            line += f"  [{places[one.path]}]"
        yield line
        # Without a similar key the list of all keys helps; it is shown once per section.
        parent = one.path.rpartition(".")[0]
        has_keys = child_types(type_at(job.run_config, parent))
        if not meant and parent not in sections and has_keys:
            sections.append(parent)
    for parent in sections:
        keys = child_types(type_at(job.run_config, parent)) or {}
        yield f"({parent or 'the top level'} has {', '.join(keys)})"


def _collision(tree: Mapping[str, Any], targets: Sequence[str]) -> Iterator[str]:
    """Yield a note for each new key that the config already has."""
    for target in targets:
        value = value_at(tree, target)
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


def _wrapped(names: Sequence[str]) -> list[str]:
    """Return the names, separated by commas, in lines of at most about 110 characters."""
    text = ", ".join(names)
    return textwrap.wrap(text, _MAX_LINE_CHARACTERS, break_long_words=False, break_on_hyphens=False)
