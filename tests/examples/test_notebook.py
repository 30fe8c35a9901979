"""The cells of the notebook run as a script, and its loss falls."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.forked import Forked

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "first_run.ipynb"


def cells() -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cells(folder: Path) -> None:
    os.chdir(folder)
    # The notebook server has it; the tests do not.
    display = ModuleType("IPython.display")
    display.IFrame = lambda path, **_: Path(path).stat()  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules["IPython.display"] = display
    names: dict[str, object] = {}
    for source in cells():
        exec(compile(source, str(NOTEBOOK), "exec"), names)
    losses = names["losses"]
    assert isinstance(losses, list) and losses[-1] < 0.8 * losses[0], losses


def test_the_cells_are_programs() -> None:
    for source in cells():
        compile(source, str(NOTEBOOK), "exec")
    assert len(cells()) == 5


@pytest.mark.exhaustive
def test_the_notebook_runs(tmp_path: Path) -> None:
    ended = Forked(run_cells, tmp_path, folder=tmp_path)
    assert ended.wait(120) == 0, ended.errors
    assert " -> " in ended.output.splitlines()[-1]
