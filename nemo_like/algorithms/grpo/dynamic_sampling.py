"""Dynamic sampling: groups with equal rewards are dropped and replaced by further prompts.

Source: Yu et al. 2025, arXiv 2503.14476 (DAPO).
"""

from __future__ import annotations

import numpy as np

from nemo_like.algorithms.grpo.advantages import has_spread
from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.grpo.step_rollout import StepRollout
from nemo_like.metrics import Mean, Metrics, Sum
from nemo_like.rollout.rollout import Rollout
from nemo_like.rollout.selection import concat_rollouts, select_rows


def rows_with_spread(
    rewards: np.ndarray, groups: np.ndarray, reward_mask: np.ndarray
) -> np.ndarray:
    """Return True for rows whose group has unequal rewards, bool [B].

    `rewards` is float [B], `groups` int [B]; `reward_mask` bool [B] is False for rows without a
    reward, which do not count.
    """
    rewards = rewards.astype(np.float64)
    _, group_of_row = np.unique(groups, return_inverse=True)
    sizes = np.maximum(np.bincount(group_of_row, weights=reward_mask), 1.0)
    means = np.bincount(group_of_row, weights=rewards * reward_mask) / sizes
    deviations = (rewards - means[group_of_row]) * reward_mask
    squares = np.bincount(group_of_row, weights=deviations**2)
    return has_spread(np.sqrt(squares / sizes), means)[group_of_row]


class KeptGroups:
    """The groups of one step that have unequal rewards, from one rollout and its refills."""

    def __init__(self, config: GrpoRunConfig) -> None:
        self._config = config
        self._num_groups = config.grpo.num_prompts_per_step
        self._sampled: list[Rollout] = []
        self._kept: list[Rollout] = []
        self._locations: list[str] = []
        self._num_sampled = 0

    @property
    def num_missing(self) -> int:
        """Groups that the step still lacks."""
        return self._num_groups - len(self._locations)

    def add(self, rollout: Rollout, locations: list[str]) -> None:
        """Add a rollout of the prompts at `locations`; its groups with equal rewards are dropped.

        The rewards are those of reward functions and models, without penalties. With separate
        components a group is kept if one of them is unequal, also where their sum is equal.
        """
        groups = rollout.batch["group"]
        is_kept = np.zeros(len(groups), dtype=bool)
        for values in self._compared_rewards(rollout):
            is_kept |= rows_with_spread(values, groups, rollout.batch["reward_mask"])
        self._sampled.append(rollout)
        self._num_sampled += len(locations)
        self._kept.append(select_rows(rollout, np.flatnonzero(is_kept)))
        # The groups of a rollout are numbered in the order of its prompts.
        self._locations += [locations[group] for group in np.unique(groups[is_kept]).tolist()]

    def _compared_rewards(self, rollout: Rollout) -> list[np.ndarray]:
        """Return the rewards that have an advantage of their own, float [B] each."""
        compared = [rollout.batch["reward"]]
        if self._config.grpo.advantage.components == "separate":
            weights = self._config.reward.weights
            for name, values in rollout.components.items():
                if weights.get(name, 1.0) != 0:
                    compared.append(values)
        return compared

    def result(self) -> StepRollout:
        """Return the kept groups as the rollout of the step; it may have none."""
        num_kept = len(self._locations)
        metrics: Metrics = {
            "dynamic_sampling/num_refills": Sum(float(len(self._sampled) - 1)),
            "dynamic_sampling/num_sampled_groups": Sum(float(self._num_sampled)),
            "dynamic_sampling/kept_share": Mean(float(num_kept), float(self._num_sampled)),
            "dynamic_sampling/num_missing_groups": Sum(float(self.num_missing)),
        }
        return StepRollout(
            concat_rollouts(self._kept),
            self._locations,
            sampled=concat_rollouts(self._sampled),
            sampling_metrics=metrics,
        )
