"""The rows of a run: read from files, encoded ahead of the steps, and shuffled by a loader."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np

from nemo_like.config.errors import ConfigError, counted, plural
from nemo_like.config.schema import MAIN_SET, DataConfig, RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.column_names import check_columns
from nemo_like.data.encoded_rows import EncodedRows, Examples, OversizeError
from nemo_like.data.formats import (
    SFT_ROWS,
    RowSchema,
    conversation,
    flagged_conversation,
    question,
    trained_tokens,
)
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.loader import BatchLoader, RowLoader, no_batch_text, num_batches
from nemo_like.data.messages import TrainOn, mask_turns, row_tools, trained_turns
from nemo_like.data.row_files import Row
from nemo_like.data.row_order import Curriculum, Mixture
from nemo_like.data.rows import BadRows, PassRateFilter, Rows, load_rows
from nemo_like.metrics import Mean, Metrics, Sum
from nemo_like.rollout.conversations import Prompt
from nemo_like.run.checkpoint import Checkpoint, CheckpointError
from nemo_like.run.progress import Progress
from nemo_like.training.model_files import open_encoder, open_model_config
from nemo_like.training.model_warnings import check_new_tokens


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts of one validation set, P of them."""

    name: str
    """"" for `data.validation_path`."""
    rows: Rows
    prompts: Sequence[Prompt]
    row_numbers: Sequence[int]
    """Row of each prompt, counted from 0: rows that are too long have no prompt."""


def validation_key(name: str) -> str:
    """Return the config key of a set."""
    return f"data.validation_sets.{name}" if name else "data.validation_path"


def named_metrics(name: str, metrics: Metrics) -> Metrics:
    """Return the metrics of a set by their logged names."""
    named: Metrics = {}
    for metric, value in metrics.items():
        named[f"validation/{name}/{metric}" if name else f"validation/{metric}"] = value
    return named


def load_validation(config: RunConfig, schema: RowSchema) -> dict[str, Rows]:
    """Read the rows of every validation set, by name.

    Raises ConfigError for a missing or empty file, or a bad line.
    """
    rows = {}
    for name, path in config.data.validation_files.items():
        rows[name] = load_rows(
            path,
            schema,
            max_rows=config.data.max_validation_rows,
            key=validation_key(name),
            columns=config.data.columns_of(name),
            set_name=name,
            skips_bad=config.data.on_bad_row == "skip",
        )
        report_skipped(rows[name].bad, validation_key(name))
    return rows


def report_skipped(bad: BadRows, name: str, progress: Progress | None = None) -> None:
    """Print the rows of a set that `data.on_bad_row=skip` left out, the first if they are many."""
    if bad.num_rows:
        text = f"{name}: data.on_bad_row=skip leaves out {counted(bad.num_rows, 'row')}"
        (progress or Progress(sys.stderr)).print_line("\n".join([f"{text}:", *bad.lines()]))


def prompt_sets(
    config: RunConfig, encoder: ChatEncoder, validation: Mapping[str, Rows]
) -> list[PromptSet]:
    """Return the validation rows as prompts, without the rows dropped as too long.

    Raises ConfigError for a bad row.
    """
    sets = []
    for name, rows in validation.items():
        encoded = EncodedRows(rows, partial(encode_question, encoder, config))
        prompts = []
        numbers = []
        for number, prompt in enumerate(prompt_examples(rows, encoded).fetch(range(len(rows)))):
            if prompt is not None:
                prompts.append(prompt)
                numbers.append(number)
        report_skipped(encoded.skipped, validation_key(name))
        sets.append(PromptSet(name=name, rows=rows, prompts=prompts, row_numbers=numbers))
    return sets


def load_training(config: RunConfig, schema: RowSchema, progress: Progress) -> Rows:
    """Read the training rows. Raises ConfigError for a missing or empty file, or a bad line."""
    check_all_columns(config.data)
    sets = {name: load_set(config, schema, name, progress) for name in training_files(config)}
    return mixed_rows(sets, config.data.train_weights)


def check_all_columns(data: DataConfig) -> None:
    """Raise ConfigError if a renamed column of a set has no meaning."""
    check_columns(data.columns)
    for name, columns in data.set_columns.items():
        check_columns(columns, f"data.set_columns.{name}")


def training_files(config: RunConfig) -> dict[str, str]:
    """Return the path of each training set by its name."""
    return {MAIN_SET: config.data.train_path, **config.data.train_sets}


def training_name(config: RunConfig) -> str:
    """Return the training rows by name, for messages: the file, or the sets of a mixture."""
    names = list(training_files(config))
    return config.data.train_path if len(names) == 1 else f"the training sets {', '.join(names)}"


def load_set(config: RunConfig, schema: RowSchema, name: str, progress: Progress) -> Rows:
    """Read one training set. Raises ConfigError for a missing or empty file, or a bad line."""
    data = config.data
    key = training_key(name)
    with progress.phase(f"reading {key}") as phase:
        rows = load_rows(
            training_files(config)[name],
            schema,
            max_rows=data.max_train_rows,
            key=key,
            columns=data.columns_of(name),
            set_name=name,
            skips_bad=data.on_bad_row == "skip",
            selection=_selection(config),
            advance=phase.advance,
        )
    report_skipped(rows.bad, key, progress)
    if rows.num_left_out:
        progress.print_line(
            f"{key}: data.pass_rate_range leaves out {rows.num_left_out:,} rows, {len(rows):,} are"
            " left"
        )
    return rows


def describe_mixture(mixture: Mixture) -> str:
    """Describe the shares of the sources.

    Example: `mixture: train 0.7 (0.9 passes per epoch), code 0.3 (2.1 passes per epoch)`.
    """
    total = sum(mixture.weights)
    parts = []
    for name, size, weight in zip(mixture.names, mixture.sizes, mixture.weights, strict=True):
        passes = weight / total * sum(mixture.sizes) / size
        parts.append(f"{name} {weight / total:.4g} ({passes:.3g} passes per epoch)")
    return f"mixture: {', '.join(parts)}"


def _selection(config: RunConfig) -> PassRateFilter | None:
    """Return the filter of the training rows; None if all are kept."""
    minimum, maximum = config.data.pass_rate_range
    if (minimum, maximum) == (0.0, 1.0):
        return None
    return PassRateFilter(minimum=minimum, maximum=maximum)


def training_key(name: str) -> str:
    """Return the config key of a training set."""
    return "data.train_path" if name == MAIN_SET else f"data.train_sets.{name}"


def mixed_rows(sets: Mapping[str, Rows], weights: Mapping[str, float]) -> Rows:
    """Return the rows of several sets with their mixture; a single set is unchanged.

    Without `weights` these are the numbers of rows, so each row is visited once per epoch.
    """
    if len(sets) == 1:
        return next(iter(sets.values()))
    sizes = tuple(map(len, sets.values()))
    by_name = weights or dict(zip(sets, map(float, sizes), strict=True))
    mixture = Mixture(names=tuple(sets), sizes=sizes, weights=tuple(by_name[name] for name in sets))
    first, *others = sets.values()
    return first.mixed_with(others, mixture)


ExampleT = TypeVar("ExampleT")

# Of a config of any algorithm.
EncodeRow = Callable[[ChatEncoder, Any, Row], EncodedRow | None]
"""Encodes one row of a file. None drops the row; raises ConfigError for a bad row."""


@dataclass(frozen=True)
class RunData:
    """The files of a run: the tokenizer, and the rows as text."""

    encoder: ChatEncoder
    train: Rows
    validation: Mapping[str, Rows] = field(default_factory=dict)
    """The rows of each validation set by its name."""


def open_data(config: RunConfig, train_schema: RowSchema, validation_schema: RowSchema) -> RunData:
    """Read and check the files of a run. Raises ConfigError for a missing or bad file or row."""
    # The model first: its check is faster than reading the data.
    model = open_model_config(config)
    train = load_training(config, train_schema, Progress())
    validation = load_validation(config, validation_schema)
    encoder = open_encoder(config, model.get_text_config().vocab_size)
    check_new_tokens(config.policy, encoder)
    return RunData(encoder, train, validation)


class ExampleSource(Generic[ExampleT]):
    """The training rows of a run as examples of a job, such as conversations or prompts."""

    def __init__(
        self,
        config: RunConfig,
        data: RunData,
        encode: EncodeRow,
        to_examples: Callable[[Rows, EncodedRows], Examples[ExampleT]],
    ) -> None:
        """Prepare to encode rows with `encode`; `to_examples` converts encoded rows."""
        self.config = config
        self.data = data
        self._encode = encode
        self._to_examples = to_examples

    # Cached: it has the encoded rows.
    @cached_property
    def rows(self) -> EncodedRows:
        """The training rows in their encoded form."""
        encoder = self.data.encoder
        return EncodedRows(
            self.data.train,
            partial(self._encode, encoder, self.config),
            num_processes=self.config.data.num_encoding_workers,
            settings=partial(encoding_settings, self.config, encoder),
        )

    def loader(self, curriculum: Curriculum | None = None) -> RowLoader[ExampleT]:
        """Return an endless loader; a batch has the examples of one step."""
        data = self.config.data
        _, batch_size = self.config.examples_per_step
        return RowLoader(
            self._to_examples(self.data.train, self.rows),
            batch_size=batch_size,
            seed=self.config.seed,
            shuffle=data.shuffle,
            last_batch=data.last_batch,
            curriculum=curriculum,
            mixture=self.data.train.mixture,
        )

    def encode_ahead(self, order: np.ndarray) -> None:
        """Encode the rows `order` int64 [n]; every row if rows can be left out.

        The number of steps depends on the rows that are left, whose number is printed. Raises
        ConfigError for bad rows.
        """
        progress = Progress()
        rows = self.rows
        data = self.config.data
        is_skipping = data.on_bad_row == "skip"
        is_dropping = self.config.policy.oversize_rows == "drop" or data.max_prompt_tokens
        if is_skipping or is_dropping:
            is_missing = np.ones(len(rows), dtype=bool)
            is_missing[order] = False
            order = np.concatenate([order, np.flatnonzero(is_missing)])
        with progress.phase("encoding rows", len(order)) as phase:
            rows.encode_ahead(order, phase.advance)
        report_skipped(rows.skipped, "the training rows", progress)
        dropped = rows.dropped
        if len(dropped):
            key = "policy.oversize_rows=drop"
            if data.max_prompt_tokens is not None:
                key = f"data.max_prompt_tokens {data.max_prompt_tokens}"
            progress.print_line(
                f"{key} leaves out {len(dropped):,} of {len(rows):,} rows, which are too long; the"
                f" first is {rows.location(int(dropped[0]))}"
            )

    def validation_batches(self) -> dict[str, list[list[ExampleT]]]:
        """Return the batches of every validation set, without the rows dropped as too long."""
        batch_size = self.config.policy.train_global_batch_size
        batches: dict[str, list[list[ExampleT]]] = {}
        for name, rows in self.data.validation.items():
            encoded = EncodedRows(rows, partial(self._encode, self.data.encoder, self.config))
            examples = self._to_examples(rows, encoded)
            batches[name] = list(examples.batches(batch_size))
            report_skipped(encoded.skipped, validation_key(name))
        return batches

    def first_examples(
        self, num_batches: int, progress: Progress, curriculum: Curriculum | None = None
    ) -> list[ExampleT]:
        """Return the examples of the first batches, at least one, that have the largest size.

        The last batch of an epoch may be smaller; a plan of it would not be typical.
        """
        num_batches = max(num_batches, 1)
        batches = []
        with progress.phase("encoding rows", num_batches, unit="batches") as phase:
            for batch in islice(self.loader(curriculum), num_batches):
                batches.append(batch)
                phase.advance()
        max_size = max(map(len, batches))
        examples: list[ExampleT] = []
        for batch in batches:
            if len(batch) == max_size:
                examples.extend(batch)
        return examples

    def steps_per_epoch(self) -> int:
        """Return the number of steps of one epoch. Raises ConfigError if it is 0."""
        _, batch_size = self.config.examples_per_step
        return steps_per_epoch(self.config.data, self.rows.num_kept, batch_size)

    def num_steps(self) -> int:
        """Return the number of steps: the smaller of `max_num_steps` and the epochs."""
        limits = self.config.epoch_loop
        in_epochs = limits.max_num_epochs * self.steps_per_epoch()
        return min(in_epochs, limits.max_num_steps or in_epochs)

    def last_step(self, loader: BatchLoader[ExampleT], step: int) -> int | None:
        """Return the last step of a run whose loader has delivered the batches up to `step`.

        It differs from `num_steps` if the files changed between a checkpoint and its resume. None
        if the number of batches is not known in advance and the config has no number of steps.
        Raises ConfigError if a run would have no step, because too many rows are left out.
        """
        limits = self.config.epoch_loop
        num_left = loader.batches_left(limits.max_num_epochs, self.rows.is_kept)
        if num_left is None:
            return limits.max_num_steps
        if step + num_left == 0:
            _, batch_size = self.config.examples_per_step
            raise ConfigError(no_batch_text(self.rows.num_kept, batch_size))
        return min(step + num_left, limits.max_num_steps or step + num_left)


def steps_per_epoch(data: DataConfig, num_rows: int, batch_size: int) -> int:
    """Return the number of steps of one epoch. Raises ConfigError if it is 0."""
    steps = num_batches(num_rows, batch_size, data.last_batch)
    if steps == 0:
        raise ConfigError(no_batch_text(num_rows, batch_size))
    return steps


def describe_run(config: RunConfig, num_steps: int, num_rows: int) -> str:
    """Describe the length of a run over epochs.

    Example: `6 steps; an epoch is 3 steps of 32 rows`.
    """
    batch_size = config.policy.train_global_batch_size
    epoch = describe_epoch(config.data, num_rows, batch_size, f"{config.example}s")
    return f"{counted(num_steps, 'step')}; {epoch}"


def describe_epoch(data: DataConfig, num_rows: int, batch_size: int, noun: str) -> str:
    """Describe the steps of an epoch. Raises ConfigError if it has none.

    Example: `an epoch is 3 steps of 32 rows and 1 of 4`.
    """
    steps = steps_per_epoch(data, num_rows, batch_size)
    num_full, num_left = divmod(num_rows, batch_size)
    # With last_batch=keep an epoch may be a single, smaller batch.
    if num_full == 0:
        return (
            f"an epoch is 1 step of {num_rows:,} {noun}, fewer than the {batch_size:,} of a batch"
        )
    text = f"an epoch is {num_full:,} {plural(num_full, 'step')} of {batch_size:,} {noun}"
    if num_left == 0:
        return text
    if steps > num_full:
        return f"{text} and 1 of {num_left:,}"
    return f"{text}; {num_left:,} are left out each time (data.last_batch=drop)"


def load_position(checkpoint: Checkpoint, loader: BatchLoader, *, allow_changed_rows: bool) -> bool:
    """Move the loader to the position of a checkpoint; return True if the rows are the same.

    Raises CheckpointError for a damaged checkpoint, and ConfigError for changed rows unless
    `allow_changed_rows`.
    """
    state = checkpoint.state()
    try:
        return loader.load_state_dict(state.loader, allow_changed_rows=allow_changed_rows)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint.path} has a damaged position of the data loader: {error!r}"
        ) from error


def loader_metrics(loader: BatchLoader) -> Metrics:
    """Return the metrics of the last batch."""
    metrics: Metrics = {
        "data/epoch": Mean(loader.epoch),
        "data/num_dropped": Sum(loader.num_dropped),
    }
    if loader.rows.num_skipped:
        metrics["data/num_skipped_rows"] = Mean(loader.rows.num_skipped)
    sources = loader.batch_sources()
    if sources is not None and loader.mixture is not None:
        for index, name in enumerate(loader.mixture.names):
            metrics[f"data/source_{name}/num_rows"] = Sum(int(np.count_nonzero(sources == index)))
    return metrics


def encode_conversation(encoder: ChatEncoder, config: RunConfig, row: Row) -> EncodedRow | None:
    """Encode one SFT row; return None if it is too long and `policy.oversize_rows` is drop.

    Raises ConfigError if it is too long and `policy.oversize_rows` is error.
    """
    return fit_row(encode_sft_row(encoder, config.data.train_on, row), config)


def encode_sft_row(encoder: ChatEncoder, train_on: TrainOn, row: Row) -> EncodedRow:
    """Encode one SFT row of any format and length; see `data.train_on`.

    Raises ConfigError for loss flags that contradict `train_on` or leave nothing to learn.
    """
    columns = SFT_ROWS.recognize(row)
    if columns == ("input_ids",):
        return _encode_tokens(encoder, row)
    if columns == ("text",):
        return _encode_text(encoder, row["text"])
    turns = trained_turns(flagged_conversation(row), train_on)
    encoded = encoder.encode_sft(conversation(row), row_tools(row))
    return encoded if turns is None else mask_turns(encoded, turns)


def _encode_tokens(encoder: ChatEncoder, row: Row) -> EncodedRow:
    """Return the tokens of a row with `input_ids`; nothing is added.

    Raises ConfigError for an id that the tokenizer or the model does not have.
    """
    ids = encoder.checked_ids(row["input_ids"])
    num_tokens = len(encoder.tokenizer)
    if ids.max() >= num_tokens:
        raise ConfigError(
            f"input_ids has the token id {ids.max()}, but the tokenizer"
            f" {encoder.tokenizer.name_or_path!r} has {num_tokens} tokens; was the row made with"
            " another tokenizer?"
        )
    return EncodedRow(ids, trained_tokens(row))


def _encode_text(encoder: ChatEncoder, text: str) -> EncodedRow:
    """Encode raw text with loss on all tokens.

    The tokenizer adds its own special tokens, such as the beginning of a sequence, unless the text
    has it already, as a rendered conversation does; the end-of-sequence token follows the text.
    """
    encoded: Any = encoder.tokenizer(text)["input_ids"]
    ids = list(encoded)
    bos_token_id = encoder.tokenizer.bos_token_id
    if bos_token_id is not None and ids[:2] == [bos_token_id, bos_token_id]:
        del ids[0]
    if not ids or ids[-1] != encoder.eos_token_id:
        ids.append(encoder.eos_token_id)
    return EncodedRow(encoder.checked_ids(ids), np.ones(len(ids), dtype=np.uint8))


def fit_row(encoded: EncodedRow, config: RunConfig) -> EncodedRow | None:
    """Apply `policy.oversize_rows` to a row: return it, its beginning, or None to drop it.

    Raises ConfigError if it is too long and `policy.oversize_rows` is error.
    """
    length = len(encoded.input_ids)
    limit = config.policy.max_total_sequence_length
    # The planner gives a singleton a microbatch of its own.
    if length <= limit or config.policy.oversize_rows == "singleton":
        return encoded
    if config.policy.oversize_rows == "truncate":
        return EncodedRow(encoded.input_ids[:limit], encoded.token_mask[:limit])
    if config.policy.oversize_rows == "drop":
        return None
    raise OversizeError(
        f"the row has {length} tokens, policy.max_total_sequence_length is {limit}; raise it, or"
        " set policy.oversize_rows to truncate (remove the end), drop (skip the row) or singleton"
        " (a separate microbatch)"
    )


def encode_question(encoder: ChatEncoder, config: RunConfig, row: Row) -> EncodedRow | None:
    """Encode the prompt of one row, with a token mask of zeros.

    Returns None for a prompt above `data.max_prompt_tokens`. For one that leaves no room for a
    completion, `policy.oversize_rows` decides: truncate removes its beginning, so that
    `max_new_tokens` fit behind it; drop returns None; the other values raise ConfigError.
    """
    prompt = question(row)
    token_ids = encoder.encode_prompt(prompt.messages, prompt.tools)
    policy = config.policy
    length = len(token_ids)
    max_tokens = config.data.max_prompt_tokens
    if max_tokens is not None and length > max_tokens:
        return None
    limit = policy.max_total_sequence_length
    if length >= limit:
        if policy.oversize_rows == "drop":
            return None
        if policy.oversize_rows != "truncate":
            raise OversizeError(
                f"the prompt has {length} tokens, policy.max_total_sequence_length is {limit}, so"
                " there is no room for a completion; raise it, or set policy.oversize_rows to"
                " truncate (remove the beginning) or drop (skip the row)"
            )
        # The end of a prompt has the question and the opening of the assistant turn.
        num_kept = max(limit - policy.generation.max_new_tokens, 1)
        token_ids = token_ids[-num_kept:]
    return EncodedRow(token_ids, np.zeros(len(token_ids), dtype=np.uint8))


def encoded_examples(rows: Rows, encoded: EncodedRows) -> Examples[EncodedRow]:
    """Return encoded rows as they are."""
    return Examples(encoded, lambda _, row: row)


def prompt_examples(rows: Rows, encoded: EncodedRows) -> Examples[Prompt]:
    """Return encoded rows as prompts."""
    return Examples(encoded, partial(prompt_of, rows))


def prompt_of(rows: Rows, row: int, encoded: EncodedRow) -> Prompt:
    """Return an encoded row of `rows` as a prompt."""
    fields = question(rows[row])
    return Prompt(
        token_ids=encoded.input_ids, text=fields.text, answer=fields.answer, row=fields.row
    )


def encoding_settings(config: RunConfig, encoder: ChatEncoder) -> str:
    """Return all that the encoding of a row depends on, as text."""
    tokenizer: Any = encoder.tokenizer
    keys = ("max_total_sequence_length", "oversize_rows")
    values = (
        config.kind,
        config.generates,
        # The share of distillation steps that take a row as a prompt.
        getattr(getattr(config, config.kind, None), "on_policy_fraction", None),
        config.data,
        [getattr(config.policy, key) for key in keys],
        config.policy.generation.max_new_tokens,
        encoder.vocab_size,
        str(tokenizer.chat_template),
        tokenizer.special_tokens_map,
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.get_vocab(),
    )
    return repr(values)
