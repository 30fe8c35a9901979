"""Serves the report of runs on the loopback interface, with new content while they go on.

Every request needs the token of the address that the command prints: other users of the machine,
and pages of other sites in the same browser, cannot guess it.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from nemo_like.config.errors import ConfigError
from nemo_like.reports.page import Content, render_page
from nemo_like.reports.run_report import report_content

_LOOPBACK = "127.0.0.1"


class ReportServer(ThreadingHTTPServer):
    """`/` is the page, `/content` what changes of it as JSON, 204 if nothing did."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int) -> None:
        """Render the page once; `port` 0 is a free one. Raises ConfigError."""
        self.paths = paths
        self.token = secrets.token_urlsafe(24)
        self._lock = threading.Lock()
        self._state = ""
        self._content: Content | None = None
        self.content()
        try:
            super().__init__((_LOOPBACK, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"--port: {_LOOPBACK}:{port} cannot be opened ({error.strerror}); give another one,"
                " or 0 for any free port"
            ) from error

    @property
    def address(self) -> str:
        """The address of the page, with the token."""
        return f"http://{_LOOPBACK}:{self.server_port}/?token={self.token}"

    def content(self) -> tuple[str, Content]:
        """Return the state of the files and the content, which is rendered if they changed."""
        # One thread renders, the others wait for its result.
        with self._lock:
            state = _state_of(self.paths)
            if self._content is None or state != self._state:
                self._content = report_content(self.paths)
                self._state = state
            return self._state, self._content


def _state_of(paths: Sequence[Path]) -> str:
    """Return a text that changes when the files of a run do."""
    names = ("metrics.jsonl", "health.jsonl", "config.yaml", "logs/driver.log", "rollouts")
    parts = []
    for path in (path / name for path in paths for name in (*names, "run.lock")):
        stat = path.stat() if path.exists() else None
        parts.append("-" if stat is None else f"{stat.st_mtime_ns}.{stat.st_size}")
    return "_".join(parts)


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        token = query.get("token", [""])[0]
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(403, "text/plain", "open the address that nemo-like report --serve prints")
        elif address.path == "/":
            page = render_page(self.server.content()[1], is_live=True)
            self._answer(200, "text/html", page)
        elif address.path == "/content":
            self._answer_content(query.get("state", [""])[0])
        else:
            self._answer(404, "text/plain", "there is no such page")

    def _answer_content(self, known_state: str) -> None:
        state, content = self.server.content()
        if state == known_state:
            self._answer(204, "application/json", "")
        else:
            value = {"state": state, **content.to_json()}
            self._answer(200, "application/json", json.dumps(value))

    def _answer(self, status: int, kind: str, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for each request."""
