"""What a job needs of a run, as one value that the job builds from its keys.

Only the packages of `algorithms` know what their jobs need. Checks of the configuration and the
functions of `training` read this value and sections of keys, and never ask for the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nemo_like.config.errors import counted
from nemo_like.config.rollout import EnvironmentConfig, GenerationConfig, RewardConfig


@dataclass(frozen=True, kw_only=True)
class BatchNeeds:
    """The batch of one step, in examples of the training file and in rows."""

    example: str = "row"
    """Noun for an example of the training file, for messages."""
    key: str = "policy.train_global_batch_size"
    """Key of `num_examples`."""
    num_examples: int
    """Examples of the training file that one step takes."""
    rows_per_example: int = 1
    """Rows that one example of the training file becomes and that must share a microbatch. The
    batch sizes of `policy` count examples."""
    num_rows: int
    """Rows of one step."""
    num_epochs: int = 1
    """Passes of training over the rows of a step."""
    is_fixed: bool = True
    """Every step has `policy.train_global_batch_size` examples."""
    lines: tuple[str, ...]
    """The arithmetic from the examples of a step to optimizer steps, one line each."""

    @classmethod
    def of_one_step(
        cls, size: int, *, example: str = "row", rows_per_example: int = 1, is_fixed: bool = True
    ) -> BatchNeeds:
        """Return the batch of `size` examples on which a step takes one optimizer step."""
        num_rows = size * rows_per_example
        line = f"{counted(size, 'row')} per step = 1 optimizer step"
        if rows_per_example > 1:
            product = f"{counted(size, example)} x {counted(rows_per_example, 'row')}"
            line = f"{product} = {num_rows} rows per step = 1 optimizer step"
        return cls(
            example=example,
            num_examples=size,
            rows_per_example=rows_per_example,
            num_rows=num_rows,
            is_fixed=is_fixed,
            lines=(line,),
        )


@dataclass(frozen=True, kw_only=True)
class RolloutNeeds:
    """What a run needs that samples completions."""

    generation: GenerationConfig
    rewards: RewardConfig
    environment: EnvironmentConfig
    requires_rewards: bool = True
    """A completion must be scored by functions, models or the environment."""


@dataclass(frozen=True, kw_only=True)
class RunNeeds:
    """What a job needs of a run."""

    job: str
    """Name of the job, for messages."""
    batch: BatchNeeds
    head: Literal["vocabulary", "scores"] = "vocabulary"
    """See `config.schema.OutputHead`."""
    reference: bool = False
    """The workers keep the frozen initial policy."""
    logprob_pass: bool = False
    """Log-probs are computed before each training step."""
    teachers: Mapping[str, str] = field(default_factory=dict)
    """Models that the workers keep as teachers, directories or hub names by config key. A row has
    the index of its own."""
    keeps_teacher_embeddings: bool = False
    """The output embeddings of teachers stay on the devices during training."""
    uses_experts: bool = False
    """Training can use the experts that the generator chose (`policy.router_replay`)."""
    groups_rows: bool = True
    """Rows form groups, which may have prefixes in common."""
    scored_rows: Literal["train", "validation"] | None = None
    """The rows whose completions the reward functions score, if any."""
    trains_images: bool = False
    """Rows may have images, if the model has a vision tower."""
    rollouts: RolloutNeeds | None = None
    """None in a run that samples no completions."""

    @property
    def reward_models(self) -> tuple[str, ...]:
        """Names of the reward models that the run starts."""
        return () if self.rollouts is None else tuple(self.rollouts.rewards.models)
