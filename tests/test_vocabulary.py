"""The text of the repository uses the terms of docs/glossary.md, not synonyms of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("nemo_like", "tests", "benchmarks", "docs", "examples", "ray_jobs")
FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
SUFFIXES = {".py", ".md", ".yaml", ".sh"}

BANNED = {
    r"dearest|costliest": "max-loaded, slowest",
    r"roomiest": "emptiest",
    r"gifts?": "relocation",
    r"workplaces?": "workers",
    r"evening": "bisection, local search",
    r"speaks? for": "is the owner of",
    r"says|asks|asked": "states, requires, requested: code and files do not speak",
    r"whole(?! numbers?\b)": "complete, full, unsharded",
    r"(?<!at_)(?:most|least)_(?!likely|loaded|microbatches)\w+": "max_, min_",
}
"""Pattern of a word, regardless of case -> the words to use."""


def texts() -> Iterator[tuple[str, str]]:
    """(path, content) of every file with text of ours, except this one."""
    paths = [ROOT / name for name in FILES]
    for folder in FOLDERS:
        paths += sorted((ROOT / folder).rglob("*"))
    for path in paths:
        if path.suffix in SUFFIXES and path != Path(__file__):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def test_no_banned_word_is_used() -> None:
    # Underscores separate the words of a name.
    patterns = {
        re.compile(rf"(?<![A-Za-z])(?:{pattern})(?![A-Za-z])", re.IGNORECASE): instead
        for pattern, instead in BANNED.items()
    }
    found = [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1} {match.group()!r}: write {instead}"
        for path, text in texts()
        for pattern, instead in patterns.items()
        for match in pattern.finditer(text)
    ]
    assert found == []
