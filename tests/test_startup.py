"""Commands import what they need and nothing else: which modules a fresh process holds when a
command has ended.
"""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import nemo_like
from nemo_like.commands.validate import validate
from nemo_like.config.schema import RunConfig
from nemo_like.run.progress import Progress
from tests.recipe import Recipe

HEAVY = {
    "torch", "ray", "vllm", "megatron", "tensorboard", "sympy", "math_verify", "pint", "numba",
    "accelerate", "wandb", "mlflow", "pyarrow", "pandas", "scipy", "PIL", "bokeh",
}  # fmt: skip
"""What `validate` on the demo needs none of."""
LIBRARIES = HEAVY | {
    "numpy",
    "transformers",
    "tokenizers",
    "omegaconf",
    "pydantic",
    "yaml",
    "rich",
    "jinja2",
}

# The command runs as `nemo-like` does, in a process of its own; the last line of its output is
# about the process.
_SCRIPT = f"""
import json, resource, sys
from nemo_like.cli import main
try:
    code = main()
except SystemExit as stop:
    code = stop.code
usage = resource.getrusage(resource.RUSAGE_SELF)
loaded = sorted(set({sorted(LIBRARIES)!r}) & set(sys.modules))
print(json.dumps([code, loaded, usage.ru_utime + usage.ru_stime]))
"""


class Ended(NamedTuple):
    """A command that has run."""

    code: int
    loaded: set[str]
    """Those of `LIBRARIES` that were imported."""
    cpu_s: float
    output: str
    errors: str


def run(*arguments: str, path: Path | None = None) -> Ended:
    """Run one command in a fresh process, with `path` on its module path."""
    root = Path(__file__).parents[1]
    folders = [str(folder) for folder in (path, root) if folder is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr
    output, _, last = done.stdout.rstrip("\n").rpartition("\n")
    code, loaded, cpu_s = json.loads(last)
    return Ended(code, set(loaded), cpu_s, output, done.stderr)


def cpu_of_importing_torch() -> float:
    before = os.times()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def config_of(recipe: Recipe, kind: str, *overrides: str) -> tuple[RunConfig, str]:
    config = recipe.sft(*overrides) if kind == "sft" else recipe.grpo(*overrides)
    return config, str(recipe.folder / f"{kind}.yaml")


ANSWER = "reward.functions={answer: {path: nemo_like.environments.math.answer_reward}}"


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("sft", ()),
        (
            "grpo",
            ("policy.train_global_batch_size=32", "policy.generation.backend=vllm", f"++{ANSWER}"),
        ),
    ],
)
def test_validate_imports_no_heavy_library_and_reports_the_same_as_with_torch(
    recipe: Recipe, kind: str, overrides
):
    config, path = config_of(recipe, kind, *overrides)
    ended = run("validate", "--config", path, *overrides)
    assert ended.code == 0, ended.output
    assert ended.loaded & HEAVY == set()
    assert ended.errors == ""
    # 2 to 3 s on an idle machine, and four times `import torch` if torch and Ray are imported.
    # Other load on the machine lengthens CPU time, so a slow one is measured against what it takes
    # to import torch now.
    assert ended.cpu_s < 6 or ended.cpu_s < 2 * cpu_of_importing_torch()
    assert "torch" in sys.modules
    shown = io.StringIO()
    validate(config).show(Progress(shown))
    assert ended.output.startswith(shown.getvalue().rstrip("\n"))


@pytest.mark.exhaustive
def test_a_reward_function_may_use_torch_and_models_of_transformers(recipe: Recipe, tmp_path: Path):
    (tmp_path / "model_reward.py").write_text(
        "import torch\n"
        "from transformers import LlamaForSequenceClassification\n"
        "def score(sample):\n"
        "    return float(torch.ones(1)) if LlamaForSequenceClassification.__mro__ else 0.0\n"
    )
    _, path = config_of(recipe, "grpo")
    ended = run(
        "validate",
        "--config",
        path,
        "reward.functions.digits.path=model_reward.score",
        path=tmp_path,
    )
    assert ended.code == 0, ended.output
    assert "torch" in ended.loaded
    assert "model_reward.score): 1" in ended.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("sft", "--help"),
        ("grpo", "--help"),
        ("validate", "--help"),
        ("plan", "--help"),
        ("init", "--help"),
        ("config", "--help"),
        ("config", "grpo"),
    ],
)
def test_help_imports_no_library(arguments: tuple[str, ...]):
    ended = run(*arguments)
    assert ended.code == 0
    assert ended.loaded == set()
    assert ended.cpu_s < 1.5  # some 0.1 s on an idle machine


def test_plan_counts_tokens_without_torch(demo: Path):
    ended = run(
        "plan",
        f"data.train_path={demo / 'sft_train.jsonl'}",
        f"policy.tokenizer_name={demo / 'model'}",
        "--limit",
        "64",
    )
    assert ended.code == 0, ended.errors
    assert ended.loaded & {"torch", "ray", "tensorboard", "sympy"} == set()


def test_settings_are_chosen_without_torch(demo: Path):
    ended = run("validate", "--model", f"{demo}/model", "--data", f"{demo}/validation.jsonl")
    assert ended.code == 0, ended.errors
    assert ended.loaded & HEAVY == set()


def test_the_interface_of_the_library_is_imported_when_it_is_used():
    script = """
import sys
import nemo_like
loaded = {name.split(".")[0] for name in sys.modules} - sys.stdlib_module_names
assert loaded <= {"nemo_like", "__main__", "sitecustomize"} | before, loaded - before
missing = [name for name in nemo_like.__all__ if getattr(nemo_like, name).__name__ != name]
assert missing == [] and set(nemo_like.__all__) <= set(dir(nemo_like))
assert nemo_like.get_packer("best_fit_decreasing", 8).pack([5, 3, 8]) == [[2], [0, 1]]
"""
    start = "import sys\nbefore = {name.split('.')[0] for name in sys.modules}\n"
    done = subprocess.run([sys.executable, "-c", start + script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_type_checkers_know_the_interface_of_the_library():
    tree = ast.parse((Path(nemo_like.__file__)).read_text(encoding="utf-8"))
    known = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nemo_like.")
        for alias in node.names
    }
    assert known == set(nemo_like.__all__)
    with pytest.raises(AttributeError, match="no attribute 'get_paker'"):
        getattr(nemo_like, "get_paker")  # noqa: B009 (pyright knows that it is missing)


def test_a_wrong_key_is_reported_before_torch_is_imported(recipe: Recipe):
    _, path = config_of(recipe, "sft")
    ended = run("sft", "--config", path, "policy.optimiser.lr=1")
    assert ended.code == 2 and "policy.optimizer" in ended.errors
    assert ended.loaded & {"torch", "ray", "transformers"} == set()
