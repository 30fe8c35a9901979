"""Tests that need a CUDA device.

They run where torch, transformers, numba, pytest and hypothesis are installed, from source and
without Ray, pydantic and Megatron-Core:

    python -m pytest --confcutdir=tests/gpu tests/gpu

`--confcutdir` leaves out the fixtures of runs, which need pydantic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.policy.tiny import save_tiny_model

_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them without a device."""
    for item in items:
        if _FOLDER not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """`model_dir(architecture)`: the directory of a tiny model, made once."""
    made: dict[str, str] = {}

    def make(architecture: str) -> str:
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            made[architecture] = str(save_tiny_model(folder, architecture))
        return made[architecture]

    return make


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deterministic kernels: the usual backward of attention adds in no fixed order."""
    # cuBLAS reads it when its handle is created.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
