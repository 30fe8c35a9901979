"""config.json and tokenizer files of an exported model.

Other releases of transformers, and tools with their own readers, must compute the same model from
them. transformers 5 writes rotary embeddings and tokenizers in a form that transformers 4 does not
read; an exported model has both forms.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from nemo_like.run.files import write_json

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS_MAP = "special_tokens_map.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    _SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
)
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
_ROPE_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_local_base_freq",
    "global_rope_theta",
    "local_rope_theta",
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_emb_base",
    "original_max_position_embeddings",
)
"""Keys of transformers 4 that transformers 5 moves into `rope_parameters`."""
_LOADING_OPTIONS = ("backend", "is_local", "local_files_only", "trust_remote_code", "name_or_path")
"""Arguments of the process that loaded a tokenizer, which transformers 5 writes with it."""


def write_config(model_config: PretrainedConfig, source: Path, directory: Path) -> None:
    """Write config.json of a model that was trained from the directory `source`.

    The settings of its image processor are copied.
    """
    model_config.save_pretrained(directory)
    _copy(_PROCESSOR_FILES, source, directory)
    path = directory / CONFIG
    content = _read(path)
    original = _read(source / CONFIG)
    pairs = [(content, original)]
    if isinstance(content.get("text_config"), dict):
        pairs.append((content["text_config"], original.get("text_config") or {}))
    for section, stored in pairs:
        # Other tools read these values of the source.
        legacy = {name: stored[name] for name in _ROPE_KEYS if name in stored}
        section.update(_legacy_rope(section) | legacy)
    write_json(path, content)


def _legacy_rope(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of transformers 4 for `rope_parameters`; empty without."""
    rope = section.get("rope_parameters")
    if not isinstance(rope, dict):
        return {}
    by_type = {name: value for name, value in rope.items() if isinstance(value, dict)}
    scaling = dict(by_type.get("full_attention", rope))
    if "rope_theta" not in scaling:
        return {}
    keys: dict[str, Any] = {"rope_theta": scaling.pop("rope_theta")}
    if "partial_rotary_factor" in scaling:
        keys["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    if "sliding_attention" in by_type:
        keys["rope_local_base_freq"] = by_type["sliding_attention"]["rope_theta"]
    if section.get("model_type") == "gpt_neox":
        keys["rotary_emb_base"] = keys["rope_theta"]
        keys["rotary_pct"] = keys.get("partial_rotary_factor", 1.0)
    if section.get("model_type") == "phi3" and "short_factor" in scaling:
        # transformers 4 accepts these three keys only.
        keys["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
        names = ("short_factor", "long_factor")
        scaling = {"type": "longrope"} | {name: scaling[name] for name in names}
    is_default = scaling.get("rope_type", scaling.get("type", "default")) == "default"
    return keys | {"rope_scaling": None if is_default else scaling}


def write_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    source: Path,
    directory: Path,
    *,
    replaces_template: bool = False,
    pad_token: str | None = None,
) -> None:
    """Write the files of `tokenizer`, which was loaded from the directory `source`.

    The files of `source` are copied, because training does not change a tokenizer. With
    `replaces_template` the chat template of `tokenizer` replaces the template of the source;
    `pad_token` replaces its padding token.
    """
    tokenizer.save_pretrained(directory)
    _copy(_TOKENIZER_FILES, source, directory)
    settings = _read(directory / TOKENIZER_CONFIG)
    for name in _LOADING_OPTIONS:
        settings.pop(name, None)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        # transformers 5 reads either name, and transformers 4 needs an object under this one.
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if replaces_template:
        settings.pop("chat_template", None)
    if pad_token is not None:
        settings["pad_token"] = pad_token
        tokens = _read(directory / _SPECIAL_TOKENS_MAP)
        if tokens:
            write_json(directory / _SPECIAL_TOKENS_MAP, tokens | {"pad_token": pad_token})
    write_json(directory / TOKENIZER_CONFIG, settings)


def _copy(names: Sequence[str], source: Path, directory: Path) -> None:
    """Copy the files that `source` has."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
