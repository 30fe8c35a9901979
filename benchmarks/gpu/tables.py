"""Write the tables and plots of README.md from the results of a GPU run.

    python -m benchmarks.gpu.tables DIR              # README.md of this folder
    python -m benchmarks.gpu.tables DIR --print      # only print, for a test on CPU

README.md is changed between its markers only. Results of a CPU or of the size `tiny` are refused:
they test the programs and measure nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.cells import read_record
from benchmarks.gpu.part import MODULES
from benchmarks.gpu.plots import memory_plot, mfu_plot, phases_plot

BEGIN = "<!-- results: begin -->"
END = "<!-- results: end -->"
README = Path(__file__).with_name("README.md")

Record = Mapping[str, Any]
Entry = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="the --out of the report")
    parser.add_argument("--print", action="store_true", help="print the tables, write nothing")
    parser.add_argument("--readme", type=Path, default=README, help="page to write")
    arguments = parser.parse_args(argv)
    records = read_records(arguments.directory)
    if not records:
        print(f"{arguments.directory} has no results of the report", file=sys.stderr)
        return 2
    if arguments.print:
        print(render(records))
        return 0
    refused = refusal(records)
    if refused:
        print(refused, file=sys.stderr)
        return 2
    write_readme(arguments.readme, records)
    return 0


def read_records(directory: Path) -> dict[str, Record]:
    """Return part -> result of the parts that a folder has, in order."""
    found = {}
    for part in MODULES:
        path = directory / f"{part}.json"
        if path.exists():
            found[part] = read_record(path)
    return found


def refusal(records: Mapping[str, Record]) -> str:
    """Return why the records are not from a GPU; an empty string if they are."""
    for part, record in records.items():
        if record["machine"]["device"] == "cpu" or record["size"] != "full":
            return (
                f"part {part} ran on {record['machine']['device']} with size {record['size']};"
                " README.md shows results of GPUs with size full only. --print shows these tables"
            )
    return ""


def write_readme(readme: Path, records: Mapping[str, Record]) -> None:
    """Replace the text between the markers of `readme`, and write the plots beside it.

    Raises ValueError for a page without markers.
    """
    text = readme.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{readme} has no lines {BEGIN} and {END}; add them where results belong")
    plots = draw(records)
    for name, svg in plots.items():
        readme.with_name(name).write_text(svg + "\n", encoding="utf-8")
    images = [f"![{name.removesuffix('.svg')}]({name})" for name in plots]
    body = "\n\n".join([render(records), *images])
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    readme.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{after}", encoding="utf-8")


def draw(records: Mapping[str, Record]) -> dict[str, str]:
    """Return file name -> SVG of each plot that has data."""
    plots: dict[str, str] = {}
    matrix = _measured(records.get("B1"), "mfu")
    if matrix:
        plots["mfu.svg"] = mfu_plot(matrix)
    with_peak = [entry for entry in matrix if "peak_gb" in entry["values"]]
    if with_peak:
        plots["memory.svg"] = memory_plot(with_peak)
    steps = _measured(records.get("C"), "phases_s")
    if steps:
        plots["grpo_step.svg"] = phases_plot(steps)
    return plots


def render(records: Mapping[str, Record]) -> str:
    """Return the tables of all parts as Markdown."""
    renderers: dict[str, Callable[[Record], list[str]]] = {
        "A": _correctness,
        "S": _short,
        "S3": _short,
        "B1": _matrix,
        "B2": _options,
        "C": _movement,
        "D": _experts,
    }
    sections = []
    for part, record in records.items():
        lines = [f"### {part}: {record['title']}", "", _machine_line(record)]
        for block in renderers[part](record):
            lines += ["", block]
        others = _other_cells(record)
        if others:
            lines += ["", others]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _machine_line(record: Record) -> str:
    machine = record["machine"]
    packages = machine["packages"]
    hardware = machine.get("gpu", machine["cpu"])
    shown = [
        hardware,
        f"torch {packages['torch']}",
        f"transformers {packages['transformers']}",
        machine["date"][:10],
        f"{record.get('part_s', 0):.0f} s",
    ]
    if machine.get("driver"):
        shown.insert(1, f"driver {machine['driver']}")
    if machine["commit"]:
        shown.append(f"commit {machine['commit']}")
    end = "" if record["finished"] else "; the part did not finish"
    return ", ".join(shown) + end + "."


def _correctness(record: Record) -> list[str]:
    rows = []
    for prefix in ("attention", "log-probs", "dtensor step", "megatron step"):
        entries = [entry for entry in record["cells"] if entry["name"].startswith(prefix)]
        if not entries:
            continue
        errors = [_worst_error(entry) for entry in entries if "values" in entry]
        num_ok = sum(entry["status"] == "ok" for entry in entries)
        largest = f"{max(errors):.2e}" if errors else ""
        rows.append((prefix, len(entries), num_ok, largest))
    blocks = [table(("check", "cells", "passed", "largest error"), rows)] if rows else []
    for entry in record["cells"]:
        if entry["name"].startswith("pytest") and "values" in entry:
            counts = entry["values"]["counts"]
            shown = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
            blocks.append(f"`{entry['name']}`: {shown}.")
    return blocks


def _worst_error(entry: Entry) -> float:
    """Return the largest error of a check."""
    values = entry["values"]
    if "relative difference" in values:
        return max(values["relative difference"].values())
    errors = [value for name, value in values.items() if name.endswith(("error", "gradient"))]
    return max([*errors, values.get("output", 0.0)])


def _matrix(record: Record) -> list[str]:
    rows = []
    for entry in _measured(record, "tokens_per_s"):
        settings = entry["settings"]
        first = (settings["model"], settings["budget"], settings["checkpointing"])
        rows.append((*first, settings["rows"], *_speed(entry["values"])))
    headers = ("model", "budget", "checkpointing", "rows", *_SPEED)
    return [table(headers, rows)]


_SPEED = ("tokens/s", "MFU", "step s", "microbatches", "peak GB", "predicted GB", "ratio")


def _speed(values: Record) -> tuple[str, ...]:
    """Return the columns `_SPEED`."""
    return (
        f"{values['tokens_per_s']:,.0f}",
        f"{values['mfu']:.1%}",
        f"{values['step_s']:.3f}",
        f"{values.get('num_microbatches', 0):.0f}",
        _optional(values.get("peak_gb"), ".1f"),
        _optional(values.get("predicted_peak_gb"), ".1f"),
        _optional(values.get("predicted_over_measured"), ".2f"),
    )


def _options(record: Record) -> list[str]:
    entries = _measured(record, "tokens_per_s")
    baseline = next((entry for entry in entries if entry["name"].startswith("baseline")), None)
    rows = []
    for entry in entries:
        values = entry["values"]
        ratio = ""
        is_same = entry["settings"]["model"] == "1b" and entry["settings"].get("rows") != "full"
        if baseline is not None and is_same:
            ratio = f"{values['tokens_per_s'] / baseline['values']['tokens_per_s']:.2f}x"
        first_s = _optional(values.get("first_step_s"), ".1f")
        rows.append((entry["name"], *_speed(values)[:5], first_s, ratio))
    headers = ("loop or option", *_SPEED[:5], "first step s", "of baseline")
    blocks = [table(headers, rows)]
    blocks += [_profile_block(entry) for entry in _measured(record, "busy_share")]
    kernels = []
    for entry in record["cells"]:
        values = entry.get("values", {})
        if "alone" in entry["name"] and values:
            milliseconds = values.get("ms", values.get("forward_ms", 0.0))
            backward = _optional(values.get("backward_ms"), ".2f")
            tflops = values.get("tflops", values.get("both_tflops", 0.0))
            kernels.append((entry["name"], f"{milliseconds:.2f}", backward, f"{tflops:.0f}"))
    if kernels:
        blocks.append(table(("kernel", "ms", "backward ms", "TFLOP/s"), kernels))
    return blocks


def _short(record: Record) -> list[str]:
    blocks = _correctness(record)
    for entry in _measured(record, "product_tflops"):
        values = entry["values"]
        blocks.append(
            f"The card: {values['product_tflops']:.0f} TFLOP/s in a bfloat16 product of 8192,"
            f" {values['copy_gb_per_s']:,.0f} GB/s in a copy (read and written). Attention:"
            f" {values['attention']}."
        )
    steps = []
    for entry in _measured(record, "tokens_per_s"):
        values = entry["values"]
        first_s = _optional(values.get("first_step_s"), ".1f")
        steps.append((entry["name"], *_speed(values), first_s))
    if steps:
        blocks.append(table(("step", *_SPEED, "first step s"), steps))
    prefixes = []
    for entry in _measured(record, "train_s ratio"):
        values = entry["values"]
        tokens = f"{values['num_tokens']:,} / {values['true computed_tokens']:,}"
        ratios = [f"{values[f'{kind} ratio']:.2f}x" for kind in ("logprob_s", "train_s")]
        prefixes.append((entry["name"], tokens, *ratios))
    if prefixes:
        headers = ("rows", "tokens / computed", "log-prob pass", "training step")
        blocks.append(table(headers, prefixes))
    blocks += [_profile_block(entry) for entry in _measured(record, "busy_share")]
    phases = _phase_rows(record)
    return [*blocks, table(("step", "phase", "s"), phases)] if phases else blocks


def _phase_rows(record: Record) -> list[tuple[str, str, str]]:
    """Return cell, phase and seconds of the steps that are measured by phase."""
    rows = []
    for entry in _measured(record, "phases_s"):
        values = entry["values"]
        for name, seconds in values["phases_s"].items():
            rows.append((entry["name"], name, f"{seconds:.3f}"))
        rows.append((entry["name"], "sum", f"{values['step_s']:.3f}"))
    return rows


def _profile_block(entry: Entry) -> str:
    values = entry["values"]
    head = (
        f"{entry['name']}: the GPU is busy {values['busy_share']:.1%} of"
        f" {values['span_ms']:.0f} ms, {values['kernels_per_microbatch']:.0f} kernels and"
        f" {values['waits_per_microbatch']:.2f} host waits per microbatch."
    )
    rows = []
    for kernel in values["top_kernels"]:
        name = f"`{kernel['name'].replace('|', '/')}`"
        share = f"{kernel['share']:.1%}"
        rows.append((name, kernel["count"], f"{kernel['ms']:.2f}", share))
    return head + "\n\n" + table(("kernel", "count", "ms", "share"), rows)


def _movement(record: Record) -> list[str]:
    rows = []
    phases = _phase_rows(record)
    for entry in record["cells"]:
        values = entry.get("values", {})
        if "phases_s" in values:
            continue
        for name, value in values.items():
            is_shown = name.endswith(("per_s", "_s", "ms_per_token_step"))
            if is_shown and not isinstance(value, list):
                rows.append((entry["name"], name, f"{value:,.3g}"))
    blocks = [table(("measurement", "quantity", "value"), rows)]
    if phases:
        blocks.append(table(("step", "phase", "s"), phases))
    return blocks


def _experts(record: Record) -> list[str]:
    rows = [(entry["name"], *_speed(entry["values"])) for entry in _measured(record, "mfu")]
    layers = []
    for entry in _measured(record, "loop_ms"):
        values = entry["values"]
        ratio = values["loop_ms"] / values["grouped_ms"]
        tflops = f"{values['grouped_tflops']:.0f}"
        times = (f"{values['loop_ms']:.2f}", f"{values['grouped_ms']:.2f}")
        layers.append((entry["name"], *times, f"{ratio:.1f}x", tflops))
    headers = ("layer", "loop ms", "grouped ms", "ratio", "grouped TFLOP/s")
    return [table(("step", *_SPEED), rows), table(headers, layers)]


def _other_cells(record: Record) -> str:
    """Return a table of the cells without a result."""
    rows = []
    for entry in record["cells"]:
        if entry["status"] != "ok":
            reason = entry.get("reason", "").partition("\n")[0][:200].replace("|", "/")
            rows.append((entry["name"], entry["status"], reason))
    return table(("cell", "status", "reason"), rows) if rows else ""


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(headers)} |", f"|{'---|' * len(headers)}"]
    lines += [f"| {' | '.join(str(value) for value in row)} |" for row in rows]
    return "\n".join(lines)


def _measured(record: Record | None, name: str) -> list[Entry]:
    """Return the cells of a part that have the value `name`."""
    if record is None:
        return []
    return [entry for entry in record["cells"] if name in entry.get("values", {})]


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(main())
