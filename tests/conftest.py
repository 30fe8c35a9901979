"""Fixtures that several test packages share."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.hub_server import Hub
    from tests.recipe import Recipe

# Several processes with threads share the cores. By default a thread of OpenMP spins while it waits
# for the others of its process, which may not run before its time slice ends: a run of a tiny model
# then takes 3 to 6 times as long. OpenMP reads the variable when torch is imported, here and in
# every process that a test starts.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# By default torch starts a process for compilation that imports torch again, for GPU kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# One server forks the processes of all tests that use this start method, and it imports what is set
# when the first of them starts. Without these modules each rank of a test imports torch,
# transformers and Megatron-Core again, 8 seconds of a core.
multiprocessing.set_forkserver_preload(["tests.preload"])

# The duration of an example depends more on the load of the machine than on the code.
settings.register_profile("untimed", parent=settings(), deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests without garbage collections, and let later ones skip what is imported."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Let the interpreter free everything, of which extensions print what remains."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and data of the demo."""
    # Imported here because it needs torch and transformers, which tests of light modules do not.
    from nemo_like.demo.task import build_demo

    folder = tmp_path_factory.mktemp("demo")
    build_demo(folder, 0)
    return folder


@pytest.fixture(scope="module")
def joined_ray() -> Iterator[None]:
    """A Ray cluster of one node with two CPUs that runs and `RayVirtualCluster` join."""
    from tests.distributed.ray_cluster import cluster_of

    with cluster_of({"num_cpus": 2}) as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", str(cluster.address))
        yield


@pytest.fixture
def recipe(demo: Path, tmp_path: Path) -> Recipe:
    """Writes configs for the tiny task into a fresh folder."""
    from tests.recipe import Recipe

    return Recipe(demo, tmp_path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hugging Face hub on this machine without repositories, and an empty cache.

    For this process and those that it starts.
    """
    from huggingface_hub import constants

    from tests.hub_server import HubServer

    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        address = server.hub.address
        cache = str(tmp_path / "hub_cache")
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HUB_CACHE", cache)
        yield server.hub
        server.shutdown()
        thread.join()
