"""The rows of distillation: conversations or prompts, each with its teacher."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nemo_like.algorithms.distillation.config import DistillRunConfig
from nemo_like.algorithms.distillation.teachers import TeacherOfRow, open_teachers
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.encoded_rows import EncodedRows, Examples
from nemo_like.data.formats import PROMPT_ROWS, SFT_ROWS, RowSchema, conversation
from nemo_like.data.jagged import EncodedRow, TokenCounts, count_tokens
from nemo_like.data.row_files import Row
from nemo_like.data.rows import Rows
from nemo_like.prediction.lengths import RowLengths
from nemo_like.rollout.conversations import Prompt
from nemo_like.run.progress import Progress, Sample
from nemo_like.training.diagnostics import (
    NUM_SAMPLES,
    Diagnostics,
    check_lengths,
    check_prompts,
    check_prompts_agree,
    check_texts,
    describe_plan,
    encode_prompt_of,
    encode_sample,
    prompt_messages,
)
from nemo_like.training.encoding import (
    encode_conversation,
    encode_question,
    encode_sft_row,
    prompt_example,
)
from nemo_like.training.reporting import step_warnings
from nemo_like.training.run_data import (
    ExampleSource,
    RunData,
    describe_run,
    open_data,
    training_name,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _any_problem(row: Row, columns: tuple[str, ...]) -> str | None:
    """Describe why a row is neither a conversation to learn from nor a prompt, or return None."""
    problem = SFT_ROWS.problem(row, columns)
    if problem is None or "input_ids" in columns or columns == ("text",):
        return problem
    return PROMPT_ROWS.problem(row, columns)


def _mixed_problem(row: Row, columns: tuple[str, ...]) -> str | None:
    """Describe why a row is not both a conversation to learn from and a prompt, or return None."""
    return SFT_ROWS.problem(row, columns) or PROMPT_ROWS.problem(row, columns)


ROW_SCHEMA = RowSchema(SFT_ROWS.formats, SFT_ROWS.understood, _any_problem)
"""What any run may read; `row_schema` has the formats of one."""
_MIXED_ROWS = RowSchema(PROMPT_ROWS.formats, PROMPT_ROWS.understood, _mixed_problem)


def row_schema(config: DistillRunConfig) -> RowSchema:
    """Return the row formats of the training file of a run."""
    fraction = config.distill.on_policy_fraction
    if fraction == 0:
        return SFT_ROWS
    return PROMPT_ROWS if fraction == 1 else _MIXED_ROWS


class TaughtRow(NamedTuple):
    """An encoded row, or a prompt for the student, and the index of its teacher."""

    example: EncodedRow | Prompt
    teacher: int


def taught_examples(
    config: DistillRunConfig, rows: Rows, encoded: EncodedRows, set_name: str | None = None
) -> Examples[TaughtRow]:
    """Return the encoded rows with their teachers.

    `set_name` is the name of a validation set, whose rows are never prompts.
    """
    teachers = TeacherOfRow(config, rows, set_name)
    is_prompt = config.generates and set_name is None

    def taught(row: int, encoded: EncodedRow) -> TaughtRow:
        example = prompt_example(rows[row], encoded) if is_prompt else encoded
        return TaughtRow(example, teachers.index(row))

    return Examples(encoded, taught)


def encode_row(encoder: ChatEncoder, config: RunConfig, row: Row) -> EncodedRow | None:
    """Encode a conversation, or for sampled completions its prompt; None drops a row too long.

    Raises ConfigError for a bad row.
    """
    if not config.generates:
        return encode_conversation(encoder, config, row)
    # A row of a run with both kinds of steps must fit as a conversation, or a step that takes it as
    # one could have no row left.
    assert isinstance(config, DistillRunConfig)
    is_mixed = config.distill.on_policy_fraction < 1
    if is_mixed and encode_conversation(encoder, config, row) is None:
        return None
    return encode_question(encoder, config, row)


def rewarded_rows(train: Rows | None, validation: Rows | None) -> Rows | None:
    """Return the rows whose completions the reward functions score."""
    return train


def open_source(config: DistillRunConfig, data: RunData | None = None) -> ExampleSource[TaughtRow]:
    """Return the training rows of a run, from `data` or read from the files of the config.

    Raises ConfigError for a missing or bad file or row.
    """
    if data is None:
        data = open_data(config, row_schema(config), SFT_ROWS)
    return ExampleSource(config, data, encode_row, partial(taught_examples, config))


def validation_batches(config: DistillRunConfig, data: RunData, name: str) -> list[list[TaughtRow]]:
    """Return the rows of a validation set in batches, without those dropped as too long."""
    rows = data.validation[name]
    encoded = EncodedRows(rows, partial(encode_conversation, data.encoder, config))
    taught = taught_examples(config, rows, encoded, name)
    batch_size = config.policy.train_global_batch_size
    batches = []
    for start in range(0, len(rows), batch_size):
        fetched = taught.fetch(range(start, min(start + batch_size, len(rows))))
        batch = [row for row in fetched if row is not None]
        if batch:
            batches.append(batch)
    return batches


def check_rows(
    config: DistillRunConfig,
    data: RunData,
    model: PretrainedConfig | None,
    diagnostics: Diagnostics,
) -> None:
    """Check teachers, texts, lengths and budgets; if all are fine, plan the first step."""
    num_problems_before = len(diagnostics.problems)
    encoder = data.encoder
    specs = diagnostics.check(lambda: open_teachers(config, encoder.tokenizer))
    for spec in (specs or {}).values():
        diagnostics.add_lines(
            "model",
            f"teacher {spec.name}: {spec.num_params / 1e6:,.1f} M parameters, on the device while"
            " it computes",
        )
    diagnostics.check(lambda: _check_format(config, data))
    check_prompts_agree(encoder, None if config.generates else data.train, diagnostics)
    messages = prompt_messages if config.generates else conversation
    check_texts(encoder, data.train, messages, diagnostics)
    source = open_source(config, data)
    num_steps = diagnostics.check(lambda: source.num_steps(config.distill))
    if num_steps is not None:
        diagnostics.add_lines("data", describe_run(config, num_steps, len(data.train)))
        diagnostics.warnings += step_warnings(config, num_steps)
    _check_lengths(config, data, diagnostics)
    if len(diagnostics.problems) > num_problems_before:
        return
    batch = diagnostics.check(lambda: next(source.loader())) or []
    title = "the first step"
    if config.generates:
        title = "a step with completions of the max length"
    describe_plan(config, title, _count_tokens(config, batch, longest=True), model, diagnostics)


def _check_format(config: DistillRunConfig, data: RunData) -> None:
    """Raise ConfigError for rows of a format that this run cannot use."""
    files = [(data.train, row_schema(config))]
    files += [(rows, SFT_ROWS) for rows in data.validation.values()]
    for rows, schema in files:
        # The format is the same for all rows, so the first ones show it.
        for index in range(min(len(rows), NUM_SAMPLES)):
            try:
                schema.check(rows[index], schema.recognize(rows[index]))
            except ConfigError as error:
                raise ConfigError(f"{rows.location(index)}: {error}") from error


def _check_lengths(config: DistillRunConfig, data: RunData, diagnostics: Diagnostics) -> None:
    """Check the lengths of a sample of the rows, and show the first ones."""
    encoder = data.encoder
    if config.generates:
        prompts = encode_sample(data.train, lambda row: encode_prompt_of(encoder, row), diagnostics)
        lengths = {index: len(token_ids) for index, token_ids in prompts.items()}
        check_prompts(config, data.train, lengths, diagnostics)
    for rows in (data.train, *data.validation.values()):
        if config.generates and rows is data.train:
            continue
        encoded = encode_sample(
            rows, lambda row: encode_sft_row(encoder, config.data.train_on, row), diagnostics
        )
        lengths = {index: len(row.input_ids) for index, row in encoded.items()}
        check_lengths(config, rows, lengths, diagnostics)
        if rows is data.train:
            for index in sorted(encoded)[:NUM_SAMPLES]:
                diagnostics.samples.append(Sample(encoder.segments(encoded[index])))


def first_lengths(
    config: DistillRunConfig, data: RunData, num_steps: int, progress: Progress
) -> RowLengths:
    """Return the row lengths of the first steps; lengths of completions are drawn at random."""
    source = open_source(config, data)
    rows = source.first_examples(min(num_steps, source.num_steps(config.distill)), progress)
    lengths, num_trained = _count_tokens(config, rows, longest=False)
    description = training_name(config)
    if config.generates:
        description = (
            f"prompts of {training_name(config)}, completion lengths drawn uniformly from 1 to"
            f" {config.policy.generation.max_new_tokens:,} tokens"
        )
    return RowLengths(lengths, description, is_ordered=True, num_trained=num_trained)


def _count_tokens(
    config: DistillRunConfig, rows: Sequence[TaughtRow], *, longest: bool
) -> TokenCounts:
    """Count the tokens of rows, with completions of the max or of random length."""
    if not config.generates:
        return count_tokens([row.example for row in rows if isinstance(row.example, EncodedRow)])
    examples = [row.example for row in rows]
    prompts = [len(each.token_ids) for each in examples if isinstance(each, Prompt)]
    values = np.array(prompts, dtype=np.int64)
    limit = config.policy.max_total_sequence_length - values
    completions = np.minimum(limit, config.policy.generation.max_new_tokens)
    if not longest:
        rng = np.random.default_rng(config.seed % 2**64)
        completions = rng.integers(1, completions + 1)
    return TokenCounts(values + completions, completions)
