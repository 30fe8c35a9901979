"""Where a run's rows come from: files, encoded with the model's tokenizer, checked, and shuffled by a loader."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nemo_like.algorithms.pretrained import load_model_config, load_tokenizer
from nemo_like.algorithms.prompt import Prompt
from nemo_like.config.errors import ConfigError, raise_problems
from nemo_like.config.parallel import model_problems
from nemo_like.config.schema import GrpoRunConfig, RunConfig, SftRunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.collate import EncodedRow
from nemo_like.data.datasets import Row, Rows, conversation, load_rows, question
from nemo_like.data.loader import RowLoader
from nemo_like.data.tools import row_tools
from nemo_like.policy.megatron_support import check_model_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def encode_conversation(encoder: ChatEncoder, config: RunConfig, row: Row) -> EncodedRow:
    """One SFT row; raises ConfigError if it is longer than `policy.max_total_sequence_length` and that is an error."""
    encoded = encoder.encode_sft(conversation(row), row_tools(row))
    limit, length = config.policy.max_total_sequence_length, len(encoded.input_ids)
    if length <= limit or config.policy.oversize_rows == "singleton":
        return encoded
    if config.policy.oversize_rows == "truncate":
        return EncodedRow(encoded.input_ids[:limit], encoded.token_mask[:limit])
    raise ConfigError(
        f"the row has {length} tokens, policy.max_total_sequence_length is {limit}; raise it, or set policy.oversize_rows"
        " to truncate (cut the end) or singleton (run it alone)"
    )


def encode_prompt(encoder: ChatEncoder, config: RunConfig, row: Row) -> Prompt:
    """One question; raises ConfigError if it leaves no room for a completion."""
    asked = question(row)
    token_ids = encoder.encode_prompt(asked.messages, asked.tools)
    limit = config.policy.max_total_sequence_length
    if len(token_ids) >= limit:
        raise ConfigError(
            f"the prompt has {len(token_ids)} tokens, policy.max_total_sequence_length is {limit}, so there is no room for"
            " a completion; raise it or remove the row"
        )
    return Prompt(token_ids=token_ids, text=asked.text, answer=asked.answer, row=asked.row)


def open_encoder(config: RunConfig, *, local_files_only: bool = False) -> ChatEncoder:
    """The tokenizer of the policy with its chat template, or the one given. Raises ConfigError for missing files.

    With `local_files_only` a hub name must be in this machine's cache.
    """
    name = config.policy.tokenizer_name or config.policy.model_name
    key = "policy.tokenizer_name" if config.policy.tokenizer_name else "policy.model_name"
    try:
        tokenizer = load_tokenizer(name, local_files_only=local_files_only or not _is_hub_name(name))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}: no tokenizer can be loaded from {name!r} ({str(error).splitlines()[0]}); give the directory of a Hugging"
            " Face model with its tokenizer, or a hub name such as HuggingFaceTB/SmolLM2-135M-Instruct"
        ) from error
    if config.policy.chat_template is not None:
        path = Path(config.policy.chat_template)
        if not path.is_file():
            raise ConfigError(f"policy.chat_template: there is no file {str(path)!r}; give a Jinja file or leave it null")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    data = config.data
    return ChatEncoder(
        tokenizer, system_prompt=data.system_prompt, prompt_template=data.prompt_template, train_on=data.train_on
    )


def open_model_config(config: RunConfig, *, local_files_only: bool = False) -> PretrainedConfig:
    """The model's configuration; raises ConfigError if a file of the model is missing or `parallel` does not divide it.

    With `local_files_only` a hub name must be in this machine's cache.
    """
    name = config.policy.model_name
    path = Path(name).expanduser()
    key = f"policy.model_name is {name!r}, "
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"{key}a directory without config.json; give that of a Hugging Face model")
    if path.is_dir() and not any(path.glob("*.safetensors")):
        gguf = next(path.glob("*.gguf"), None)
        way_out = f"nemo-like convert {gguf} --out DIR makes some of the GGUF file" if gguf else "save the model as safetensors"
        raise ConfigError(f"{key}a directory without *.safetensors weights; {way_out}")
    try:
        model_config = load_model_config(name, local_files_only=local_files_only or not _is_hub_name(name))
    except (OSError, ValueError) as error:
        if path.is_dir():
            raise ConfigError(f"{key}whose config.json cannot be used: {str(error).splitlines()[0]}") from error
        raise ConfigError(
            f"{key}but there is no such directory, and no model of that name in this machine's Hugging Face cache"
        ) from error
    if config.policy.engine == "megatron" and importlib.util.find_spec("megatron") is None:
        raise ConfigError("policy.engine is megatron, but megatron-core is not installed: pip install 'nemo-like[megatron]'")
    if config.policy.engine == "megatron":
        check_model_config(model_config, name)
    raise_problems(model_problems(config, model_config))
    return model_config


def _is_hub_name(name: str) -> bool:
    """Only a full hub name is looked for over the network; a mistyped path would wait there for nothing."""
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
        data = config.data
        open_model_config(config)
        train = load_rows(data.train_path, purpose="sft", max_rows=data.max_train_rows)
        validation = load_validation(config, "sft")
        return cls(config, open_encoder(config), train, validation)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run: the smaller of `sft.max_num_steps` and the epochs."""
        sft = self.config.sft
        in_epochs = -(-len(self.train) * sft.max_num_epochs // self.config.policy.train_global_batch_size)
        return in_epochs if sft.max_num_steps is None else min(in_epochs, sft.max_num_steps)

    def loader(self) -> RowLoader[Row, EncodedRow]:
        """Endless shuffled batches of one optimizer step."""
        return RowLoader(
            self.train,
            partial(encode_conversation, self.encoder, self.config),
            batch_size=self.config.policy.train_global_batch_size,
            seed=self.config.seed,
            shuffle=self.config.data.shuffle,
        )

    def validation_batches(self) -> Iterator[list[EncodedRow]]:
        """Every held-out row once."""
        if self.validation is None:
            return
        encode = partial(encode_conversation, self.encoder, self.config)
        yield from RowLoader(
            self.validation, encode, batch_size=self.config.policy.train_global_batch_size
        ).one_pass()

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
        train = load_rows(config.data.train_path, purpose="rl", max_rows=config.data.max_train_rows)
        return cls(config, open_encoder(config), train, load_validation(config, "rl"))

    def loader(self) -> RowLoader[Row, Prompt]:
        """Endless shuffled batches of the prompts of one step."""
        return RowLoader(
            self.train,
            partial(encode_prompt, self.encoder, self.config),
            batch_size=self.config.grpo.num_prompts_per_step,
            seed=self.config.seed,
            shuffle=self.config.data.shuffle,
        )

    def validation_prompts(self) -> list[Prompt]:
        """The held-out rows as questions."""
        return _prompts(self.encoder, self.config, self.validation)


def load_validation(config: RunConfig, purpose: Literal["sft", "rl"]) -> Rows | None:
    """The held-out rows, None where no file is named. Raises ConfigError for a missing or empty file, or a bad line."""
    data = config.data
    if data.validation_path is None:
        return None
    return load_rows(
        data.validation_path, purpose=purpose, max_rows=data.max_validation_rows, key="data.validation_path"
    )


def _prompts(encoder: ChatEncoder, config: RunConfig, rows: Rows | None) -> list[Prompt]:
    if rows is None:
        return []
    loader = RowLoader(rows, partial(encode_prompt, encoder, config), batch_size=1)
    return [loader.encode(row) for row in range(len(rows))]
