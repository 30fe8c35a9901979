"""Writes docs/interface.md, the reference of `import nemo_like`, from signatures and docstrings.

The command is `python -m tests.interface_page > docs/interface.md`. The source is read as syntax
trees; nothing heavy is imported.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "nemo_like"
_HEADER = """# Interface of the library

`import nemo_like` has these names, e.g. `nemo_like.get_packer`. Each is imported from its module
when it is used, so the import itself takes milliseconds and needs no torch. This page is generated
from the source by `python -m tests.interface_page > docs/interface.md`; a test compares the two.
[In your own loop](library.md) shows how to use the loaders.
"""


def interface_page() -> str:
    """Return the page as Markdown."""
    parts = [_HEADER]
    module = ""
    for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("nemo_like."):
            continue
        if node.module != module:
            module = str(node.module)
            parts.append(f"## `{module}`\n")
        path = PACKAGE / f"{module.removeprefix('nemo_like.').replace('.', '/')}.py"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        definitions = {
            each.name: each
            for each in tree.body
            if isinstance(each, ast.FunctionDef | ast.ClassDef)
        }
        parts += [_entry(definitions[alias.name]) for alias in node.names]
    return "\n".join(parts)


def _entry(definition: ast.FunctionDef | ast.ClassDef) -> str:
    lines = [f"### `{definition.name}`\n", "```text"]
    if isinstance(definition, ast.FunctionDef):
        lines += [_signature(definition, definition.name), ""]
    lines += [inspect.cleandoc(ast.get_docstring(definition) or ""), ""]
    for member in definition.body if isinstance(definition, ast.ClassDef) else ():
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
            lines.append(f"{'.' + _signature(member, member.name)}")
        elif isinstance(member, ast.FunctionDef) and member.name == "__init__":
            lines.append(_signature(member, definition.name))
        elif isinstance(member, ast.AnnAssign):
            lines.append(f".{ast.unparse(member.target)}: {ast.unparse(member.annotation)}")
    return "\n".join(lines).rstrip() + "\n```\n"


def _signature(definition: ast.FunctionDef, name: str) -> str:
    arguments = ast.unparse(definition.args)
    arguments = re.sub(r"^(self|cls)(, )?", "", arguments)
    if any(ast.unparse(each) == "property" for each in definition.decorator_list):
        return name
    return f"{name}({arguments})"


if __name__ == "__main__":
    print(interface_page(), end="")
