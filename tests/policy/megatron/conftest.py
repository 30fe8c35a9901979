"""Processes of Megatron's ranks and the results of transformers, shared by the tests here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.policy.megatron.ranks import PARALLEL, Gradients, OnRanks, meeting_in, open_pool
from tests.policy.megatron.reference import transformers_gradients
from tests.policy.tiny import run_ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """Processes that have imported everything, for the tests of one module; see `rank_pool`."""
    with open_pool() as ranks:
        yield ranks


@pytest.fixture
def on_ranks(pool: ProcessPoolExecutor, tmp_path: Path) -> OnRanks:
    """Run a function on every rank of a layout of `PARALLEL`; see `OnRanks`."""

    def run(function: Callable[..., Any], layout: str, *args: Any) -> list[Any]:
        world_size, parallel = PARALLEL[layout]
        return run_ranks(pool, function, world_size, meeting_in(tmp_path), parallel, *args)

    return run


@pytest.fixture(scope="package")
def expected(model_dir: Callable[[str], str]) -> Callable[[str], tuple[Gradients, float]]:
    """`expected(architecture)`: gradients and loss of transformers, computed once."""

    @cache
    def compute(architecture: str) -> tuple[Gradients, float]:
        return transformers_gradients(model_dir(architecture))

    return compute
