"""Data sets of the hub: from a local server, from the cache, and clear errors. No network."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from nemo_like.config.errors import ConfigError
from nemo_like.data.datasets import PROMPT_ROWS
from nemo_like.data.hub_files import parse_hub_data
from nemo_like.data.row_loading import load_rows

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "room/sums"


class Hub(BaseHTTPRequestHandler):
    """The few requests of the hub that downloads of one public data set need."""

    files: dict[str, bytes]
    requests: list[str]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.requests.append(path)
        kind, _, rest = path.removeprefix("/api").lstrip("/").partition("/")
        file = rest.partition("/resolve/")[2]
        for revision in ("refs/convert/parquet", "main", COMMIT):
            file = file.removeprefix(f"{revision}/")
        if kind == "datasets" and NAME in rest and file in self.files:
            self._send(self.files[file], file)
        elif kind == "datasets" and f"{NAME}/tree/" in rest:
            entries = []
            for name, content in self.files.items():
                oid = hashlib.sha1(content).hexdigest()
                entries.append({"type": "file", "path": name, "size": len(content), "oid": oid})
            self._send(json.dumps(entries).encode())
        elif kind == "datasets" and path.startswith(f"/api/datasets/{NAME}"):
            self._send(json.dumps({"id": NAME, "sha": COMMIT, "siblings": []}).encode())
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, content: bytes, file: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        if file:
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
        else:
            self.send_header("Content-Type", "application/json")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def parquet(prompt: str) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [prompt], "answer": ["1"]}), sink)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub on this machine with two configurations, and an empty cache."""
    Hub.files = {
        "train.jsonl": b'{"prompt": "a file", "answer": "1"}\n',
        "main/train/0000.parquet": parquet("first"),
        "main/train/0001.parquet": parquet("second"),
        "main/test/0000.parquet": parquet("test"),
        "socratic/train/0000.parquet": parquet("other"),
    }
    Hub.requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield Hub
    server.shutdown()
    server.server_close()
    thread.join()


def prompts(path: str) -> list[str]:
    return [row["prompt"] for row in load_rows(path, PROMPT_ROWS)]


def test_splits_and_files_are_downloaded_once(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    split = f"hf://{NAME}?split=train&config=main"
    assert prompts(split) == ["first", "second"]
    assert prompts(f"hf://datasets/{NAME}/train.jsonl") == ["a file"]
    # Only one configuration has this split.
    assert prompts(f"hf://{NAME}?split=test") == ["test"]
    assert not any("socratic" in path for path in hub.requests)
    # Without the hub the cache is used, and nothing else.
    num_requests = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert prompts(split) == ["first", "second"]
    assert prompts(f"hf://{NAME}/train.jsonl") == ["a file"]
    with pytest.raises(ConfigError, match=r"cannot be read from the .* hub .* give the path of"):
        prompts(f"hf://{NAME}/other.jsonl")
    with pytest.raises(ConfigError, match=r"hf://room/none\?split=train cannot be read"):
        prompts("hf://room/none?split=train")
    assert len(hub.requests) == num_requests


def test_what_the_data_set_has_is_listed(hub: type[Hub]) -> None:
    with pytest.raises(ConfigError, match=r"no split 'train' .* it has config=main&split=test, "):
        prompts(f"hf://{NAME}?split=train")
    with pytest.raises(ConfigError, match=r"no split 'dev' of the configuration 'main'; it has"):
        prompts(f"hf://{NAME}?split=dev&config=main")
    with pytest.raises(ConfigError, match=r"cannot be read from the .*check the name and HF_TOKEN"):
        prompts("hf://room/none?split=train")


@pytest.mark.parametrize(
    "path",
    [
        "hf://sums?split=train",
        "hf://room/sums",
        "hf://room/sums?split=",
        "hf://room/sums?split=train&part=1",
        "hf://room/sums/a.jsonl?split=train",
        "hf://room/sums/../../secret.jsonl",
        "hf://ro om/sums?split=train",
    ],
)
def test_a_name_of_another_form_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.train_path is 'hf://.*hf://OWNER/NAME"):
        parse_hub_data(path, "data.train_path")
