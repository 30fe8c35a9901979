"""Paths of a config mean the same in every process: relative ones are made absolute once, by the
driver, and models of the Hugging Face hub are downloaded there.

Workers run in another working directory, where a relative path would not be found.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TypeVar

from nemo_like.config.model_directory import model_directory
from nemo_like.config.rollout import RewardModelConfig
from nemo_like.config.schema import PolicyConfig, RunConfig

HUB_PREFIX = "hf://"
"""Beginning of a data set of the Hugging Face hub."""

ConfigT = TypeVar("ConfigT", bound=RunConfig)


def resolve_paths(config: ConfigT) -> ConfigT:
    """Return the config with `~` expanded and absolute paths, relative ones taken from the working
    directory of this process; links are kept.

    Models and tokenizers on the hub are downloaded, and their names replaced by their directories.
    Raises ConfigError for a model that does not exist; see `model_directory`.
    """
    data = config.data
    models = {name: _reward_model(name, model) for name, model in config.reward.models.items()}
    validation_path = data.validation_path
    if validation_path is not None:
        validation_path = _data(validation_path)
    return replace(
        config,
        output_dir=_absolute(config.output_dir),
        policy=resolve_policy(config.policy),
        data=replace(
            data,
            train_path=_data(data.train_path),
            train_sets={name: _data(path) for name, path in data.train_sets.items()},
            validation_path=validation_path,
            validation_sets={name: _data(path) for name, path in data.validation_sets.items()},
        ),
        reward=replace(config.reward, models=models),
    )


def resolve_policy(policy: PolicyConfig, *, weights: bool = True) -> PolicyConfig:
    """Return `policy` with absolute paths; see `resolve_paths`. `weights` is for its model."""
    lora = policy.lora
    if lora.adapter_path is not None:
        lora = replace(lora, adapter_path=_absolute(lora.adapter_path))
    return replace(
        policy,
        model_name=model_directory("policy.model_name", policy.model_name, weights=weights),
        tokenizer_name=_tokenizer("policy", policy.tokenizer_name),
        chat_template=_template(policy.chat_template),
        lora=lora,
    )


def _reward_model(name: str, model: RewardModelConfig) -> RewardModelConfig:
    key = f"reward.models.{name}"
    return replace(
        model,
        model_name=model_directory(f"{key}.model_name", model.model_name, weights=True),
        tokenizer_name=_tokenizer(key, model.tokenizer_name),
        chat_template=_template(model.chat_template),
    )


def _tokenizer(section: str, name: str | None) -> str | None:
    if name is None:
        return None
    return model_directory(f"{section}.tokenizer_name", name, weights=False)


def _template(path: str | None) -> str | None:
    return None if path is None else _absolute(path)


def _data(path: str) -> str:
    """Return the path of a data file or directory; a name of the hub is not changed."""
    return path if path.startswith(HUB_PREFIX) else _absolute(path)


def _absolute(path: str) -> str:
    # `Path.resolve` would follow links, which may point to a new version later.
    return os.path.abspath(os.path.expanduser(path))
