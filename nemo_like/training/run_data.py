"""The rows of a run: read from files, encoded ahead of the steps, and shuffled by a loader."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Generic, TypeVar

import numpy as np

from nemo_like.config.errors import ConfigError, counted, plural
from nemo_like.config.needs import BatchNeeds
from nemo_like.config.schema import MAIN_SET, DataConfig, EpochLoopConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.column_names import check_columns
from nemo_like.data.encoded_rows import EncodedRows, Examples
from nemo_like.data.formats import RowSchema
from nemo_like.data.image_encoding import ImageEncoder
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.loader import BatchLoader, RowLoader, no_batch_text, num_batches
from nemo_like.data.row_order import Curriculum, Mixture, RowOrder
from nemo_like.data.rows import BadRows, PassRateFilter, Rows, load_rows
from nemo_like.metrics import Mean, Metrics, Sum
from nemo_like.run.checkpoint import Checkpoint, CheckpointError
from nemo_like.run.progress import Progress
from nemo_like.training.encoding import EncodeRow, RowLimits, encoding_settings


def validation_key(name: str) -> str:
    """Return the config key of a set."""
    return f"data.validation_sets.{name}" if name else "data.validation_path"


def named_metrics(name: str, metrics: Metrics) -> Metrics:
    """Return the metrics of a set by their logged names."""
    named: Metrics = {}
    for metric, value in metrics.items():
        named[f"validation/{name}/{metric}" if name else f"validation/{metric}"] = value
    return named


def load_validation(
    data: DataConfig, schema: RowSchema, images: ImageEncoder | None = None
) -> dict[str, Rows]:
    """Read the rows of every validation set, by name; `images` places the images of a row.

    Raises ConfigError for a missing or empty file, or a bad line.
    """
    rows = {}
    for name, path in data.validation_files.items():
        rows[name] = load_rows(
            path,
            schema,
            max_rows=data.max_validation_rows,
            key=validation_key(name),
            columns=data.columns_of(name),
            set_name=name,
            skips_bad=data.on_bad_row == "skip",
            images=images,
        )
        report_skipped(rows[name].bad, validation_key(name))
    return rows


def report_skipped(bad: BadRows, name: str, progress: Progress | None = None) -> None:
    """Print the rows of a set that `data.on_bad_row=skip` left out, the first if they are many."""
    if bad.num_rows:
        text = f"{name}: data.on_bad_row=skip leaves out {counted(bad.num_rows, 'row')}"
        (progress or Progress(sys.stderr)).print_line("\n".join([f"{text}:", *bad.lines()]))


def load_training(
    data: DataConfig, schema: RowSchema, progress: Progress, images: ImageEncoder | None = None
) -> Rows:
    """Read the training rows. Raises ConfigError for a missing or empty file, or a bad line."""
    check_all_columns(data)
    sets = {name: load_set(data, schema, name, progress, images) for name in training_files(data)}
    return mixed_rows(sets, data.train_weights)


def check_all_columns(data: DataConfig) -> None:
    """Raise ConfigError if a renamed column of a set has no meaning."""
    check_columns(data.columns)
    for name, columns in data.set_columns.items():
        check_columns(columns, f"data.set_columns.{name}")


def training_files(data: DataConfig) -> dict[str, str]:
    """Return the path of each training set by its name."""
    return {MAIN_SET: data.train_path, **data.train_sets}


def training_name(data: DataConfig) -> str:
    """Return the training rows by name, for messages: the file, or the sets of a mixture."""
    names = list(training_files(data))
    return data.train_path if len(names) == 1 else f"the training sets {', '.join(names)}"


def load_set(
    data: DataConfig,
    schema: RowSchema,
    name: str,
    progress: Progress,
    images: ImageEncoder | None = None,
) -> Rows:
    """Read one training set. Raises ConfigError for a missing or empty file, or a bad line."""
    key = training_key(name)
    with progress.phase(f"reading {key}") as phase:
        rows = load_rows(
            training_files(data)[name],
            schema,
            max_rows=data.max_train_rows,
            key=key,
            columns=data.columns_of(name),
            set_name=name,
            skips_bad=data.on_bad_row == "skip",
            selection=_selection(data),
            images=images,
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


def _selection(data: DataConfig) -> PassRateFilter | None:
    """Return the filter of the training rows; None if all are kept."""
    minimum, maximum = data.pass_rate_range
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


@dataclass(frozen=True)
class RunData:
    """The files of a run: the tokenizer, and the rows as text."""

    encoder: ChatEncoder
    train: Rows
    validation: Mapping[str, Rows] = field(default_factory=dict)
    """The rows of each validation set by its name."""


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """How the rows of a run are encoded and in which batches they are read."""

    data: DataConfig
    limits: RowLimits
    batch: BatchNeeds
    seed: int


class ExampleSource(Generic[ExampleT]):
    """The training rows of a run as examples of a job, such as conversations or prompts."""

    def __init__(
        self,
        settings: RowSettings,
        data: RunData,
        encode: EncodeRow,
        to_examples: Callable[[Rows, EncodedRows], Examples[ExampleT]],
    ) -> None:
        """Prepare to encode rows with `encode`; `to_examples` converts encoded rows."""
        self.settings = settings
        self.data = data
        self._encode = encode
        self._to_examples = to_examples

    # Cached: it has the encoded rows.
    @cached_property
    def rows(self) -> EncodedRows:
        """The training rows in their encoded form."""
        encoder = self.data.encoder
        limits, data = self.settings.limits, self.settings.data
        return EncodedRows(
            self.data.train,
            partial(self._encode, encoder, limits),
            num_processes=data.num_encoding_workers,
            settings=partial(encoding_settings, self._encode, encoder, limits, data),
        )

    def loader(self, curriculum: Curriculum | None = None) -> RowLoader[ExampleT]:
        """Return an endless loader; a batch has the examples of one step."""
        return RowLoader(
            self._to_examples(self.data.train, self.rows),
            self.order(curriculum),
            batch_size=self.settings.batch.num_examples,
            last_batch=self.settings.data.last_batch,
        )

    def order(self, curriculum: Curriculum | None = None) -> RowOrder:
        """Return the order in which a run visits the training rows."""
        return RowOrder(
            len(self.rows),
            self.rows.digests,
            seed=self.settings.seed,
            shuffle=self.settings.data.shuffle,
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
        data = self.settings.data
        is_skipping = data.on_bad_row == "skip"
        is_dropping = self.settings.limits.oversize == "drop" or data.max_prompt_tokens
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
        settings = self.settings
        batches: dict[str, list[list[ExampleT]]] = {}
        for name, rows in self.data.validation.items():
            encoded = EncodedRows(rows, partial(self._encode, self.data.encoder, settings.limits))
            examples = self._to_examples(rows, encoded)
            batches[name] = list(examples.batches(settings.batch.num_examples))
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
        batch_size = self.settings.batch.num_examples
        return steps_per_epoch(self.settings.data, self.rows.num_kept, batch_size)

    def num_steps(self, limits: EpochLoopConfig) -> int:
        """Return the number of steps: the smaller of `max_num_steps` and the epochs."""
        in_epochs = limits.max_num_epochs * self.steps_per_epoch()
        return min(in_epochs, limits.max_num_steps or in_epochs)

    def last_step(
        self, limits: EpochLoopConfig, loader: BatchLoader[ExampleT], step: int
    ) -> int | None:
        """Return the last step of a run whose loader has delivered the batches up to `step`.

        It differs from `num_steps` if the files changed between a checkpoint and its resume. None
        if the number of batches is not known in advance and the config has no number of steps.
        Raises ConfigError if a run would have no step, because too many rows are left out.
        """
        num_left = loader.batches_left(limits.max_num_epochs, self.rows.is_kept)
        if num_left is None:
            return limits.max_num_steps
        if step + num_left == 0:
            batch_size = self.settings.batch.num_examples
            raise ConfigError(no_batch_text(self.rows.num_kept, batch_size))
        return min(step + num_left, limits.max_num_steps or step + num_left)


def steps_per_epoch(data: DataConfig, num_rows: int, batch_size: int) -> int:
    """Return the number of steps of one epoch. Raises ConfigError if it is 0."""
    steps = num_batches(num_rows, batch_size, data.last_batch)
    if steps == 0:
        raise ConfigError(no_batch_text(num_rows, batch_size))
    return steps


def describe_run(data: DataConfig, batch: BatchNeeds, num_steps: int, num_rows: int) -> str:
    """Describe the length of a run over epochs.

    Example: `6 steps; an epoch is 3 steps of 32 rows`.
    """
    epoch = describe_epoch(data, num_rows, batch.num_examples, f"{batch.example}s")
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


def encoded_examples(rows: Rows, encoded: EncodedRows) -> Examples[EncodedRow]:
    """Return encoded rows as they are."""
    return Examples(encoded, lambda _, row: row)
