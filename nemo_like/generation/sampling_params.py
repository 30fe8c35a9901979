"""Sampling options of completions."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like.config.generation import GenerationConfig
from nemo_like.sampling_filter import SamplingFilter


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling options, with the names and meanings of `policy.generation`."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        _require(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or above")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]; 1 turns the filter off")
        _require(
            self.top_k is None or self.top_k >= -1,
            "top_k",
            self.top_k,
            "at least 1; null, 0 or -1 turns the filter off",
        )
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]; 0 turns the filter off")
        _require(all(self.stop_strings), "stop_strings", self.stop_strings, "non-empty strings")

    @property
    def token_filter(self) -> SamplingFilter:
        """Filter of the tokens that may be sampled; not applied at temperature 0."""
        return SamplingFilter(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    @classmethod
    def from_config(
        cls, config: GenerationConfig, *, temperature: float | None = None
    ) -> SamplingParams:
        """Return the sampling keys of `config`; `temperature` overrides its temperature.

        Validation usually samples greedily.
        """
        if temperature is None:
            temperature = config.temperature
        return cls(
            max_new_tokens=config.max_new_tokens,
            temperature=temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            stop_strings=tuple(config.stop_strings),
        )


def _require(is_valid: bool, key: str, value: object, rule: str) -> None:
    if not is_valid:
        raise ValueError(f"policy.generation.{key} is {value!r}; it must be {rule}")
