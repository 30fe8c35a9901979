"""Rewards that programs give, and advantages of single turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError, shown_value
from nemo_like.environments.reward import finite_number

_TOLERANCE = 1e-12


def named_rewards(value: Any) -> dict[str, float]:
    """Return the rewards in a JSON value: a number, or numbers by name. Raises ConfigError."""
    given = value if isinstance(value, dict) else {"reward": value}
    rewards = {}
    for name, each in given.items():
        number = finite_number(each)
        if number is None:
            raise ConfigError(f"{shown_value(value)} is not a finite number or numbers by name")
        rewards[name] = number
    return rewards


def return_to_go(
    rewards: Sequence[np.ndarray], groups: np.ndarray, discount: float = 1.0
) -> list[np.ndarray]:
    """Return the advantage of each turn of each episode, float64 [K] per episode.

    `rewards` are float [K] per episode: the reward of each of its K turns, in the order of time.
    `groups` is int [B]; the episodes of a group have the same prompt. With the discount gamma

        A_k = sum over j >= k of gamma^(j - k) r_j - b,

    where b is the mean of sum over j of gamma^j r_j over the other episodes of the group. The
    expected policy gradient is exact for gamma = 1: rewards before a turn do not depend on it, and
    b does not depend on the episode. A baseline that includes the episode itself would scale the
    gradient, and one per number of the turn would change its direction, because episodes that have
    ended are missing there. Raises ValueError for a group of one episode.
    """
    to_go = []
    for values in rewards:
        returns = np.zeros(len(values))
        total = 0.0
        for turn in range(len(values) - 1, -1, -1):
            total = float(values[turn]) + discount * total
            returns[turn] = total
        to_go.append(returns)
    totals = np.array([returns[0] if len(returns) else 0.0 for returns in to_go])
    advantages = []
    for episode, returns in enumerate(to_go):
        others = groups == groups[episode]
        others[episode] = False
        if not others.any():
            raise ValueError("a group of one episode has no others for its baseline")
        values = returns - totals[others].mean()
        # Of equal returns the differences are rounding errors.
        is_zero = np.abs(values) <= _TOLERANCE * np.maximum(1.0, np.abs(returns))
        advantages.append(np.where(is_zero, 0.0, values))
    return advantages
