"""Renders the templates of this package to one self-contained HTML page.

Every text is escaped: HTML by autoescape, control characters as on a terminal. The page may load
nothing, and the browser runs its two scripts only, which the policy lists by their hashes; a script
in a text would not run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nemo_like import __version__
from nemo_like.config.errors import printable
from nemo_like.reports.charts import ChartIds, javascript


@dataclass(frozen=True)
class Content:
    """What changes of a page while a run goes on."""

    title: str
    html: Markup
    charts: Mapping[str, Any]
    """Element id -> drawing."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values for the script of the page."""
        return {"title": self.title, "html": str(self.html), "charts": self.charts}


def render_content(template: str, title: str, values: Mapping[str, Any]) -> Content:
    """Render the content of a page from a template and its values."""
    ids = ChartIds()
    text = _environment().get_template(template).render(chart_id=ids.add, **values)
    return Content(printable(title), Markup(text), ids.to_json())


def render_page(content: Content, *, is_live: bool = False) -> str:
    """Return the page; with `is_live` its script requests new content from the server."""
    scripts = [javascript(), _resource("page.js")]
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:"
    if is_live:
        policy += "; connect-src 'self'"
    return (
        _environment()
        .get_template("base.html")
        .render(
            content=content,
            policy=policy,
            style=Markup(_resource("style.css")),
            scripts=[Markup(script) for script in scripts],
            is_live=is_live,
            version=__version__,
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("nemo_like.reports"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_printable,
    )
    # A drawing refers to objects that come before, so the order of its keys counts.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    return environment


def _printable(value: Any) -> Any:
    """Return the value of an expression without control characters; markup is our own."""
    return printable(value) if type(value) is str else value


def _resource(name: str) -> str:
    return resources.files("nemo_like.reports").joinpath("templates", name).read_text("utf-8")


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
