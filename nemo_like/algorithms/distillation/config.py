"""Keys of `nemo-like distill` and the checks of their relations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from nemo_like.config.constraints import Ge, Gt, Le, Lt
from nemo_like.config.errors import Problem
from nemo_like.config.schema import MAIN_SET, EpochLoopConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class DistillConfig(EpochLoopConfig):
    """Distillation: the teachers, the divergence from them, and the loop."""

    teacher: str | None = None
    """Directory of the teacher, a Hugging Face model with the tokenizer of the policy, or the
    name of one on the hub. It is frozen and has the policy's engine, layout and precision. Excludes
    `distill.teachers`."""
    teachers: dict[str, str] = field(default_factory=dict)
    """Several teachers by name, e.g. `{train: runs/a/hf, code: runs/b/hf}`: each row has the
    teacher whose name is in its column `distill.teacher_column`. Without that key the names are the
    names of the training sets, where `train` is `data.train_path` and `data.validation_path`."""
    teacher_column: str | None = None
    """Column of the rows that names the teacher among `distill.teachers`."""
    divergence: Literal["reverse_kl", "forward_kl", "mixed_kl", "jsd"] = "reverse_kl"
    """Divergence of the student p from the teacher q per token: `reverse_kl` is KL(p || q),
    `forward_kl` KL(q || p), `mixed_kl` a weighted sum of both, `jsd` the generalized
    Jensen-Shannon divergence of GKD."""
    forward_weight: Annotated[float, Ge(0), Le(1)] = 0.5
    """Weight of the forward KL in `mixed_kl`; the reverse KL has the rest."""
    jsd_beta: Annotated[float, Gt(0), Lt(1)] = 0.5
    """Weight of the teacher in the mixture of `jsd`: near 0 it is proportional to the forward KL,
    near 1 to the reverse KL."""
    student_temperature: Annotated[float, Gt(0)] = 1.0
    """The student's logits are divided by this in the divergence."""
    teacher_temperature: Annotated[float, Gt(0)] = 1.0
    """The teacher's logits are divided by this in the divergence."""
    top_k: Annotated[int | None, Ge(1)] = None
    """Compare only the teacher's most probable tokens of each position; null is the complete
    vocabulary, in chunks."""
    top_k_tail: Literal["bucket", "renormalize"] = "bucket"
    """Tokens outside of `top_k`: `bucket` counts all of them as one further token of both
    distributions, `renormalize` leaves them out and renormalizes both."""
    sft_weight: Annotated[float, Ge(0)] = 0.0
    """Weight of the negative log-likelihood of the rows of the data (not of sampled completions),
    which is added to the divergence."""
    on_policy_fraction: Annotated[float, Ge(0), Le(1)] = 0.0
    """Share of the steps that train on completions which the student samples for the prompts of the
    rows, chosen at random from `seed` (lambda of GKD); the others train on the rows themselves. 0
    is off-policy, 1 on-policy distillation. Above 0 a step takes
    `policy.train_global_batch_size` prompts with one completion each."""


@dataclass(frozen=True, kw_only=True)
class DistillRunConfig(RunConfig):
    """All keys of `nemo-like distill`."""

    distill: DistillConfig = field(default_factory=DistillConfig)

    kind: ClassVar[str] = "distill"

    @property
    def generates(self) -> bool:
        """True if the student samples completions."""
        return self.distill.on_policy_fraction > 0

    @property
    def samples_validation(self) -> bool:
        """False: a validation computes the divergence from the teacher on its rows."""
        return False

    @property
    def needs_rewards(self) -> bool:
        """True if completions are scored, which is for the metrics only."""
        return bool(self.reward.functions)

    @property
    def teachers_by_key(self) -> dict[str, str]:
        """Directories or hub names of the teachers by config key."""
        return {teacher_key(name): path for name, path in self.named_teachers.items()}

    @property
    def keeps_teacher_embeddings(self) -> bool:
        """True unless the teachers give the most probable tokens only."""
        return self.distill.top_k is None

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
        for key, kind in (("forward_weight", "mixed_kl"), ("jsd_beta", "jsd")):
            is_set = getattr(distill, key) != getattr(DistillConfig, key)
            if is_set and distill.divergence != kind:
                yield Problem(
                    (f"distill.{key}", "distill.divergence"),
                    f"distill.{key} is {getattr(distill, key):g}, which has no effect with"
                    f" distill.divergence {distill.divergence}: remove it, or set"
                    f" distill.divergence to {kind}",
                )
        if distill.top_k is None and distill.top_k_tail != "bucket":
            yield Problem(
                ("distill.top_k_tail", "distill.top_k"),
                f"distill.top_k_tail is {distill.top_k_tail}, but distill.top_k is null, so there"
                " is no tail: set distill.top_k, or remove distill.top_k_tail",
            )
        if distill.top_k == 1 and distill.top_k_tail == "renormalize":
            yield Problem(
                ("distill.top_k", "distill.top_k_tail"),
                "distill.top_k is 1 and distill.top_k_tail renormalize, so both distributions have"
                " one token and their divergence is always 0: set distill.top_k to 2 or more",
            )
        if distill.sft_weight > 0 and distill.on_policy_fraction == 1:
            yield Problem(
                ("distill.sft_weight", "distill.on_policy_fraction"),
                f"distill.sft_weight is {distill.sft_weight:g}, which has no effect with"
                " distill.on_policy_fraction 1: no step trains on the rows of the data. Set it to"
                " 0, or distill.on_policy_fraction below 1",
            )
        if self.environment.path is not None:
            yield Problem(
                ("environment.path",),
                "environment.path is set, but distillation samples completions of one turn; set it"
                " to null",
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
    if distill.teacher_column is not None:
        if not distill.teachers:
            yield Problem(
                ("distill.teacher_column", "distill.teachers"),
                f"distill.teacher_column is {distill.teacher_column!r}, but distill.teachers is"
                " empty; name the teachers, or remove distill.teacher_column",
            )
        return
    if not distill.teachers:
        return
    sets = {MAIN_SET, *config.data.train_sets}
    if set(distill.teachers) != sets:
        yield Problem(
            ("distill.teachers", "data.train_sets"),
            f"distill.teachers has {', '.join(sorted(distill.teachers))}, the training sets are"
            f" {', '.join(sorted(sets))}; give each of them a teacher, or set"
            " distill.teacher_column",
        )
    for name in config.data.validation_sets:
        if name not in distill.teachers:
            yield Problem(
                ("data.validation_sets", "distill.teachers"),
                f"data.validation_sets.{name} has no teacher: give it the name of one of"
                f" distill.teachers ({', '.join(distill.teachers)})",
            )
