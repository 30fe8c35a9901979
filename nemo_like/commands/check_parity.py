"""`nemo-like check parity --config FILE`: compare its layout with transformers."""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging as transformers_logging

from nemo_like.algorithms.registry import load_any_config
from nemo_like.commands.train import FAILED
from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import RunConfig
from nemo_like.console import say
from nemo_like.models.tiny import save_tiny_copy
from nemo_like.models.vision import VISION_TYPES
from nemo_like.training.model_files import open_model_config
from nemo_like.training.parity import (
    LIMIT,
    Comparison,
    Reference,
    check_mode,
    random_batch,
    tiny_run,
)

MODES = ("packed", "dynamic")


@dataclass(frozen=True)
class ParityReport:
    """All comparisons of one layout."""

    title: str
    findings: tuple[Comparison, ...]

    @property
    def is_equal(self) -> bool:
        return all(finding.is_equal for finding in self.findings)

    def __str__(self) -> str:
        lines = [self.title]
        for finding in self.findings:
            verdict = "equal" if finding.is_equal else "DIFFERENT"
            if finding.is_rounding:
                verdict = "rounding"
            line = (
                f"  {finding.mode:<8} {finding.what:<34} {finding.difference:8.1e} "
                f" {verdict:<10}{finding.detail}"
            )
            lines.append(line.rstrip())
        num_different = sum(not finding.is_equal for finding in self.findings)
        verdict = f"{num_different} DIFFERENT" if num_different else "all equal"
        lines.append(f"{len(self.findings)} comparisons, limit {LIMIT:g} relative: {verdict}")
        return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison; return the exit code, 1 for a difference. Raises ConfigError."""
    config = load_any_config(arguments.config, arguments.overrides, arguments.kind)
    report = check_parity(config)
    say(str(report))
    return 0 if report.is_equal else FAILED


def check_parity(config: RunConfig) -> ParityReport:
    """Compare the layout of `config` with transformers. Uses neither a GPU nor data.

    The data-parallel size is limited to 2, which is enough for the check; the tiny model has at
    least one layer per pipeline stage. Raises ConfigError for an unsupported model or layout.
    """
    transformers_logging.disable_progress_bar()
    model_config = open_model_config(config.policy, config.parallel, config.cluster, config.needs)
    modes = MODES[:1]
    if model_config.model_type not in VISION_TYPES:
        model_config, modes = model_config.get_text_config(), MODES
    parallel = config.parallel
    with tempfile.TemporaryDirectory(prefix="nemo_like_parity_") as folder:
        model = save_tiny_copy(model_config, parallel, Path(folder) / "model")
        tiny = tiny_run(
            config.policy,
            parallel,
            policy_layout(config.parallel, config.cluster).dp,
            Path(folder) / "model",
        )
        batch = random_batch(model.config)
        expected = Reference(model, batch, tiny)
        num_workers = tiny.num_workers
        # Forked from this process, a rank would inherit the threads of torch in an undefined state.
        method = multiprocessing.get_context("forkserver")
        findings: list[Comparison] = []
        # One pool for all modes: starting a process imports torch, which takes seconds.
        with ProcessPoolExecutor(num_workers, mp_context=method) as pool:
            for mode in modes:
                findings += check_mode(tiny, mode, batch, expected, Path(folder), pool)
    layout = str(tiny.layout)
    title = (
        f"{config.policy.engine} on {layout}: a tiny {model_config.model_type} against"
        f" transformers, {len(batch['length'])} rows"
    )
    return ParityReport(title, tuple(findings))
