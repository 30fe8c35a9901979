"""Keys of `nemo-like grpo` and the checks of their relations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from nemo_like.algorithms.grpo.advantage_config import AdvantageConfig
from nemo_like.algorithms.grpo.sampling_config import (
    DynamicSamplingConfig,
    PromptSelectionConfig,
    oversampling_problems,
)
from nemo_like.config.check import batching_section
from nemo_like.config.constraints import Ge, Gt, Le
from nemo_like.config.errors import Problem, counted, either, quotient
from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.config.needs import BatchNeeds, RolloutNeeds, RunNeeds
from nemo_like.config.parallel import is_colocated, policy_layout
from nemo_like.config.rollout import EnvironmentConfig, GenerationConfig, RewardConfig
from nemo_like.config.schema import RunConfig
from nemo_like.integer_math import nearest_multiples


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """Completions that reach the length limit (DAPO)."""

    filter: bool = False
    """Give truncated completions no loss, and conversations without room for another turn.
    Their rewards stay in the baseline of their group."""
    penalty_buffer: Annotated[int, Ge(0)] = 0
    """Tokens before `policy.generation.max_new_tokens` in which the soft penalty grows from 0 to
    `grpo.overlong.penalty_factor`; 0 turns it off."""
    penalty_factor: Annotated[float, Gt(0)] = 1.0
    """Reward that a completion of `policy.generation.max_new_tokens` tokens loses."""

    def problems(self, max_new_tokens: int) -> Iterator[Problem]:
        """Yield a penalty that every completion would get."""
        key = "grpo.overlong"
        if self.penalty_buffer >= max_new_tokens:
            yield Problem(
                (f"{key}.penalty_buffer", "policy.generation.max_new_tokens"),
                f"{key}.penalty_buffer is {self.penalty_buffer} and"
                f" policy.generation.max_new_tokens {max_new_tokens}, so every completion would get"
                f" a penalty: set {key}.penalty_buffer below {max_new_tokens}, e.g. to"
                f" {max(max_new_tokens // 4, 0)}",
            )


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """The GRPO loop. Rows per step = `num_prompts_per_step` x `num_generations_per_prompt`."""

    num_prompts_per_step: Annotated[int, Ge(1)] = 8
    """Prompts per step."""
    num_generations_per_prompt: Annotated[int, Ge(1)] = 4
    """Group size: completions sampled per prompt. At least 2, as the advantage compares them; 3
    with `grpo.advantage.normalize=leave_one_out_std`, 1 with `grpo.advantage.baseline=none`."""
    max_num_steps: Annotated[int, Ge(1)] = 100
    """Steps of rollout and training. Each has rows per step / `policy.train_global_batch_size`
    optimizer steps, times `grpo.num_epochs_per_rollout`."""
    num_epochs_per_rollout: Annotated[int, Ge(1)] = 1
    """Passes over the rows of a rollout, each in another order. The previous log-probs are computed
    once, before the first."""
    reference_update_period: Annotated[int, Ge(0)] = 0
    """Copy the policy into the reference of the KL penalty after every so many steps; 0 keeps the
    initial policy. Checkpoints then have the reference as well."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    prompt_selection: PromptSelectionConfig = field(default_factory=PromptSelectionConfig)
    oversampling_factor: Annotated[float, Ge(1), Le(4)] = 1.0
    """Sample so many times `num_prompts_per_step` prompts, train on the first
    `num_prompts_per_step` whose completions have all ended, and cancel the others. Cancelled
    prompts wait until they fill a step of their own, in which none is cancelled."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    max_staleness: Annotated[int, Ge(0)] = 0
    """Max number of weight updates between the sampling of a token and the step that trains on it.
    0 is synchronous. Above 0 the completions of up to this many later steps are sampled while a
    step trains; needs `cluster.backend=ray`, and on GPUs `cluster.generation_workers`."""
    weight_update: Literal["drain", "in_flight", "restart"] = "drain"
    """Treatment of unfinished completions when new weights are ready, with `grpo.max_staleness`
    above 0: `drain` finishes them first, `in_flight` updates at once and keeps their tokens,
    `restart` updates at once and samples them again."""
    val_period: Annotated[int, Ge(0)] = 0
    """Validate after every so many steps; 0 validates only at the end. Needs
    `data.validation_path`."""
    val_at_start: bool = True
    """Validate before the first step as well."""
    val_temperature: Annotated[float, Ge(0)] = 0.0
    """Sampling temperature of validation answers; 0 is greedy decoding."""
    val_top_p: Annotated[float | None, Gt(0), Le(1)] = None
    """`policy.generation.top_p` of validation answers; null is the value of training."""
    val_top_k: Annotated[int | None, Ge(-1)] = None
    """`policy.generation.top_k` of validation answers; null is the value of training, 0 and -1 turn
    the filter off."""
    val_max_new_tokens: Annotated[int | None, Ge(1)] = None
    """`policy.generation.max_new_tokens` of validation answers; null is the value of training."""
    val_num_samples: Annotated[int, Ge(1)] = 1
    """Validation answers per prompt. Above 1 avg@n and pass@k are logged; needs
    `grpo.val_temperature` above 0."""
    val_pass_reward: float = 1.0
    """Reward from which a validation answer counts as correct, for avg@n and pass@k."""

    @property
    def max_prompts_per_step(self) -> int:
        """Max number of prompts that a step samples, refills of dynamic sampling included."""
        return self.num_prompts_per_step * self.dynamic_sampling.max_tries

    @property
    def num_sampled_prompts(self) -> int:
        """Number of prompts that a step begins to sample, with those that it cancels."""
        # Rounded, as 10 * 1.1 is above 11.
        return math.ceil(round(self.num_prompts_per_step * self.oversampling_factor, 6))


@dataclass(frozen=True, kw_only=True)
class GrpoRunConfig(RunConfig):
    """All keys of `nemo-like grpo`."""

    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    loss_fn: PolicyGradientLossConfig = field(default_factory=PolicyGradientLossConfig)

    kind: ClassVar[str] = "grpo"

    @cached_property
    def needs(self) -> RunNeeds:
        """See `RunConfig.needs`."""
        # With a KL penalty, or a loss of the user that reads the reference's log-probs.
        has_reference = self.loss_fn.needs_reference
        batch = BatchNeeds(
            key="grpo.num_prompts_per_step",
            num_examples=self.grpo.num_prompts_per_step,
            num_rows=self.rows_per_step,
            num_epochs=self.grpo.num_epochs_per_rollout,
            lines=tuple(_batch_lines(self)),
        )
        rollouts = RolloutNeeds(
            generation=self.policy.generation, rewards=self.reward, environment=self.environment
        )
        return RunNeeds(
            job=self.kind,
            batch=batch,
            reference=has_reference,
            logprob_pass=self.computes_prev_logprobs or has_reference,
            uses_experts=True,
            scored_rows="train",
            trains_images=True,
            rollouts=rollouts,
        )

    @property
    def computes_prev_logprobs(self) -> bool:
        """True if the policy's log-probs are computed before the first optimizer step of a rollout.

        With one optimizer step the training pass computes them, unless the reward needs them
        before; with `loss_fn.importance_correction.kind=bypass` the generator's are used, and
        `loss_fn.surrogate=reinforce` has no ratio.
        """
        is_single_step = not self.has_many_optimizer_steps
        is_bypassed = self.loss_fn.importance_correction.kind == "bypass"
        is_in_loss = "prev_logprobs" in self.loss_fn.logprob_names(is_single_step=is_single_step)
        return is_in_loss or (self.has_kl_in_reward and not is_bypassed)

    @property
    def has_many_optimizer_steps(self) -> bool:
        """True if more than one optimizer step is taken on a complete rollout."""
        num_rows = self.rows_per_step * self.grpo.num_epochs_per_rollout
        return num_rows > self.policy.train_global_batch_size

    @property
    def has_kl_in_reward(self) -> bool:
        """True if a KL penalty is part of the rewards, so that each token has its advantage."""
        return self.loss_fn.has_kl_in_reward

    @property
    def rows_per_step(self) -> int:
        """Completions of one step."""
        return self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt

    def job_problems(self) -> Iterator[Problem]:
        """Yield the problems of groups, sampling and rewards."""
        yield from _sampling_problems(self.policy.generation)
        yield from _validation_problems(self)
        yield from _group_problems(self)
        yield from self.grpo.advantage.problems(self.grpo.num_generations_per_prompt)
        yield from overlong_problems(self)
        yield from self.grpo.advantage.turn_problems(
            has_turns=self.environment.is_used,
            surrogate=self.loss_fn.surrogate,
            drops_groups=self.grpo.dynamic_sampling.enabled,
        )
        yield from reward_name_problems(self.reward, self.environment)
        yield from dynamic_sampling_problems(self.grpo)
        yield from oversampling_problems(
            self.grpo.oversampling_factor,
            max_staleness=self.grpo.max_staleness,
            dynamic_sampling=self.grpo.dynamic_sampling.enabled,
            has_environment=self.environment.is_used,
        )
        yield from self.grpo.prompt_selection.problems(
            baseline=self.grpo.advantage.baseline, turns=self.grpo.advantage.turns
        )
        yield from epoch_problems(self)
        yield from reference_problems(self)
        yield from _reward_problems(self.reward, self.environment)
        yield from self.loss_fn.problems()
        yield from _asynchronous_problems(self)


def _batch_lines(config: GrpoRunConfig) -> list[str]:
    """Return the arithmetic from prompts to optimizer steps, one line each."""
    prompts = config.grpo.num_prompts_per_step
    group = config.grpo.num_generations_per_prompt
    batch = config.policy.train_global_batch_size
    steps = config.grpo.max_num_steps
    rows = config.rows_per_step
    # A whole number, or `_group_problems` has refused the config.
    updates = rows // batch
    epochs = config.grpo.num_epochs_per_rollout
    optimizer_steps = counted(updates, "optimizer step")
    generations = f"{counted(prompts, 'prompt')} x {counted(group, 'generation')}"
    num_rows = counted(rows, "row")
    lines = [
        f"{generations} = {num_rows} per step",
        f"{num_rows} / {counted(batch, 'row')} per optimizer step = {optimizer_steps}",
    ]
    if epochs > 1:
        lines.append(
            f"{optimizer_steps} x {epochs} epochs per rollout ="
            f" {updates * epochs} optimizer steps per step"
        )
        updates *= epochs
    lines.append(
        f"{counted(steps, 'step')} = {counted(steps * updates, 'optimizer step')} over"
        f" {counted(steps * rows, 'row')}"
    )
    if config.grpo.dynamic_sampling.enabled:
        tries = config.grpo.dynamic_sampling.max_tries
        lines.append(
            f"dynamic sampling: up to {tries} x {counted(prompts, 'prompt')} per step; a step"
            " that stays short has fewer optimizer steps"
        )
    if config.grpo.oversampling_factor > 1:
        sampled = counted(config.grpo.num_sampled_prompts, "prompt")
        lines.append(f"oversampling: {sampled} per step, the first {prompts} to end are trained")
    read = config.loss_fn.logprob_names(is_single_step=False)
    has_no_ratio = "prev_logprobs" not in read
    if config.loss_fn.importance_correction.kind == "bypass":
        lines.append("previous log-probs: from the generator")
    elif has_no_ratio:
        lines.append("previous log-probs: the loss does not read them")
    elif not config.computes_prev_logprobs:
        lines.append(
            "previous log-probs: from the training pass, as each rollout has 1 optimizer step"
        )
    return lines


def _sampling_problems(generation: GenerationConfig) -> Iterator[Problem]:
    if generation.temperature == 0:
        yield Problem(
            ("policy.generation.temperature",),
            "policy.generation.temperature is 0: greedy completions of one prompt are all equal, so"
            " their advantages are 0; set it above 0, usually to 1 (grpo.val_temperature is for"
            " validation)",
        )


def _validation_problems(config: GrpoRunConfig) -> Iterator[Problem]:
    num_samples = config.grpo.val_num_samples
    max_new_tokens = config.grpo.val_max_new_tokens or 0
    longest = config.policy.max_total_sequence_length
    if max_new_tokens >= longest:
        key = "grpo.val_max_new_tokens"
        yield Problem(
            (key, "policy.max_total_sequence_length"),
            f"{key} is {max_new_tokens} and policy.max_total_sequence_length {longest}, which"
            f" includes the prompt: lower {key}, or raise policy.max_total_sequence_length",
        )
    if num_samples > 1 and config.grpo.val_temperature == 0:
        yield Problem(
            ("grpo.val_num_samples", "grpo.val_temperature"),
            f"grpo.val_num_samples is {num_samples} and grpo.val_temperature is 0: greedy answers"
            " to one prompt are all equal, so avg@n and pass@k would be equal to one answer's; set"
            " grpo.val_temperature above 0, usually to 0.6 to 1, or grpo.val_num_samples to 1",
        )


def _group_problems(config: GrpoRunConfig) -> Iterator[Problem]:
    """The rows must divide into optimizer steps."""
    prompts = config.grpo.num_prompts_per_step
    group = config.grpo.num_generations_per_prompt
    batch = config.policy.train_global_batch_size
    rows = prompts * group
    if rows % batch == 0:
        return
    # The suggested batch sizes must also pass `_worker_shares`.
    unit = (
        policy_layout(config.parallel, config.cluster).dp
        if batching_section(config.policy) is None
        else 1
    )
    divisors = [size for size in range(1, rows + 1) if rows % size == 0]
    legal = [size for size in divisors if size % unit == 0] or divisors
    smaller = [size for size in legal if size < batch]
    larger = [size for size in legal if size > batch]
    sizes = smaller[-1:] + larger[:1]
    # prompts x group is a multiple of the batch for multiples of this number of prompts.
    prompts_unit = batch // math.gcd(batch, group)
    yield Problem(
        (
            "policy.train_global_batch_size",
            "grpo.num_prompts_per_step",
            "grpo.num_generations_per_prompt",
        ),
        f"{prompts} prompts x {group} generations = {rows} rows per step, and {rows} /"
        f" policy.train_global_batch_size {batch} = {quotient(rows / batch)} optimizer steps, not a"
        f" whole number: set policy.train_global_batch_size to {either(sizes)}, or"
        f" grpo.num_prompts_per_step to {nearest_multiples(prompts, prompts_unit)}",
    )


def _reward_problems(reward: RewardConfig, environment: EnvironmentConfig) -> Iterator[Problem]:
    weights = reward.weights
    if environment.is_used:
        # The environment gives rewards.
        return
    if not weights:
        yield Problem(
            ("reward.functions", "reward.models"),
            "reward.functions and reward.models are empty, so nothing scores the completions; e.g."
            " reward.functions.answer.path=nemo_like.environments.math.answer_reward, or set"
            " environment.path",
        )
    elif all(weight == 0 for weight in weights.values()):
        yield Problem(
            ("reward.functions", "reward.models"),
            "every weight in reward.functions and reward.models is 0, so the reward is always 0;"
            " give one a weight",
        )


def _asynchronous_problems(config: GrpoRunConfig) -> Iterator[Problem]:
    """Generation beside training needs processes, and on GPUs devices, of its own."""
    staleness = config.grpo.max_staleness
    weight_update = config.grpo.weight_update
    if weight_update != "drain" and staleness == 0:
        yield Problem(
            ("grpo.weight_update", "grpo.max_staleness"),
            f"grpo.weight_update is {weight_update}, which has no effect with grpo.max_staleness 0:"
            " no completion is being sampled when weights are updated. Set it to drain, or"
            " grpo.max_staleness above 0",
        )
    if staleness == 0:
        return
    cluster = config.cluster
    if cluster.backend == "local":
        yield Problem(
            ("grpo.max_staleness", "cluster.backend"),
            f"grpo.max_staleness is {staleness}, but with cluster.backend local generation and"
            " training share one process: set it to 0, or cluster.backend to ray",
        )
    elif is_colocated(cluster, config.needs.rollouts):
        yield Problem(
            ("grpo.max_staleness", "cluster.generation_workers"),
            f"grpo.max_staleness is {staleness}, but cluster.generation_workers is 0: the generator"
            " shares the policy's GPUs and cannot run while it trains. Set"
            " cluster.generation_workers to the number of GPUs for generation, or"
            " grpo.max_staleness to 0",
        )


def asynchronous_warnings(config: GrpoRunConfig) -> list[str]:
    """Return warnings about training on completions of older weights."""
    loss = config.loss_fn
    # A loss of the user may correct in its own way, and has no keys of a correction.
    is_corrected = loss.importance_correction.kind != "none" or loss.path is not None
    has_no_ratio = loss.surrogate == "reinforce"
    has_clip = config.has_many_optimizer_steps and not has_no_ratio
    if config.grpo.max_staleness == 0 or has_clip or is_corrected:
        return []
    reason = "with one optimizer step per rollout"
    consequence = ", and their ratio is never clipped"
    if has_no_ratio:
        reason = "with loss_fn.surrogate reinforce, which has no ratio,"
        consequence = ""
    text = (
        f"grpo.max_staleness is {config.grpo.max_staleness} and"
        f" loss_fn.importance_correction.kind is none: {reason} nothing corrects the gradient for"
        f" completions of older weights{consequence}; set it to token_truncate, for example"
    )
    return [text]


def dynamic_sampling_problems(grpo: GrpoConfig) -> Iterator[Problem]:
    """Yield what dynamic sampling cannot be combined with."""
    if not grpo.dynamic_sampling.enabled:
        return
    key = "grpo.dynamic_sampling.enabled"
    staleness = grpo.max_staleness
    if staleness > 0:
        yield Problem(
            (key, "grpo.max_staleness"),
            f"{key} is true and grpo.max_staleness {staleness}: the prompts that would replace"
            " dropped groups belong to later steps, whose rollouts have already started. Set"
            " grpo.max_staleness to 0, or dynamic sampling to false",
        )
    if grpo.advantage.baseline == "none":
        yield Problem(
            (key, "grpo.advantage.baseline"),
            f"{key} is true and grpo.advantage.baseline none: without a baseline a group with equal"
            " rewards has advantages and trains the policy, so there is no reason to drop it. Set"
            " baseline to group_mean, or dynamic sampling to false",
        )


def overlong_problems(config: GrpoRunConfig) -> Iterator[Problem]:
    """Yield an overlong penalty of conversations, whose turns have a limit each."""
    yield from config.grpo.overlong.problems(config.policy.generation.max_new_tokens)
    if config.environment.is_used and config.grpo.overlong.penalty_buffer > 0:
        yield Problem(
            ("grpo.overlong.penalty_buffer", "environment.path"),
            f"grpo.overlong.penalty_buffer is {config.grpo.overlong.penalty_buffer}, but with"
            " environment.path a completion has several turns, and"
            " policy.generation.max_new_tokens limits each of them: set penalty_buffer to 0",
        )


def reward_name_problems(reward: RewardConfig, environment: EnvironmentConfig) -> Iterator[Problem]:
    """Yield rewards with a name that a reward of the environment may have."""
    if not environment.is_used:
        return
    for name in reward.weights:
        section = "functions" if name in reward.functions else "models"
        if name == "environment" or name.startswith("environment_"):
            yield Problem(
                (f"reward.{section}.{name}", "environment.path"),
                f"reward.{section} has the name {name}, but names that begin with environment are"
                " reserved for the rewards of environment.path: choose another name",
            )


def reference_problems(config: GrpoRunConfig) -> Iterator[Problem]:
    """Yield keys of the reference and of its KL penalty that have no effect, or cannot work."""
    period = config.grpo.reference_update_period
    if period > 0 and not config.needs.reference:
        yield Problem(
            ("grpo.reference_update_period", "loss_fn.reference_policy_kl_penalty"),
            f"grpo.reference_update_period is {period}, but loss_fn.reference_policy_kl_penalty is"
            " 0, so there is no reference to update: set the penalty above 0, or the period to 0",
        )
    if period > 0 and config.policy.lora.enabled:
        yield Problem(
            ("grpo.reference_update_period", "policy.lora.enabled"),
            f"grpo.reference_update_period is {period}, but with policy.lora.enabled the reference"
            " shares the frozen weights of the model and never changes: set the period to 0",
        )
    if config.loss_fn.reference_policy_kl_in == "loss":
        return
    key = "loss_fn.reference_policy_kl_in"
    if not config.has_kl_in_reward:
        yield Problem(
            (key, "loss_fn.reference_policy_kl_penalty"),
            f"{key} is reward, but loss_fn.reference_policy_kl_penalty is 0, so there is no KL: set"
            " the penalty above 0, e.g. to 0.01, or remove the key",
        )
    if config.grpo.advantage.whiten == "rows":
        yield Problem(
            ("grpo.advantage.whiten", key),
            f"grpo.advantage.whiten is rows, but with {key} reward each token has its own"
            " advantage: set whiten to tokens or none",
        )
    if config.has_kl_in_reward and config.loss_fn.surrogate == "gspo":
        yield Problem(
            (key, "loss_fn.surrogate"),
            f"{key} is reward, so that each token has its own advantage, but loss_fn.surrogate gspo"
            " has one loss per row: set the surrogate to gspo_token",
        )
    generation = config.policy.generation
    for name, is_filter in (
        ("top_k", generation.top_k is not None and generation.top_k > 0),
        ("top_p", generation.top_p < 1),
        ("min_p", generation.min_p > 0),
    ):
        if is_filter:
            yield Problem(
                (key, f"policy.generation.{name}"),
                f"{key} is reward and policy.generation.{name} {getattr(generation, name)}: the KL"
                " needs the policy's log-probs in the unfiltered distribution, and the log-prob"
                f" pass computes them in the distribution that is sampled from. Set {key} to"
                f" loss, or remove policy.generation.{name}",
            )


def epoch_problems(config: GrpoRunConfig) -> Iterator[Problem]:
    """Yield several passes over a rollout with a loss that has no ratio."""
    num_epochs = config.grpo.num_epochs_per_rollout
    if num_epochs > 1 and config.loss_fn.surrogate == "reinforce":
        yield Problem(
            ("grpo.num_epochs_per_rollout", "loss_fn.surrogate"),
            f"grpo.num_epochs_per_rollout is {num_epochs}, but loss_fn.surrogate reinforce has no"
            " ratio to the policy before the first pass, so later passes would be off-policy"
            " without a correction: set the epochs to 1, or the surrogate to ppo",
        )
