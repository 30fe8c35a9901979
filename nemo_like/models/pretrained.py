"""Opens configurations and tokenizers of Hugging Face models. No weights are loaded here.

transformers is imported on the first use: it takes more CPU time than everything else that checking
a config needs.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import OutputHead
from nemo_like.models.spec import ModelSpec
from nemo_like.models.vision import VISION_TYPES
from nemo_like.models.weight_files import has_own_head

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_NOT_NEEDED = ("torch", "PIL")
"""Packages that transformers imports with configurations and tokenizers where they are
installed.
"""
_OTHER_PARTS = ("vision_config", "audio_config")
_LANGUAGE_MODEL_ALONE = ("qwen3_5", "qwen3_5_moe")
"""Composite types whose language model is built and loaded without the other parts."""


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

    It does not tie the embeddings of a model whose files have two different ones. Raises OSError
    for files that are missing and ValueError for files that cannot be used, with a text of one
    line.
    """
    from transformers import AutoConfig

    config = _open(AutoConfig.from_pretrained, directory)
    for section in (config, config.get_text_config()):
        if getattr(section, "tie_word_embeddings", False) and has_own_head(Path(directory)):
            section.tie_word_embeddings = False
    return config


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


def is_composite(model_config: PretrainedConfig) -> bool:
    """Return True for a model with other parts than a language model, such as a vision tower."""
    is_nested = model_config.get_text_config() is not model_config
    return is_nested or bool(_other_parts(model_config))


def _other_parts(model_config: PretrainedConfig) -> list[str]:
    """Return the keys of other parts that the type has, not those left over from another type."""
    return [
        part
        for part in _OTHER_PARTS
        if part in model_config.sub_configs and getattr(model_config, part) is not None
    ]


def check_model_type(
    model_config: PretrainedConfig,
    head: OutputHead,
    model_name: str,
    key: str,
    *,
    trains_images: bool = False,
) -> bool:
    """Raise ConfigError for a model that the engines cannot build with the output head `head`.

    `key` is the config key of `model_name`. Composite models are refused, except those of which
    transformers builds the language model alone, and with `trains_images` those that are trained
    with images: then the result is True.
    """
    # Not from the package above: without torch that one has no such names.
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    model_type = model_config.model_type
    is_causal = head == "vocabulary"
    subject = f"{key} is {model_name!r}, a model of type {model_type}"
    if trains_images and is_causal and model_type in VISION_TYPES:
        return True
    if is_composite(model_config) and not (is_causal and model_type in _LANGUAGE_MODEL_ALONE):
        parts = _other_parts(model_config)
        raise ConfigError(
            f"{subject}, which has {' and '.join(parts or ['other parts'])} beside its language"
            " model: such composite models cannot be trained; use a language model, for example"
            " one of type qwen3"
        )
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not is_causal:
        names = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if model_type not in names:
        kind = "causal language model" if is_causal else "sequence classification"
        raise ConfigError(
            f"{subject}: transformers has no {kind} of this type; use a Llama-, Mistral- or"
            " Qwen-like model"
        )
    return False


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
