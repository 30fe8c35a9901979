"""The advantages of a rollout as a run configures them, with their metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nemo_like.algorithms.grpo.advantages import (
    group_advantages,
    kl_to_go,
    separate_advantages,
    token_advantages,
    whitened,
)
from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.grpo.overlong import is_truncated, overlong_penalty
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.metrics import Mean, Metrics, Sum
from nemo_like.rollout.rollout import Rollout

_PENALTY = "overlong_penalty"
"""Name of the soft overlong penalty among the components of the reward."""


@dataclass(frozen=True)
class RolloutAdvantages:
    """Advantages of the B rows of a rollout."""

    column: np.ndarray | Jagged
    """What the loss reads: float32 [B] per row, or Jagged [T] per token with a KL in the reward."""
    rows: np.ndarray
    """float32 [B]: of each row the mean over its trained tokens."""
    metrics: Metrics


def rollout_advantages(
    config: GrpoRunConfig, rollout: Rollout, logprobs: Mapping[str, Jagged]
) -> RolloutAdvantages:
    """Return the advantages of a rollout.

    With R the weighted sum of reward functions and models plus the soft overlong penalty: baseline
    and division of R per group give A (`group_advantages`; per component `separate_advantages`).
    With `loss_fn.reference_policy_kl_in` `reward` the advantage of token t is
    A_t = A - penalty * sum over s >= t of KL_s (`token_advantages`), where KL_s is the k1 estimate
    l_prev - l_ref from `logprobs` (float32 [T] each by name) and has no gradient. Whitening is the
    last step; only trained tokens and rows count for it.
    """
    batch = rollout.batch
    metrics: Metrics = {}
    advantages = _row_advantages(config, rollout, metrics)
    trained = trained_tokens(batch)
    row_of_token = np.repeat(np.arange(batch.size), batch["length"])
    num_trained = np.bincount(row_of_token, weights=trained, minlength=batch.size)
    advantage = config.grpo.advantage
    if not config.has_kl_in_reward:
        if advantage.whiten == "tokens":
            advantages = whitened(advantages, num_trained, advantage.eps)
        elif advantage.whiten == "rows":
            is_row_trained = (num_trained > 0).astype(np.float64)
            advantages = whitened(advantages, is_row_trained, advantage.eps)
        is_effective = (advantages != 0) & (num_trained > 0)
        metrics["reward/num_effective_rows"] = Sum(float(is_effective.sum()))
        return RolloutAdvantages(advantages, advantages, metrics)
    k1, kl_sums = kl_to_go(_policy_logprobs(batch, logprobs), _reference(logprobs), trained)
    metrics["policy/reference_kl_k1"] = Mean(float(k1.sum()), float(trained.sum()))
    per_token = token_advantages(
        advantages,
        kl_sums,
        kl_penalty=config.loss_fn.reference_policy_kl_penalty,
        lengths=batch["length"],
    )
    if advantage.whiten == "tokens":
        per_token = whitened(per_token, trained.astype(np.float64), advantage.eps)
    per_token = np.where(trained, per_token, 0.0).astype(np.float32)
    row_sums = np.bincount(row_of_token, weights=per_token, minlength=batch.size)
    row_means = row_sums / np.maximum(num_trained, 1.0)
    num_nonzero = np.bincount(row_of_token, weights=per_token != 0, minlength=batch.size)
    metrics["reward/num_effective_rows"] = Sum(float((num_nonzero > 0).sum()))
    column = Jagged(per_token, batch["input_ids"].offsets)
    return RolloutAdvantages(column, row_means.astype(np.float32), metrics)


def trained_tokens(batch: BatchedDataDict) -> np.ndarray:
    """Return True for the tokens of the rows of `batch` that have a loss, bool [T]."""
    is_row_trained = np.repeat(batch["row_mask"], batch["length"])
    return (batch["token_mask"].values != 0) & is_row_trained


def _row_advantages(config: GrpoRunConfig, rollout: Rollout, metrics: Metrics) -> np.ndarray:
    """Return the advantage of each row before whitening, float32 [B]; adds to `metrics`."""
    overlong = config.grpo.overlong
    completion_lengths = rollout.completions.token_ids.lengths
    penalty = overlong_penalty(
        completion_lengths,
        config.policy.generation.max_new_tokens,
        overlong.penalty_buffer,
        overlong.penalty_factor,
    )
    if overlong.penalty_buffer > 0:
        metrics["reward/overlong_penalty_mean"] = Mean(float(penalty.sum()), len(penalty))
    if overlong.filter:
        num_filtered = float(is_truncated(rollout).sum())
        metrics["reward/num_overlong_filtered"] = Sum(num_filtered)
    groups = rollout.batch["group"]
    reward_mask = rollout.batch["reward_mask"]
    if config.grpo.advantage.components == "sum":
        rewards = rollout.batch["reward"].astype(np.float64) + penalty
        return group_advantages(rewards, groups, config.grpo.advantage, reward_mask)
    components = dict(rollout.components)
    # The rewards of an environment are added as they are.
    weights = dict.fromkeys(components, 1.0) | config.reward.weights
    if overlong.penalty_buffer > 0:
        components[_PENALTY] = penalty
        weights[_PENALTY] = 1.0
    return separate_advantages(components, weights, groups, config.grpo.advantage, reward_mask)


def _policy_logprobs(batch: BatchedDataDict, logprobs: Mapping[str, Jagged]) -> Jagged:
    """Return the log-probs of the policy that sampled the tokens, float32 [T].

    They are those that the loss takes as previous log-probs: with
    `loss_fn.importance_correction.kind=bypass` the generator's.
    """
    return logprobs.get("prev_logprobs", batch["generation_logprobs"])


def _reference(logprobs: Mapping[str, Jagged]) -> Jagged:
    """Return the reference's log-probs, float32 [T]."""
    return logprobs["reference_logprobs"]
