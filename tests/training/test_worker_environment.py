"""Environment variables of workers: `cluster.env`, what the driver passes on, and the allocator."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, get_args

import pytest

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.run import workers_start
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import ClusterConfig, RunConfig
from nemo_like.run.progress import Progress
from nemo_like.training.groups import WorkerKind, environment_variables, worker_environment
from nemo_like.training.workers import start_workers
from tests.config.test_check import GRPO, SFT
from tests.recipe import Recipe

KINDS = get_args(WorkerKind)
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
ALLOCATOR_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
REMOVED = dict.fromkeys(ALLOCATOR_NAMES)
"""Of workers that must not have settings of the allocator, also not inherited ones."""


def with_cluster(config: RunConfig, **keys: Any) -> Any:
    return replace(config, cluster=ClusterConfig(**keys))


def environment_of(
    config: RunConfig, kind: WorkerKind, driver: dict[str, str]
) -> dict[str, str | None]:
    return worker_environment(config.cluster, config.needs.rollouts, kind, driver)


@pytest.mark.parametrize("kind", KINDS)
def test_networks_and_caches_of_the_driver_reach_every_worker(kind: WorkerKind) -> None:
    passed_on = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "HF_HOME": "/cache"}
    driver = passed_on | {"PATH": "/bin", "WANDB_API_KEY": "secret", "NOT_NCCL_X": "1"}
    removed = {} if kind == "policy" else REMOVED
    assert environment_of(SFT, kind, driver) == passed_on | removed


@pytest.mark.parametrize("kind", KINDS)
def test_own_variables_replace_those_of_the_driver(kind: WorkerKind) -> None:
    config = with_cluster(SFT, env={"NCCL_DEBUG": "WARN", "MY_VARIABLE": "1", "MY_TOKEN": None})
    driver = {"NCCL_DEBUG": "INFO", "MY_TOKEN": "secret"}
    expected = {"NCCL_DEBUG": "WARN", "MY_VARIABLE": "1", "MY_TOKEN": "secret"}
    removed = {} if kind == "policy" else REMOVED
    assert environment_of(config, kind, driver) == expected | removed


def test_a_null_without_a_value_in_the_driver_is_refused() -> None:
    config = with_cluster(SFT, env={"MY_TOKEN": None})
    with pytest.raises(ConfigError, match=r"cluster\.env\.MY_TOKEN is null"):
        environment_of(config, "policy", {})


@pytest.mark.parametrize("name", ALLOCATOR_NAMES)
@pytest.mark.parametrize("is_own", [True, False])
def test_allocator_settings_reach_the_policy_only(name: str, is_own: bool) -> None:
    setting = {name: "max_split_size_mb:512"}
    config = with_cluster(GRPO, gpus_per_node=1, env=setting if is_own else {})
    driver = {} if is_own else setting
    assert environment_of(config, "policy", driver) == REMOVED | setting
    assert environment_of(config, "generation", driver) == REMOVED


@pytest.mark.parametrize(
    ("own_name", "driver_name"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_own_allocator_settings_replace_those_of_the_driver_under_either_name(
    own_name: str, driver_name: str
) -> None:
    own = {own_name: "max_split_size_mb:512"}
    config = with_cluster(SFT, gpus_per_node=1, env=own)
    driver = {driver_name: "expandable_segments:True"}
    assert environment_of(config, "policy", driver) == REMOVED | own


@pytest.mark.parametrize(
    ("config", "has_segments"),
    [
        (with_cluster(SFT, gpus_per_node=1), True),
        (with_cluster(SFT), False),
        # Weights reach a colocated generator through CUDA IPC.
        (with_cluster(GRPO, gpus_per_node=1), False),
        (with_cluster(GRPO, gpus_per_node=1, generation_workers=1), True),
    ],
)
def test_expandable_segments_are_the_default_of_gpus_without_ipc(
    config: SftRunConfig | GrpoRunConfig, has_segments: bool
) -> None:
    segments = {ALLOCATOR: "expandable_segments:True"}
    expected = REMOVED | segments if has_segments else {}
    assert environment_of(config, "policy", {}) == expected
    assert environment_of(config, "generation", {}) == REMOVED


def test_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_LIKE_A", "before")
    monkeypatch.delenv("NEMO_LIKE_B", raising=False)
    monkeypatch.setenv("NEMO_LIKE_C", "before")
    inside = {"NEMO_LIKE_A": "inside", "NEMO_LIKE_B": "inside", "NEMO_LIKE_C": None}
    with environment_variables(inside):
        assert (os.environ["NEMO_LIKE_A"], os.environ["NEMO_LIKE_B"]) == ("inside", "inside")
        assert "NEMO_LIKE_C" not in os.environ
    assert (os.environ["NEMO_LIKE_A"], os.environ["NEMO_LIKE_C"]) == ("before", "before")
    assert "NEMO_LIKE_B" not in os.environ


def test_the_local_backend_has_them_during_the_run(recipe: Recipe) -> None:
    config = recipe.sft("+cluster.env.NEMO_LIKE_C=1e3")
    with start_workers(workers_start(config), Progress()):
        assert os.environ["NEMO_LIKE_C"] == "1e3"
    assert "NEMO_LIKE_C" not in os.environ
