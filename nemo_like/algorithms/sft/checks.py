"""Checks of the rows of SFT by `validate`, and their lengths for `plan`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.algorithms.sft.data import open_curriculum, open_loader, open_source, open_stream
from nemo_like.config.batching import BatchingConfig
from nemo_like.config.errors import counted, plural
from nemo_like.config.schema import EpochLoopConfig
from nemo_like.data.formats import conversation
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.planning.token_counts import count_tokens
from nemo_like.data.rows import Rows
from nemo_like.data.streaming.former import WindowWarning
from nemo_like.policy.batching import with_image_work
from nemo_like.prediction.lengths import RowLengths
from nemo_like.run.progress import Progress
from nemo_like.training.row_checks import RowChecks
from nemo_like.training.run_data import ExampleSource, RunData, training_name


def check_rows(config: SftRunConfig, data: RunData, checks: RowChecks) -> None:
    """Check texts, lengths, budgets and loss masks; if all are fine, plan the first step."""
    diagnostics = checks.diagnostics
    num_problems_before = len(diagnostics.problems)
    encoder = data.encoder
    checks.check_texts(encoder, data.train, conversation)
    checks.check_prompts_agree(encoder)
    source = open_source(config, data)
    is_streaming = config.data.batching.is_streaming
    if is_streaming:
        diagnostics.add_lines(
            "data", _describe_stream(config.data.batching, config.sft, len(data.train))
        )
    else:
        checks.check_num_steps(config.sft, source)
    for rows in (data.train, *data.validation.values()):
        encoded = checks.check_conversations(data, rows)
        if rows is data.train:
            _check_trained(checks, rows, encoded)
    if len(diagnostics.problems) > num_problems_before:
        return
    if is_streaming:
        _describe_first_step(config, source, checks)
        return
    loader = diagnostics.check(lambda: open_loader(config, source, None))
    batch = None if loader is None else diagnostics.check(lambda: next(loader))
    checks.describe_plan("the first step", count_tokens(batch or ()))


def _check_trained(checks: RowChecks, rows: Rows, encoded: Mapping[int, EncodedRow]) -> None:
    """Warn about rows of which no token is trained, by index in `rows`."""
    limit = None
    if checks.policy.oversize_rows == "truncate":
        limit = checks.policy.max_total_sequence_length
    # Nothing predicts the first token.
    untrained = [index for index, row in encoded.items() if not row.token_mask[1:limit].any()]
    if untrained:
        cut = "" if limit is None else f" within policy.max_total_sequence_length {limit}"
        checks.diagnostics.warnings.append(
            f"{len(untrained)} of the rows sampled have no token with loss{cut}, e.g."
            f" {rows.location(untrained[0])}"
        )


def _describe_stream(batching: BatchingConfig, limits: EpochLoopConfig, num_rows: int) -> str:
    """Describe the length of a run whose steps have different numbers of rows."""
    length = f"{counted(limits.max_num_epochs, 'epoch')} of {counted(num_rows, 'row')}"
    if limits.max_num_steps is not None:
        steps = counted(limits.max_num_steps, "step")
        length = f"{steps}" if batching.tail == "wrap" else f"{length}, at most {steps}"
    return (
        f"{length}; data.batching.kind {batching.kind} forms steps of"
        f" {batching.microbatches_per_step} full"
        f" {plural(batching.microbatches_per_step, 'microbatch', 'microbatches')} per worker"
    )


def _describe_first_step(
    config: SftRunConfig, source: ExampleSource[EncodedRow], checks: RowChecks
) -> None:
    """Form the first step of a stream; warn if the window is too small to fill a microbatch."""
    diagnostics = checks.diagnostics
    loader = diagnostics.check(lambda: open_stream(config, source, checks.model))
    with warnings.catch_warnings(category=WindowWarning, action="ignore"):
        rows = None if loader is None else diagnostics.check(lambda: next(loader))
    if loader is None or rows is None:
        return
    step = loader.planned
    metrics = step.metrics()
    num_microbatches = step.plan.num_microbatches
    diagnostics.add_lines(
        "plan",
        f"the first step: {counted(len(rows), 'row')}, {int(step.plan.lengths.sum()):,} tokens,"
        f" {metrics['packing/padding_share']:.1%} padding,"
        f" {metrics['packing/utilization']:.1%} of the token budget used; microbatches per worker"
        f" and optimizer step: {num_microbatches}",
    )
    max_tokens = step.plan.spec.max_tokens or 0
    window_rows = config.data.batching.num_window_rows
    mean_length = float(step.plan.lengths.mean())
    counts_rows = loader.spec.window_tokens == 0
    is_small = window_rows * mean_length < max_tokens and len(source.data.train) > window_rows
    if counts_rows and is_small:
        diagnostics.warnings.append(
            f"data.batching.window_rows is {window_rows}, which at {mean_length:.0f} tokens per row"
            f" cannot fill a microbatch of {max_tokens:,} tokens; set it to"
            f" {math.ceil(4 * max_tokens / mean_length):,} or more"
        )


def first_lengths(
    config: SftRunConfig, data: RunData, num_steps: int, progress: Progress
) -> RowLengths:
    """Return the row lengths of the first steps."""
    source = open_source(config, data)
    curriculum = open_curriculum(config.data.curriculum, source, progress)
    num_batches = min(num_steps, source.num_steps(config.sft))
    rows = source.first_examples(num_batches, progress, curriculum)
    images = [row.images for row in rows]
    counts = with_image_work(count_tokens(rows), images, config.policy, data.encoder.vision)
    return RowLengths(counts, training_name(config.data), is_ordered=True)
