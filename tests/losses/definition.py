"""The policy-gradient losses by definition: NumPy, float64, one row at a time, no autograd.

Written from the published formulas. A value without gradient, sg(), is evaluated at a second set of
log-probs, `fixed`, which the finite differences of the gradient leave as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nemo_like.config.loss import PolicyGradientLossConfig

CLIPS = {
    "ppo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "cispo": (math.inf, 4.0),
    "reinforce": (math.inf, math.inf),
}
CORRECTION_BOUNDS = {
    "token_truncate": (0.0, 2.0),
    "sequence_truncate": (0.0, 2.0),
    "token_mask": (0.5, 5.0),
    "sequence_mask": (0.999, 1.002),
}
STEP = 1e-6
"""Of the finite differences; the distance of a ratio to its clip must be larger."""


@dataclass(frozen=True, kw_only=True)
class DefinedRow:
    """One row of T tokens, float64 [T] each."""

    policy: np.ndarray
    prev: np.ndarray
    generation: np.ndarray
    reference: np.ndarray
    entropy: np.ndarray
    is_trained: np.ndarray
    """bool [T]"""
    advantage: float


def loss_value(
    rows: list[DefinedRow],
    policies: list[np.ndarray],
    fixed: list[np.ndarray],
    config: PolicyGradientLossConfig,
) -> float:
    """The loss of a batch as a function of `policies`, float64 [T] per row.

    The KL penalty is the k2 estimate, whose derivative is the gradient of all three.
    """
    num_tokens = sum(int(row.is_trained.sum()) for row in rows)
    num_rows = sum(bool(row.is_trained.any()) for row in rows)
    total = 0.0
    for row, policy, constant in zip(rows, policies, fixed, strict=True):
        trained = row.is_trained
        n = int(trained.sum())
        if n == 0:
            continue
        losses = surrogate(row, policy[trained], constant[trained], config)
        losses = losses * weights(row, config)
        difference = (row.reference - policy)[trained]
        losses = losses + config.reference_policy_kl_penalty * difference**2 / 2
        losses = losses - config.entropy_coefficient * row.entropy[trained]
        normalization = config.normalization
        if normalization is None:
            normalization = "sequence" if config.surrogate.startswith("gspo") else "token"
        if normalization == "token":
            total += losses.sum() / num_tokens
        elif normalization == "sequence":
            total += losses.mean() / num_rows
        else:
            assert config.constant_length is not None
            total += losses.sum() / (num_rows * config.constant_length)
    return float(total)


def surrogate(
    row: DefinedRow, policy: np.ndarray, fixed: np.ndarray, config: PolicyGradientLossConfig
) -> np.ndarray:
    """The surrogate of the trained tokens of a row, float64 [n]."""
    advantage = row.advantage
    is_bypass = config.importance_correction.kind == "bypass"
    prev = (row.generation if is_bypass else row.prev)[row.is_trained]
    low, high = clip_interval(config)
    name = config.surrogate
    if name == "reinforce":
        return -advantage * policy
    if name == "cispo":
        return -np.clip(np.exp(fixed - prev), low, high) * advantage * policy
    if name == "ppo":
        ratio = np.exp(policy - prev)
    elif name == "gspo":
        # One loss per row.
        ratio = np.full_like(policy, np.exp(np.mean(policy - prev)))
    else:
        ratio = np.exp(np.mean(fixed - prev)) * np.exp(policy - fixed)
    losses = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, low, high))
    if config.ratio_clip_c is not None and advantage < 0:
        losses = np.minimum(losses, -advantage * config.ratio_clip_c)
    return losses


def weights(row: DefinedRow, config: PolicyGradientLossConfig) -> np.ndarray:
    """The weights of the importance correction of the trained tokens of a row, float64 [n]."""
    kind = config.importance_correction.kind
    w = np.exp((row.prev - row.generation)[row.is_trained])
    if kind in ("none", "bypass"):
        return np.ones_like(w)
    lower, upper = CORRECTION_BOUNDS[kind]
    product = float(np.prod(w))
    mean = product ** (1 / len(w))
    if kind == "token_truncate":
        return np.minimum(w, upper)
    if kind == "sequence_truncate":
        return np.full_like(w, min(product, upper))
    if kind == "token_mask":
        return np.where((w >= lower) & (w <= upper), w, 0.0)
    kept = w if config.surrogate != "gspo" else np.full_like(w, mean)
    return kept if lower <= mean <= upper else np.zeros_like(w)


def clip_interval(config: PolicyGradientLossConfig) -> tuple[float, float]:
    """The smallest and the largest value of the clipped ratio."""
    below, above = CLIPS[config.surrogate]
    if config.ratio_clip_min is not None:
        below = config.ratio_clip_min
    if config.ratio_clip_max is not None:
        above = config.ratio_clip_max
    return 1 - below, 1 + above


def gradient(rows: list[DefinedRow], config: PolicyGradientLossConfig) -> list[np.ndarray]:
    """The gradient with respect to every log-prob by central differences, float64 [T] per row."""
    fixed = [row.policy for row in rows]
    gradients = []
    for index, row in enumerate(rows):
        values = np.zeros_like(row.policy)
        for token in np.flatnonzero(row.is_trained):
            sides = []
            for step in (STEP, -STEP):
                policies = [policy.copy() for policy in fixed]
                policies[index][token] += step
                sides.append(loss_value(rows, policies, fixed, config))
            values[token] = (sides[0] - sides[1]) / (2 * STEP)
        gradients.append(values)
    return gradients


def distance_to_a_kink(rows: list[DefinedRow], config: PolicyGradientLossConfig) -> float:
    """The smallest distance of a ratio or weight to a bound, where the loss is not smooth."""
    distances = [math.inf]
    bounds = [*clip_interval(config), config.ratio_clip_c or math.inf]
    correction = CORRECTION_BOUNDS.get(config.importance_correction.kind, (math.inf, math.inf))
    for row in rows:
        if not row.is_trained.any():
            continue
        mismatch = (row.prev - row.generation)[row.is_trained]
        measured = [*np.exp(mismatch), np.exp(mismatch.sum()), np.exp(mismatch.mean())]
        for bound in correction:
            distances += [abs(value - bound) for value in measured]
        for prev in (row.prev, row.generation):
            log_ratio = (row.policy - prev)[row.is_trained]
            for ratio in (*np.exp(log_ratio), np.exp(log_ratio.mean())):
                distances += [abs(ratio - bound) for bound in bounds]
    return min(distances)
