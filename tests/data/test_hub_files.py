"""Data sets of the hub: from a local server, from the cache, and clear errors. No network."""

from __future__ import annotations

import socket

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from nemo_like.config.errors import ConfigError
from nemo_like.data.formats import PROMPT_ROWS
from nemo_like.data.row_files import parse_hub_data
from nemo_like.data.rows import load_rows
from tests.hub_server import Hub, Repository

NAME = "room/sums"


def parquet(prompt: str) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [prompt], "answer": ["1"]}), sink)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def sums(hub: Hub) -> Hub:
    """The hub with a data set of two configurations."""
    files = {
        "train.jsonl": b'{"prompt": "a file", "answer": "1"}\n',
        "main/train/0000.parquet": parquet("first"),
        "main/train/0001.parquet": parquet("second"),
        "main/test/0000.parquet": parquet("test"),
        "socratic/train/0000.parquet": parquet("other"),
    }
    hub.repositories[f"datasets/{NAME}"] = Repository(files)
    return hub


def prompts(path: str) -> list[str]:
    return [row["prompt"] for row in load_rows(path, PROMPT_ROWS)]


def test_splits_and_files_are_downloaded_once(sums: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    split = f"hf://{NAME}?split=train&config=main"
    assert prompts(split) == ["first", "second"]
    assert prompts(f"hf://datasets/{NAME}/train.jsonl") == ["a file"]
    # Only one configuration has this split.
    assert prompts(f"hf://{NAME}?split=test") == ["test"]
    assert not any("socratic" in path for path in sums.requests)
    # Without the hub the cache is used, and nothing else.
    num_requests = len(sums.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert prompts(split) == ["first", "second"]
    assert prompts(f"hf://{NAME}/train.jsonl") == ["a file"]
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE forbids .* give the path of the files"):
        prompts(f"hf://{NAME}/other.jsonl")
    with pytest.raises(ConfigError, match=r"hf://room/none\?split=train; its files are not"):
        prompts("hf://room/none?split=train")
    assert len(sums.requests) == num_requests


def test_a_hub_that_does_not_answer_is_not_waited_for(
    sums: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = f"hf://{NAME}?split=train&config=main"
    expected = prompts(split)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
        assert prompts(split) == expected
        with pytest.raises(ConfigError, match=r"cannot be downloaded .*\(ReadTimeout"):
            prompts("hf://room/none?split=train")


def test_a_gated_data_set_needs_its_license(sums: Hub) -> None:
    sums.repositories[f"datasets/{NAME}"].is_gated = True
    page = f"{sums.address}/datasets/{NAME}"
    with pytest.raises(
        ConfigError, match=f"accept the license of this data set at {page}, and set HF_TOKEN"
    ):
        prompts(f"hf://{NAME}/train.jsonl")


def test_what_the_data_set_has_is_listed(sums: Hub) -> None:
    with pytest.raises(ConfigError, match=r"no split 'train' .* it has config=main&split=test, "):
        prompts(f"hf://{NAME}?split=train")
    with pytest.raises(ConfigError, match=r"no split 'dev' of the configuration 'main'; it has"):
        prompts(f"hf://{NAME}?split=dev&config=main")
    with pytest.raises(ConfigError, match=r"no such data set: correct the name, or .* HF_TOKEN"):
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
