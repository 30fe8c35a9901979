"""Selection of prompts before they are sampled (`grpo.prompt_selection`).

A group whose rewards are all equal has advantages of 0. GRESO (Zheng et al. 2025, arXiv 2506.02177)
observes that prompts stay uninformative for several epochs, and skips them with a probability that
grows with their history. Here a prompt whose last z visits were uninformative is sampled with the
probability

    k = max(exploration, decay^z)

which is known before the visit. With g the gradient of the group of a prompt and b = 1 if the
prompt is sampled, E[b g / k] = g: the weight 1 / k makes the sum over the visits an unbiased
estimate of that sum without selection (Horvitz and Thompson 1952). It holds for every rule that
reads the past only, also if a step ends after a number of informative groups (optional stopping). A
step divides the weights by their mean, which changes the length of its gradient, not the direction;
the ratio is consistent, with a bias of the order of 1 / number of groups. No weight is above
1 / `exploration` before this division. Without weights a step follows the objective in which each
prompt counts k times, as in GRESO.

The draws depend on the seed, the epoch and the position only, and the history is part of the
checkpoint, so a resumed run selects the same prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nemo_like.metrics import Mean, Metrics

WEIGHT = "prompt_weight"
"""Column of a rollout, float32 [B]: 1 / k of the prompt of each row."""
_STREAM = 0x5E1EC7
"""Separates the draws from those of other parts of the run with the same seed."""
_MEMORY = 0.9
"""Factor of the weight of a group in the expected yield, per step since it was sampled."""

Outcome = tuple[int, bool, int]
"""A row of the data set, whether the rewards of its group were unequal, and the mean number of
tokens of its completions."""


class PromptSelector:
    """Decides which visited rows are sampled, from the outcomes of their earlier groups.

    The prompts of step t are chosen with the outcomes of the steps before t - `lag`, whatever the
    steps are that have ended: with `grpo.max_staleness` as the lag a resumed run, which starts the
    rollouts ahead of training again, has the same history for each of them.
    """

    def __init__(self, *, decay: float, exploration: float, seed: int, lag: int = 0) -> None:
        self._decay = decay
        self._exploration = exploration
        self._entropy = (seed % 2**64, _STREAM)
        self._lag = lag
        self._streaks: dict[int, int] = {}
        """Uninformative visits of each row since its last informative one."""
        self._lengths: dict[int, int] = {}
        """Mean tokens of a completion of each row at its last visit."""
        self._recent: list[tuple[int, list[Outcome]]] = []
        """Steps and outcomes that are not in `_streaks`, as a step without them may be chosen."""
        self._visible: dict[int, int] = {}
        """Streaks of the rows of `_recent` for the step that is chosen."""
        self._visible_lengths: dict[int, int] = {}
        """Their lengths."""
        self._num_informative = 0.0
        self._num_sampled = 0.0

    def begin(self, step: int) -> None:
        """Choose the prompts of `step` from now on."""
        self._visible = {}
        self._visible_lengths = {}
        for recorded, outcomes in self._recent:
            if recorded < step - self._lag:
                self._add(self._visible, outcomes)
                self._visible_lengths.update((row, length) for row, _, length in outcomes)

    def streak(self, row: int) -> int:
        """Return the number of uninformative visits of a row since its last informative one."""
        return self._visible.get(row, self._streaks.get(row, 0))

    def probability(self, row: int) -> float:
        """Return the probability with which a visit of the row is sampled, in (0, 1]."""
        return max(self._exploration, self._decay ** self.streak(row))

    def choose(
        self, rows: Sequence[int], epoch: int, position: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Decide about the visits of `rows`, the first at `position` of the epoch.

        Returns whether each is sampled, bool [n], and with which probability, float64 [n].
        """
        probabilities = np.array([self.probability(row) for row in rows], dtype=np.float64)
        is_sampled = np.ones(len(rows), dtype=bool)
        for index in np.flatnonzero(probabilities < 1).tolist():
            rng = np.random.default_rng((*self._entropy, epoch, position + index))
            is_sampled[index] = rng.random() < probabilities[index]
        return is_sampled, probabilities

    def lengths(self, rows: Sequence[int]) -> np.ndarray | None:
        """Predict the tokens of a completion of each row, float64 [n]; None without history.

        It is the mean of the last visit, and the mean of all rows with history for other rows.
        """
        known = self._lengths | self._visible_lengths
        if not known:
            return None
        mean = sum(known.values()) / len(known)
        return np.array([known.get(row, mean) for row in rows])

    @property
    def expected_yield(self) -> float:
        """Share of informative groups of recent steps; 1 before the first, never 0."""
        return (1 + self._num_informative) / (1 + self._num_sampled)

    def num_prompts(self, num_missing: int, limit: int) -> int:
        """Return for how many prompts `num_missing` informative groups are expected.

        At least that number, and at most `limit`.
        """
        return min(limit, math.ceil(num_missing / self.expected_yield))

    def record(self, step: int, outcomes: Sequence[Outcome], num_skipped: int) -> Metrics:
        """Add the outcomes of a step, after those of all earlier steps; return its metrics.

        `num_skipped` visits of the step were not sampled.
        """
        num_sampled = len(outcomes)
        num_informative = sum(is_informative for _, is_informative, _ in outcomes)
        num_visits = float(num_sampled + num_skipped)
        metrics: Metrics = {
            "selection/skipped_share": Mean(float(num_skipped), num_visits),
            "selection/uninformative_share": Mean(
                float(num_sampled - num_informative), float(num_sampled)
            ),
            "selection/expected_yield": Mean(self.expected_yield),
        }
        self._num_informative = _MEMORY * self._num_informative + num_informative
        self._num_sampled = _MEMORY * self._num_sampled + num_sampled
        self._recent.append((step, list(outcomes)))
        while self._recent and self._recent[0][0] <= step - self._lag:
            shown = self._recent.pop(0)[1]
            self._add(self._streaks, shown)
            self._lengths.update((row, length) for row, _, length in shown)
        return metrics

    def _add(self, streaks: dict[int, int], outcomes: Sequence[Outcome]) -> None:
        for row, is_informative, _ in outcomes:
            before = streaks.get(row, self._streaks.get(row, 0))
            streaks[row] = 0 if is_informative else before + 1

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "rows": list(self._streaks),
            "streaks": list(self._streaks.values()),
            "lengths": list(self._lengths.values()),
            "recent": [[step, *map(list, outcomes)] for step, outcomes in self._recent],
            "num_informative": self._num_informative,
            "num_sampled": self._num_sampled,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the history of `state`."""
        self._streaks = dict(zip(state["rows"], state["streaks"], strict=True))
        self._lengths = dict(zip(state["rows"], state["lengths"], strict=True))
        self._recent = []
        for step, *outcomes in state["recent"]:
            self._recent.append((step, [(row, spread, size) for row, spread, size in outcomes]))
        self._num_informative = state["num_informative"]
        self._num_sampled = state["num_sampled"]


def step_weights(weights: np.ndarray, row_mask: np.ndarray) -> np.ndarray:
    """Return the weights of the rows of a step, float64 [B], with a mean of 1 over trained rows.

    `weights` is float [B], `row_mask` bool [B].
    """
    weights = weights.astype(np.float64)
    return weights / weights[row_mask].mean() if row_mask.any() else weights
