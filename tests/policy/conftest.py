from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like.policy.heads.logit_chunks import compiled
from tests.policy.tiny import save_tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """`model_dir(architecture)`: the directory of a tiny model, made once."""
    made: dict[str, str] = {}

    def make(architecture: str) -> str:
        if architecture not in made:
            made[architecture] = str(
                save_tiny_model(tmp_path_factory.mktemp(architecture), architecture)
            )
        return made[architecture]

    return make


@pytest.fixture(scope="module")
def rank_pool() -> Iterator[ProcessPoolExecutor]:
    """Up to four processes, started when they are needed from one that has imported everything, see
    tests/conftest.py.

    Each module has its own: gloo leaves about ten threads per process group in a process, and these
    poll, so that processes of many tests slow down every other one.
    """
    method = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(4, mp_context=method) as pool:
        yield pool


@pytest.fixture
def meeting(tmp_path: Path) -> Path:
    """A rendezvous file that does not exist yet."""
    return tmp_path / "rendezvous"


@pytest.fixture
def eager_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs of compiled layers, which run without a compiler; log-probs are not compiled.

    The graphs do not depend on the compiler.
    """
    compile_function = torch.compile
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def compile_layers(function: Any, **options: Any) -> Any:
        # `nn.Module.compile` passes a method of the module.
        if not isinstance(getattr(function, "__self__", None), nn.Module):
            return function
        return compile_function(function, backend=keep, **options)

    compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", compile_layers)
    yield graphs
    compiled.cache_clear()
