"""The submit scripts: one for each example config, and clear about wrong use before anything is submitted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "ray_jobs").glob("*.sh"))
CONFIGS = sorted(path for path in (ROOT / "examples" / "configs").glob("*.yaml") if not path.name.startswith("_"))


def test_each_example_has_a_submit_script_that_names_it() -> None:
    assert CONFIGS
    for config in CONFIGS:
        script = ROOT / "ray_jobs" / f"submit_{config.stem}.sh"
        command = "grpo" if "grpo" in config.stem else "sft"
        assert f"submit.sh{'' if config.stem.startswith('demo') else chr(34)} {command} examples/configs/{config.name}" in (
            script.read_text(encoding="utf-8")
        )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_each_script_is_executable_and_parses(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: ray_jobs/submit.sh"),
        (["--upload", "grpo"], "usage: ray_jobs/submit.sh"),
        (["dance", "x.yaml"], "unknown command 'dance'"),
        (["sft", "examples/configs/missing.yaml"], "no config file examples/configs/missing.yaml"),
    ],
)
def test_wrong_use_is_told_with_exit_code_2(arguments: list[str], message: str) -> None:
    done = subprocess.run([ROOT / "ray_jobs" / "submit.sh", *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_clusters_are_closed_and_dashboards_stay_on_loopback() -> None:
    start = (ROOT / "ray_jobs" / "start_head.sh").read_text(encoding="utf-8")
    assert "export RAY_AUTH_MODE=token" in start
    assert "--dashboard-host 127.0.0.1" in start
    assert not any("0.0.0.0" in script.read_text(encoding="utf-8") for script in SCRIPTS)
