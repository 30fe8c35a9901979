"""Keys of `nemo-like distill` and the checks of their relations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from nemo_like.config.constraints import Ge, Gt, Le, Lt
from nemo_like.config.errors import Problem
from nemo_like.config.needs import BatchNeeds, RolloutNeeds, RunNeeds
from nemo_like.config.schema import MAIN_SET, EpochLoopConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class DistillConfig(EpochLoopConfig):
    """Distillation: the teachers, the divergence from them, and the loop."""

    teacher: str | None = None
    """Directory or hub name of the teacher, a model with the tokenizer of the policy. Excludes
    `distill.teachers`."""
    teachers: dict[str, str] = field(default_factory=dict)
    """One teacher for each training set, e.g. `{train: runs/a/hf, code: runs/b/hf}`. Validation
    sets have the teacher of their name, `data.validation_path` has the teacher `train`."""
    divergence: Literal["reverse_kl", "forward_kl", "mixed_kl", "jsd"] = "reverse_kl"
    """Divergence of the student p from the teacher q per token: `reverse_kl` is KL(p || q),
    `forward_kl` KL(q || p), `mixed_kl` a weighted sum of both, `jsd` the generalized
    Jensen-Shannon divergence of GKD."""
    divergence_weight: Annotated[float, Gt(0), Lt(1)] = 0.5
    """Weight of the forward KL in `mixed_kl`; weight of the teacher in the mixture of `jsd`, which
    near 0 is proportional to the forward KL and near 1 to the reverse KL."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """The logits of student and teacher are divided by this in the divergence."""
    top_k: Annotated[int | None, Ge(1)] = None
    """Compare only the teacher's most probable tokens of each position, and all others as one
    further token; null compares the complete vocabulary, in chunks."""
    sft_weight: Annotated[float, Ge(0)] = 0.0
    """Weight of the negative log-likelihood of the rows of the data (not of sampled completions),
    which is added to the divergence."""
    on_policy_fraction: Annotated[float, Ge(0), Le(1)] = 0.0
    """Share of the steps, chosen at random, that train on completions which the student samples
    (lambda of GKD), one for each of `policy.train_global_batch_size` prompts; the others train on
    the rows. 0 is off-policy, 1 on-policy distillation."""


@dataclass(frozen=True, kw_only=True)
class DistillRunConfig(RunConfig):
    """All keys of `nemo-like distill`."""

    distill: DistillConfig = field(default_factory=DistillConfig)

    kind: ClassVar[str] = "distill"

    @cached_property
    def needs(self) -> RunNeeds:
        """See `RunConfig.needs`; with on-policy steps the student samples completions."""
        rollouts = None
        if self.distill.on_policy_fraction > 0:
            rollouts = RolloutNeeds(
                generation=self.policy.generation,
                rewards=self.reward,
                environment=self.environment,
                # Scores of completions are metrics only.
                requires_rewards=bool(self.reward.functions),
            )
        return RunNeeds(
            job=self.kind,
            batch=BatchNeeds.of_one_step(self.policy.train_global_batch_size),
            teachers={teacher_key(name): path for name, path in self.named_teachers.items()},
            # Not for the most probable tokens alone.
            keeps_teacher_embeddings=self.distill.top_k is None,
            scored_rows="train",
            rollouts=rollouts,
        )

    @property
    def named_teachers(self) -> dict[str, str]:
        """The teachers by name; a single one has the name ''."""
        if self.distill.teacher is not None:
            return {"": self.distill.teacher}
        return self.distill.teachers

    def job_problems(self) -> Iterator[Problem]:
        """Yield the problems of the teachers and of keys without effect."""
        yield from _teacher_problems(self)
        distill = self.distill
        if distill.sft_weight > 0 and distill.on_policy_fraction == 1:
            yield Problem(
                ("distill.sft_weight", "distill.on_policy_fraction"),
                f"distill.sft_weight is {distill.sft_weight:g}, which has no effect with"
                " distill.on_policy_fraction 1: no step trains on the rows of the data. Set it to"
                " 0, or distill.on_policy_fraction below 1",
            )
        if self.environment.is_used:
            yield Problem(
                ("environment.path",),
                f"{self.environment.name} is set, but distillation samples completions of one"
                " turn; remove it",
            )


def teacher_key(name: str) -> str:
    """Return the config key of a teacher by its name, '' for a single one."""
    return f"distill.teachers.{name}" if name else "distill.teacher"


def _teacher_problems(config: DistillRunConfig) -> Iterator[Problem]:
    """One teacher, or one for every row."""
    distill = config.distill
    keys = ("distill.teacher", "distill.teachers")
    if distill.teacher is None and not distill.teachers:
        yield Problem(keys, "distill.teacher is not set; give the directory of a model")
    if distill.teacher is not None and distill.teachers:
        yield Problem(keys, "distill.teacher and distill.teachers are both set; remove one of them")
    if not distill.teachers:
        return
    sets = {MAIN_SET, *config.data.train_sets}
    if set(distill.teachers) != sets:
        yield Problem(
            ("distill.teachers", "data.train_sets"),
            f"distill.teachers has {', '.join(sorted(distill.teachers))}, the training sets are"
            f" {', '.join(sorted(sets))}; give each of them a teacher",
        )
    for name in config.data.validation_sets:
        if name not in distill.teachers:
            yield Problem(
                ("data.validation_sets", "distill.teachers"),
                f"data.validation_sets.{name} has no teacher: give it the name of one of"
                f" distill.teachers ({', '.join(distill.teachers)})",
            )
