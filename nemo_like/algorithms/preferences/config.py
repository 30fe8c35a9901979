"""Keys of `nemo-like dpo` and `nemo-like rm`, and the checks of their relations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from nemo_like.config.constraints import Ge, Gt, Lt
from nemo_like.config.errors import Problem
from nemo_like.config.needs import BatchNeeds, RunNeeds
from nemo_like.config.schema import EpochLoopConfig, PolicyConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class DpoConfig(EpochLoopConfig):
    """The DPO loop: length of the run and validation."""


@dataclass(frozen=True, kw_only=True)
class PreferenceLossConfig:
    """The loss of a pair. Its margin is the difference of the rewards of the two completions."""

    kind: Literal["dpo", "ipo", "simpo"] = "dpo"
    """`dpo`: logistic loss of the margin of summed log-probs relative to the reference. `ipo`:
    squared error of the margin of mean log-probs relative to the reference. `simpo`: logistic loss
    of the margin of mean log-probs, without a reference."""
    beta: Annotated[float, Gt(0)] = 0.1
    """Factor of the log-probs in the reward. Common values: 0.1 for `dpo` and `ipo`, 2 to 10 for
    `simpo`."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Assumed probability that the two completions of a pair are labeled the wrong way round
    (conservative DPO). Must be 0 for `ipo`."""
    simpo_gamma: Annotated[float, Ge(0)] = 0.5
    """Target margin of rewards for `simpo`; the other kinds do not use it."""
    sft_loss_weight: Annotated[float, Ge(0)] = 0.0
    """Weight of the negative log-likelihood of the chosen completion, averaged over its tokens
    (RPO)."""


@dataclass(frozen=True, kw_only=True)
class DpoRunConfig(RunConfig):
    """All keys of `nemo-like dpo`."""

    dpo: DpoConfig = field(default_factory=DpoConfig)
    loss_fn: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)

    kind: ClassVar[str] = "dpo"

    @property
    def loop(self) -> DpoConfig:
        """The keys of the loop."""
        return self.dpo

    @cached_property
    def needs(self) -> RunNeeds:
        """See `RunConfig.needs`; every loss except SimPO has a reference."""
        has_reference = self.loss_fn.kind != "simpo"
        return RunNeeds(
            job=self.kind,
            batch=_batch_of_pairs(self.policy),
            reference=has_reference,
            logprob_pass=has_reference,
            trains_images=True,
        )

    def job_problems(self) -> Iterator[Problem]:
        """Yield the problems of loss and data keys."""
        loss = self.loss_fn
        # IPO regresses the margin to a constant: there is no probability of a label to smooth.
        if loss.kind == "ipo" and loss.label_smoothing > 0:
            yield Problem(
                ("loss_fn.label_smoothing", "loss_fn.kind"),
                f"loss_fn.label_smoothing is {loss.label_smoothing:g}, but the loss of ipo is not"
                " defined for smoothed labels: set it to 0, or loss_fn.kind to dpo",
            )
        yield from _pair_problems(self)


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(EpochLoopConfig):
    """The training loop of a reward model: length of the run, validation and loss."""

    center_coefficient: Annotated[float, Ge(0)] = 0.0
    """Weight of the squared sum of the two scores of a pair, which keeps scores near 0; a common
    value is 0.01."""


@dataclass(frozen=True, kw_only=True)
class RewardModelRunConfig(RunConfig):
    """All keys of `nemo-like rm`."""

    rm: RewardModelConfig = field(default_factory=RewardModelConfig)

    kind: ClassVar[str] = "rm"

    @property
    def loop(self) -> RewardModelConfig:
        """The keys of the loop."""
        return self.rm

    @cached_property
    def needs(self) -> RunNeeds:
        """See `RunConfig.needs`."""
        return RunNeeds(job=self.kind, batch=_batch_of_pairs(self.policy), head="scores")

    def job_problems(self) -> Iterator[Problem]:
        """Yield the problems of model and data keys."""
        lora = self.policy.lora
        if lora.is_quantized:
            yield Problem(
                ("policy.lora.quantization",),
                f"policy.lora.quantization is {lora.quantization}, which reward models do not have:"
                " set it to none",
            )
        yield from _pair_problems(self)


PreferenceRunConfig = DpoRunConfig | RewardModelRunConfig


def _batch_of_pairs(policy: PolicyConfig) -> BatchNeeds:
    return BatchNeeds.of_one_step(
        policy.train_global_batch_size, example="pair", rows_per_example=2
    )


def _pair_problems(config: PreferenceRunConfig) -> Iterator[Problem]:
    if config.data.train_on != "assistant":
        yield Problem(
            ("data.train_on",),
            f"data.train_on is {config.data.train_on}, but a preference compares completions"
            " only: set it to assistant",
        )
