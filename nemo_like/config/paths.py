"""Paths of a config mean the same in every process: relative ones are made absolute once, by the
driver.

Workers run in another working directory. A relative `policy.model_name` would not be found there,
and would then be looked up on the Hugging Face hub, where somebody else's model may have that name.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import TypeVar

from nemo_like.config.errors import ConfigError
from nemo_like.config.reward import RewardModelConfig
from nemo_like.config.schema import RunConfig

HUB_PREFIX = "hf://"
"""Beginning of a data set of the Hugging Face hub."""

ConfigT = TypeVar("ConfigT", bound=RunConfig)


def resolve_paths(config: ConfigT) -> ConfigT:
    """Return the config with `~` expanded and absolute paths, relative ones taken from the working
    directory of this process.

    A model or tokenizer name changes only if it is a path here, or is written as one (`./`, `../`,
    `~`); links are kept.
    """
    policy = config.policy
    data = config.data
    tokenizer_name = policy.tokenizer_name
    if tokenizer_name is not None:
        tokenizer_name = model_path(tokenizer_name)
    chat_template = policy.chat_template
    if chat_template is not None:
        chat_template = _absolute(chat_template)
    lora = policy.lora
    if lora.adapter_path is not None:
        lora = replace(lora, adapter_path=_absolute(lora.adapter_path))
    models = {name: _reward_model(model) for name, model in config.reward.models.items()}
    validation_path = data.validation_path
    if validation_path is not None:
        validation_path = _data(validation_path)
    return replace(
        config,
        output_dir=_absolute(config.output_dir),
        policy=replace(
            policy,
            model_name=model_path(policy.model_name),
            tokenizer_name=tokenizer_name,
            chat_template=chat_template,
            lora=lora,
        ),
        data=replace(
            data,
            train_path=_data(data.train_path),
            train_sets={name: _data(path) for name, path in data.train_sets.items()},
            validation_path=validation_path,
            validation_sets={name: _data(path) for name, path in data.validation_sets.items()},
        ),
        reward=replace(config.reward, models=models),
    )


def is_local(name: str) -> bool:
    """Return True if a model or tokenizer name is a path, which is never looked up on a hub."""
    return os.path.isabs(name) or os.path.isdir(name)


def require_model_directory(key: str, name: str) -> None:
    """Raise ConfigError if `name` is an absolute path that is not a directory on this node. For
    workers.
    """
    if os.path.isabs(name) and not os.path.isdir(name):
        raise ConfigError(
            f"{key}: {name} is not a directory on node {socket.gethostname()}, where a worker needs"
            " it; put the model on a file system that all nodes mount at the same path"
        )


def _reward_model(model: RewardModelConfig) -> RewardModelConfig:
    tokenizer_name = model.tokenizer_name
    if tokenizer_name is not None:
        tokenizer_name = model_path(tokenizer_name)
    chat_template = model.chat_template
    if chat_template is not None:
        chat_template = _absolute(chat_template)
    return replace(
        model,
        model_name=model_path(model.model_name),
        tokenizer_name=tokenizer_name,
        chat_template=chat_template,
    )


def model_path(name: str) -> str:
    """Return the absolute path of a model or tokenizer, or a name of a hub unchanged."""
    # `org/model` is the name of a hub, and a path only if there is such a directory.
    exists = os.path.exists(os.path.expanduser(name))
    is_path = exists or name.startswith(("./", "../", "~", "/"))
    return _absolute(name) if is_path else name


def _data(path: str) -> str:
    """Return the path of a data file or directory; a name of the hub is not changed."""
    return path if path.startswith(HUB_PREFIX) else _absolute(path)


def _absolute(path: str) -> str:
    # `Path.resolve` would follow links, which may point to a new version later.
    return os.path.abspath(os.path.expanduser(path))
