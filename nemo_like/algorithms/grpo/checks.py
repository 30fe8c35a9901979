"""Checks of relations between the sections of a GRPO config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_like.config.errors import Problem

if TYPE_CHECKING:
    from nemo_like.algorithms.grpo.config import GrpoRunConfig


def dynamic_sampling_problems(config: GrpoRunConfig) -> Iterator[Problem]:
    """Yield what dynamic sampling cannot be combined with."""
    if not config.grpo.dynamic_sampling.enabled:
        return
    key = "grpo.dynamic_sampling.enabled"
    staleness = config.grpo.max_staleness
    if staleness > 0:
        yield Problem(
            (key, "grpo.max_staleness"),
            f"{key} is true and grpo.max_staleness {staleness}: the prompts that would replace"
            " dropped groups belong to later steps, whose rollouts have already started. Set"
            " grpo.max_staleness to 0, or dynamic sampling to false",
        )
    if config.grpo.advantage.baseline == "none":
        yield Problem(
            (key, "grpo.advantage.baseline"),
            f"{key} is true and grpo.advantage.baseline none: without a baseline a group with equal"
            " rewards has advantages and trains the policy, so there is no reason to drop it. Set"
            " baseline to group_mean, or dynamic sampling to false",
        )


def overlong_problems(config: GrpoRunConfig) -> Iterator[Problem]:
    """Yield an overlong penalty of conversations, whose turns have a limit each."""
    yield from config.grpo.overlong.problems(config.policy.generation.max_new_tokens)
    if config.environment.path is not None and config.grpo.overlong.penalty_buffer > 0:
        yield Problem(
            ("grpo.overlong.penalty_buffer", "environment.path"),
            f"grpo.overlong.penalty_buffer is {config.grpo.overlong.penalty_buffer}, but with"
            " environment.path a completion has several turns, and"
            " policy.generation.max_new_tokens limits each of them: set penalty_buffer to 0",
        )


def reward_name_problems(config: GrpoRunConfig) -> Iterator[Problem]:
    """Yield rewards with a name that a reward of the environment may have."""
    if config.environment.path is None:
        return
    for name in config.reward.weights:
        section = "functions" if name in config.reward.functions else "models"
        if name == "environment" or name.startswith("environment_"):
            yield Problem(
                (f"reward.{section}.{name}", "environment.path"),
                f"reward.{section} has the name {name}, but names that begin with environment are"
                " reserved for the rewards of environment.path: choose another name",
            )


def reference_problems(config: GrpoRunConfig) -> Iterator[Problem]:
    """Yield keys of the reference and of its KL penalty that have no effect, or cannot work."""
    period = config.grpo.reference_update_period
    if period > 0 and not config.needs_reference:
        yield Problem(
            ("grpo.reference_update_period", "loss_fn.reference_policy_kl_penalty"),
            f"grpo.reference_update_period is {period}, but loss_fn.reference_policy_kl_penalty is"
            " 0, so there is no reference to update: set the penalty above 0, or the period to 0",
        )
    if period > 0 and config.policy.lora.enabled:
        yield Problem(
            ("grpo.reference_update_period", "policy.lora.enabled"),
            f"grpo.reference_update_period is {period}, but with policy.lora.enabled the reference"
            " is the model without adapters, which never changes: set the period to 0",
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
