"""The output head of a Hugging Face model: an output embedding, or a scalar head on the last token.

A model with a scalar head is what `AutoModelForSequenceClassification` loads with one label: the
backbone and `score.weight` [1, D] without a bias.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import OutputHead
from nemo_like.models.pretrained import load_model_config, with_output_head
from nemo_like.models.spec import SCORE_WEIGHT, ModelSpec
from nemo_like.models.vision import VISION_TYPES


class OpenedConfig(NamedTuple):
    """The configuration of a model with the output head that a run needs."""

    config: PretrainedConfig
    initial_weights: dict[str, Tensor]
    """float32 [*shape] by name: weights that the files do not have."""


def open_config(model_name: str, head: OutputHead, *, trainable: bool, seed: int) -> OpenedConfig:
    """Load the configuration of `model_name` and change it for a model with `head`.

    A language model gets an initial score head, which depends on `seed` only. Raises ConfigError
    for a model that cannot have `head`: a reward model has no output embedding, and a model that is
    not trained needs a score head in its files.
    """
    stored = load_model_config(model_name)
    config = with_output_head(stored, head, model_name)
    spec = ModelSpec.from_config(config, model_name)
    if head == "vocabulary" or ModelSpec.from_config(stored, model_name).head == "scores":
        return OpenedConfig(config, {})
    if not trainable:
        raise ConfigError(
            f"{model_name} is a language model without a score head; name the directory of a reward"
            " model, such as `nemo-like rm` exports"
        )
    std = float(getattr(config, "initializer_range", 0.02))
    weight = initial_scores(spec.hidden_size, std, seed)
    return OpenedConfig(config, {SCORE_WEIGHT: weight})


def initial_scores(hidden_size: int, std: float, seed: int) -> Tensor:
    """Return the initial `score.weight`, float32 [1, hidden_size]: normal with `std`.

    As in transformers, `std` is the model's `initializer_range`. The values depend on `seed` only,
    and not on the engine or the layout of the ranks.
    """
    generator = torch.Generator().manual_seed(
        (seed << 32) % 2**63 + zlib.crc32(SCORE_WEIGHT.encode())
    )
    return torch.empty(1, hidden_size).normal_(0.0, std, generator=generator)


def auto_class(model_config: PretrainedConfig) -> Any:
    """Return the class of transformers that builds and loads models of a configuration."""
    if model_config.model_type in VISION_TYPES:
        return AutoModelForImageTextToText
    is_causal = ModelSpec.from_config(model_config).head == "vocabulary"
    return AutoModelForCausalLM if is_causal else AutoModelForSequenceClassification


def meta_model(model_config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Build the architecture on the meta device, with tied weights where the model ties them.

    `options` are as in transformers' `from_config`. Raises ConfigError for an architecture that
    transformers does not have with a score head.
    """
    is_causal = ModelSpec.from_config(model_config).head == "vocabulary"
    with torch.device("meta"):
        try:
            model = auto_class(model_config).from_config(model_config, **options)
        except ValueError as error:
            if is_causal:
                raise
            raise ConfigError(
                f"a model of type {model_config.model_type} cannot be a reward model: transformers"
                " has no sequence classification for it; use a Llama-, Mistral- or Qwen-like model"
            ) from error
    if not is_causal:
        _check_score_head(model)
    model.tie_weights()
    return model


def _check_score_head(model: PreTrainedModel) -> None:
    """Raise ConfigError unless the head is `score`, a linear layer [1, D] without a bias."""
    score = getattr(model, "score", None)
    is_linear = isinstance(score, torch.nn.Linear)
    if not is_linear or score.bias is not None or score.out_features != 1:
        raise ConfigError(
            f"{type(model).__name__} has no linear head `score` with one output and without a bias;"
            " use a Llama-, Mistral- or Qwen-like model as reward model"
        )
