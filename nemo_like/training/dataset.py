"""The rows of a run: read from files, encoded ahead of the steps, and shuffled by a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.config.import_path import import_function, user_error_text
from nemo_like.config.schema import EpochLoopConfig, RunConfig
from nemo_like.config.text import counted, plural
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.datasets import RowSchema
from nemo_like.data.encoded_rows import EncodedRows
from nemo_like.data.loader import BatchLoader, FetchableRows, RowLoader, no_batch_text, num_batches
from nemo_like.data.row_files import Row
from nemo_like.data.row_order import Curriculum
from nemo_like.data.rows import Rows
from nemo_like.metrics import Mean, Metrics, Sum
from nemo_like.run.checkpoint import Checkpoint, CheckpointError
from nemo_like.run.progress import Progress
from nemo_like.training.data_sets import load_training, load_validation
from nemo_like.training.encoding import EncodeRow, encode_ahead, open_training_rows
from nemo_like.training.model_files import open_encoder, open_model_config

ExampleT = TypeVar("ExampleT")


@dataclass(frozen=True)
class RunData:
    """The files of a run: the tokenizer, and the rows as text."""

    encoder: ChatEncoder
    train: Rows
    validation: Mapping[str, Rows] = field(default_factory=dict)
    """The rows of each validation set by its name."""


def open_data(
    config: RunConfig, schema: RowSchema, validation_schema: RowSchema | None = None
) -> RunData:
    """Read and check the files of a run. Raises ConfigError for a missing or bad file or row.

    The validation rows have the formats of `schema` as well by default.
    """
    # The model first: its check is faster than reading the data.
    model = open_model_config(config)
    train = load_training(config, schema, Progress())
    validation = load_validation(config, validation_schema or schema)
    encoder = open_encoder(config, model.get_text_config().vocab_size)
    return RunData(encoder, train, validation)


class ExampleSource(Generic[ExampleT]):
    """The training rows of a run as examples of a job, such as conversations or prompts."""

    def __init__(
        self,
        config: RunConfig,
        data: RunData,
        encode: EncodeRow,
        to_examples: Callable[[Rows, EncodedRows], FetchableRows[ExampleT]],
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
        return open_training_rows(self.config, self.data.encoder, self.data.train, self._encode)

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
        """Encode the rows of `order`, int64 [n]; see `encoding.encode_ahead`.

        Raises ConfigError for bad rows.
        """
        encode_ahead(self.config, self.rows, order)

    def validation_batches(self, name: str) -> Iterator[list[ExampleT]]:
        """Yield every row of a validation set once, without the rows dropped as too long."""
        rows = self.data.validation[name]
        encoded = EncodedRows(rows, partial(self._encode, self.data.encoder, self.config))
        examples = self._to_examples(rows, encoded)
        batch_size = self.config.policy.train_global_batch_size
        for start in range(0, len(rows), batch_size):
            end = min(start + batch_size, len(rows))
            batch = [row for row in examples.fetch(range(start, end)) if row is not None]
            if batch:
                yield batch

    def all_validation_batches(self) -> dict[str, list[list[ExampleT]]]:
        """Return the batches of every validation set by its name; see `validation_batches`."""
        return {name: list(self.validation_batches(name)) for name in self.data.validation}

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
        return steps_per_epoch(self.config, self.rows.num_kept, batch_size)

    def num_steps(self, limits: EpochLoopConfig) -> int:
        """Return the number of steps: the smaller of `max_num_steps` and the epochs."""
        in_epochs = limits.max_num_epochs * self.steps_per_epoch()
        return _at_most(in_epochs, limits.max_num_steps)

    def last_step(
        self, limits: EpochLoopConfig, loader: BatchLoader[ExampleT], step: int
    ) -> int | None:
        """Return the last step of a run whose loader has delivered the batches up to `step`.

        It differs from `num_steps` if the files changed between a checkpoint and its resume. None
        if the number of batches is not known in advance and `limits` has no number of steps. Raises
        ConfigError if a run would have no step, because too many rows are left out.
        """
        num_left = loader.batches_left(limits.max_num_epochs, self.rows.is_kept)
        if num_left is None:
            return limits.max_num_steps
        if step + num_left == 0:
            _, batch_size = self.config.examples_per_step
            raise ConfigError(no_batch_text(self.rows.num_kept, batch_size))
        return _at_most(step + num_left, limits.max_num_steps)

    def is_exhausted(self, limits: EpochLoopConfig, loader: BatchLoader[ExampleT]) -> bool:
        """Return True if the loader has no further batch. Raises ConfigError for a bad row."""
        # `last_step` is exact.
        if self.config.has_fixed_batches:
            return False
        return not loader.has_batch(limits.max_num_epochs, self.rows.is_kept)


def encoded_examples(rows: Rows, encoded: EncodedRows) -> EncodedRows:
    """Return the encoded rows: a job without a conversion uses them as its examples."""
    return encoded


def _at_most(count: int, limit: int | None) -> int:
    return count if limit is None else min(count, limit)


def steps_per_epoch(config: RunConfig, num_rows: int, batch_size: int) -> int:
    """Return the number of steps of one epoch. Raises ConfigError if it is 0."""
    steps = num_batches(num_rows, batch_size, config.data.last_batch)
    if steps == 0:
        raise ConfigError(no_batch_text(num_rows, batch_size))
    return steps


def describe_run(config: RunConfig, num_steps: int, num_rows: int) -> str:
    """Describe the length of a run over epochs.

    Example: `6 steps; an epoch is 3 steps of 32 rows`.
    """
    batch_size = config.policy.train_global_batch_size
    epoch = describe_epoch(config, num_rows, batch_size, f"{config.example}s")
    return f"{counted(num_steps, 'step')}; {epoch}"


def describe_epoch(config: RunConfig, num_rows: int, batch_size: int, noun: str) -> str:
    """Describe the steps of an epoch. Raises ConfigError if it has none.

    Example: `an epoch is 3 steps of 32 rows and 1 of 4`.
    """
    steps = steps_per_epoch(config, num_rows, batch_size)
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


_COLUMN = "column:"


def open_curriculum(
    name: str | None, rows: Rows, encoded: EncodedRows, progress: Progress
) -> Curriculum | None:
    """Return the difficulty of `rows` that `data.curriculum` names; None without one.

    For `length` every row is encoded first. Raises ConfigError for a row without a finite number.
    """
    if name is None:
        return None
    if name == "length":
        return Curriculum(name, _lengths(encoded, progress))
    measure = _column_measure(name.removeprefix(_COLUMN))
    if not name.startswith(_COLUMN):
        measure = import_function(
            "data.curriculum", name, "my_package.difficulty", "row of the file"
        )
    difficulty = np.empty(len(rows), dtype=np.float64)
    for index, row in enumerate(rows):
        difficulty[index] = _number(measure, row, f"{rows.location(index)}: data.curriculum {name}")
    return Curriculum(name, difficulty)


def _lengths(encoded: EncodedRows, progress: Progress) -> np.ndarray:
    """Encode every row; return the lengths, float64 [N], 0 for a dropped row."""
    with progress.phase("encoding rows for data.curriculum=length", len(encoded)) as phase:
        encoded.encode_ahead(np.arange(len(encoded)), phase.advance)
    lengths = np.zeros(len(encoded), dtype=np.float64)
    for index in range(len(encoded)):
        row = encoded.fetch([index])[0]
        if row is not None:
            lengths[index] = len(row.input_ids)
    return lengths


def _column_measure(column: str) -> Callable[[Row], Any]:
    """Return a function that gives the value of `column` in a row."""
    return lambda row: row.get(column)


def _number(measure: Callable[[Row], Any], row: Row, place: str) -> float:
    """Return the difficulty of a row. Raises ConfigError that begins with `place`."""
    try:
        value = measure(row)
    except Exception as error:
        # A function of the user can fail in any way.
        raise ConfigError(f"{place} failed with {user_error_text(error)}") from error
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not np.isfinite(np.float32(value)):
        raise ConfigError(f"{place} is {value!r}; every row needs a finite number")
    return float(value)


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
    sources = loader.batch_sources()
    counts = {} if sources is None else sources.num_rows
    for name, num_rows in counts.items():
        metrics[f"data/source_{name}/num_rows"] = Sum(num_rows)
    return metrics
