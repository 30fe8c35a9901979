"""The rows of distillation, conversations or prompts, and the teachers: each row finds its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nemo_like.algorithms.distillation.config import DistillRunConfig, teacher_key
from nemo_like.config.errors import ConfigError
from nemo_like.config.paths import model_directory
from nemo_like.config.schema import MAIN_SET
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.encoded_rows import EncodedRows, Examples
from nemo_like.data.formats import PROMPT_ROWS, SFT_ROWS, RowSchema, conversation
from nemo_like.data.jagged import EncodedRow, Jagged
from nemo_like.data.planning.prefixes import SharedPrefixes
from nemo_like.data.planning.token_counts import TokenCounts, count_tokens
from nemo_like.data.row_files import Row
from nemo_like.data.rows import Rows
from nemo_like.models.pretrained import load_tokenizer
from nemo_like.models.spec import ModelSpec
from nemo_like.prediction.lengths import RowLengths
from nemo_like.rollout.conversations import Prompt
from nemo_like.run.progress import Progress
from nemo_like.training.diagnostics import (
    Diagnostics,
    check_conversations,
    check_num_steps,
    check_prompts,
    check_prompts_agree,
    check_texts,
    describe_plan,
    encode_prompt_of,
    encode_sample,
    prompt_messages,
)
from nemo_like.training.model_files import open_model_config, open_model_spec
from nemo_like.training.row_sample import length_lines
from nemo_like.training.run_data import (
    ExampleSource,
    RunData,
    encode_conversation,
    encode_question,
    open_data,
    prompt_of,
    report_skipped,
    training_name,
    validation_key,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def _check_mixed(row: Row, columns: tuple[str, ...]) -> None:
    """Raise ConfigError for a row that is not both a conversation to learn from and a prompt."""
    SFT_ROWS.check_format(row, columns)
    PROMPT_ROWS.check_format(row, columns)


_MIXED_ROWS = RowSchema(PROMPT_ROWS.formats, PROMPT_ROWS.understood, _check_mixed)


def row_schemas(config: DistillRunConfig) -> tuple[RowSchema, RowSchema]:
    """Return the row formats of the training and of the validation files."""
    fraction = config.distill.on_policy_fraction
    if fraction == 0:
        return SFT_ROWS, SFT_ROWS
    return PROMPT_ROWS if fraction == 1 else _MIXED_ROWS, SFT_ROWS


class TaughtRow(NamedTuple):
    """An encoded row, or a prompt for the student, and the index of its teacher."""

    example: EncodedRow | Prompt
    teacher: int


def taught_examples(
    config: DistillRunConfig, rows: Rows, encoded: EncodedRows, set_name: str | None = None
) -> Examples[TaughtRow]:
    """Return encoded rows with their teachers.

    `set_name` is the name of a validation set, whose rows are never prompts.
    """
    teachers = TeacherOfRow(config, rows, set_name)
    has_prompts = config.generates and set_name is None

    def taught(row: int, example: EncodedRow) -> TaughtRow:
        shown = prompt_of(rows, row, example) if has_prompts else example
        return TaughtRow(shown, teachers.index(row))

    return Examples(encoded, taught)


def encode_row(encoder: ChatEncoder, config: DistillRunConfig, row: Row) -> EncodedRow | None:
    """Encode a conversation, or for sampled completions its prompt; None drops a row too long.

    Raises ConfigError for a bad row.
    """
    if not config.generates:
        return encode_conversation(encoder, config, row)
    # A row of a run with both kinds of steps must fit as a conversation, or a step that takes it as
    # one could have no row left.
    is_mixed = config.distill.on_policy_fraction < 1
    if is_mixed and encode_conversation(encoder, config, row) is None:
        return None
    return encode_question(encoder, config, row)


def open_source(config: DistillRunConfig, data: RunData | None = None) -> ExampleSource[TaughtRow]:
    """Return the training rows of a run, from `data` or read from the files of the config.

    Raises ConfigError for a missing or bad file or row.
    """
    if data is None:
        data = open_data(config, *row_schemas(config))
    return ExampleSource(config, data, encode_row, partial(taught_examples, config))


def validation_batches(config: DistillRunConfig, data: RunData, name: str) -> list[list[TaughtRow]]:
    """Return the rows of a validation set in batches, without those dropped as too long."""
    rows = data.validation[name]
    encoded = EncodedRows(rows, partial(encode_conversation, data.encoder, config))
    taught = taught_examples(config, rows, encoded, name)
    batches = list(taught.batches(config.policy.train_global_batch_size))
    report_skipped(encoded.skipped, validation_key(name))
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
    check_prompts_agree(encoder, diagnostics)
    messages = prompt_messages if config.generates else conversation
    check_texts(encoder, data.train, messages, diagnostics)
    source = open_source(config, data)
    check_num_steps(source, diagnostics)
    _check_lengths(config, data, diagnostics)
    if len(diagnostics.problems) > num_problems_before:
        return
    batch = diagnostics.check(lambda: next(source.loader())) or []
    title = "the first step"
    if config.generates:
        title = "a step with completions of the max length"
    describe_plan(config, title, _count_tokens(config, batch, longest=True), model, diagnostics)


def _check_lengths(config: DistillRunConfig, data: RunData, diagnostics: Diagnostics) -> None:
    """Check the lengths of a sample of the rows, and show the first ones."""
    encoder = data.encoder
    if config.generates:
        prompts = encode_sample(data.train, lambda row: encode_prompt_of(encoder, row), diagnostics)
        lengths = {index: len(token_ids) for index, token_ids in prompts.items()}
        check_prompts(config, data.train, lengths, diagnostics)
        diagnostics.add_lines("lengths", *length_lines(data.train, lengths, config.policy))
    for rows in (data.train, *data.validation.values()):
        if config.generates and rows is data.train:
            continue
        check_conversations(config, data, rows, diagnostics)


def first_lengths(
    config: DistillRunConfig, data: RunData, num_steps: int, progress: Progress
) -> RowLengths:
    """Return the row lengths of the first steps; lengths of completions are drawn at random."""
    source = open_source(config, data)
    rows = source.first_examples(min(num_steps, source.num_steps()), progress)
    counts = _count_tokens(config, rows, longest=False)
    description = training_name(config)
    if config.generates:
        description = (
            f"prompts of {training_name(config)}, completion lengths drawn uniformly from 1 to"
            f" {config.policy.generation.max_new_tokens:,} tokens"
        )
    return RowLengths(counts, description, is_ordered=True)


def _count_tokens(
    config: DistillRunConfig, rows: Sequence[TaughtRow], *, longest: bool
) -> TokenCounts:
    """Count the tokens of rows, with completions of the max or of random length."""
    groups = [row.teacher for row in rows]
    if not config.generates:
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


def resolve_teachers(config: DistillRunConfig) -> DistillRunConfig:
    """Return the config with the directories of the teachers; see `config.paths`."""
    found = {}
    for name, path in config.named_teachers.items():
        found[name] = model_directory(teacher_key(name), path, weights=True)
    # A single teacher has the name ''.
    return replace(
        config, distill=replace(config.distill, teacher=found.pop("", None), teachers=found)
    )


def open_teachers(
    config: DistillRunConfig, tokenizer: PreTrainedTokenizerBase
) -> dict[str, ModelSpec]:
    """Check the files, the layout and the tokenizer of every teacher; return their sizes by name.

    `tokenizer` is the policy's. Raises ConfigError for a teacher that cannot be used.
    """
    specs = {}
    for name, path in config.named_teachers.items():
        key = teacher_key(name)
        # The policy's checks, for a model that is not trained and samples nothing.
        policy = config.policy.frozen(path)
        as_policy = replace(
            config, policy=policy, distill=replace(config.distill, on_policy_fraction=0.0)
        )
        try:
            model_config = open_model_config(as_policy)
        except ConfigError as error:
            raise ConfigError(str(error).replace("policy.model_name", key)) from error
        try:
            own = load_tokenizer(model_directory(key, path, weights=False))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{key}: no tokenizer can be loaded from {path!r} ({error}); a teacher needs the"
                " files of its tokenizer, which must be equal to the policy's"
            ) from error
        problem = vocabulary_problem(tokenizer.get_vocab(), own.get_vocab())
        if problem is not None:
            raise ConfigError(
                f"{key}: the tokenizer of {path!r} differs from the policy's: {problem}. A student"
                " learns probabilities of token ids, so both need the same tokenizer: choose models"
                " of one family"
            )
        specs[name] = ModelSpec.from_config(model_config, path)
        _check_top_k(config, specs[name], key)
    return specs


def vocabulary_problem(policy: Mapping[str, int], teacher: Mapping[str, int]) -> str | None:
    """Describe the first difference of two vocabularies, or return None."""
    if policy == teacher:
        return None
    for token, index in sorted(policy.items(), key=lambda item: item[1]):
        other = teacher.get(token)
        if other != index:
            found = "no such token" if other is None else f"the id {other}"
            return f"token {token!r} has the id {index}, and {found} in the teacher's"
    return f"it has {len(teacher) - len(policy)} further tokens"


def _check_top_k(config: DistillRunConfig, teacher: ModelSpec, key: str) -> None:
    top_k = config.distill.top_k
    if top_k is None:
        return
    # Padding of the larger of both embeddings is not in the teacher's distribution.
    policy_size = open_model_spec(config).vocab_size
    if top_k >= min(teacher.vocab_size, policy_size):
        raise ConfigError(
            f"distill.top_k is {top_k}, but {key} has a vocabulary of {teacher.vocab_size} and the"
            f" policy one of {policy_size}; set it to null for the complete vocabulary"
        )


class TeacherOfRow:
    """Finds the teacher of the rows of a file, as an index of `DistillRunConfig.teacher_names`."""

    def __init__(self, config: DistillRunConfig, rows: Rows, name: str | None = None) -> None:
        """`name` is '' for `data.validation_path` and None for the training rows."""
        names = list(config.named_teachers)
        self._teachers: np.ndarray | None = None
        """Teacher of each set, int64 [S]; None for a single one."""
        self._first_rows = np.zeros(1, dtype=np.int64)
        """First row of each set, int64 [S]."""
        if len(names) == 1:
            return
        sets: tuple[str, ...] = (MAIN_SET,)
        if name is not None:
            sets = (name or MAIN_SET,)
        elif rows.mixture is not None:
            sets = rows.mixture.names
            sizes = np.array(rows.mixture.sizes, dtype=np.int64)
            self._first_rows = np.cumsum(sizes) - sizes
        self._teachers = np.array([names.index(each) for each in sets], dtype=np.int64)

    def index(self, row: int) -> int:
        """Return the teacher of a row."""
        if self._teachers is None:
            return 0
        position = np.searchsorted(self._first_rows, row, side="right") - 1
        return int(self._teachers[position])
