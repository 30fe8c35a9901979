"""Overrides from the command line: `key=value` sets, `+key=value` adds, `~key` goes back to the
default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from nemo_like.config.errors import ConfigError, Location, Problem
from nemo_like.config.foreign import unknown_text
from nemo_like.config.keys import JobSchema, is_open_section, is_section, type_at, without_none
from nemo_like.config.text import shortened, shown_value
from nemo_like.config.yaml_locations import KeySource, Sources

MAX_OVERRIDE_CHARACTERS = 4_000
MAX_OVERRIDE_DEPTH = 12
COMMAND_LINE = Location("the command line")


@dataclass(frozen=True, slots=True)
class ParsedOverride:
    """One override. Example: `policy.optimizer.lr=1e-4` has value 0.0001 and raw text `1e-4`."""

    key: str
    value: Any
    raw_text: str
    is_delete: bool
    chooses_file: bool
    """True for the choice of a file of a Hydra config group (a folder), as in `policy=qwen`."""
    text: str

    def for_hydra(self, job: JobSchema) -> str:
        """Return the override in Hydra's syntax.

        Every key of the schema has a default, so `+key` and `key` mean the same; `++` is both.
        """
        if self.chooses_file:
            return self.text
        if not self.is_delete:
            return "++" + self.text.lstrip("+")
        _, may_be_null = without_none(type_at(job.run_config, self.key))
        # Hydra cannot delete a key whose value is null. The default of every nullable key is null,
        # so assigning null has the same effect as deleting it.
        return f"++{self.key}=null" if may_be_null else self.text


def parse_overrides(texts: Sequence[str], config_dir: Path) -> list[ParsedOverride]:
    """Parse `texts`. Raises ConfigError, with the correct form, for one that does not parse."""
    parser = OverridesParser.create()
    parsed = []
    for text in texts:
        shown = shown_value(text)
        _check_size(text, shown)
        try:
            override = parser.parse_override(text)
            parsed.append(_parsed(override, text, config_dir))
        # Besides its own errors Hydra's parser raises these for unusual text.
        except (HydraException, ValueError, RecursionError, OSError) as error:
            raise ConfigError(f"override {shown} does not parse: {_syntax_hint(text)}") from error
        if override.is_sweep_override():
            raise ConfigError(
                f"override {shown} has several values; write key=[a,b] for a list, key=\"'a,b'\""
                " for one text"
            )
    return parsed


def check_override_keys(job: JobSchema, overrides: Sequence[ParsedOverride]) -> Iterator[Problem]:
    """Yield a problem for each key that is not in the schema, also inside values like `{lr: 1}`."""
    for override in overrides:
        if not override.chooses_file:
            yield from _check_key(job, override.key, override.value)


def set_in_tree(tree: dict[str, Any], overrides: Sequence[ParsedOverride]) -> None:
    """Assign the values of the overrides in `tree`, the merged content of the files."""
    for override in overrides:
        if override.chooses_file or override.is_delete:
            continue
        section = tree
        *parents, name = override.key.split(".")
        for parent in parents:
            # A missing section, and a plain value in its place, become a section.
            if not isinstance(section.get(parent), dict):
                section[parent] = {}
            section = section[parent]
        section[name] = override.value


def record_overrides(sources: Sources, overrides: Sequence[ParsedOverride]) -> None:
    """Add the keys that the command line sets to `sources`."""
    for override in overrides:
        if override.chooses_file:
            continue
        # A mapping is merged into the section; any other value replaces what was below the key.
        if not isinstance(override.value, dict):
            sources.drop(override.key)
        _record(sources, override.key, override.value, override.raw_text)


def _parsed(override: Override, text: str, config_dir: Path) -> ParsedOverride:
    key = override.key_or_group
    value = override.value()
    is_delete = override.is_delete()
    # Hydra decides by the folder as well whether `policy=qwen` names a file or a value.
    is_folder = "/" in key or override.package is not None or (config_dir / key).is_dir()
    names_file = is_delete or isinstance(value, str | list)
    _, _, raw_text = text.partition("=")
    return ParsedOverride(
        key=key,
        value=value,
        raw_text=raw_text.strip(),
        is_delete=is_delete,
        chooses_file=is_folder and names_file,
        text=text,
    )


def _check_size(text: str, shown: str) -> None:
    """Raise ConfigError for a text that is too long, too deeply nested or not UTF-8.

    Hydra's parser recurses into brackets and is slow on long texts.
    """
    if len(text) > MAX_OVERRIDE_CHARACTERS:
        raise ConfigError(
            f"override {shown} is longer than {MAX_OVERRIDE_CHARACTERS:,} characters; write it in"
            " the YAML file"
        )
    depth = 0
    max_depth = 0
    for character in text:
        if character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        max_depth = max(max_depth, depth)
    if max_depth > MAX_OVERRIDE_DEPTH:
        raise ConfigError(f"override {shown} is nested more than {MAX_OVERRIDE_DEPTH} levels deep")
    # Python accepts such text from the command line, and fails when it is written to a file.
    if re.search("[\ud800-\udfff]", text):
        raise ConfigError(
            f"override {shown} is not UTF-8 text, or has half of a surrogate pair; remove it"
        )


def _syntax_hint(text: str) -> str:
    if "=" not in text and not text.startswith("~"):
        return f"write {shortened(text)}=VALUE"
    key, _, value = text.partition("=")
    # These characters have a meaning in Hydra's grammar.
    has_special = any(character in value for character in "=,:'\"()[]{}\\ ")
    is_quoted = value.startswith(("[", "{", "'", '"'))
    if has_special and not is_quoted:
        return f"quote the value twice, once for the shell: {shortened(key)}=\"'...'\""
    return (
        "write key=value, +key=value or ~key, with dots between sections, e.g."
        " policy.optimizer.lr=1e-4"
    )


def _check_key(job: JobSchema, key: str, value: Any) -> Iterator[Problem]:
    annotation = type_at(job.run_config, key)
    if annotation is None:
        yield Problem((key,), unknown_text(job, key), COMMAND_LINE)
    elif isinstance(value, dict) and (is_section(annotation) or is_open_section(annotation)):
        for name, inner in value.items():
            yield from _check_key(job, f"{key}.{name}", inner)


def _record(sources: Sources, key: str, value: Any, raw_text: str | None) -> None:
    is_plain = raw_text is not None and not raw_text.startswith(("'", '"', "[", "{"))
    # The raw text is kept of unquoted scalars only, as for YAML files.
    sources.by_key[key] = KeySource(COMMAND_LINE, raw_text if is_plain else None)
    if isinstance(value, dict):
        for name, inner in value.items():
            _record(sources, f"{key}.{name}", inner, None)
