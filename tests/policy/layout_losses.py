"""Losses in layouts of rows and ranks: which are computed where, and what they must be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.policy.tiny import context, relative_error, run_ranks

TOLERANCE = 1e-5
Found = dict[tuple[str, str], tuple[dict[str, np.ndarray], dict[str, float]]]
"""(batching, loss) -> gradients, which are on rank 0, and metrics."""
Expected = dict[str, tuple[dict[str, torch.Tensor], float]]
"""Loss -> gradients and value by definition."""


def batching_of_losses(
    batching: Iterable[str], losses: Iterable[str], layout: int
) -> dict[str, list[str]]:
    """The losses to be computed with each way of batching: all in layout 0; in each further layout
    every loss with the last way of batching, and with another one than in the layout before.
    """
    *names, last = batching
    found: dict[str, list[str]] = {name: [] for name in (*names, last)}
    for index, loss in enumerate(losses):
        others = names if layout == 0 else [names[(layout + index) % len(names)]]
        for name in (*others, last):
            found[name].append(loss)
    return found


def found_on_ranks(
    pool: ProcessPoolExecutor,
    program: Callable[..., Found],
    world_size: int,
    meeting: Path,
    *args: Any,
) -> list[Found]:
    """`run_ranks`; a single rank is in this process."""
    if world_size == 1:
        return [program(context(0, 1, meeting), *args)]
    return run_ranks(pool, program, world_size, meeting, *args)


def assert_losses(
    results: list[Found],
    expected: Expected,
    layout: str,
    *,
    equal_metric: str,
    rel: float = 0.0,
    loss_abs: float | None = None,
) -> None:
    """Compare gradients and losses of rank 0 with `expected`, and one metric between the ranks,
    which may differ by `rel`.
    """
    assert {name for _, name in results[0]} == expected.keys()
    for (batching, name), (values, metrics) in results[0].items():
        gradient, loss = expected[name]
        found = {key: torch.from_numpy(value) for key, value in values.items()}
        assert relative_error(found, gradient) < TOLERANCE, (layout, batching, name)
        assert metrics["policy/loss"] == pytest.approx(loss, rel=TOLERANCE, abs=loss_abs)
        for other in results[1:]:
            value = other[batching, name][1][equal_metric]
            assert value == pytest.approx(metrics[equal_metric], rel=rel, abs=0.0)
