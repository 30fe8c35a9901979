"""The message for a config of another tool, and the groups of keys that are not carried over."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from nemo_like.config.errors import counted, shortened
from nemo_like.config.foreign import Finding

_NUM_SHOWN = 5
_MAX_PATH_CHARACTERS = 120
_MAX_LINE_CHARACTERS = 110


def refusal_text(source: str, tool: str, found: Sequence[Finding]) -> str:
    """Return the text of the error for the config `source` of another tool."""
    renamed = [one for one in found if one.group == "renamed"]
    unknown = [one for one in found if one.group == "unknown"]
    num_dropped = len(found) - len(renamed) - len(unknown)
    examples = [f"{shown_key(one.path)} is {' and '.join(one.targets)}" for one in renamed]
    return (
        f"{source} is a config of {tool}: {counted(len(renamed), 'key')} with another name or value"
        f" here ({', '.join([*examples[:_NUM_SHOWN], '...'])}), {num_dropped} without a counterpart"
        f" or an effect, {len(unknown)} unknown.\nWrite a config of this package from it:"
        f" nemo-like migrate {source} --out NEW.yaml"
    )


def reason_lines(found: Sequence[Finding]) -> Iterator[str]:
    """Yield the keys with one reason together, after the reason."""
    for reason in dict.fromkeys(one.text for one in found):
        paths = [shown_key(one.path) for one in found if one.text == reason]
        if len(paths) == 1:
            yield f"{paths[0]}: {reason}"
        else:
            yield f"{reason}:"
            yield from textwrap.wrap(
                ", ".join(paths),
                _MAX_LINE_CHARACTERS,
                initial_indent="  ",
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )


def shown_key(path: str) -> str:
    """Return a key of a user's file for a message of one line."""
    return shortened(path.replace("\n", "\\n"), _MAX_PATH_CHARACTERS)


def shown_text(value: Any) -> str:
    """Return a value of a user's file for a message of one line."""
    return shortened(" ".join(str(value).split()))
