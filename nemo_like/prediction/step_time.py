"""Predicted time of the phases of a step, from the measured phases of a past run.

A phase takes `costs @ features`: features are numbers of the rows and the plan of a step, such as
its microbatches, and costs are the seconds of each, fitted to the recorded steps. The same costs
with the features of other steps give the prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nemo_like.data.planning.plan import BatchPlan
from nemo_like.data.planning.prefixes import SharedPrefixes
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.integer_math import ceil_div
from nemo_like.prediction.comparison import Outcome, Strategy
from nemo_like.prediction.duration import train_passes
from nemo_like.prediction.plan_report import PlanRequest, seconds_per_step

_TOLERANCE = 0.2
"""Standard deviation of the assumed shares of `fit_costs`, relative to the time of the phase."""
_MIN_NOISE = 0.01
"""Least relative error of a measured time."""
_MAX_ROWS = 65_536
"""Rows of all steps that are planned, unless one step has more."""


@dataclass(frozen=True, eq=False)
class Phase:
    """A part of a step: measured in S recorded steps, predicted for T other ones."""

    name: str
    rule: str
    """What the time grows with."""
    seconds: np.ndarray
    """float64 [S]: measured."""
    recorded: np.ndarray
    """float64 [S, F]: features of the recorded steps."""
    target: np.ndarray
    """float64 [T, F]: features of the predicted steps."""
    shares: tuple[float, ...] = (1.0,)
    """Assumed share of each feature in the time, as far as the recorded steps do not show it."""
    costs_of: Phase | None = None
    """A phase with the same features and costs, if this one was not measured."""

    @cached_property
    def costs(self) -> np.ndarray:
        """Seconds of one unit of each feature, float64 [F]."""
        if self.costs_of is not None:
            return self.costs_of.costs
        return fit_costs(self.recorded, self.seconds, self.shares)

    @property
    def measured_s(self) -> float:
        """Mean seconds of the recorded steps."""
        return float(self.seconds.mean())

    @property
    def predicted_s(self) -> float:
        """Mean seconds of the predicted steps."""
        return float((self.target @ self.costs).mean())


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPrediction:
    """The time of a step, as the sum of its phases."""

    phases: tuple[Phase, ...]
    num_recorded: int
    """Steps whose times were used."""
    num_tokens: float
    """Tokens of a predicted step, prompts included."""
    num_workers: int
    notes: tuple[str, ...]
    """What the past run could not measure."""

    @property
    def measured_s(self) -> float:
        return sum(phase.measured_s for phase in self.phases)

    @property
    def predicted_s(self) -> float:
        return sum(phase.predicted_s for phase in self.phases)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.predicted_s


def fit_costs(features: np.ndarray, seconds: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Fit nonnegative costs [F] to `seconds` float64 [S] of steps with `features` float64 [S, F].

    Least squares with a normal prior (ridge regression): the part of the time of feature f is
    `shares[f]`, with a standard deviation of `_TOLERANCE`. Where the features of the steps hardly
    differ, any division of the time among them would fit, and the assumed shares remain. The mean
    of the recorded steps is met exactly.
    """
    means = features.mean(axis=0)
    is_used = means > 0
    # In parts of the mean time: a cost of 1 takes all of it.
    units = np.where(is_used, means, 1.0)
    scaled = features / units
    relative = seconds / (seconds.mean() or 1.0)
    plain, *_ = np.linalg.lstsq(scaled, relative, rcond=None)
    freedom = max(len(seconds) - int(is_used.sum()), 1)
    noise = max(float(np.sqrt(np.sum((relative - scaled @ plain) ** 2) / freedom)), _MIN_NOISE)
    rows = np.vstack([scaled / noise, np.eye(len(means)) / _TOLERANCE])
    values = np.concatenate([relative / noise, np.array(shares) / _TOLERANCE])
    found, *_ = np.linalg.lstsq(rows, values, rcond=None)
    costs = np.where(is_used, np.maximum(found, 0.0), 0.0)
    return costs / (costs.sum() or 1.0) * seconds.mean() / units


def draw_steps(
    steps: Sequence[TokenCounts],
    group_size: int,
    num_groups: int | None = None,
    new_group_size: int = 1,
    *,
    max_trained: int | None = None,
    seed: int = 0,
) -> list[TokenCounts]:
    """Return steps with the lengths of recorded ones.

    `steps` have groups of `group_size` consecutive rows. The result has the groups of each step,
    or with `num_groups` so many random groups of all of them, with `new_group_size` rows each. A
    larger group repeats its rows. Rows have at most `max_trained` trained tokens. The order of the
    groups is random, and nothing depends on the order of the given rows.
    """
    rng = np.random.default_rng(seed % 2**64)
    drawn = []
    if num_groups is None:
        for counts in steps:
            groups = _sorted_groups(counts, group_size)
            drawn.append(counts.take(rng.permutation(groups).ravel()))
    else:
        pool = TokenCounts.concat(steps)
        # A smaller group has any rows of the group, not the shortest.
        groups = rng.permuted(_sorted_groups(pool, group_size), axis=1)
        num_steps = max(min(len(steps), _MAX_ROWS // (num_groups * new_group_size)), 1)
        num_rounds = ceil_div(num_steps * num_groups, len(groups))
        order = np.concatenate([rng.permutation(len(groups)) for _ in range(num_rounds)])
        for start in range(0, num_steps * num_groups, num_groups):
            chosen = groups[order[start : start + num_groups]]
            drawn.append(_resized(pool, chosen, new_group_size))
    return [_limited(counts, max_trained) for counts in drawn]


def pass_features(
    request: PlanRequest, plans: Sequence[BatchPlan], *, is_forward: bool
) -> np.ndarray:
    """Return the features of training, or of a forward pass, for each plan, float64 [S, 2].

    They are the seconds of the slowest rank at assumed rates, and the microbatches of a rank.
    """
    strategy = Strategy("configured", "as configured", request.spec)
    request = replace(request, measured=None)
    num_passes = train_passes(request.placement) if is_forward else 1
    found = []
    for plan in plans:
        outcome = Outcome(strategy, plan, request.max_tokens, **request.overheads)
        seconds = seconds_per_step(request, outcome) * plan.num_steps
        found.append((seconds / num_passes, plan.num_microbatches))
    return np.array(found, dtype=np.float64)


def _sorted_groups(counts: TokenCounts, group_size: int) -> np.ndarray:
    """Return the rows of each group, int64 [N, G], in an order that depends on lengths only."""
    keys = [counts.lengths]
    if counts.num_trained is not None:
        keys.insert(0, counts.num_trained)
    groups = np.arange(len(counts.lengths)).reshape(-1, group_size)
    within = np.lexsort([key[groups] for key in keys], axis=1)
    groups = np.take_along_axis(groups, within, axis=1)
    columns = [key[groups[:, column]] for column in range(group_size) for key in keys]
    return groups[np.lexsort(columns)]


def _resized(pool: TokenCounts, groups: np.ndarray, group_size: int) -> TokenCounts:
    """Return the rows of `groups` int64 [N, G], as groups of `group_size` rows."""
    rows = groups[:, np.arange(group_size) % groups.shape[1]].ravel()
    if len(np.unique(rows)) == len(rows):
        return pool.take(rows)
    # Repeated rows have the prompt in common, as other rows of the group do.
    return with_prompt_prefixes(replace(pool, prefixes=None).take(rows), group_size)


def with_prompt_prefixes(counts: TokenCounts, group_size: int) -> TokenCounts:
    """Return the counts with prefixes, unless they are known: the prompts of consecutive rows.

    What is not trained of a row is its prompt.
    """
    if group_size == 1 or counts.num_trained is None or counts.prefixes is not None:
        return counts
    ids = np.arange(len(counts.lengths)) // group_size
    prefixes = SharedPrefixes.of_groups(ids, counts.lengths - counts.num_trained)
    return replace(counts, prefixes=prefixes)


def _limited(counts: TokenCounts, max_trained: int | None) -> TokenCounts:
    """Return the counts with at most `max_trained` trained tokens per row."""
    if max_trained is None or counts.num_trained is None:
        return counts
    trained = np.minimum(counts.num_trained, max_trained)
    lengths = np.maximum(counts.lengths - counts.num_trained + trained, 1)
    prefixes = None if counts.prefixes is None else counts.prefixes.limited(lengths)
    return TokenCounts(lengths, trained, prefixes)
