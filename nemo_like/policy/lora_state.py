"""LoRA in both engines: whether a forward pass includes the adapters, and the check of targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from nemo_like.config.errors import ConfigError
from nemo_like.config.lora import ALL_LINEAR, LoraConfig


class LoraState:
    """State that all adapters of a model share."""

    def __init__(self, config: LoraConfig) -> None:
        self.scale = config.scale
        self.is_enabled = True

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Return a context in which the model computes without adapters."""
        before = self.is_enabled
        self.is_enabled = False
        try:
            yield
        finally:
            self.is_enabled = before


def check_targets(config: LoraConfig, layers: Iterable[str]) -> None:
    """Raise ConfigError for a target that names none of `layers`, which can have an adapter."""
    names = list(layers)
    for target in config.target_modules:
        if target == ALL_LINEAR:
            continue
        if not any(f".{name}".endswith(f".{target}") for name in names):
            ends = sorted({name.rpartition(".")[2] for name in names})
            raise ConfigError(
                f"policy.lora.target_modules: {target!r} is not a linear layer that can have an"
                f" adapter; these are {', '.join(ends)} (experts, routers, and in models with"
                " experts all feed-forward layers, have none)"
            )
