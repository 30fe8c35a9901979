"""The documentation agrees with the source: links, names, metrics, messages, commands and keys.

The source is read as text and as syntax trees; no heavy library is imported.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import nemo_like
from nemo_like.algorithms.registry import RUN_CONFIGS
from nemo_like.cli import build_parser
from nemo_like.config.keys import field_types, is_section, type_at, without_none
from tests.forked import Forked, run_program
from tests.test_layers import LEVELS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nemo_like"
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *DOCS.glob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "ray_jobs").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
)
PAGE_NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]

AREAS = (
    "packing", "policy", "mismatch", "reward", "generation", "validation", "timing", "performance",
    "conversation", "environment",
    "progress", "data", "rewards", "logprobs", "importance", "staleness",
    "weight_sync", "dynamic_sampling", "selection", "upload", "rm", "reward_model", "episodes",
)  # fmt: skip
"""First parts of metric names."""

_FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FOLDERS = "nemo_like|tests|docs|examples|benchmarks|ray_jobs|docker"


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    return [Block(*match.groups()) for match in _FENCE.finditer(read(page))]


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", read(page))


def spans(page: str) -> list[str]:
    """Inline code of the page."""
    return _SPAN.findall(prose(page))


# Size

MAX_WIDTH = 120
MAX_WORDS = 60_750
GENERATED = ("docs/configuration.md", "docs/models.md")


@pytest.mark.parametrize(
    "page", [page for page in PAGE_NAMES if page.startswith("docs/") and page not in GENERATED]
)
def test_lines_are_at_most_as_wide_as_an_editor(page: str) -> None:
    # A row of a table is one line.
    lines = [line for line in read(page).splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > MAX_WIDTH] == []


def test_the_documentation_stays_small() -> None:
    words = {path.name: len(path.read_text(encoding="utf-8").split()) for path in DOCS.glob("*.md")}
    total = sum(words.values())
    largest = sorted(words, key=lambda name: -words[name])[:5]
    assert total <= MAX_WORDS, f"{total:,} words; the longest pages are {', '.join(largest)}"


# Links


def slug(heading: str) -> str:
    """The anchor that mkdocs and GitHub give a heading of plain words."""
    text = re.sub(r"[^\w\s-]", "", heading.lower())
    return re.sub(r"\s", "-", text.strip())


def anchors(path: Path) -> set[str]:
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_relative_links_lead_somewhere(page: str) -> None:
    dead = []
    for link in _LINK.findall(_SPAN.sub("", prose(page))):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (ROOT / page).parent / target if target else ROOT / page
        is_dead = not path.exists()
        if anchor and not is_dead and path.suffix == ".md":
            is_dead = anchor not in anchors(path)
        if is_dead:
            dead.append(link)
    assert dead == []


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_files_that_are_named_exist(page: str) -> None:
    text = " ".join([*spans(page), *(block.text for block in blocks(page))])
    named = re.findall(rf"(?<![\w/.-])(?:{_FOLDERS})/[\w./-]*(?![\w*<{{])", text)
    missing = {name for name in named if not (ROOT / name.rstrip(".")).exists()}
    assert missing == set()


def test_every_page_is_in_the_navigation() -> None:
    listed = []
    entries = list(yaml.safe_load(read("mkdocs.yml"))["nav"])
    while entries:
        for target in entries.pop().values():
            # A section is a list of entries.
            if isinstance(target, list):
                entries += target
            else:
                listed.append(target)
    assert sorted(listed) == [path.name for path in PAGES if path.parent == DOCS]


def test_the_api_page_has_every_public_name() -> None:
    names = re.findall(r"^::: nemo_like\.(\w+)$", read("docs/api.md"), re.MULTILINE)
    assert sorted(names) == sorted(nemo_like.__all__)


def test_the_site_loads_nothing_from_a_network() -> None:
    settings = yaml.safe_load(read("mkdocs.yml"))
    # The theme loads its fonts from a network without this switch.
    assert settings["theme"]["name"] == "material"
    assert settings["theme"]["font"] is False
    assert not {"extra_javascript", "hooks"} & set(settings)
    plugins = {
        plugin if isinstance(plugin, str) else next(iter(plugin)) for plugin in settings["plugins"]
    }
    # The plugin `offline` refers to a content delivery network.
    assert plugins <= {"search", "mkdocstrings"}
    for name in settings["extra_css"]:
        assert not re.search(r"@import|url\(|//", (DOCS / name).read_text())


# Names


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def resolves(name: str) -> bool:
    """Whether a dotted name is a module of the source or something that a module defines."""
    path = ROOT
    parts = name.split(".")
    for index, part in enumerate(parts):
        if (path / part).is_dir():
            path = path / part
        elif (path / f"{part}.py").is_file():
            return is_defined(tree_of(path / f"{part}.py").body, parts[index + 1 :])
        else:
            return is_defined(tree_of(path / "__init__.py").body, parts[index:])
    return True


def is_defined(body: list[ast.stmt], names: list[str]) -> bool:
    """Whether `names` is an attribute path through definitions, assignments and imports."""
    if not names:
        return True
    first, *rest = names
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == first:
            return is_defined(node.body, rest)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == first:
            return not rest
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == first for target in targets):
                return not rest
        if isinstance(node, ast.If) and is_defined(node.body, names):
            # The imports for type checkers name what a module has.
            return True
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == first:
                    return resolves(".".join([str(node.module), alias.name, *rest]))
    return False


def test_names_are_resolved_through_classes_and_imports() -> None:
    assert resolves("nemo_like.data.planning.plan.BatchPlan.metrics")
    assert resolves("nemo_like.data.planning")
    assert resolves("nemo_like.losses.NllLoss.normalization")
    assert resolves("nemo_like.BatchPlan.metrics") and not resolves("nemo_like.BatchPlan.nothing")
    assert not resolves("nemo_like.data.planning.plan.BatchPlan.nothing")
    assert not resolves("nemo_like.nowhere")


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_dotted_names_are_in_the_source(page: str) -> None:
    names = set(re.findall(r"\bnemo_like(?:\.[A-Za-z_]\w*)+", read(page)))
    assert {name for name in names if not resolves(name)} == set()


def test_the_levels_are_those_that_are_enforced() -> None:
    rows = re.findall(r"^\| (\d+) \| (`[^|]+`) \|", read("docs/architecture.md"), re.MULTILINE)
    documented = {name: int(level) for level, names in rows for name in _SPAN.findall(names)}
    assert {name: LEVELS.get(name) for name in documented} == documented
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= documented.keys()


# Metrics


def package_trees() -> Iterator[ast.Module]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield tree_of(path)


def as_pattern(node: ast.JoinedStr) -> str:
    """An f-string with `*` for what is filled in."""
    values = [part.value if isinstance(part, ast.Constant) else "*" for part in node.values]
    return "".join(map(str, values))


def texts_of(tree: ast.Module) -> Iterator[str]:
    """Every string of a file; an f-string once, as its pattern."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.JoinedStr):
            yield as_pattern(node)
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        nodes.extend(ast.iter_child_nodes(node))


def constants_of(tree: ast.Module) -> dict[str, str]:
    """Strings assigned to a name of the module."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                    found[target.id] = node.value.value
    return found


def last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def timed_and_counted(tree: ast.Module) -> Iterator[str]:
    """Names of `timers("x")`, of `timers.add("x", …)` and the keys of the dictionary `counters`."""
    constants = constants_of(tree)
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Call) and node.args:
            key = node.args[0]
            is_timer = ast.unparse(node.func).endswith(("timers", "timers.add"))
            if is_timer and isinstance(key, ast.Constant):
                yield f"timing/{key.value}_s"
            if not ast.unparse(node.func).endswith("counters.get"):
                continue
        elif isinstance(node, ast.Subscript) and last_name(node.value) == "counters":
            key = node.slice
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield f"progress/{key.value}"
        elif isinstance(key, ast.Name) and key.id in constants:
            yield f"progress/{constants[key.id]}"


def logged_names() -> set[str]:
    """Metric names as far as the source shows them; `*` stands for a part known at run time."""
    is_metric = re.compile(rf"(?:{'|'.join(AREAS)})/[a-z0-9_*]+(?:/[a-z0-9_*]+)?").fullmatch
    names: set[str] = set()
    for tree in package_trees():
        names |= set(timed_and_counted(tree))
        names |= set(filter(is_metric, texts_of(tree)))
    # The two patterns below only give the names of timers and counters.
    return names - {"timing/*_s", "progress/*"}


def documented_names() -> set[str]:
    """Names in the first column of the tables of docs/metrics.md; `<x>` is written as `*`."""
    rows = re.findall(r"^\| (`[^|]+`) \|", read("docs/metrics.md"), re.MULTILINE)
    names = [name for row in rows for name in _SPAN.findall(row)]
    return {re.sub(r"<\w+>", "*", name) for name in names}


def matches(name: str, pattern: str) -> bool:
    parts = [re.escape(part) for part in pattern.split("*")]
    return re.fullmatch("[a-z0-9_*]+".join(parts), name) is not None


def test_every_logged_metric_is_documented_and_every_documented_one_is_logged() -> None:
    logged = logged_names()
    documented = documented_names()
    assert len(logged) > 60, "the derivation of names from the source is broken"

    def is_known(name: str, others: set[str]) -> bool:
        return any(matches(name, other) or matches(other, name) for other in others)

    assert {name for name in logged if not is_known(name, documented)} == set()
    assert {name for name in documented if not is_known(name, logged)} == set()


# Messages


def messages() -> list[str]:
    """Texts of the package and of the scripts, `*` for what is filled in, spaces as one."""
    found = [text for tree in package_trees() for text in texts_of(tree)]
    for script in (ROOT / "ray_jobs").iterdir():
        found.append(script.read_text(encoding="utf-8"))
    return [re.sub(r"\s+", " ", text) for text in found]


def test_messages_that_are_explained_are_those_of_the_source() -> None:
    explained = re.findall(r"^### `(.+)`$", read("docs/troubleshooting.md"), re.MULTILINE)
    assert len(explained) > 20
    texts = messages()

    def is_in_source(message: str) -> bool:
        parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
        return any(re.search(".*".join(parts), text) for text in texts)

    assert [message for message in explained if not is_in_source(message)] == []


# Commands and keys


def commands(page: str) -> Iterator[list[str]]:
    """Arguments of every `nemo-like` command line in the shell blocks of a page."""
    for block in blocks(page):
        if block.language not in ("bash", "sh"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            starts = [i for i, word in enumerate(words) if word.endswith("nemo-like")]
            if starts:
                arguments = words[starts[0] + 1 :]
                ends = [i for i, word in enumerate(arguments) if word in ("&", "&&", "|", ";", ">")]
                yield arguments[: min(ends, default=len(arguments))]


def has_key(key: str) -> bool:
    return any(type_at(config, key) is not None for config in RUN_CONFIGS.values())


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_commands_parse_and_set_keys_that_exist(page: str) -> None:
    for words in commands(page):
        try:
            arguments, unknown = build_parser().parse_known_args(words)
        except SystemExit as stop:
            assert stop.code == 0, f"nemo-like {shlex.join(words)}"
            continue
        assert unknown == [], f"nemo-like {shlex.join(words)}"
        for override in getattr(arguments, "overrides", ()):
            key = override.lstrip("+~").partition("=")[0]
            assert has_key(key), f"{override} in nemo-like {shlex.join(words)}"


def sections() -> set[str]:
    return {
        name
        for config in RUN_CONFIGS.values()
        for name, annotation in field_types(config).items()
        if is_section(without_none(annotation)[0])
    }


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_keys_in_the_text_exist(page: str) -> None:
    form = re.compile(
        rf"[+~]?((?:{'|'.join(sorted(sections()))})(?:\.[a-z_0-9<>]+)+)(?:\.\*)?(=.*)?"
    )
    found = [match for match in map(form.fullmatch, spans(page)) if match is not None]
    keys = [re.sub(r"<\w+>", "name", match[1]) for match in found]
    # A file of a run is named as the section.
    assert {key for key in keys if not has_key(key)} - {"health.jsonl"} == set()


def paths_of(value: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys of nested mappings."""
    if not isinstance(value, dict):
        return
    for name, inner in value.items():
        yield f"{prefix}{name}"
        yield from paths_of(inner, f"{prefix}{name}.")


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_keys_in_yaml_blocks_exist(page: str) -> None:
    for block in blocks(page):
        if block.language == "yaml":
            keys = set(paths_of(yaml.safe_load(block.text))) - {"defaults"}
            assert {key for key in keys if not has_key(key)} == set()


# Programs


@pytest.mark.parametrize(
    "page", [page for page in PAGE_NAMES if any(b.language == "python" for b in blocks(page))]
)
def test_python_blocks_of_a_page_run_as_one_program(page: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "\n".join(block.text for block in blocks(page) if block.language == "python")
    )
    ended = Forked(run_program, program, folder=tmp_path)
    assert ended.wait() == 0, ended.errors
