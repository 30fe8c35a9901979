"""Errors in code of the user name its file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.config.import_path import import_function, user_error_text


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


def test_an_error_inside_a_library_names_the_line_that_called_it() -> None:
    def parse() -> None:
        json.loads("{")

    with pytest.raises(json.JSONDecodeError) as caught:
        parse()
    line = parse.__code__.co_firstlineno + 1
    text = user_error_text(caught.value)
    caller = f"called in {__file__}:{line + 3}"
    assert text.endswith(f' ({__file__}:{line}: json.loads("{{"), {caller})')
