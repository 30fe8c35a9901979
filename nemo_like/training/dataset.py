"""Where a run's rows come from: files, encoded with the model's tokenizer, checked, and shuffled by
a loader.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from nemo_like.config.errors import ConfigError, raise_problems, shown_path
from nemo_like.config.schema import GrpoRunConfig, RunConfig, SftRunConfig
from nemo_like.config.text import is_possible_path, shown_value
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.collate import EncodedRow
from nemo_like.data.datasets import Rows, load_rows
from nemo_like.data.encoded_rows import EncodedRows
from nemo_like.data.loader import FetchableRows, RowLoader, no_batch_text, num_batches
from nemo_like.models.layout_check import layout_problems
from nemo_like.models.pretrained import load_model_config, load_tokenizer
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.megatron.support import check_model_spec
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

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Value = TypeVar("Value")
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


def open_encoder(config: RunConfig, *, local_files_only: bool = False) -> ChatEncoder:
    """The tokenizer of the policy with its chat template, or the one given. Raises ConfigError for
    missing files.

    With `local_files_only` a hub name must be in this machine's cache.
    """
    name = config.policy.tokenizer_name or config.policy.model_name
    key = "policy.tokenizer_name" if config.policy.tokenizer_name else "policy.model_name"
    try:
        tokenizer = load_tokenizer(
            name, local_files_only=local_files_only or not _is_hub_name(name)
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}: no tokenizer can be loaded from {name!r} ({error}); give the directory of a"
            f" Hugging"
            " Face model with its tokenizer, or a hub name such as"
            " HuggingFaceTB/SmolLM2-135M-Instruct"
        ) from error
    if config.policy.chat_template is not None:
        path = Path(config.policy.chat_template)
        if not path.is_file():
            raise ConfigError(
                f"policy.chat_template: there is no file {str(path)!r}; give a Jinja file or leave"
                f" it null"
            )
        try:
            tokenizer.chat_template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"policy.chat_template: {shown_path(path)} cannot be read as UTF-8 text: {error}"
            ) from error
    data = config.data
    try:
        return ChatEncoder(
            tokenizer,
            system_prompt=data.system_prompt,
            prompt_template=data.prompt_template,
            train_on=data.train_on,
        )
    except ConfigError:
        raise
    except (
        Exception
    ) as error:  # values of the wrong type in tokenizer_config.json are first noticed in use
        raise ConfigError(
            f"{key}: the tokenizer of {name!r} cannot be used ({type(error).__name__}: {error});"
            f" correct its"
            " tokenizer_config.json, or save the tokenizer again"
        ) from error


def weight_file_problem(path: Path) -> str | None:
    """What is wrong with a safetensors file, from its header and size; None if they agree.

    The header is a JSON object after its length in 8 bytes; the tensors follow without a gap
    (https://github.com/huggingface/safetensors, "Format").
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size, MAX_HEADER_BYTES):
                raise ValueError("the length of the header exceeds the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        expected = 8 + length + max(ends, default=0)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "is damaged: it does not begin with the header of a safetensors file"
    return (
        None
        if size == expected
        else f"is damaged: it has {size:,} bytes and should have {expected:,}"
    )


def open_model_config(config: RunConfig, *, local_files_only: bool = False) -> PretrainedConfig:
    """The model's configuration; raises ConfigError if a file of the model is missing or `parallel`
    does not divide it.

    With `local_files_only` a hub name must be in this machine's cache.
    """
    name = config.policy.model_name
    path = Path(name).expanduser()
    key = f"policy.model_name is {name!r}, "
    if not is_possible_path(str(path)):
        raise ConfigError(f"policy.model_name is {shown_value(name)}, which is too long for a path")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(
            f"{key}a directory without config.json; give that of a Hugging Face model"
        )
    if path.is_dir() and not any(path.glob("*.safetensors")):
        gguf = next(path.glob("*.gguf"), None)
        way_out = (
            f"nemo-like convert {gguf} --out DIR makes some of the GGUF file"
            if gguf
            else "save the model as safetensors"
        )
        raise ConfigError(f"{key}a directory without *.safetensors weights; {way_out}")
    if path.is_dir():
        for file in _weight_files(path, key):
            problem = weight_file_problem(file)
            if problem is not None:
                raise ConfigError(
                    f"{key}but its file {shown_path(file)} {problem}; download or export the model"
                    f" again"
                )
    try:
        model_config = load_model_config(
            name, local_files_only=local_files_only or not _is_hub_name(name)
        )
    except (OSError, ValueError) as error:
        if path.is_dir() or isinstance(error, ValueError):
            raise ConfigError(f"{key}whose config.json cannot be used: {error}") from error
        raise ConfigError(
            f"{key}but there is no such directory, and no model of that name in this machine's"
            f" Hugging Face cache"
        ) from error
    spec = ModelSpec.from_config(model_config, name)
    if config.policy.engine == "megatron" and importlib.util.find_spec("megatron") is None:
        raise ConfigError(
            "policy.engine is megatron, but megatron-core is not installed: pip install"
            " 'nemo-like[megatron]'"
        )
    if config.policy.engine == "megatron":
        check_model_spec(spec, name)
    raise_problems(layout_problems(config, spec))
    return model_config


def _weight_files(folder: Path, key: str) -> list[Path]:
    """The safetensors files of a model directory, with those that its index names. Raises
    ConfigError for a bad index.
    """
    files = {file.name for file in folder.glob("*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            is_plain = all(name == Path(name).name for name in names)
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise ConfigError(
                f"{key}but its file {shown_path(index)} is not an index of weight files"
                f" ({type(error).__name__}: {error})"
            ) from error
        if not is_plain:
            raise ConfigError(
                f"{key}but its file {shown_path(index)} names files outside of the directory"
            )
        files |= names
    return [folder / name for name in sorted(files)]


def _is_hub_name(name: str) -> bool:
    """Only a full hub name is looked for over the network; a mistyped path would wait there for
    nothing.
    """
    return not Path(name).exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None


@dataclass(frozen=True)
class SftSource:
    """Rows to learn from, and those held out."""

    config: SftRunConfig
    encoder: ChatEncoder
    train: Rows
    validation: Rows | None

    @classmethod
    def open(cls, config: SftRunConfig) -> SftSource:
        """Read the files; raises ConfigError for a missing or empty file, or a bad line."""
        open_model_config(config)
        train = load_training(config, "sft", Progress())
        validation = load_validation(config, "sft")
        return cls(config, open_encoder(config), train, validation)

    @cached_property
    def rows(self) -> EncodedRows:
        """The training rows in their encoded form."""
        return open_training_rows(self.config, self.encoder, self.train)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run: the smaller of `sft.max_num_steps` and the epochs."""
        sft, batch_size = self.config.sft, self.config.policy.train_global_batch_size
        in_epochs = sft.max_num_epochs * steps_per_epoch(
            self.config, self.rows.num_kept, batch_size
        )
        return in_epochs if sft.max_num_steps is None else min(in_epochs, sft.max_num_steps)

    def last_step(self, loader: RowLoader[EncodedRow], step: int) -> int:
        """The step at which the run ends, for a loader that stands behind `step`; `num_steps`
        unless rows changed.
        """
        in_epochs = step + loader.batches_left(self.config.sft.max_num_epochs, self.rows.is_kept)
        limit = self.config.sft.max_num_steps
        return in_epochs if limit is None else min(in_epochs, limit)

    def loader(self) -> RowLoader[EncodedRow]:
        """Endless shuffled batches of one optimizer step."""
        return _loader(self.config, self.rows, self.config.policy.train_global_batch_size)

    def start_encoding(self, loader: RowLoader[EncodedRow]) -> None:
        """See `encoding.start_encoding`."""
        num_needed = self.num_steps * self.config.policy.train_global_batch_size
        start_encoding(self.config, self.rows, loader.order, num_needed)

    def finish_encoding(self, progress: Progress) -> None:
        """See `encoding.finish_encoding`."""
        finish_encoding(self.config, self.rows, progress)

    def validation_batches(self) -> Iterator[list[EncodedRow]]:
        """Every held-out row once."""
        if self.validation is None:
            return
        rows = EncodedRows(self.validation, partial(encode_conversation, self.encoder, self.config))
        batch_size = self.config.policy.train_global_batch_size
        for start in range(0, len(self.validation), batch_size):
            encoded = rows.fetch(range(start, min(start + batch_size, len(self.validation))))
            if batch := [row for row in encoded if row is not None]:
                yield batch

    def validation_prompts(self) -> list[Prompt]:
        """The held-out rows as questions."""
        return _prompts(self.encoder, self.config, self.validation)


@dataclass(frozen=True)
class PromptSource:
    """Prompts to answer, and those held out."""

    config: GrpoRunConfig
    encoder: ChatEncoder
    train: Rows
    validation: Rows | None

    @classmethod
    def open(cls, config: GrpoRunConfig) -> PromptSource:
        """Read the files; raises ConfigError for a missing or empty file, or a bad line."""
        open_model_config(config)
        train = load_training(config, "rl", Progress())
        return cls(config, open_encoder(config), train, load_validation(config, "rl"))

    @cached_property
    def rows(self) -> EncodedRows:
        """The training rows in their encoded form."""
        return open_training_rows(self.config, self.encoder, self.train)

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of the run; the last step of an epoch may have fewer prompts, and so
        fewer of them.
        """
        grpo, last_batch = self.config.grpo, self.config.data.last_batch
        batch_size = self.config.policy.train_global_batch_size
        num_prompts = self.rows.num_kept
        per_epoch = steps_per_epoch(self.config, num_prompts, grpo.num_prompts_per_step)
        num_epochs, later_steps = divmod(grpo.max_num_steps, per_epoch)
        per_step = -(-grpo.num_prompts_per_step * grpo.num_generations_per_prompt // batch_size)
        num_full = num_prompts // grpo.num_prompts_per_step
        rows_of_rest = num_prompts % grpo.num_prompts_per_step * grpo.num_generations_per_prompt
        in_rest = -(-rows_of_rest // batch_size) if last_batch == "keep" else 0
        return num_epochs * (num_full * per_step + in_rest) + later_steps * per_step

    def loader(self) -> RowLoader[Prompt]:
        """Endless shuffled batches of the prompts of one step."""
        return _loader(
            self.config, PromptRows(self.train, self.rows), self.config.grpo.num_prompts_per_step
        )

    def start_encoding(self, loader: RowLoader[Prompt]) -> None:
        """See `encoding.start_encoding`."""
        num_needed = self.config.grpo.max_num_steps * self.config.grpo.num_prompts_per_step
        start_encoding(self.config, self.rows, loader.order, num_needed)

    def finish_encoding(self, progress: Progress) -> None:
        """See `encoding.finish_encoding`."""
        finish_encoding(self.config, self.rows, progress)

    def validation_prompts(self) -> list[Prompt]:
        """The held-out rows as questions."""
        return _prompts(self.encoder, self.config, self.validation)


def load_training(config: RunConfig, purpose: Literal["sft", "rl"], progress: Progress) -> Rows:
    """The training rows. Raises ConfigError for a missing or empty file, or a bad line."""
    data = config.data
    with progress.phase("reading data.train_path") as phase:
        return load_rows(
            data.train_path, purpose=purpose, max_rows=data.max_train_rows, advance=phase.advance
        )


def load_validation(config: RunConfig, purpose: Literal["sft", "rl"]) -> Rows | None:
    """The held-out rows, None where no file is named. Raises ConfigError for a missing or empty
    file, or a bad line.
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
    """Steps in which every row is trained on once. Raises ConfigError if there is none."""
    steps = num_batches(num_rows, batch_size, config.data.last_batch)
    if steps == 0:
        raise ConfigError(no_batch_text(num_rows, batch_size))
    return steps


def describe_epoch(config: RunConfig, num_rows: int, batch_size: int, noun: str) -> str:
    """The steps of an epoch in words. Raises ConfigError if there is none.

    Example: `an epoch is 3 steps of 32 rows and 1 of 4`.
    """
    steps = steps_per_epoch(config, num_rows, batch_size)
    full, rest = divmod(num_rows, batch_size)
    if full == 0:
        return (
            f"an epoch is 1 step of {num_rows:,} {noun}, fewer than the {batch_size:,} of a batch"
        )
    text = f"an epoch is {full:,} {'step' if full == 1 else 'steps'} of {batch_size:,} {noun}"
    if rest == 0:
        return text
    return (
        f"{text} and 1 of {rest:,}"
        if steps > full
        else f"{text}; {rest:,} are left out each time (data.last_batch=drop)"
    )


def _loader(config: RunConfig, rows: FetchableRows[Value], batch_size: int) -> RowLoader[Value]:
    data = config.data
    return RowLoader(
        rows,
        batch_size=batch_size,
        seed=config.seed,
        shuffle=data.shuffle,
        last_batch=data.last_batch,
    )
