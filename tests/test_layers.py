"""The shape of the package: imports point downward only, heavy libraries live in one place each,
files stay small.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from nemo_like.config.needs import BatchNeeds, RunNeeds
from nemo_like.training.files import RunFiles
from nemo_like.training.run import TrainingRun
from nemo_like.training.step_log import StepLog
from nemo_like.training.workers import RunWorkers

PACKAGE = Path(__file__).parents[1] / "nemo_like"

LEVELS = {
    "cli": 12, "demo": 12, "__main__": 12,
    "commands": 11,
    "algorithms": 10,
    "training": 9, "reports": 9,
    "rollout": 8,
    "policy": 7, "generation": 7, "agents": 7,
    "weight_sync": 6, "prediction": 6, "environments": 6,
    "torch_data": 5, "distributed": 5,
    "data": 4, "losses": 4, "sampling_filter": 4, "models": 3,
    "device_transfer": 3, "console": 3,
    "run": 3,
    "config": 2, "metrics": 2,
    "parallel_layout": 1,
    "integer_math": 0, "learning_rate": 0, "training_engines": 0, "__init__": 0,
}  # fmt: skip
TOP = 12

LIBRARY_PLACES = {
    "ray": ("distributed/ray/",),
    "hydra": ("config/",),
    "omegaconf": ("config/",),
    "pydantic": ("config/", "agents/protocol.py", "agents/responses.py"),
    "openai": ("agents/protocol.py", "agents/responses.py", "agents/runners/"),
    "starlette": ("agents/endpoint.py", "agents/delivery.py"),
    "uvicorn": ("agents/endpoint.py",),
    "flash_attn": ("policy/inputs/",),
    "torchao": ("policy/dtensor/optimizer.py",),
    "bitsandbytes": ("policy/lora.py",),
    "vllm": ("generation/vllm_", "agents/vllm_parser.py"),
    "megatron": ("policy/megatron/",),
    "numba": ("data/packing/",),
    "tensorboard": ("run/sinks.py",),
    "wandb": ("run/services.py",),
    "mlflow": ("run/services.py",),
    "math_verify": ("environments/expressions.py",),
    "pint": ("environments/expressions.py",),
    "bokeh": ("reports/charts.py",),
    "fsspec": ("run/store.py",),
    "PIL": ("data/images.py", "demo/vision.py"),
}
"""Where each heavy library may be imported, as the beginnings of paths in the package."""

HEAVY = {"torch", "ray", "vllm", "megatron", "transformers", "numba"}
LIGHT_MODULES = (
    "nemo_like",
    "nemo_like.cli",
    "nemo_like.config",
    "nemo_like.config.load",
    "nemo_like.config.schema",
    "nemo_like.algorithms.registry",
    "nemo_like.data.planning.plan",
    "nemo_like.data.packing.algorithms",
    "nemo_like.distributed.ray.session_guard",
    "nemo_like.distributed.worker_group",
    "nemo_like.environments.environment",
    "nemo_like.environments.math",
    "nemo_like.environments.reward",
    "nemo_like.metrics",
    "nemo_like.run.directory",
    "nemo_like.run.tracking",
    "nemo_like.run.checkpoint",
    "nemo_like.run.files",
    "nemo_like.run.progress",
    "nemo_like.reports.plan_page",
    "nemo_like.reports.run_report",
    "nemo_like.reports.server",
)

TESTS = Path(__file__).parent
MAX_INNER_USES = 14
"""Functions of the tests that read private names or replace functions of the package; see below."""
FOREIGN_NAMES = {
    "_asdict",
    "_attn_implementation",
    "_cdata",
    "_exit",
    "_get_backend",
    "_getframe",
    "_global_node",
    "_opname",
    "_refresh_packed_embeddings",
    "_register_backend",
    "_replace",
    "_reset_prefix_cache",
    "_run_exitfuncs",
    "_schema",
    "_sleep",
    "_timeout",
    "_world",
}
"""Private names of Python and of libraries."""

MAX_FILE_LINES = 400
"""Code lines: without blank lines, comments and docstrings."""
MAX_FUNCTION_LINES = 80
MAX_CODE_LINES = 63030
"""Code lines of the package. A change that needs more raises this number; lower it with each
merge that leaves at least a hundred lines of room.
"""
JOB_COMPARISONS = {
    "config/foreign.py": 3,
    "config/migrate.py": 3,
    "training/reporting.py": 1,
    "demo/__main__.py": 1,
    "commands/choices.py": 5,
    "commands/start.py": 2,
}
"""Modules outside of `algorithms` that still compare the name of a job: do not add any."""
MAX_CONFIG_MODULES = 37
"""Modules that import the configuration of a complete run."""


@cache
def sources() -> list[tuple[str, ast.Module]]:
    """(path in the package, its syntax tree) of every file."""
    return [
        (path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def num_code_lines(path: str, tree: ast.Module) -> int:
    """Lines of a file that are neither blank nor a comment nor part of a docstring."""
    documented: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = (PACKAGE / path).read_text(encoding="utf-8").splitlines()
    return sum(
        number not in documented and bool(line.strip()) and not line.strip().startswith("#")
        for number, line in enumerate(lines, 1)
    )


@cache
def imported_names(tree: ast.Module) -> list[str]:
    """Dotted names a file imports anywhere in it: `from a import b` is `a.b`, a relative import
    begins with a dot.
    """
    return list(_imported_names(tree))


def called_name(call: ast.Call) -> str:
    """The last name of what is called: `c` of `a.b.c()`."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called_name(node).endswith("import_module"):
            yield from (
                str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)
            )


def module_name(path: str) -> str:
    """Return the dotted name of a file of the package."""
    return "nemo_like." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def part_of_path(path: str) -> str:
    return path.removesuffix(".py").split("/")[0]


def part_of_import(name: str) -> str:
    """Return the part of the package that has an imported name; `__version__` and other names of
    the package itself are in `__init__`.
    """
    part = name.split(".")[1] if "." in name else "__init__"
    return part if part in LEVELS else "__init__"


def test_every_module_has_a_level() -> None:
    parts = {part_of_path(path) for path, _ in sources()}
    assert parts <= set(LEVELS), "give the new part a level here, and import lower levels only"


INTERFACE = "__init__.py"
"""Its names are imported from their modules when they are used; it names them for type checkers."""


def test_imports_point_to_lower_levels_only() -> None:
    wrong = []
    for path, tree in sources():
        if path == INTERFACE:
            continue
        part = part_of_path(path)
        for name in imported_names(tree):
            if name.split(".")[0] != "nemo_like":
                continue
            other = part_of_import(name)
            is_same_place = other == part or LEVELS[other] == LEVELS[part] == TOP
            if not is_same_place and LEVELS[other] >= LEVELS[part]:
                wrong.append(
                    f"{path} (level {LEVELS[part]}) imports {name} (level {LEVELS[other]})"
                )
    assert wrong == []


def test_modules_do_not_import_each_other() -> None:
    """Imports inside functions and for types count."""
    modules = {module_name(path) for path, _ in sources()}
    imports: dict[str, set[str]] = {}
    for path, tree in sources():
        if path == INTERFACE:
            continue
        names = {
            name if name in modules else name.rpartition(".")[0] for name in imported_names(tree)
        }
        imports[module_name(path)] = (names & modules) - {module_name(path)}
    cycle: list[str] = []
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        cycle = error.args[1]
    assert cycle == []


def test_folders_do_not_import_each_other() -> None:
    """In every folder the files and subfolders import one another in one direction only."""
    modules = {module_name(path) for path, _ in sources()}
    # Folder -> its entry -> the entries beside it that the first one imports.
    imports: dict[str, dict[str, set[str]]] = {}
    for path, tree in sources():
        if path == INTERFACE:
            continue
        importer = module_name(path).split(".")
        for name in imported_names(tree):
            imported = (name if name in modules else name.rpartition(".")[0]).split(".")
            if ".".join(imported) not in modules:
                continue
            pairs = enumerate(zip(importer, imported, strict=False))
            depth = next((index for index, (own, other) in pairs if own != other), None)
            if depth is not None:
                beside = imports.setdefault(".".join(importer[:depth]), {})
                beside.setdefault(importer[depth], set()).add(imported[depth])
    cycles = {}
    for folder, beside in imports.items():
        try:
            TopologicalSorter(beside).prepare()
        except CycleError as error:
            cycles[folder] = error.args[1]
    assert {"nemo_like", "nemo_like.data", "nemo_like.policy"} <= imports.keys()
    assert cycles == {}


def test_a_run_does_not_need_the_library_for_other_loops() -> None:
    """Nothing but the interface of the package imports `torch_data`."""
    assert [
        f"{path} imports {name}"
        for path, tree in sources()
        for name in imported_names(tree)
        if path != INTERFACE
        and not path.startswith("torch_data/")
        and name.startswith("nemo_like.torch_data")
    ] == []


def test_few_modules_name_the_configuration_of_a_run() -> None:
    """Other functions take the section that they need."""
    named: dict[str, int] = {}
    for path, tree in sources():
        if any(name.endswith("RunConfig") for name in imported_names(tree)):
            place = path.split("/")[0]
            named[place] = named.get(place, 0) + 1
    assert named.keys() <= {"algorithms", "commands", "config", "demo"}
    assert sum(named.values()) <= MAX_CONFIG_MODULES


def test_only_algorithms_compare_the_name_of_a_job() -> None:
    """Other modules read what a job needs; see `config.needs`."""
    jobs = {"sft", "grpo", "dpo", "rm", "distill"}
    found: dict[str, int] = {}
    for path, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Compare) or "kind" not in ast.unparse(node):
                continue
            values = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            if values & jobs and not path.startswith("algorithms/"):
                found[path] = found.get(path, 0) + 1
    assert found == JOB_COMPARISONS


def test_a_run_without_rollouts_imports_none_of_their_packages() -> None:
    code = "import sys, nemo_like.algorithms.sft.loop; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    parts = {name.split(".")[1] for name in done.stdout.split() if name.startswith("nemo_like.")}
    assert parts & {"rollout", "generation", "weight_sync", "environments"} == set()


def test_the_parts_of_a_run_have_few_fields() -> None:
    for part in (TrainingRun, RunFiles, StepLog, RunWorkers, RunNeeds, BatchNeeds):
        assert len(fields(part)) <= 12, part


def test_imports_are_absolute() -> None:
    assert [
        f"{path}: {name}"
        for path, tree in sources()
        for name in imported_names(tree)
        if name.startswith(".")
    ] == []


def test_heavy_libraries_are_imported_in_one_place() -> None:
    wrong = [
        f"{path} imports {name}, which belongs in {' or '.join(LIBRARY_PLACES[name.split('.')[0]])}"
        for path, tree in sources()
        for name in imported_names(tree)
        if name.split(".")[0] in LIBRARY_PLACES
        and not path.startswith(LIBRARY_PLACES[name.split(".")[0]])
    ]
    assert wrong == []


def test_nothing_is_unpickled() -> None:
    picklers = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    imports = [
        f"{path}: {name}"
        for path, tree in sources()
        for name in imported_names(tree)
        if name in picklers
    ]
    loads = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (
            (called_name(node) == "load" and ast.unparse(node.func) == "torch.load")
            or any(word.arg == "allow_pickle" for word in node.keywords)
        )
    ]
    assert imports + loads == []


def test_no_module_has_a_name_without_meaning() -> None:
    meaningless = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [
        path for path, _ in sources() if meaningless & set(path.removesuffix(".py").split("/"))
    ] == []


def test_files_and_functions_stay_small() -> None:
    long = [
        f"{path}: {num_lines} code lines"
        for path, tree in sources()
        if (num_lines := num_code_lines(path, tree)) > MAX_FILE_LINES
    ]
    long += [
        f"{path}:{node.lineno} {node.name}: {num_lines} lines"
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (num_lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_the_package_grows_by_decision_only() -> None:
    num_lines = sum(num_code_lines(path, tree) for path, tree in sources())
    assert num_lines <= MAX_CODE_LINES, "remove code, or raise MAX_CODE_LINES with a reason"


def test_light_modules_import_nothing_heavy() -> None:
    """One process imports one module after another; the first with something heavy is reported."""
    script = f"""
import importlib, sys
for module in {LIGHT_MODULES!r}:
    importlib.import_module(module)
    heavy = {HEAVY!r} & sys.modules.keys()
    assert not heavy, f"{{module}} imports {{sorted(heavy)}}"
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, done.stderr


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in FOREIGN_NAMES


def inner_uses(tree: ast.AST) -> Iterator[str]:
    """Uses of the package that are tied to how it is written: private attributes and imports of
    other objects than `self`, and replaced functions and classes. A constant may be replaced.
    """
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nemo_like")
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nemo_like"):
            for alias in node.names:
                if is_private(alias.name):
                    yield f"{node.lineno}: import {alias.name}"
        elif (
            isinstance(node, ast.Call)
            and called_name(node) in ("setattr", "object")
            and ast.unparse(node.func).endswith((".setattr", "patch.object"))
        ):
            # An object and a name, or one text with both.
            texts = [ast.unparse(argument).strip("'") for argument in node.args[:2]]
            if isinstance(node.args[0], ast.Constant):
                texts = texts[0].rsplit(".", 1)
            is_ours = texts[0].split(".")[0] in imported | {"nemo_like"}
            if is_ours and (is_private(texts[1]) or not texts[1].isupper()):
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_tests_use_what_users_of_a_module_use() -> None:
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tops = {
            line: node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        uses: dict[str, str] = {}
        for use in inner_uses(tree):
            uses.setdefault(tops.get(int(use.split(":")[0]), "imports"), use)
        found += [f"{path.relative_to(TESTS)}:{use} in {name}" for name, use in uses.items()]
    assert len(found) <= MAX_INNER_USES, "\n".join(found)
