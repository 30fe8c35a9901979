"""Models of the hub become directories: from a local server, from the cache, and clear errors."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from nemo_like.config.errors import ConfigError
from nemo_like.config.paths import hub_name, model_directory, require_model_directory
from tests.hub_server import COMMIT, Hub, Repository

NAME = "room/tiny"
KEY = "policy.model_name"
DESCRIPTION = ["chat_template.jinja", "config.json", "tokenizer.json"]
WEIGHTS = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]


@pytest.fixture
def tiny(hub: Hub) -> Repository:
    """A repository with weights in two files, and files that no run reads."""
    files = {name: f"{name} of a model".encode() for name in (*DESCRIPTION, *WEIGHTS)}
    files[WEIGHTS[0]] *= 100_000
    for name in ("pytorch_model.bin", "original/consolidated.00.pth", "onnx/config.json"):
        files[name] = b"not read"
    hub.repositories[f"models/{NAME}"] = Repository(files)
    return hub.repositories[f"models/{NAME}"]


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set HF_HUB_OFFLINE, which the library reads when it is imported."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_only_what_is_read_is_downloaded_and_only_once(
    tiny: Repository, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = model_directory(KEY, NAME, weights=False)
    assert hub.downloads() == DESCRIPTION
    assert sorted(os.listdir(described)) == DESCRIPTION
    found = model_directory(KEY, NAME, weights=True)
    assert found == described
    assert hub_name(found) == NAME
    assert hub.downloads() == sorted([*DESCRIPTION, *WEIGHTS])
    for name in (*DESCRIPTION, *WEIGHTS):
        assert (Path(found) / name).read_bytes() == tiny.files[name]
    # A commit does not change, so its directory needs no request.
    num_requests = len(hub.requests)
    assert model_directory(KEY, found, weights=True) == found
    offline(monkeypatch)
    assert model_directory(KEY, NAME, weights=True) == found
    assert len(hub.requests) == num_requests


def test_a_directory_has_priority_over_the_hub(
    tiny: Repository, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert model_directory(KEY, NAME, weights=True) == str(tmp_path / NAME)
    assert hub.requests == []


def test_an_interrupted_transfer_continues_where_it_ended(
    tiny: Repository, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library keeps what it received in units of this size.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.interrupted[WEIGHTS[0]] = 1_000_000
    found = model_directory(KEY, NAME, weights=True)
    assert (Path(found) / WEIGHTS[0]).read_bytes() == tiny.files[WEIGHTS[0]]
    (resumed,) = [request for request in hub.requests if "bytes=" in request]
    assert resumed.endswith(f"{WEIGHTS[0]} bytes=1000000-")


def test_files_of_an_interrupted_download_are_kept(tiny: Repository, hub: Hub) -> None:
    content = tiny.files.pop(WEIGHTS[1])
    # The listing has the file, and the server does not.
    tiny.unavailable[WEIGHTS[1]] = len(content)
    with pytest.raises(ConfigError, match="'room/tiny', which is not a directory; it cannot be"):
        model_directory(KEY, NAME, weights=True)
    del tiny.unavailable[WEIGHTS[1]]
    tiny.files[WEIGHTS[1]] = content
    hub.requests.clear()
    model_directory(KEY, NAME, weights=True)
    assert hub.downloads() == [WEIGHTS[1]]


def test_processes_of_a_node_without_the_files_download_them_once(
    tiny: Repository, hub: Hub, tmp_path: Path
) -> None:
    # The path that the driver sends, on a node with an empty cache.
    path = f"{tmp_path}/hub_cache/models--room--tiny/snapshots/{COMMIT}"
    code = (
        "import sys; from nemo_like.config.paths import require_model_directory;"
        f"require_model_directory('{KEY}', sys.argv[1])"
    )
    workers = [subprocess.Popen([sys.executable, "-c", code, path]) for _ in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert hub.downloads() == sorted([*DESCRIPTION, *WEIGHTS])
    assert (Path(path) / "config.json").read_bytes() == tiny.files["config.json"]


def test_a_node_that_has_the_files_needs_no_network(
    tiny: Repository, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = model_directory(KEY, NAME, weights=True)
    num_requests = len(hub.requests)
    require_model_directory(KEY, found)
    assert len(hub.requests) == num_requests


def test_a_gated_model_names_its_license_and_token(tiny: Repository, hub: Hub) -> None:
    tiny.is_gated = True
    page = f"{hub.address}/room/tiny"
    with pytest.raises(
        ConfigError, match=f"'room/tiny'; it is gated: .* at {page}, and set HF_TOKEN"
    ):
        model_directory(KEY, NAME, weights=False)


def test_an_unknown_name_has_the_nearest_directory(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "room" / "tiny-chat").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"did you mean 'room/tiny-chat'\?\); .* has no such model"
    ):
        model_directory(KEY, "room/tiny-chart", weights=True)
    assert hub.downloads() == []


@pytest.mark.parametrize(
    "name", ["models/Smol-Instrct", "./models/Smol-Instrct", "modls/Smol-Instruct"]
)
def test_a_missing_path_has_the_nearest_directory(
    name: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "Smol-Instruct").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"did you mean 'models/Smol-Instruct'\?"):
        model_directory(KEY, name, weights=True)


def test_without_the_hub_the_message_has_the_command_that_downloads(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No server listens on this port of the same machine.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"cannot be downloaded .*`hf download room/tiny`"):
        model_directory(KEY, NAME, weights=True)
    offline(monkeypatch)
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE forbids .*`hf download room/tiny`"):
        model_directory(KEY, NAME, weights=True)


def test_a_hub_that_does_not_answer_is_not_waited_for(
    tiny: Repository, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = model_directory(KEY, NAME, weights=True)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
        assert model_directory(KEY, NAME, weights=True) == found
        with pytest.raises(ConfigError, match=r"cannot be downloaded .*\(ReadTimeout"):
            model_directory(KEY, "room/other", weights=True)


def test_weights_that_are_missing_are_an_error_without_network(
    tiny: Repository, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_directory(KEY, NAME, weights=False)
    offline(monkeypatch)
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE forbids to download them"):
        model_directory(KEY, NAME, weights=True)


def test_pickle_files_are_no_weights(tiny: Repository, hub: Hub) -> None:
    for name in WEIGHTS:
        del tiny.files[name]
    with pytest.raises(
        ConfigError, match=r"no model\*\.safetensors \(pytorch_model\.bin\); pickle"
    ):
        model_directory(KEY, NAME, weights=True)
    assert hub.downloads() == DESCRIPTION
