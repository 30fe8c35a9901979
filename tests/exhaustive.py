"""The marker of tests that only `make test-all` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def usually(values: Iterable[str], *usual: str) -> list[Any]:
    """Each value as a parameter of a test. `make test` has the usual ones, `make test-all` all.

    Every part of the other values is in a usual value, of this test or of one beside it.
    """
    values = tuple(values)
    assert set(usual) <= set(values), set(usual) - set(values)
    return [
        value if value in usual else pytest.param(value, marks=pytest.mark.exhaustive)
        for value in values
    ]
