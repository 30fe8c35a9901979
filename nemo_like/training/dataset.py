"""The rows and prompts of a run: read from files, encoded, and shuffled by a loader."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, TypeVar

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import GrpoRunConfig, RunConfig, SftRunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.collate import EncodedRow
from nemo_like.data.datasets import Rows, load_rows
from nemo_like.data.encoded_rows import EncodedRows
from nemo_like.data.loader import FetchableRows, RowLoader, no_batch_text, num_batches
from nemo_like.progress import Progress
from nemo_like.rollout.prompt import Prompt
from nemo_like.training.encoding import (
    PromptRows,
    encode_conversation,
    encode_question,
    finish_encoding,
    open_training_rows,
    start_encoding,
)
from nemo_like.training.model_files import open_encoder, open_model_config

Value = TypeVar("Value")


@dataclass(frozen=True)
class SftSource:
    """The training and validation rows of an SFT run."""

    config: SftRunConfig
    encoder: ChatEncoder
    train: Rows
    validation: Rows | None

    @classmethod
    def open(cls, config: SftRunConfig) -> SftSource:
        """Read the files. Raises ConfigError for a missing or empty file, or a bad line."""
        # The model first: its check is faster than reading the data.
        open_model_config(config)
        train = load_training(config, "sft", Progress())
        validation = load_validation(config, "sft")
        return cls(config, open_encoder(config), train, validation)

    # Cached: it has the encoded rows, and the processes that encode them.
    @cached_property
    def rows(self) -> EncodedRows:
        """The training rows in their encoded form."""
        return open_training_rows(self.config, self.encoder, self.train)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run: the smaller of `sft.max_num_steps` and the epochs."""
        sft = self.config.sft
        batch_size = self.config.policy.train_global_batch_size
        per_epoch = steps_per_epoch(self.config, self.rows.num_kept, batch_size)
        in_epochs = sft.max_num_epochs * per_epoch
        if sft.max_num_steps is None:
            return in_epochs
        return min(in_epochs, sft.max_num_steps)

    def last_step(self, loader: RowLoader[EncodedRow], step: int) -> int:
        """Return the last step of a run whose loader has delivered the batches up to `step`.

        It differs from `num_steps` if the files changed between a checkpoint and its resume.
        """
        in_epochs = step + loader.batches_left(self.config.sft.max_num_epochs, self.rows.is_kept)
        limit = self.config.sft.max_num_steps
        if limit is None:
            return in_epochs
        return min(in_epochs, limit)

    def loader(self) -> RowLoader[EncodedRow]:
        """Return an endless loader; a batch has the rows of one optimizer step."""
        return _loader(self.config, self.rows, self.config.policy.train_global_batch_size)

    def start_encoding(self, loader: RowLoader[EncodedRow]) -> None:
        """Start to encode the rows that the run visits; see `encoding.start_encoding`."""
        # Rows that a short run does not reach are not encoded.
        num_needed = self.num_steps * self.config.policy.train_global_batch_size
        start_encoding(self.config, self.rows, loader.order, num_needed)

    def finish_encoding(self, progress: Progress) -> None:
        """Wait for the rows that are being encoded; see `encoding.finish_encoding`."""
        finish_encoding(self.config, self.rows, progress)

    def validation_batches(self) -> Iterator[list[EncodedRow]]:
        """Yield every validation row once, without the rows dropped as too long."""
        if self.validation is None:
            return
        # In this process: the encoding processes work on the training rows only.
        rows = EncodedRows(self.validation, partial(encode_conversation, self.encoder, self.config))
        batch_size = self.config.policy.train_global_batch_size
        for start in range(0, len(self.validation), batch_size):
            end = min(start + batch_size, len(self.validation))
            encoded = rows.fetch(range(start, end))
            batch = [row for row in encoded if row is not None]
            if batch:
                yield batch

    def validation_prompts(self) -> list[Prompt]:
        """Return the validation rows as prompts; empty without a validation file."""
        return _prompts(self.encoder, self.config, self.validation)


@dataclass(frozen=True)
class PromptSource:
    """The training and validation prompts of a GRPO run."""

    config: GrpoRunConfig
    encoder: ChatEncoder
    train: Rows
    validation: Rows | None

    @classmethod
    def open(cls, config: GrpoRunConfig) -> PromptSource:
        """Read the files. Raises ConfigError for a missing or empty file, or a bad line."""
        open_model_config(config)
        train = load_training(config, "rl", Progress())
        return cls(config, open_encoder(config), train, load_validation(config, "rl"))

    @cached_property
    def rows(self) -> EncodedRows:
        """The training rows in their encoded form."""
        return open_training_rows(self.config, self.encoder, self.train)

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of the run."""
        grpo = self.config.grpo
        num_prompts = self.rows.num_kept
        num_full, num_prompts_left = divmod(num_prompts, grpo.num_prompts_per_step)
        per_full_step = self._num_updates(grpo.num_prompts_per_step)
        per_epoch = num_full * per_full_step
        if self.config.data.last_batch == "keep":
            # The last step of an epoch may have fewer prompts, and so fewer optimizer steps.
            per_epoch += self._num_updates(num_prompts_left)
        num_steps_per_epoch = steps_per_epoch(self.config, num_prompts, grpo.num_prompts_per_step)
        num_epochs, num_later_steps = divmod(grpo.max_num_steps, num_steps_per_epoch)
        # The last, incomplete epoch ends before the smaller step at its end.
        return num_epochs * per_epoch + num_later_steps * per_full_step

    def _num_updates(self, num_prompts: int) -> int:
        """Return the number of optimizer steps on the completions of `num_prompts` prompts."""
        num_rows = num_prompts * self.config.grpo.num_generations_per_prompt
        return math.ceil(num_rows / self.config.policy.train_global_batch_size)

    def loader(self) -> RowLoader[Prompt]:
        """Return an endless loader; a batch has the prompts of one step."""
        prompts = PromptRows(self.train, self.rows)
        return _loader(self.config, prompts, self.config.grpo.num_prompts_per_step)

    def start_encoding(self, loader: RowLoader[Prompt]) -> None:
        """Start to encode the rows that the run visits; see `encoding.start_encoding`."""
        num_needed = self.config.grpo.max_num_steps * self.config.grpo.num_prompts_per_step
        start_encoding(self.config, self.rows, loader.order, num_needed)

    def finish_encoding(self, progress: Progress) -> None:
        """Wait for the rows that are being encoded; see `encoding.finish_encoding`."""
        finish_encoding(self.config, self.rows, progress)

    def validation_prompts(self) -> list[Prompt]:
        """Return the validation rows as prompts; empty without a validation file."""
        return _prompts(self.encoder, self.config, self.validation)


def load_training(config: RunConfig, purpose: Literal["sft", "rl"], progress: Progress) -> Rows:
    """Read the training rows. Raises ConfigError for a missing or empty file, or a bad line."""
    data = config.data
    with progress.phase("reading data.train_path") as phase:
        return load_rows(
            data.train_path, purpose=purpose, max_rows=data.max_train_rows, advance=phase.advance
        )


def load_validation(config: RunConfig, purpose: Literal["sft", "rl"]) -> Rows | None:
    """Read the validation rows; None if `data.validation_path` is null.

    Raises ConfigError for a missing or empty file, or a bad line.
    """
    data = config.data
    if data.validation_path is None:
        return None
    return load_rows(
        data.validation_path,
        purpose=purpose,
        max_rows=data.max_validation_rows,
        key="data.validation_path",
    )


def _prompts(encoder: ChatEncoder, config: RunConfig, rows: Rows | None) -> list[Prompt]:
    if rows is None:
        return []
    encoded = EncodedRows(rows, partial(encode_question, encoder, config))
    prompts = PromptRows(rows, encoded).fetch(range(len(rows)))
    return [prompt for prompt in prompts if prompt is not None]


def steps_per_epoch(config: RunConfig, num_rows: int, batch_size: int) -> int:
    """Return the number of steps of one epoch. Raises ConfigError if it is 0."""
    steps = num_batches(num_rows, batch_size, config.data.last_batch)
    if steps == 0:
        raise ConfigError(no_batch_text(num_rows, batch_size))
    return steps


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
    unit = "step" if num_full == 1 else "steps"
    text = f"an epoch is {num_full:,} {unit} of {batch_size:,} {noun}"
    if num_left == 0:
        return text
    if steps > num_full:
        return f"{text} and 1 of {num_left:,}"
    return f"{text}; {num_left:,} are left out each time (data.last_batch=drop)"


def _loader(config: RunConfig, rows: FetchableRows[Value], batch_size: int) -> RowLoader[Value]:
    data = config.data
    return RowLoader(
        rows,
        batch_size=batch_size,
        seed=config.seed,
        shuffle=data.shuffle,
        last_batch=data.last_batch,
    )
