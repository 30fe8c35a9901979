"""Keys of `nemo-like sft` and the checks of their relations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from nemo_like.config.batching import StreamableDataConfig, batching_problems
from nemo_like.config.errors import Problem
from nemo_like.config.needs import BatchNeeds, RolloutNeeds, RunNeeds
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

    @cached_property
    def needs(self) -> RunNeeds:
        """See `RunConfig.needs`; validation may generate answers."""
        rollouts = None
        if self.sft.val_generate:
            rollouts = RolloutNeeds(
                generation=self.policy.generation, rewards=self.reward, environment=self.environment
            )
        # The rows of a stream are chosen from a window.
        batch = BatchNeeds.of_one_step(
            self.policy.train_global_batch_size, is_fixed=not self.data.batching.is_streaming
        )
        return RunNeeds(
            job=self.kind,
            batch=batch,
            groups_rows=False,
            scored_rows="validation",
            trains_images=True,
            rollouts=rollouts,
        )

    def job_problems(self) -> Iterator[Problem]:
        """Yield the problems of batch formation and of generated validation answers."""
        yield from batching_problems(self.policy, self.data, self.sft.max_num_steps)
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
