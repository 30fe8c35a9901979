"""Checks of the rows and teachers of distillation by `validate`, and row lengths for `plan`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_like.algorithms.distillation.config import DistillRunConfig
from nemo_like.algorithms.distillation.data import TaughtRow, open_source, open_teachers
from nemo_like.data.formats import conversation
from nemo_like.data.jagged import EncodedRow, Jagged
from nemo_like.data.planning.prefixes import SharedPrefixes
from nemo_like.data.planning.token_counts import TokenCounts, count_tokens
from nemo_like.prediction.lengths import RowLengths
from nemo_like.rollout.conversations import Prompt
from nemo_like.run.progress import Progress
from nemo_like.training.row_checks import RowChecks, encode_prompt_of, prompt_messages
from nemo_like.training.row_sample import length_lines
from nemo_like.training.run_data import RunData, training_name


def check_rows(config: DistillRunConfig, data: RunData, checks: RowChecks) -> None:
    """Check teachers, texts, lengths and budgets; if all are fine, plan the first step."""
    diagnostics = checks.diagnostics
    num_problems_before = len(diagnostics.problems)
    encoder = data.encoder
    specs = diagnostics.check(lambda: open_teachers(config, encoder.tokenizer))
    for spec in (specs or {}).values():
        diagnostics.add_lines(
            "model",
            f"teacher {spec.name}: {spec.num_params / 1e6:,.1f} M parameters, on the device while"
            " it computes",
        )
    checks.check_prompts_agree(encoder)
    messages = prompt_messages if config.needs.rollouts else conversation
    checks.check_texts(encoder, data.train, messages)
    source = open_source(config, data)
    checks.check_num_steps(config.distill, source)
    _check_lengths(checks, data)
    if len(diagnostics.problems) > num_problems_before:
        return
    batch = diagnostics.check(lambda: next(source.loader())) or []
    title = "the first step"
    if config.needs.rollouts is not None:
        title = "a step with completions of the max length"
    checks.describe_plan(title, _count_tokens(config, batch, longest=True))


def _check_lengths(checks: RowChecks, data: RunData) -> None:
    """Check the lengths of a sample of the rows, and show the first ones."""
    encoder = data.encoder
    if checks.needs.rollouts:
        prompts = checks.encode_sample(data.train, lambda row: encode_prompt_of(encoder, row))
        lengths = {index: len(token_ids) for index, token_ids in prompts.items()}
        checks.check_prompts(data.train, lengths)
        checks.check_unknown(encoder, data.train, prompts)
        lines = length_lines(data.train, lengths, checks.policy)
        checks.diagnostics.add_lines("lengths", *lines)
    for rows in (data.train, *data.validation.values()):
        if checks.needs.rollouts and rows is data.train:
            continue
        checks.check_conversations(data, rows)


def first_lengths(
    config: DistillRunConfig, data: RunData, num_steps: int, progress: Progress
) -> RowLengths:
    """Return the row lengths of the first steps; lengths of completions are drawn at random."""
    source = open_source(config, data)
    rows = source.first_examples(min(num_steps, source.num_steps(config.distill)), progress)
    counts = _count_tokens(config, rows, longest=False)
    description = training_name(config.data)
    if config.needs.rollouts is not None:
        description = (
            f"prompts of {training_name(config.data)}, completion lengths drawn uniformly from 1 to"
            f" {config.policy.generation.max_new_tokens:,} tokens"
        )
    return RowLengths(counts, description, is_ordered=True)


def _count_tokens(
    config: DistillRunConfig, rows: Sequence[TaughtRow], *, longest: bool
) -> TokenCounts:
    """Count the tokens of rows, with completions of the max or of random length."""
    groups = [row.teacher for row in rows]
    if not config.needs.rollouts is not None:
        examples = [row.example for row in rows if isinstance(row.example, EncodedRow)]
        return count_tokens(examples, groups)
    prompts = [row.example.token_ids for row in rows if isinstance(row.example, Prompt)]
    values = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    limit = config.policy.max_total_sequence_length - values
    completions = np.minimum(limit, config.policy.generation.max_new_tokens)
    if not longest:
        rng = np.random.default_rng(config.seed % 2**64)
        completions = rng.integers(1, completions + 1)
    prefixes = SharedPrefixes.of_tokens(groups, Jagged.from_rows(prompts, np.int32))
    return TokenCounts(values + completions, completions, prefixes)
