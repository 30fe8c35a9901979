"""Reads a page as a browser does: its elements and texts, or what Chromium made of it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest


class Page(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def kinds(self) -> set[tuple[str, frozenset[str]]]:
        """Names of the elements with the names of their attributes."""
        return {(tag, frozenset(attributes)) for tag, attributes in self.elements}

    @property
    def charts(self) -> dict[str, Any]:
        """Element id -> drawing."""
        data = self.text.split('<script type="application/json" id="charts">')[1]
        return json.loads(data.split("</script>")[0])

    @property
    def shown(self) -> str:
        return "".join(self.words)


def in_chromium(address: str) -> str:
    """The elements of a page after its scripts ran. Skips the test without a browser."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("no Chromium: install the package chromium")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000")
    done = subprocess.run(
        [browser, *options, "--dump-dom", address], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_drawn(dom: str, num_charts: int) -> None:
    """No script failed, and every chart has points."""
    errors = re.search('data-errors="([^"]*)"', dom)
    assert errors is not None, "no script ran"
    assert html.unescape(errors[1]) == "[]"
    points = [int(number) for number in re.findall('data-points="([0-9]+)"', dom)]
    assert len(points) == num_charts and min(points) > 0


def file_address(path: Path) -> str:
    return path.resolve().as_uri()
