"""`nemo-like config`: prints the keys of a config as text or Markdown."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from dataclasses import replace

from nemo_like.algorithms.registry import RUN_CONFIGS, job_schema
from nemo_like.config.errors import ConfigError
from nemo_like.config.keys import (
    USER_NAME,
    KeyReference,
    SectionReference,
    section_references,
    type_at,
    unknown_key_text,
)
from nemo_like.console import say

MAX_WIDTH = 100
_MARKDOWN_HEADER = """# Configuration reference

Every key of a config for {commands}. This file is generated from `nemo_like/config/schema.py`
and the `config.py` of each algorithm by
`nemo-like config all --markdown > docs/configuration.md`; a test compares the two.

Keys are written as nested sections in YAML (`policy: {{optimizer: {{lr: 1.0e-4}}}}`) and with
dots on the command line (`policy.optimizer.lr=1e-4`). `null` means no value. `NAME` is a name
of your choice.
"""


def print_keys(arguments: argparse.Namespace) -> int:
    """Print the reference; return the exit code. Raises ConfigError for an unknown key."""
    say(reference_text(arguments.kind, arguments.key, markdown=arguments.markdown))
    return 0


def reference_text(kind: str, key: str, *, markdown: bool) -> str:
    """Return the reference of `key` (a key, a section, or "" for every key) of one job or of all.

    Raises ConfigError, with the nearest known key, if there is no such key.
    """
    kinds: list[str] = [known for known in RUN_CONFIGS if kind in (known, "all")]
    if key and not any(type_at(RUN_CONFIGS[known], key) is not None for known in kinds):
        raise ConfigError(unknown_key_text(job_schema(kinds[0]), key))
    kinds_of = _sections(kinds, key)
    if markdown:
        return _markdown(kinds_of, kinds)
    # Longer lines are hard to read, however wide the terminal is.
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    entries = []
    for section in kinds_of:
        for reference in section.keys:
            entries.append(_text_entry(reference, width))
    return "\n".join(entries)


def _sections(kinds: list[str], key: str) -> dict[SectionReference, list[str]]:
    """Return the sections of these jobs with the keys at or below `key`, each with its jobs.

    A section of the same name that differs between two jobs is listed once for each.
    """
    kinds_of: dict[SectionReference, list[str]] = {}
    for kind in kinds:
        for section in section_references(RUN_CONFIGS[kind]):
            keys = tuple(each for each in section.keys if not key or _is_below(each.key, key))
            if keys or not key:
                kinds_of.setdefault(replace(section, keys=keys), []).append(kind)
    return kinds_of


def _is_below(key: str, ancestor: str) -> bool:
    """Return True if `key` is `ancestor` or below it; `NAME` in `key` matches every name."""
    names = key.split(".")
    wanted = ancestor.split(".")
    if len(wanted) > len(names):
        return False
    # The names after those of the ancestor are free, hence not strict.
    pairs = zip(names, wanted, strict=False)
    return all(name in (other, USER_NAME) for name, other in pairs)


def _text_entry(reference: KeyReference, width: int) -> str:
    """Return one key: a line with type, constraints and default, then the description."""
    properties = [reference.type, reference.constraints]
    if reference.default == "required":
        properties.append("required")
    else:
        properties.append(f"default {reference.default}")
    lines = [reference.key]
    for text in ("; ".join(filter(None, properties)), reference.description):
        lines += textwrap.wrap(
            text, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(lines)


def _markdown(kinds_of: dict[SectionReference, list[str]], kinds: list[str]) -> str:
    commands = " and ".join(f"`nemo-like {kind}`" for kind in kinds)
    parts = [_MARKDOWN_HEADER.format(commands=commands)]
    for section, kinds_of_section in kinds_of.items():
        # A section that every job has needs no remark.
        only = kinds_of_section if len(kinds_of_section) < len(kinds) else []
        parts.append(_markdown_section(section, only))
    return "\n".join(parts).rstrip("\n")


def _markdown_section(section: SectionReference, only: list[str]) -> str:
    """Return one heading, the description and the table of keys; `only` restricts it to jobs."""
    description = section.description
    if only:
        jobs = " and ".join(f"`nemo-like {kind}`" for kind in only)
        description += f" Only in a config for {jobs}."
    lines = [f"## `{section.path}`" if section.path else "## Top level", "", description, ""]
    lines += ["| key | type | default | description |", "|---|---|---|---|"]
    for reference in section.keys:
        name = reference.key.removeprefix(f"{section.path}.")
        type_text = ", ".join(filter(None, [reference.type, reference.constraints]))
        default = reference.default if reference.default == "required" else f"`{reference.default}`"
        cells = (f"`{name}`", type_text, default, reference.description)
        # A vertical bar would end the cell.
        escaped = [cell.replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines) + "\n"
