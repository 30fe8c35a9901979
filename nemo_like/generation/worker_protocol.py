"""The methods of a generation worker that a driver calls, with their arguments and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from nemo_like.config.schema import GenerationConfig
from nemo_like.data.jagged import Jagged
from nemo_like.sampling_filter import SamplingFilter
from nemo_like.weight_sync.transport import WeightTarget

FinishReason = Literal["stop", "length"]
"""`stop`: an end token or a stop string. `length`: the token limit was reached."""


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
        _require(
            self.max_new_tokens >= 1,
            "max_new_tokens",
            self.max_new_tokens,
            "at least 1",
        )
        _require(
            self.temperature >= 0,
            "temperature",
            self.temperature,
            "0 (greedy) or above",
        )
        _require(
            0 < self.top_p <= 1,
            "top_p",
            self.top_p,
            "in (0, 1]; 1 turns the filter off",
        )
        _require(
            self.top_k is None or self.top_k >= -1,
            "top_k",
            self.top_k,
            "at least 1; null, 0 or -1 turns the filter off",
        )
        _require(
            0 <= self.min_p <= 1,
            "min_p",
            self.min_p,
            "in [0, 1]; 0 turns the filter off",
        )
        _require(
            all(self.stop_strings),
            "stop_strings",
            self.stop_strings,
            "non-empty strings",
        )

    @property
    def token_filter(self) -> SamplingFilter:
        """Filter of the tokens that may be sampled; not applied at temperature 0."""
        return SamplingFilter(
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )

    @classmethod
    def from_config(
        cls,
        config: GenerationConfig,
        *,
        temperature: float | None = None,
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


@dataclass(frozen=True, slots=True)
class Completions:
    """B completions.

    Example: "4" and an end token after one prompt, three tokens without an end after another:
    `token_ids` rows [20, 2] and [9, 9, 7], `finish_reasons` ["stop", "length"].
    """

    token_ids: Jagged
    """int32: the tokens sampled after each prompt, the end token included."""
    logprobs: Jagged
    """float32: log-prob of each token under the distribution that it was drawn from."""
    finish_reasons: list[FinishReason]
    weight_version: int
    """Version of the weights, set by the last weight update; 0 is the model as loaded."""

    def __len__(self) -> int:
        """Number of completions, B."""
        return len(self.finish_reasons)

    def take(self, rows: np.ndarray) -> Completions:
        """Return the given rows (int64 [n]) in the given order."""
        reasons = [self.finish_reasons[row] for row in rows]
        return Completions(
            self.token_ids.take(rows),
            self.logprobs.take(rows),
            reasons,
            self.weight_version,
        )

    @staticmethod
    def concat(parts: Sequence[Completions]) -> Completions:
        """Concatenate the rows of all parts.

        Raises ValueError if they were sampled with different weights.
        """
        versions = sorted({part.weight_version for part in parts})
        if len(versions) != 1:
            raise ValueError(
                f"completions of {len(parts)} workers carry weight versions {versions}; they must"
                f" be of one version"
            )
        finish_reasons: list[FinishReason] = []
        for part in parts:
            finish_reasons.extend(part.finish_reasons)
        return Completions(
            Jagged.concat([part.token_ids for part in parts]),
            Jagged.concat([part.logprobs for part in parts]),
            finish_reasons,
            versions[0],
        )


class GenerationWorkerProtocol(WeightTarget, Protocol):
    """One replica of the generator."""

    def generate(
        self,
        prompt_ids: Jagged,
        seeds: np.ndarray,
        sampling: SamplingParams,
        max_total_length: int,
    ) -> Completions:
        """Return one completion for each of the P rows of `prompt_ids`; `seeds` is uint64 [P].

        See `Generator.generate`.
        """
        ...

    def offload(self) -> None:
        """Move the weights to host memory."""
        ...

    def onload(self) -> None:
        """Move the weights back to the device."""
        ...


def _require(
    is_valid: bool,
    key: str,
    value: object,
    rule: str,
) -> None:
    if not is_valid:
        raise ValueError(f"policy.generation.{key} is {value!r}; it must be {rule}")
