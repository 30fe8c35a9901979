"""`nemo-like init` writes the example configs and never overwrites a file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from nemo_like.algorithms.registry import detect_kind, load_config
from nemo_like.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "configs"


def test_the_written_configs_are_the_examples_and_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "new" / "configs"
    assert main(["init", str(directory)]) == 0
    names = sorted(path.name for path in EXAMPLES.glob("*.yaml"))
    assert sorted(path.name for path in directory.iterdir()) == ["README.md", *names]
    assert f"wrote {len(names)} example configs to {directory}" in capsys.readouterr().out
    for name in ("README.md", *names):
        assert (directory / name).read_bytes() == (EXAMPLES / name).read_bytes()
    config = directory / "demo_grpo.yaml"
    assert load_config(detect_kind(config), config).run_name == "demo_grpo"


def test_existing_files_are_kept_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    existing = tmp_path / "demo_sft.yaml"
    existing.write_text("mine: true\n")
    assert main(["init", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {existing} exists already; nothing was written")
    assert existing.read_text() == "mine: true\n"
    assert list(tmp_path.iterdir()) == [existing]


def test_a_directory_that_cannot_be_created_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["init", str(tmp_path / "file" / "configs")]) == 2
    message = capsys.readouterr().err
    assert "cannot be written" in message and len(message.splitlines()) == 1


def test_the_wheel_contains_the_examples_and_the_scripts() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {
        "examples": "nemo_like/scripts/examples",
        "ray_jobs": "nemo_like/scripts/ray_jobs",
    }


def test_the_scripts_are_copied_and_nothing_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--scripts", str(tmp_path / "new")]) == 0
    for name in ("ray_jobs/submit.sh", "ray_jobs/README.md", "examples/library/torch_loop.py"):
        assert (tmp_path / "new" / name).read_bytes() == (ROOT / name).read_bytes()
    assert (tmp_path / "new" / "ray_jobs" / "start_head.sh").stat().st_mode & 0o100
    assert not list((tmp_path / "new").rglob("*.pyc"))
    mine = tmp_path / "other" / "ray_jobs" / "submit.sh"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert main(["init", "--scripts", str(tmp_path / "other")]) == 2
    assert f"{mine} exists already" in capsys.readouterr().err
    assert mine.read_text() == "mine" and list(mine.parent.iterdir()) == [mine]
