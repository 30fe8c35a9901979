"""Reads single values of a model's configuration, under the names of several architectures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_like.config.errors import ConfigError, shown_value

_REQUIRED = object()
_COMPUTED = frozenset(
    (
        "_name_or_path",
        "architectures",
        "head_dim",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rope_parameters",
        "text_config",
    )
)
"""Keys that some classes of transformers set without declaring them."""


class ConfigFields:
    """Reads a configuration by any of the names that architectures use for one property."""

    def __init__(self, config: Mapping[str, Any] | object, name: str) -> None:
        if config is None or isinstance(config, (str, bytes)):
            raise ConfigError(
                "a model configuration is a mapping or an object with its attributes; got"
                f" {shown_value(config)}"
            )
        self._config = config
        own_name = self._lookup("_name_or_path") or self._lookup("model_type") or ""
        self.name = name or str(own_name)
        text_config = self._lookup("text_config")
        # Multimodal configurations nest the language model.
        if text_config is not None:
            self._config = text_config

    def get(self, *names: str, default: Any = _REQUIRED) -> Any:
        """The first of `names` that is set, else `default`. Raises ConfigError without either."""
        for name in names:
            value = self._lookup(name)
            if value is not None:
                return value
        if default is _REQUIRED:
            spellings = " / ".join(names)
            raise ConfigError(f"{self.model} has no {spellings} in its config.json")
        return default

    def size(self, *names: str, default: Any = _REQUIRED) -> int:
        """As `get`. Raises ConfigError for a value that is not a positive integer.

        A list of one value for every layer is that value.
        """
        value = self.get(*names, default=default)
        if isinstance(value, list) and value[1:] and value.count(value[0]) == len(value):
            value = value[0]
        # bool is a subclass of int.
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{self.model} gives {names[0]} {shown_value(value)} in its config.json; it must"
                " be a positive integer"
            )
        return value

    @property
    def model(self) -> str:
        return f"the model {self.name}" if self.name else "the model"

    def _lookup(self, name: str) -> Any:
        if isinstance(self._config, Mapping):
            return self._config.get(name)
        return getattr(self._config, name, None) if self._is_read(name) else None

    def _is_read(self, name: str) -> bool:
        """Return False for a key that a class of transformers keeps but does not have.

        transformers stores every key of config.json, and a model ignores those of other types, such
        as `sliding_window` of a Llama.
        """
        declared = getattr(type(self._config), "__dataclass_fields__", None)
        if declared is None or name in declared or name in _COMPUTED:
            return True
        aliases = getattr(type(self._config), "attribute_map", {})
        return name in aliases or hasattr(type(self._config), name)
