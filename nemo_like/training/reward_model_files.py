"""Opens and checks the files of a reward model: configuration, tokenizer and chat template."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like.config.errors import ConfigError
from nemo_like.config.reward import RewardModelConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.models.spec import ModelSpec
from nemo_like.training.model_files import load_checked_config, load_encoder


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
