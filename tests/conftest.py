"""What tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.demo_task import build_demo
from tests.recipe import Recipe


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and data of the demo."""
    folder = tmp_path_factory.mktemp("demo")
    build_demo(folder, 0)
    return folder


@pytest.fixture
def recipe(demo: Path, tmp_path: Path) -> Recipe:
    """Writes configs for the tiny task into a fresh folder."""
    return Recipe(demo, tmp_path)
