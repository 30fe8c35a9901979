"""Fixtures that several test packages share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.recipe import Recipe

# The duration of an example depends more on the load of the machine than on the code.
settings.register_profile("untimed", parent=settings(), deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and data of the demo."""
    # Imported here because it needs torch and transformers, which tests of light modules do not.
    from nemo_like.demo_task import build_demo

    folder = tmp_path_factory.mktemp("demo")
    build_demo(folder, 0)
    return folder


@pytest.fixture
def recipe(demo: Path, tmp_path: Path) -> Recipe:
    """Writes configs for the tiny task into a fresh folder."""
    from tests.recipe import Recipe

    return Recipe(demo, tmp_path)
