"""Opens and checks the files of a run's model: tokenizer, chat template, configuration, weights."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from nemo_like.config.errors import ConfigError, raise_problems, shown_path
from nemo_like.config.model_directory import hub_name, model_directory
from nemo_like.config.parallel import named_by_keys, policy_layout
from nemo_like.config.rollout import RewardModelConfig
from nemo_like.config.schema import RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.models.layout_check import frozen_weights, model_problems
from nemo_like.models.pretrained import load_model_config, load_tokenizer, with_output_head
from nemo_like.models.spec import ModelSpec
from nemo_like.models.weight_files import read_header, weight_sizes
from nemo_like.policy.megatron.families import family_of
from nemo_like.policy.megatron.freezing import frozen_parameters
from nemo_like.policy.megatron.param_map import ModelSharding
from nemo_like.training.checks import check_lora, check_quantization
from nemo_like.training.generation_backends import generation_backend

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class TokenizerSection(Protocol):
    """The keys of a section that names a tokenizer: `policy`, or one of `reward.models`."""

    @property
    def model_name(self) -> str: ...

    @property
    def tokenizer_name(self) -> str | None: ...

    @property
    def chat_template(self) -> str | None: ...


def open_encoder(config: RunConfig, vocab_size: int | None) -> ChatEncoder:
    """Load the policy's tokenizer with its chat template, or with `policy.chat_template`.

    `vocab_size` is the size of the model's vocabulary, None if it is not known. Raises ConfigError
    for missing or unusable files.
    """
    data = config.data
    return load_encoder(
        config.policy,
        "policy",
        vocab_size,
        system_prompt=data.system_prompt,
        prompt_template=data.prompt_template,
        # The encoding of SFT rows selects the last turn from all of the assistant.
        train_on="all" if data.train_on == "all" else "assistant",
    )


def load_encoder(
    section: TokenizerSection,
    section_key: str,
    vocab_size: int | None,
    *,
    system_prompt: str | None = None,
    prompt_template: str | None = None,
    train_on: Literal["assistant", "all"] = "assistant",
) -> ChatEncoder:
    """Load the tokenizer and the chat template that a section names; see `open_encoder`.

    `section_key` is the key of the section, for messages.
    """
    key = f"{section_key}.tokenizer_name" if section.tokenizer_name else f"{section_key}.model_name"
    name = section.tokenizer_name or section.model_name
    directory = model_directory(key, name, weights=False)
    try:
        tokenizer = load_tokenizer(directory)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}: no tokenizer can be loaded from {name!r} ({error}); give the directory or the"
            " hub name of a Hugging Face model with its tokenizer"
        ) from error
    if section.chat_template is not None:
        template_key = f"{section_key}.chat_template"
        tokenizer.chat_template = _read_chat_template(Path(section.chat_template), template_key)
    try:
        return ChatEncoder(
            tokenizer,
            system_prompt=system_prompt,
            prompt_template=prompt_template,
            train_on=train_on,
            vocab_size=vocab_size,
        )
    except ConfigError:
        raise
    except Exception as error:
        # The library does not check the types in tokenizer_config.json: a wrong one raises
        # an exception of any type when the tokenizer is first used.
        raise ConfigError(
            f"{key}: the tokenizer of {name!r} cannot be used ({type(error).__name__}: {error});"
            " correct its tokenizer_config.json, or save the tokenizer again"
        ) from error


def _read_chat_template(path: Path, key: str) -> str:
    if not path.is_file():
        raise ConfigError(
            f"{key}: there is no file {str(path)!r}; give a Jinja file or leave it null"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{key}: {shown_path(path)} cannot be read as UTF-8 text: {error}"
        ) from error


def open_model_config(config: RunConfig) -> PretrainedConfig:
    """Load the model's configuration and check it against its files, the engine and `parallel`.

    Raises ConfigError for a missing or damaged file, and for a model that the engine, `parallel` or
    vLLM does not support.
    """
    name = config.policy.model_name
    model_config = with_output_head(
        load_checked_config(name, "policy.model_name"), config.output_head, name
    )
    spec = ModelSpec.from_config(model_config, name)
    if config.policy.engine == "megatron":
        # megatron-core is an optional dependency.
        if importlib.util.find_spec("megatron") is None:
            raise ConfigError(
                "policy.engine is megatron, but megatron-core is not installed: pip install"
                " 'nemo-like[megatron]'"
            )
        family_of(spec, name)
    layout_problems = model_problems(policy_layout(config), config.policy.engine, spec)
    problems = named_by_keys(layout_problems, config.cluster)
    if config.generates:
        problems += generation_backend(config).problems(config, spec)
    raise_problems(problems)
    _check_optimizer(config, spec)
    check_lora(config.policy, spec)
    check_quantization(config.policy, spec, config.parallel.tensor)
    return model_config


def load_checked_config(name: str, key: str) -> PretrainedConfig:
    """Load the configuration of the model that `key` names, and check its files.

    Raises ConfigError for a missing or damaged file.
    """
    directory = model_directory(key, name, weights=False)
    subject = f"{key} is {name!r}, "
    # The library checks the size of a download, and a command may not have needed the weights.
    if hub_name(directory) is None:
        _check_model_directory(Path(directory), subject)
    return _load_model_config(directory, subject)


@dataclass(frozen=True)
class RewardModelFiles:
    """The files of a reward model, without its weights."""

    spec: ModelSpec
    encoder: ChatEncoder
    """With the reward model's tokenizer; it adds no prompts."""
    max_length: int | None
    """Max tokens of a conversation; None without a limit."""


def open_reward_model(name: str, config: RewardModelConfig) -> RewardModelFiles:
    """Open the files of `reward.models.<name>`.

    Raises ConfigError for missing or damaged files, for a model that is not one for sequence
    classification with one output, and for a limit above the positions of the model.
    """
    key = f"reward.models.{name}"
    model = load_checked_config(config.model_name, f"{key}.model_name")
    architecture = str((getattr(model, "architectures", None) or ["model of no architecture"])[0])
    if not architecture.endswith("ForSequenceClassification"):
        raise ConfigError(
            f"{key}.model_name is {config.model_name!r}, a {architecture}, which has no score head:"
            " give the directory that `nemo-like rm` exports (<output_dir>/<run_name>/hf), or"
            " another model for sequence classification with one label"
        )
    num_labels = int(getattr(model, "num_labels", 1))
    if num_labels != 1:
        raise ConfigError(
            f"{key}.model_name is {config.model_name!r}, a classifier of {num_labels} labels; a"
            " reward model has one output (num_labels 1 in config.json)"
        )
    spec = ModelSpec.from_config(model, config.model_name)
    limit = spec.max_positions
    if config.max_length is not None and limit is not None and config.max_length > limit:
        raise ConfigError(
            f"{key}.max_length is {config.max_length}, above the {limit} positions of the model"
            f" {config.model_name!r}: lower it, or set it to null for that number"
        )
    encoder = load_encoder(config, key, spec.vocab_size)
    return RewardModelFiles(spec, encoder, config.max_length or limit)


def _check_optimizer(config: RunConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for a missing library, or patterns of `policy.freeze` that cannot be."""
    policy = config.policy
    if policy.optimizer.name == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "policy.optimizer.name is adamw_8bit, but torchao is not installed: pip install"
            " 'nemo-like[optim]', or set policy.optimizer.name to adamw"
        )
    # A reward model has no output embedding, but a scalar head.
    sizes = None if config.kind == "rm" else weight_sizes(spec)
    if not policy.freeze or sizes is None:
        # The workers check the names of a model whose names are not known here.
        return
    names = {name: name for name in sizes}
    if spec.is_tied:
        names["lm_head.weight"] = "model.embed_tokens.weight"
    frozen = frozen_weights(policy.freeze, names)
    if policy.engine == "megatron":
        sharding = ModelSharding(spec, pp=config.parallel.pipeline)
        family = family_of(spec, policy.model_name)
        frozen_parameters(frozen, family, sharding, 0, {})


def open_model_spec(config: RunConfig) -> ModelSpec:
    """Read the sizes of the model, without further checks. Raises ConfigError as above."""
    name = config.policy.model_name
    directory = model_directory("policy.model_name", name, weights=False)
    model_config = _load_model_config(directory, f"policy.model_name is {name!r}, ")
    return ModelSpec.from_config(model_config, name).with_output_head(config.output_head)


def _load_model_config(directory: str, subject: str) -> PretrainedConfig:
    """Load config.json of a directory. `subject` begins the error message."""
    _require_config_file(Path(directory), subject)
    try:
        return load_model_config(directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{subject}whose config.json cannot be used: {error}") from error


def _require_config_file(path: Path, subject: str) -> None:
    """Raise ConfigError for a directory without config.json. `subject` begins the message."""
    if (path / "config.json").is_file():
        return
    solution = "give the directory of a Hugging Face model"
    if (path / "adapter_config.json").is_file():
        solution = (
            "it has a LoRA adapter: give the merged model that the run exported (its hf"
            " directory), or the one that `nemo-like export` writes"
        )
    elif any((path / part).is_dir() for part in ("checkpoints", "policy")):
        solution = (
            f"it is a run or one of its checkpoints: give the model that `nemo-like export"
            f" {shown_path(path)} --out DIR` writes"
        )
    if (path / "hf" / "config.json").is_file():
        solution = f"give the model that this run exported, {shown_path(path / 'hf')}"
    raise ConfigError(f"{subject}a directory without config.json; {solution}")


def _check_model_directory(path: Path, subject: str) -> None:
    """Raise ConfigError for missing or damaged files. `subject` begins the message."""
    _require_config_file(path, subject)
    if not any(path.glob("*.safetensors")):
        gguf = next(path.glob("*.gguf"), None)
        solution = "save the model as safetensors"
        if gguf is not None:
            solution = f"nemo-like convert {gguf} --out DIR makes some of the GGUF file"
        raise ConfigError(f"{subject}a directory without *.safetensors weights; {solution}")
    for file in _weight_files(path, subject):
        try:
            read_header(file)
        except ValueError as error:
            raise ConfigError(
                f"{subject}but its file {shown_path(file)} {error}; download or export the model"
                " again"
            ) from error


def _weight_files(directory: Path, subject: str) -> list[Path]:
    """Return the safetensors files of a model directory and those that its index names.

    Raises ConfigError for a bad index. `subject` begins the message.
    """
    names = {file.name for file in directory.glob("*.safetensors")}
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names |= _indexed_names(index, subject)
    return [directory / name for name in sorted(names)]


def _indexed_names(index: Path, subject: str) -> set[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        is_plain = all(name == Path(name).name for name in names)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{subject}but its file {shown_path(index)} is not an index of weight files"
            f" ({type(error).__name__}: {error})"
        ) from error
    # An index comes with a downloaded model: it must not direct reads to other directories.
    if not is_plain:
        raise ConfigError(
            f"{subject}but its file {shown_path(index)} names files outside of the directory"
        )
    return names
