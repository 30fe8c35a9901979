"""Everything outside distributed/ray works in a process that cannot import Ray."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from tests.recipe import Recipe

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "nemo_like"

WITHOUT_RAY = "import sys; sys.modules['ray'] = None\n"
"""`import ray` raises ImportError after this line."""

SCRIPT = """
import importlib, json
from nemo_like import cli
config, *names = sys.argv[1:]
try:
    import ray
except ImportError:
    print("no ray")
for command in ("validate", "plan"):
    assert cli.main([command, "--config", config]) == 0, command
training = ["sft", "--config", config, "sft.max_num_steps=1", "sft.val_at_start=false"]
assert cli.main(training) == 0
for name in names:
    importlib.import_module(name)
print(len(names), "modules")
"""


def modules_outside_ray() -> list[str]:
    """Names of all modules but those of distributed/ray and the entry points that run at import."""
    # The Megatron engine imports an optional dependency.
    has_megatron = importlib.util.find_spec("megatron") is not None
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        if parts[1:3] == ("distributed", "ray") or parts[-1] == "__main__":
            continue
        if parts[1:3] == ("policy", "megatron") and not has_megatron:
            continue
        # They run in the interpreter of the user, with packages of the user.
        if parts[1:3] == ("agents", "runners"):
            continue
        names.append(".".join(part for part in parts if part != "__init__"))
    return names


def test_commands_run_and_all_modules_can_be_imported(recipe: Recipe) -> None:
    recipe.sft()
    names = modules_outside_ray()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY + SCRIPT, str(recipe.folder / "sft.yaml"), *names],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, *shown, last = done.stdout.splitlines()
    assert first == "no ray"
    assert last == f"{len(names)} modules"
    assert any("sft_train.jsonl" in line for line in shown), "the output of validate"
    lines = (recipe.folder / "sft" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [1]
    assert records[0]["policy/loss"] > 0
