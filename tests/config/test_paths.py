"""Relative paths become absolute on the driver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.config.batching import StreamableDataConfig
from nemo_like.config.errors import ConfigError
from nemo_like.config.paths import require_model_directory, resolve_paths
from nemo_like.config.schema import PolicyConfig


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SftRunConfig:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    policy = PolicyConfig(
        model_name="models/tiny", tokenizer_name="models/tiny", chat_template="chat.jinja"
    )
    data = StreamableDataConfig(train_path="data/train.jsonl", validation_path="~/validation.jsonl")
    return SftRunConfig(run_name="run", output_dir="runs", policy=policy, data=data)


def test_relative_paths_are_those_of_the_driver(
    config: SftRunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = resolve_paths(config)
    assert resolved.output_dir == f"{tmp_path}/runs"
    assert resolved.policy.model_name == resolved.policy.tokenizer_name == f"{tmp_path}/models/tiny"
    assert resolved.policy.chat_template == f"{tmp_path}/chat.jinja"
    assert resolved.data.train_path == f"{tmp_path}/data/train.jsonl"
    assert resolved.data.validation_path == str(Path.home() / "validation.jsonl")
    monkeypatch.chdir("/")
    assert resolve_paths(resolved) == resolved, (
        "a resumed run compares equal wherever it is started"
    )


def test_a_link_is_kept(config: SftRunConfig, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(tmp_path / "models" / "tiny")
    policy = replace(config.policy, model_name="current")
    assert resolve_paths(replace(config, policy=policy)).policy.model_name == f"{tmp_path}/current"


def test_a_worker_names_its_node_where_the_model_is_missing(tmp_path: Path) -> None:
    require_model_directory("policy.model_name", str(tmp_path))
    with pytest.raises(
        ConfigError,
        match=rf"policy\.model_name: {tmp_path}/nowhere is not a directory on node \S+,",
    ):
        require_model_directory("policy.model_name", f"{tmp_path}/nowhere")
