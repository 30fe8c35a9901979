"""A server on this machine that answers the requests of huggingface_hub."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(/tree/.*|/revision/.*|)")
_FILE = re.compile(
    rf"/(datasets/)?([^/]+/[^/]+)/resolve/(?:refs/convert/parquet|main|{COMMIT})/(.+)"
)


@dataclass
class Repository:
    """One repository; every revision has the same files."""

    files: dict[str, bytes]
    is_gated: bool = False
    """Its files are listed, and refused."""
    unavailable: dict[str, int] = field(default_factory=dict)
    """Sizes of files that are listed, and answered with an error of the server."""


@dataclass
class Hub:
    """What the server has, and the requests that it got."""

    address: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    """By kind and name, such as `models/room/tiny`."""
    requests: list[str] = field(default_factory=list)
    """Method and path, and the range of bytes if one is requested."""
    interrupted: dict[str, int] = field(default_factory=dict)
    """Bytes after which the next transfer of a file ends, by the file's name."""

    def downloads(self) -> list[str]:
        """Return the names of the files that were transferred, sorted; with the range if any."""
        gets = [
            request
            for request in self.requests
            if request.startswith("GET /") and "/api/" not in request
        ]
        return sorted(request.rpartition("/")[2] for request in gets)


class HubServer(ThreadingHTTPServer):
    """Serves a `Hub` on a free port."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.hub = Hub(f"http://127.0.0.1:{self.server_port}")


class _Request(BaseHTTPRequestHandler):
    @property
    def _hub(self) -> Hub:
        assert isinstance(self.server, HubServer)
        return self.server.hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(self.path.partition("?")[0])
        requested = f"{self.command} {path} {self.headers.get('Range', '')}".strip()
        self._hub.requests.append(requested)
        if match := _API.fullmatch(path):
            repository = self._hub.repositories.get(f"{match[1]}/{match[2]}")
            if repository is not None:
                self._describe(match[2], repository, is_tree=match[3].startswith("/tree/"))
                return
        elif match := _FILE.fullmatch(path):
            kind = "datasets" if match[1] else "models"
            repository = self._hub.repositories.get(f"{kind}/{match[2]}")
            if repository is not None and repository.is_gated:
                self._refuse(403, "GatedRepo")
                return
            if repository is not None and match[3] in repository.files:
                self._send_file(match[3], repository.files[match[3]])
                return
            if repository is not None:
                is_listed = match[3] in repository.unavailable
                self._refuse(500 if is_listed else 404, "EntryNotFound")
                return
        self._refuse(404, "RepoNotFound")

    def _describe(self, name: str, repository: Repository, *, is_tree: bool) -> None:
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": _hash(content)}
            for path, content in repository.files.items()
        ]
        for path, size in repository.unavailable.items():
            entries.append({"type": "file", "path": path, "size": size, "oid": _hash(b"")})
        described = {"id": name, "sha": COMMIT, "siblings": []}
        content = json.dumps(entries if is_tree else described).encode()
        self._send_head(200, len(content), {"Content-Type": "application/json"})
        if self.command == "GET":
            self.wfile.write(content)

    def _send_file(self, name: str, content: bytes) -> None:
        start = int((self.headers.get("Range") or "bytes=0-")[len("bytes=") :].split("-")[0])
        headers = {"ETag": f'"{_hash(content)}"', "X-Repo-Commit": COMMIT}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send_head(206 if start else 200, len(content) - start, headers)
        if self.command == "GET":
            end = self._hub.interrupted.pop(name, len(content))
            self.wfile.write(content[start:end])
            # The client waits for the bytes that are missing until the connection ends.
            self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        self._send_head(status, 0, {"X-Error-Code": code})

    def _send_head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(length)}).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
