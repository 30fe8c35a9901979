"""The results of `nemo-like check parity --model` as a file, and as a page of the documentation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_like.config.errors import ConfigError, shown_path

EQUAL = "yes"
REFUSED = "no: "
WRONG = "WRONG: "

Results = dict[str, dict[str, str]]
"""Model type -> column -> `EQUAL`, or `REFUSED` or `WRONG` with the reason."""

_HEAD = """# Model types

What the DTensor engine can do with a model type of transformers. Each cell is the result of
`nemo-like check parity --model TYPE` with transformers {transformers} and PyTorch {torch}: a tiny
random model of the type, float32 on CPU, against transformers' own forward (eager attention, its
own masks) on single unpadded rows.

The columns `packed` to `cp 2`, and `ep 2` of models with experts, compare loss, gradient of every
parameter, log-probs of every token, four optimizer steps and a resumed checkpoint, each to 1e-5,
and run the isolation check. `export` compares the logits of the exported model to the bit, `LoRA`
the gradients of adapters on all linear layers with PEFT's. A cell without `yes` has its reason
below the table.

A type that is not in the table may work as well: the engine has no code for single types.

    nemo-like check parity --model TYPE
"""


def read_table(path: Path) -> dict[str, Any]:
    """Return the content of a results file; empty for one that does not exist."""
    if not path.exists():
        return {"versions": {}, "types": {}}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"--table {shown_path(path)} is not JSON: {error}") from error


def update_table(path: Path, results: Results, versions: Mapping[str, str]) -> None:
    """Add `results` to the file and write the page beside it, with the suffix `.md`."""
    table = read_table(path)
    table["versions"] = dict(versions)
    types = {**table["types"], **results}
    table["types"] = {name: types[name] for name in sorted(types)}
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(table), encoding="utf-8")


def page(table: Mapping[str, Any]) -> str:
    """Return the page of a results file as Markdown."""
    types: Results = table["types"]
    columns = list(dict.fromkeys(column for cells in types.values() for column in cells))
    lines = [_HEAD.format(**table["versions"])]
    lines.append("| model type | " + " | ".join(columns) + " |")
    lines.append("|---" * (len(columns) + 1) + "|")
    reasons: dict[str, list[str]] = {}
    for name, cells in types.items():
        shown = []
        for column in columns:
            text = cells.get(column, "")
            shown.append(text.partition(":")[0])
            if text and text != EQUAL:
                reasons.setdefault(f"`{name}`: {text.partition(': ')[2]}", []).append(column)
        lines.append(f"| `{name}` | " + " | ".join(shown) + " |")
    lines.append("")
    if reasons:
        lines.append("Reasons:\n")
    for reason, places in reasons.items():
        lines.append(f"* {reason} ({'; '.join(places)})")
    return "\n".join(lines) + "\n"
