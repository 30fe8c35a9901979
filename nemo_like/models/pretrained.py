"""Opens configurations and tokenizers of Hugging Face models, and gives a model an output head. No
weights are loaded here.

transformers is imported on the first use: it takes more CPU time than everything else that checking
a config needs.

The output head of a Hugging Face model: an output embedding, or a scalar head on the last token.

A model with a scalar head is what `AutoModelForSequenceClassification` loads with one label: the
backbone and `score.weight` [1, D] without a bias.
"""

from __future__ import annotations

import copy
import logging
import sys
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from nemo_like.config.errors import ConfigError
from nemo_like.config.output_head import OutputHead
from nemo_like.models.spec import SCORE_WEIGHT, ModelSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_NOT_NEEDED = ("torch", "PIL")
"""Packages that transformers imports with configurations and tokenizers where they are
installed.
"""


def import_transformers_without_torch() -> None:
    """Import transformers' configuration and tokenizer classes without importing torch.

    transformers imports torch wherever it is installed, which takes seconds of CPU time; neither
    class needs it. It decides once per process whether torch is available, so this process cannot
    load models afterwards: call this only in a process that ends without loading any. `import
    torch` itself works as before. Does nothing if torch or transformers is imported already.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    hidden = [name for name in _NOT_NEEDED if name not in sys.modules]
    disabled = logging.root.manager.disable
    # transformers reports that models are not available.
    logging.disable(logging.WARNING)
    # importlib reports a module that is None as not installed.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        from transformers import AutoConfig, AutoTokenizer  # noqa: F401
        from transformers.utils.import_utils import is_torch_available

        assert not is_torch_available()
    finally:
        for name in hidden:
            del sys.modules[name]
        logging.disable(disabled)


def load_model_config(directory: str) -> PretrainedConfig:
    """Return the configuration of the model in a directory.

    Raises OSError for files that are missing and ValueError for files that cannot be used, with a
    text of one line.
    """
    from transformers import AutoConfig

    return _open(AutoConfig.from_pretrained, directory)


def load_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a directory. Raises as `load_model_config`."""
    from transformers import AutoTokenizer

    return _open(AutoTokenizer.from_pretrained, directory)


def with_output_head(
    model_config: PretrainedConfig, head: OutputHead, model_name: str
) -> PretrainedConfig:
    """Return `model_config` with the architecture of `head`; a copy where it changes.

    Raises ConfigError as `ModelSpec.with_output_head`, and for a classifier of several labels.
    """
    spec = ModelSpec.from_config(model_config, model_name)
    spec.with_output_head(head)
    if head == "vocabulary":
        return model_config
    if spec.head == "scores":
        if model_config.num_labels != 1:
            raise ConfigError(
                f"policy.model_name is {model_name!r}, a classifier with"
                f" {model_config.num_labels} labels; a reward model has one"
            )
        return model_config
    config = copy.deepcopy(model_config)
    config.architectures = [_classification_architecture(config)]
    config.num_labels = 1
    return config


def _open(from_pretrained: Callable[..., Any], directory: str) -> Any:
    try:
        return from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except OSError as error:
        raise OSError(_first_line(error)) from error
    # Corrupt files raise almost any type; the Rust tokenizers raise Exception itself.
    except Exception as error:
        raise ValueError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    """Return the first line of the error's text, after its type where the text needs it."""
    name = type(error).__name__
    text = str(error).strip()
    if not text:
        return name
    first = text.splitlines()[0].strip()
    # A KeyError's text, for example, is the key alone.
    is_sentence = isinstance(error, OSError | ImportError) or type(error) in (ValueError, Exception)
    return first if is_sentence else f"{name}: {first}"


def _classification_architecture(model_config: PretrainedConfig) -> str:
    """Return the class name of a model with a score head, such as LlamaForSequenceClassification.

    transformers names the classes of a model alike.
    """
    names = model_config.architectures or [f"{model_config.model_type.capitalize()}ForCausalLM"]
    return names[0].replace("ForCausalLM", "").replace("LMHeadModel", "") + (
        "ForSequenceClassification"
    )


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


def meta_model(model_config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Build the architecture on the meta device, with tied weights where the model ties them.

    `options` are as in transformers' `from_config`. Raises ConfigError for an architecture that
    transformers does not have with a score head.
    """
    is_causal = ModelSpec.from_config(model_config).head == "vocabulary"
    auto_class: Any = AutoModelForCausalLM if is_causal else AutoModelForSequenceClassification
    with torch.device("meta"):
        try:
            model = auto_class.from_config(model_config, **options)
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
