"""Keys of `nemo-like sft` and the checks of their relations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from nemo_like.config.batching import StreamableDataConfig, batching_problems
from nemo_like.config.errors import Problem
from nemo_like.config.schema import EpochLoopConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class SftConfig(EpochLoopConfig):
    """The SFT loop: length of the run and validation."""

    val_generate: bool = False
    """Also generate an answer for each validation prompt and score it with `reward.functions` and
    `reward.models`."""


@dataclass(frozen=True, kw_only=True)
class SftRunConfig(RunConfig):
    """All keys of `nemo-like sft`."""

    data: StreamableDataConfig
    sft: SftConfig = field(default_factory=SftConfig)

    kind: ClassVar[str] = "sft"
    scored_rows: ClassVar[Literal["train", "validation"] | None] = "validation"

    @property
    def generates(self) -> bool:
        """True if validation generates answers."""
        return self.sft.val_generate

    @property
    def has_fixed_batches(self) -> bool:
        """True unless the rows of a step are chosen from a window."""
        return not self.data.batching.is_streaming

    def job_problems(self) -> Iterator[Problem]:
        """Yield the problems of batch formation and of generated validation answers."""
        yield from batching_problems(self, self.data, self.sft.max_num_steps)
        if not self.sft.val_generate:
            return
        if not self.data.validation_files:
            yield Problem(
                ("sft.val_generate",),
                "sft.val_generate is true, but data.validation_path is not set",
            )
        if not self.reward.weights:
            yield Problem(
                ("sft.val_generate",),
                "sft.val_generate is true, but reward.functions and reward.models have nothing to"
                " score answers with",
            )
