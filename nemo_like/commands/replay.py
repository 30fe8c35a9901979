"""`nemo-like replay`: repeat a recorded optimizer step of GRPO, with the run's loss and another."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from nemo_like.algorithms.grpo.replay import ReplayReport, replay_step
from nemo_like.config.text import counted, printable

_FIRST = (
    "policy/loss",
    "policy/grad_norm",
    "policy/clip_fraction",
    "policy/clip_fraction_high",
    "policy/clip_fraction_low",
    "policy/clip_fraction_dual",
    "policy/approx_kl_k1",
    "policy/approx_kl_k3",
)
"""Metrics that are printed before the others of the loss."""
_PACKING = (
    "packing/efficiency",
    "packing/utilization",
    "packing/padding_share",
    "packing/num_microbatches",
    "packing/rank_imbalance_flops",
)
_NOT_COMPARED = (
    "policy/lr",
    "policy/skipped_steps",
    "policy/rank_time_worst_over_mean",
    "policy/recompilations",
    "policy/peak_memory_gb",
    "policy/peak_memory_mean_gb",
)
"""Metrics of an optimizer step that was taken."""


def run(arguments: argparse.Namespace) -> int:
    """Replay the step, print the comparison and return the exit code. Raises ConfigError."""
    report = replay_step(arguments.source, arguments.step, arguments.overrides)
    print(printable(report_text(report)))
    return 0


def report_text(report: ReplayReport) -> str:
    """Return the comparison as a table.

    The columns are the logged values and the repeated ones, and with overrides the repeated ones
    and those with overrides; each pair is followed by its difference.
    """
    title = (
        f"step {report.step}, optimizer step 1 of {report.num_optimizer_steps}:"
        f" {counted(report.num_rows, 'row')}, weights of {report.weights}"
    )
    lines = [
        title,
        f"packing/*: all rows of the step, planned for the run's layout {report.layout}",
        "",
        *_table(("logged", report.logged), ("replayed", report.replayed)),
    ]
    if report.overridden is not None:
        lines += [
            "",
            f"with {' '.join(report.overrides)}",
            *_table(("replayed", report.replayed), ("overridden", report.overridden)),
        ]
    return "\n".join(lines)


def _table(
    left: tuple[str, Mapping[str, float | None]], right: tuple[str, Mapping[str, float | None]]
) -> list[str]:
    """Return the lines of a table with two sides, (title, metrics) each, and their difference."""
    (left_title, before), (right_title, after) = left, right
    lines = [f"{'metric':<36}{left_title:>16}{right_title:>16}{'difference':>14}"]
    for name in _names(before, after):
        old = before.get(name)
        new = after.get(name)
        difference = "" if old is None or new is None else f"{new - old:+.3g}"
        lines.append(f"{name:<36}{_number(old):>16}{_number(new):>16}{difference:>14}")
    return lines


def _names(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> list[str]:
    """Return the metrics of either side in the order of the table."""
    both = [*before, *(name for name in after if name not in before)]
    others = []
    for name in both:
        is_listed = name in _FIRST or name.startswith("packing/")
        if not is_listed and name not in _NOT_COMPARED:
            others.append(name)
    wanted = (*_FIRST, *sorted(others), *_PACKING)
    return [name for name in wanted if name in both]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.8g}"
