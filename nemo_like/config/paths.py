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
from nemo_like.config.schema import RunConfig

ConfigT = TypeVar("ConfigT", bound=RunConfig)


def resolve_paths(config: ConfigT) -> ConfigT:
    """The config with `~` expanded and every relative path taken from this process's working
    directory.

    A model or tokenizer name changes only if it is a path here, or is written as one (`./`, `../`,
    `~`); links are kept.
    """
    policy, data = config.policy, config.data
    return replace(
        config,
        output_dir=_absolute(config.output_dir),
        policy=replace(
            policy,
            model_name=_model(policy.model_name),
            tokenizer_name=None if policy.tokenizer_name is None else _model(policy.tokenizer_name),
            chat_template=None if policy.chat_template is None else _absolute(policy.chat_template),
        ),
        data=replace(
            data,
            train_path=_absolute(data.train_path),
            validation_path=None
            if data.validation_path is None
            else _absolute(data.validation_path),
        ),
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
            f" it; put the model on a"
            " file system that all nodes mount at the same path"
        )


def _model(name: str) -> str:
    is_path = os.path.exists(os.path.expanduser(name)) or name.startswith(("./", "../", "~", "/"))
    return _absolute(name) if is_path else name


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
