"""The rows of distillation, conversations or prompts, and the teachers: each row finds its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nemo_like.algorithms.distillation.config import DistillRunConfig, teacher_key
from nemo_like.algorithms.rows import open_data, row_settings
from nemo_like.config.errors import ConfigError
from nemo_like.config.paths import model_directory
from nemo_like.config.schema import MAIN_SET, PolicyConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.encoded_rows import EncodedRows, Examples
from nemo_like.data.formats import PROMPT_ROWS, SFT_ROWS, RowSchema
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.row_files import Row
from nemo_like.data.rows import Rows
from nemo_like.models.pretrained import load_tokenizer
from nemo_like.models.spec import ModelSpec
from nemo_like.rollout.conversations import Prompt
from nemo_like.training.encoding import EncodeRow, RowLimits, encode_conversation, encode_question
from nemo_like.training.model_files import open_model_config, open_model_spec
from nemo_like.training.prompts import prompt_of
from nemo_like.training.run_data import ExampleSource, RunData, report_skipped, validation_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    has_prompts = config.needs.rollouts is not None and set_name is None

    def taught(row: int, example: EncodedRow) -> TaughtRow:
        shown = prompt_of(rows, row, example) if has_prompts else example
        return TaughtRow(shown, teachers.index(row))

    return Examples(encoded, taught)


def _encode_mixed(encoder: ChatEncoder, limits: RowLimits, row: Row) -> EncodedRow | None:
    """Encode the prompt of a row that some steps take as a conversation.

    None drops a row that is too long. Raises ConfigError for a bad row.
    """
    # It must fit as a conversation, or a step that takes it as one could have no row left.
    if encode_conversation(encoder, limits, row) is None:
        return None
    return encode_question(encoder, limits, row)


def _encoding(fraction: float) -> EncodeRow:
    """Return how rows are encoded: as conversations, or for sampled completions as prompts."""
    if fraction == 0:
        return encode_conversation
    return encode_question if fraction == 1 else _encode_mixed


def open_source(config: DistillRunConfig, data: RunData | None = None) -> ExampleSource[TaughtRow]:
    """Return the training rows of a run, from `data` or read from the files of the config.

    Raises ConfigError for a missing or bad file or row.
    """
    if data is None:
        data = open_data(config, *row_schemas(config))
    taught = partial(taught_examples, config)
    return ExampleSource(
        row_settings(config), data, _encoding(config.distill.on_policy_fraction), taught
    )


def validation_batches(config: DistillRunConfig, data: RunData, name: str) -> list[list[TaughtRow]]:
    """Return the rows of a validation set in batches, without those dropped as too long."""
    rows = data.validation[name]
    limits = RowLimits.of(config.policy, config.data)
    encoded = EncodedRows(rows, partial(encode_conversation, data.encoder, limits))
    taught = taught_examples(config, rows, encoded, name)
    batches = list(taught.batches(config.policy.train_global_batch_size))
    report_skipped(encoded.skipped, validation_key(name))
    return batches


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
        needs = replace(config.needs, rollouts=None)
        try:
            model_config = open_model_config(policy, config.parallel, config.cluster, needs)
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
        _check_top_k(config.distill.top_k, config.policy, specs[name], key)
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


def _check_top_k(top_k: int | None, policy: PolicyConfig, teacher: ModelSpec, key: str) -> None:
    if top_k is None:
        return
    # Padding of the larger of both embeddings is not in the teacher's distribution.
    policy_size = open_model_spec(policy).vocab_size
    if top_k >= min(teacher.vocab_size, policy_size):
        raise ConfigError(
            f"distill.top_k is {top_k}, but {key} has a vocabulary of {teacher.vocab_size} and the"
            f" policy one of {policy_size}; set it to null for the complete vocabulary"
        )


class TeacherOfRow:
    """Finds the teacher of the rows of a file, as an index of `RunNeeds.teachers`."""

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
