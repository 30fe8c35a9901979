"""What a rollout asks of a generator and what it gets back; `Generator` spreads it over workers of
any engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nemo_like.config.schema import GenerationConfig
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.worker_group import WorkerGroup, onloaded
from nemo_like.sampling_filter import SamplingFilter

FinishReason = Literal["stop", "length"]
"""`stop`: an end token or a stop string. `length`: no room for another token."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. The keys mean what they mean under `policy.generation`."""

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
        """The filter of the tokens that may be sampled; not applied at temperature 0."""
        return SamplingFilter(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    @classmethod
    def from_config(
        cls, config: GenerationConfig, *, temperature: float | None = None
    ) -> SamplingParams:
        """The sampling keys of `config`, at another temperature if one is given (validation is
        usually greedy).
        """
        return cls(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature if temperature is None else temperature,
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
    """int32: what was sampled after each prompt, the end token included."""
    logprobs: Jagged
    """float32: of each token under the distribution it was drawn from."""
    finish_reasons: list[FinishReason]
    weight_version: int
    """The version of the weights that sampled, as last pushed; 0 is the model as loaded."""

    def __len__(self) -> int:
        return len(self.finish_reasons)

    def take(self, rows: np.ndarray) -> Completions:
        """The given rows in the given order."""
        reasons = [self.finish_reasons[row] for row in rows]
        return Completions(
            self.token_ids.take(rows), self.logprobs.take(rows), reasons, self.weight_version
        )

    @staticmethod
    def concat(parts: Sequence[Completions]) -> Completions:
        """All rows of all parts in order; raises ValueError if they were sampled by different
        weights.
        """
        versions = sorted({part.weight_version for part in parts})
        if len(versions) != 1:
            raise ValueError(
                f"completions of {len(parts)} workers carry weight versions {versions}; they must"
                f" be of one version"
            )
        return Completions(
            Jagged.concat([part.token_ids for part in parts]),
            Jagged.concat([part.logprobs for part in parts]),
            [reason for part in parts for reason in part.finish_reasons],
            versions[0],
        )


class Generator:
    """Completions from a group of generation workers, in the order asked."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group

    def onloaded(self) -> AbstractContextManager[None]:
        """Weights are on the device inside, and in host memory outside."""
        return onloaded(self.group)

    def generate(
        self,
        prompt_ids: Jagged,
        seeds: np.ndarray,
        sampling: SamplingParams,
        *,
        max_total_length: int,
    ) -> Completions:
        """One completion for each row of `prompt_ids` (int32, B rows); row i draws from the stream
        of `seeds[i]`.

        `seeds` is uint64 [B]; rows of equal prompt and equal seed are equal. A completion ends at
        the latest when it and its prompt have `max_total_length` tokens together. Raises ValueError
        for a prompt with no room for a token.
        """
        if len(seeds) != len(prompt_ids):
            raise ValueError(f"{len(prompt_ids)} prompts need as many seeds, got {len(seeds)}")
        _check_room(prompt_ids.lengths, max_total_length)
        rows_of_worker = deal_by_length(prompt_ids.lengths, self.group.topology.dp)
        parts = self.group.run_all_workers_sharded_data(
            "generate",
            [prompt_ids.take(rows) for rows in rows_of_worker],
            [np.asarray(seeds, dtype=np.uint64)[rows] for rows in rows_of_worker],
            sampling=sampling,
            max_total_length=max_total_length,
        )
        return Completions.concat(parts).take(np.argsort(np.concatenate(rows_of_worker)))

    def shutdown(self) -> None:
        self.group.shutdown()


def deal_by_length(lengths: np.ndarray, num_workers: int) -> list[np.ndarray]:
    """Row indices of each worker: rows sorted by length, longest first, are dealt there and back.

    Example: lengths [5, 1, 3, 4] over 2 workers give [[0, 1], [3, 2]], 6 and 7 tokens.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    position = np.arange(len(order))
    turn, seat = np.divmod(position, num_workers)
    worker = np.where(turn % 2 == 0, seat, num_workers - 1 - seat)
    return [order[worker == index] for index in range(num_workers)]


def _check_room(lengths: np.ndarray, max_total_length: int) -> None:
    for row in np.flatnonzero((lengths == 0) | (lengths >= max_total_length))[:1]:
        if lengths[row] == 0:
            raise ValueError(
                f"prompt {row} has no tokens; a completion needs at least one to start from"
            )
        raise ValueError(
            f"prompt {row} has {lengths[row]} tokens and policy.max_total_sequence_length is"
            f" {max_total_length}, which"
            f" leaves no room for a completion; raise it to at least {lengths[row] + 1} or drop the"
            f" prompt"
        )


def _require(holds: bool, key: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"policy.generation.{key} is {value!r}; it must be {rule}")
