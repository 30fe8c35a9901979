"""Configurations of well-known models, and the `ModelSpec` of a path or of a preset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.model_directory import model_directory
from nemo_like.models.spec import ModelSpec


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, width: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **more,
    }


_TIED = {"tie_word_embeddings": True}
_QWEN2: dict[str, Any] = {"model_type": "qwen2", "use_sliding_window": False}

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "135m": ("SmolLM2-135M", _llama(576, 30, 9, 3, 1536, 49152, **_TIED)),
    "0.5b": ("Qwen2.5-0.5B", _llama(896, 24, 14, 2, 4864, 151936, **_QWEN2, **_TIED)),
    "1b": ("Llama-3.2-1B", _llama(2048, 16, 32, 8, 8192, 128256, **_TIED)),
    "1.5b": ("Qwen2.5-1.5B", _llama(1536, 28, 12, 2, 8960, 151936, **_QWEN2, **_TIED)),
    "3b": ("Llama-3.2-3B", _llama(3072, 28, 24, 8, 8192, 128256, **_TIED)),
    "7b": ("Qwen2.5-7B", _llama(3584, 28, 28, 4, 18944, 152064, **_QWEN2)),
    "8b": ("Llama-3.1-8B", _llama(4096, 32, 32, 8, 14336, 128256)),
    "14b": ("Qwen2.5-14B", _llama(5120, 48, 40, 8, 13824, 152064, **_QWEN2)),
    "32b": ("Qwen2.5-32B", _llama(5120, 64, 40, 8, 27648, 152064, **_QWEN2)),
    "70b": ("Llama-3.1-70B", _llama(8192, 80, 64, 8, 28672, 128256)),
    "72b": ("Qwen2.5-72B", _llama(8192, 80, 64, 8, 29568, 152064, **_QWEN2)),
}
"""Size on the command line -> (the model with these published sizes, its configuration)."""


def load_spec(model: str, key: str = "--model") -> ModelSpec:
    """Return the spec of a model directory, a `config.json`, a hub name, or a size of `PRESETS`.

    Raises ConfigError for anything else and for files that cannot be used; `key` names a model that
    cannot be downloaded.
    """
    path = Path(model).expanduser()
    if "/" in model and not path.exists():
        path = Path(model_directory(key, model, weights=False))
    # A path has priority: a directory may have the name of a preset.
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        # A file of weights given by mistake is no text at all.
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{shown_path(path)} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError(
                f"{shown_path(path)} contains {type(config).__name__}, not a model configuration"
            )
        return ModelSpec.from_config(config, model)
    preset = PRESETS.get(model.lower())
    if preset is None:
        choices = [f"{size} ({name})" for size, (name, _) in PRESETS.items()]
        sizes = ", ".join(choices)
        raise ConfigError(
            f"unknown model {model!r}: there is no such directory or config.json, and the presets"
            f" are {sizes}"
        )
    name, config = preset
    return ModelSpec.from_config(config, name)
