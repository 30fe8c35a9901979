"""What docstrings name in backticks is in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.test_docs import PACKAGE, has_key, is_defined, package_trees, sections, tree_of

MODULES = {path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py")}
FOLDERS = {path.rpartition("/")[0] for path in MODULES} - {""}
FOREIGN = {
    "build_dataloader_fn", "config.timers", "datasets.save_to_disk",
    "get_cosine_with_hard_restarts_schedule_with_warmup", "get_wsd_schedule", "load_state",
    "model.embed_tokens.weight", "model.named_parameters", "per_device_train_batch_size",
    "rewards_chosen",
    "save_state", "tensor_parallel/mappings.py", "train_dataloader",
    "policy.lr", "policy.optimzer", "policy.optimzer.lr", "policy.seqence_packing",
    "use_experts_implementation", "verl/utils/seqlen_balancing.py",
}  # fmt: skip
"""Names of other libraries, and misspelled keys, that docstrings mention."""
FILES = (".gz", ".json", ".jsonl", ".lock", ".parquet", ".yaml")

_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_SNAKE = re.compile(r"_?[a-z]\w*_\w+")


@cache
def words() -> frozenset[str]:
    """Names and words in strings of the package, without docstrings."""
    found: set[str] = set()
    for tree in package_trees():
        docs = {id(node) for node in docstrings(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant):
                if isinstance(node.value, str) and id(node) not in docs:
                    found |= set(re.findall(r"\w+", node.value))
                continue
            for field in ("id", "attr", "arg", "name", "module", "asname"):
                found |= set(str(getattr(node, field, "") or "").split("."))
    return frozenset(found | {part for path in MODULES for part in path.split("/")})


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Of modules, classes, functions and attributes: strings that are statements."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


@cache
def exists(name: str) -> bool:
    """A module, or what one defines, by the end of its path: `planning.plan`, `plan.plan_batch`."""
    parts = name.removeprefix("nemo_like.").split(".")
    for length in range(len(parts), 0, -1):
        end = "/".join(parts[:length])
        for path in MODULES | FOLDERS:
            if path == end or path.endswith("/" + end):
                file = PACKAGE / f"{path}.py"
                if path in FOLDERS:
                    file = PACKAGE / path / "__init__.py"
                if not parts[length:] or (
                    file.is_file() and is_defined(tree_of(file).body, parts[length:])
                ):
                    return True
    return False


@cache
def classes() -> frozenset[str]:
    nodes = (node for tree in package_trees() for node in ast.walk(tree))
    return frozenset(node.name for node in nodes if isinstance(node, ast.ClassDef))


def local_names(tree: ast.Module) -> set[str]:
    """Parameters and attributes: `inputs.labels` is not of the module `inputs`."""
    names = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return names | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def is_stale(name: str, local: set[str]) -> bool:
    """Whether a name looks like one of the package and is not."""
    if name in FOREIGN or name.endswith(FILES):
        return False
    if name.endswith(".py"):
        return (
            not any(f"/{path}.py".endswith(f"/{name}") for path in MODULES)
            and not (PACKAGE.parent / name).exists()
        )
    if not _DOTTED.fullmatch(name):
        return bool(_SNAKE.fullmatch(name)) and not {name, name.lstrip("_")} & words()
    first, *rest = name.split(".")
    if first in classes():
        return not set(rest) <= words()
    if first in sections():
        return not has_key(name) and not exists(name) and first not in local
    is_module = any(path.rpartition("/")[2] == first for path in MODULES | FOLDERS)
    return is_module and first not in local and not exists(name)


def stale_names(path: Path) -> Iterator[str]:
    tree = tree_of(path)
    local = local_names(tree)
    for node in docstrings(tree):
        for span in _SPAN.findall(str(node.value)):
            if is_stale(span.removesuffix("()"), local):
                yield f"{path.relative_to(PACKAGE.parent)}:{node.lineno}: {span}"


def test_names_in_docstrings_exist() -> None:
    found = [text for path in sorted(PACKAGE.rglob("*.py")) for text in stale_names(path)]
    assert not found, "\n".join(found)


def test_stale_names_are_found() -> None:
    for name in ("planning.plan", "plan.plan_batch", "policy.optimizer.lr", "Engine.run"):
        assert not is_stale(name, set()), name
    for name in ("planning.plans", "plan.no_such", "policy.teachers", "Engine.no_such", "no_such"):
        assert is_stale(name, set()), name
