"""Everything outside distributed/ray works in a process that cannot import Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipe import Recipe

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "nemo_like"

WITHOUT_RAY = "import sys; sys.modules['ray'] = None\n"
"""`import ray` raises ImportError after this line."""

IMPORT_ALL = """
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
print(len(sys.argv) - 1)
"""

RUN_CLI = """
from nemo_like import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def run_without_ray(script: str, *arguments: str) -> str:
    """Run a script in a process without Ray; return its standard output."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY + script, *arguments],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def modules_outside_ray() -> list[str]:
    """Names of all modules but those of distributed/ray and the entry points that run at import."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        if parts[1:3] == ("distributed", "ray") or parts[-1] == "__main__":
            continue
        names.append(".".join(part for part in parts if part != "__init__"))
    return names


def test_ray_cannot_be_imported_in_these_tests() -> None:
    script = "try:\n    import ray\nexcept ImportError:\n    print('no ray')"
    assert run_without_ray(script).strip() == "no ray"


def test_the_policy_is_importable() -> None:
    run_without_ray("import nemo_like.policy.policy")


def test_every_module_outside_distributed_ray_is_importable() -> None:
    names = modules_outside_ray()
    # The Megatron engine imports an optional dependency.
    if not has_megatron():
        names = [name for name in names if not name.startswith("nemo_like.policy.megatron")]
    assert run_without_ray(IMPORT_ALL, *names).split()[-1] == str(len(names))


def has_megatron() -> bool:
    script = "import importlib.util as u; print(u.find_spec('megatron') is not None)"
    return run_without_ray(script).strip() == "True"


def test_a_training_step_runs_on_the_local_group(recipe: Recipe) -> None:
    recipe.sft()
    config = recipe.folder / "sft.yaml"
    run_without_ray(
        RUN_CLI, "sft", "--config", str(config), "sft.max_num_steps=1", "sft.val_at_start=false"
    )
    lines = (recipe.folder / "sft" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [1]
    assert records[0]["policy/loss"] > 0


@pytest.mark.parametrize("command", ["validate", "plan"])
def test_validate_and_plan_run(recipe: Recipe, command: str) -> None:
    recipe.sft()
    shown = run_without_ray(RUN_CLI, command, "--config", str(recipe.folder / "sft.yaml"))
    assert shown.strip()
