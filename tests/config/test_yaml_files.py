"""Unusual YAML is one clear error, and messages stay readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.algorithms.registry import detect_kind, load_config
from nemo_like.config.errors import ConfigError, Problem, printable, raise_problems, shown_value
from nemo_like.data.formats import SFT_ROWS
from nemo_like.data.rows import load_rows
from tests.fuzz.cases import BASE_CONFIGS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: &s [*s]", "contains itself"),
        ("seed: !!int abc", "config.yaml:1 has the value 'abc'"),
        ("run_name: 2024-13-45", "policy.model_name is not set"),
        ("seed: !!python/name:os.system ''", "not valid YAML"),
        ("<<: x", "not valid YAML"),
    ],
)
def test_unusual_yaml_is_one_error(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config("grpo", path)
    assert words in str(caught.value) and len(str(caught.value)) < 2_000


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_other_encodings_are_named(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("seed: 1", encoding=encoding)
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config("sft", path)


@pytest.mark.parametrize("text", BASE_CONFIGS)
def test_a_byte_order_mark_is_no_part_of_the_config(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8-sig")
    assert load_config(detect_kind(path), path).run_name in ("a", "b")


def test_many_problems_make_one_message_of_readable_length() -> None:
    with pytest.raises(ConfigError) as caught:
        raise_problems([Problem((f"k{n}",), f"k{n} " + "x" * 100) for n in range(1_000)])
    assert len(str(caught.value)) < 2_000
    assert "1000 problems" in str(caught.value) and "more" in str(caught.value)


def test_printable_text_cannot_control_a_terminal() -> None:
    hostile = "a\x1b[31mb\x9bc\u202ed\u2066e\ud83df\x00g\rh\ti\nj\u2028"
    assert printable(hostile) == "a\\x1b[31mb\\x9bc\\u202ed\\u2066e\\ud83df\\x00g\\rh\ti\nj\\u2028"
    assert printable("\u00e9\u4e2d", "ascii") == "\\xe9\\u4e2d"


def test_values_of_any_size_can_be_shown() -> None:
    assert shown_value(16**5_000) == "a value of type int"
    assert len(shown_value("x" * 10_000)) < 120


@pytest.mark.parametrize("name", ["x" * 5_000, "y/" * 3_000])
def test_a_path_too_long_for_the_file_system_does_not_exist(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config("sft", Path(name))
    path = tmp_path / "config.yaml"
    for defaults in (name, f"[{name}]"):
        path.write_text(f"defaults: {defaults}")
        with pytest.raises(ConfigError):
            load_config("sft", path)
    with pytest.raises(ConfigError, match="there is no"):
        load_rows(name, SFT_ROWS)
