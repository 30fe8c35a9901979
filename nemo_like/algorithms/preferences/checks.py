"""Checks of preference pairs by `validate`, and their row lengths for `plan`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_like.algorithms.preferences.config import PreferenceRunConfig
from nemo_like.algorithms.preferences.data import open_source, pair_samples
from nemo_like.data.messages import Message
from nemo_like.data.planning.token_counts import TokenCounts, count_tokens
from nemo_like.data.preferences import PreferencePair, encode_preference, preference
from nemo_like.data.row_files import Row
from nemo_like.policy.batching import with_image_work
from nemo_like.prediction.lengths import RowLengths
from nemo_like.run.progress import Progress
from nemo_like.training.row_checks import RowChecks
from nemo_like.training.row_sample import NUM_SAMPLES, length_lines
from nemo_like.training.run_data import RunData, training_name


def check_rows(config: PreferenceRunConfig, data: RunData, checks: RowChecks) -> None:
    """Check texts, lengths and budgets of pairs; if all are fine, plan the first step."""
    diagnostics = checks.diagnostics
    num_problems_before = len(diagnostics.problems)
    source = open_source(config, data)
    encoder = data.encoder
    checks.check_texts(encoder, data.train, _messages)
    checks.check_num_steps(config.loop, source)
    for rows in (data.train, *data.validation.values()):
        pairs = checks.encode_sample(rows, lambda row: encode_preference(encoder, row))
        # The limit of a row holds for each of the two.
        longer = {
            index: max(pair.rows, key=lambda row: len(row.input_ids))
            for index, pair in pairs.items()
        }
        lengths = {index: len(row.input_ids) for index, row in longer.items()}
        checks.check_lengths(rows, lengths)
        token_ids = {index: row.input_ids for index, row in longer.items()}
        checks.check_unknown(encoder, rows, token_ids)
        if rows is data.train:
            trained = {index: row.num_trained for index, row in longer.items()}
            lines = length_lines(rows, lengths, config.policy, trained)
            diagnostics.add_lines("lengths", *lines)
            for index in sorted(pairs)[:NUM_SAMPLES]:
                diagnostics.samples += pair_samples(encoder, pairs[index])
    if len(diagnostics.problems) == num_problems_before:
        batch = diagnostics.check(lambda: next(source.loader())) or []
        checks.describe_plan("the first step", _count_tokens(batch))


def first_lengths(
    config: PreferenceRunConfig, data: RunData, num_steps: int, progress: Progress
) -> RowLengths:
    """Return the row lengths of the first steps, with the two rows of a pair next to each other."""
    source = open_source(config, data)
    pairs = source.first_examples(min(num_steps, source.num_steps(config.loop)), progress)
    description = f"{training_name(config.data)}, two rows per pair"
    images = [row.images for pair in pairs for row in pair.rows]
    counts = with_image_work(_count_tokens(pairs), images, config.policy, data.encoder.vision)
    return RowLengths(counts, description, is_ordered=True)


def _count_tokens(pairs: Sequence[PreferencePair]) -> TokenCounts:
    """Count the tokens of the 2N rows of N pairs."""
    pair_ids = np.repeat(np.arange(len(pairs)), 2)
    return count_tokens([row for pair in pairs for row in pair.rows], pair_ids)


def _messages(row: Row) -> list[Message]:
    texts = preference(row)
    return [*texts.prompt, *texts.chosen, *texts.rejected]
