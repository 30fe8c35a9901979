"""Keys of `nemo-like rm` and the checks of their relations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from nemo_like.config.constraints import Ge
from nemo_like.config.errors import Problem
from nemo_like.config.output_head import OutputHead
from nemo_like.config.schema import EpochLoopConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(EpochLoopConfig):
    """The training loop of a reward model: length of the run, validation and loss."""

    center_coefficient: Annotated[float, Ge(0)] = 0.0
    """Weight of the squared sum of the two scores of a pair, which keeps scores near 0. The
    preferences determine differences of scores only. A common value is 0.01."""


@dataclass(frozen=True, kw_only=True)
class RewardModelRunConfig(RunConfig):
    """All keys of `nemo-like rm`."""

    rm: RewardModelConfig = field(default_factory=RewardModelConfig)

    kind: ClassVar[str] = "rm"
    example: ClassVar[str] = "pair"
    rows_per_example: ClassVar[int] = 2
    output_head: ClassVar[OutputHead] = "scores"

    def job_problems(self) -> Iterator[Problem]:
        """Yield the problems of model and data keys."""
        lora = self.policy.lora
        if lora.is_quantized:
            yield Problem(
                ("policy.lora.quantization",),
                f"policy.lora.quantization is {lora.quantization}, which reward models do not have:"
                " set it to none",
            )
        if self.data.train_on != "assistant":
            yield Problem(
                ("data.train_on",),
                f"data.train_on is {self.data.train_on}, but a preference compares completions"
                " only: set it to assistant",
            )
