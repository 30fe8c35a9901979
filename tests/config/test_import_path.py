"""Errors in code of the user name its file and line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.config.import_path import (
    WORKING_DIRECTORY,
    check_module,
    import_function,
    user_error_text,
)


@pytest.mark.parametrize(
    ("source", "place", "message"),
    [
        ("def score(sample)\n    return 1.0\n", "mine.py:1", "SyntaxError: expected ':'"),
        ("import other\n", "other.py:2", "SyntaxError: "),
        ("import json\n\njson.loads('no')\n", "mine.py:3", "JSONDecodeError: Expecting value"),
        ("\nimport not_installed\n", "mine.py:2", "No module named 'not_installed'"),
    ],
)
def test_a_module_that_cannot_be_imported(
    source: str, place: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A module is imported once per process.
    name = f"mine_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "other.py").write_text("a = 1\nb = = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        import_function("reward.functions.a.path", f"{name}.score", "m.f", "RewardSample")
    text = str(caught.value)
    assert message in text
    assert f"({tmp_path}/{place.replace('mine', name)}: " in text
    assert "PYTHONPATH" not in text


def test_a_module_that_is_not_found_needs_a_search_path() -> None:
    with pytest.raises(ConfigError, match=r"No module named 'no_such_package'\. .*PYTHONPATH"):
        import_function("key", "no_such_package.rewards.score", "m.f", "RewardSample")


@pytest.fixture
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory with functions of the user; nothing of it is on the search path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [name for name in sys.path if name])
    # A module is imported once per process.
    for name in ("import_path_a", "import_path_b"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "tools").mkdir()
    for name in ("import_path_a.py", "tools/import_path_b.py", "tools/json.py"):
        (tmp_path / name).write_text("def score(sample):\n    return sample + 1\n")
    return tmp_path


@pytest.mark.parametrize(
    "path", ["import_path_a.score", "import_path_a.py:score", "tools/import_path_b.py:score"]
)
@pytest.mark.parametrize("is_worker", [False, True])
def test_functions_in_files_of_the_working_directory(
    path: str, is_worker: bool, own_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_worker:
        # The working directory of a Ray worker is not that of the driver.
        monkeypatch.setenv(WORKING_DIRECTORY, os.getcwd())
        monkeypatch.chdir("/")
    check_module("key", path)
    assert import_function("key", path, "m.f", "RewardSample")(1) == 2
    # A file of the user must not hide a library.
    assert str(own_files) not in sys.path[:-2]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.py:score", "key is 'missing.py:score', but there is no file .*missing.py"),
        ("tools/json.py:score", "'json' is the name of the module .*json/__init__.py; rename the"),
        ("import_path_a.py:scores", "'import_path_a' has no 'scores'; it has score"),
        ("score", "write module.function, e.g. m.f, or FILE.py:function"),
    ],
)
def test_a_file_that_cannot_be_used(path: str, message: str, own_files: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        import_function("key", path, "m.f", "RewardSample")


def test_an_error_inside_a_library_names_the_line_that_called_it() -> None:
    def parse() -> None:
        json.loads("{")

    with pytest.raises(json.JSONDecodeError) as caught:
        parse()
    line = parse.__code__.co_firstlineno + 1
    text = user_error_text(caught.value)
    caller = f"called in {__file__}:{line + 3}"
    assert text.endswith(f' ({__file__}:{line}: json.loads("{{"), {caller})')
