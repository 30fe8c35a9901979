"""The check of a weight update: log-probs of policy and replicas for the same fixed rows.

A replica can accept all weights and compute with others: vLLM on CPU computes logits from a packed
copy of the output head, which an update may not refresh; a tensor may be left out, or be NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nemo_like.data.jagged import Jagged
from nemo_like.metrics import Max, Metrics
from nemo_like.weight_sync.channel import WeightSyncError

ROW_LENGTHS = (16, 32, 48)
"""The last row is longer than a KV block of vLLM: 16 tokens on GPUs, 32 as the CPU build is
started. The two halves have equal lengths, so that two policy ranks score one each."""

_SEED = 20260101

_STALE_RATIO = 4.0
"""A replica that is this many times closer to the previous weights than to the new ones has the
previous weights. An updated replica has the distance of the rounding errors to the new ones."""

_ROUNDING_SHARE = 0.02
"""Differences below this share of the threshold are explained by rounding."""


@dataclass(frozen=True)
class Threshold:
    """The largest accepted difference of log-probs, in nats."""

    value: float
    uses_mean: bool
    """Compared with the mean over all tokens of a replica instead of the maximum."""


THRESHOLDS = {
    # Two float32 implementations differ by 1e-6 to 4e-4 (SmolLM2-135M, log-probs down to -25); a
    # stale head differs by 0.09 and more.
    "float32": Threshold(2e-3, uses_mean=False),
    # bfloat16 has a significand of 8 bits, so a logit between 8 and 16 is a multiple of 1/16 and
    # one between 16 and 32 a multiple of 1/8: single tokens differ by several rounding steps,
    # whatever the weights, and the mean is compared. SmolLM2-135M with equal weights, policy and
    # vLLM on CPU: mean 0.06 to 0.13 and max 0.77 over nine draws of the rows, whose random tokens
    # have log-probs down to -25; mean 0.04 and max 0.37 over 2480 tokens that it sampled itself.
    # Mean of damaged replicas: 0.83 to 0.88 with one of 30 layers skipped, 0.48 to 0.73 with a head
    # and 1.8 to 2.1 with all weights that are stale by a tenth of their standard deviation. All
    # weights stale by 0.003 of it (0.08 to 0.13) are not distinguishable from rounding.
    "bfloat16": Threshold(0.25, uses_mean=True),
}
"""By dtype of the generator's weights."""


def probe_rows(
    vocab_size: int, *, excluded_ids: frozenset[int] = frozenset(), max_length: int | None = None
) -> Jagged:
    """Return the fixed rows that are scored after each update, int32 [16], [32] and [48].

    The ids are drawn from all ids below `vocab_size` except `excluded_ids`; equal arguments give
    equal rows. `max_length` limits the rows, for models with few positions. Raises ValueError if
    no id is left or a row would have fewer than two tokens.
    """
    allowed = np.setdiff1d(np.arange(vocab_size), sorted(excluded_ids))
    if len(allowed) == 0:
        raise ValueError(f"no token id below {vocab_size} is left for the rows of the check")
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length is {max_length}; a row of the check needs 2 tokens")
    random = np.random.default_rng(_SEED)
    rows = []
    for length in ROW_LENGTHS:
        row = random.choice(allowed, size=length)
        rows.append(row[:max_length])
    return Jagged.from_rows(rows, np.int32)


class LogprobCheck:
    """Compares the log-probs of the replicas and of the policy after each update."""

    def __init__(self, dtype: str) -> None:
        """`dtype` is the dtype of the generator's weights; raises ValueError if it has no
        threshold.
        """
        if dtype not in THRESHOLDS:
            raise ValueError(
                f"there is no threshold for weights in {dtype}; one of {', '.join(THRESHOLDS)}"
            )
        self._threshold = THRESHOLDS[dtype]
        self._version: int | None = None
        self._current: np.ndarray | None = None
        self._previous: np.ndarray | None = None

    def compare(self, policy: Jagged, replicas: Mapping[int, Jagged], version: int) -> Metrics:
        """Compare log-probs at temperature 1, unfiltered, float32 with the lengths of the rows.

        The first value of each row is not used. Replicas may be compared in several calls of one
        version. Returns the largest differences. Raises WeightSyncError that names the replica and
        the likely cause, and ValueError for log-probs of other lengths.
        """
        expected = _scored(policy)
        if not np.isfinite(expected).all():
            raise WeightSyncError(
                f"the policy's log-probs of weight version {version} are not finite: its weights"
                " are NaN or inf; lower policy.optimizer.lr and continue from a checkpoint"
            )
        if version != self._version:
            self._version = version
            self._previous = self._current
            self._current = expected
        largest = 0.0
        largest_mean = 0.0
        for replica, logprobs in replicas.items():
            if not np.array_equal(logprobs.lengths, policy.lengths):
                raise ValueError(
                    f"replica {replica} returned log-probs of lengths {logprobs.lengths.tolist()};"
                    f" the rows have {policy.lengths.tolist()}"
                )
            errors = self._check_replica(replica, policy, logprobs)
            largest = max(largest, float(errors.max()))
            largest_mean = max(largest_mean, float(errors.mean()))
        return {
            "weight_sync/check_max_error": Max(largest),
            "weight_sync/check_mean_error": Max(largest_mean),
        }

    def _check_replica(self, replica: int, policy: Jagged, logprobs: Jagged) -> np.ndarray:
        """Return the absolute differences of one replica, float64 [n]; raise if they are wrong.

        `policy` and `logprobs` are float32 with the lengths of the rows.
        """
        actual = _scored(logprobs)
        title = f"replica {replica} does not compute with the weights of version {self._version}"
        num_not_finite = int((~np.isfinite(actual)).sum())
        if num_not_finite:
            raise WeightSyncError(
                f"{title}: {num_not_finite} of {len(actual)} log-probs are not finite, while the"
                " policy's are. Weights in the replica are NaN or inf: the transfer damaged them,"
                " or they overflow in its dtype"
            )
        errors = np.abs(actual - _scored(policy))
        distance = self._distance(errors)
        summary = (
            f"the largest difference of a log-prob is {errors.max():.3g} nats, the mean"
            f" {errors.mean():.3g}"
        )
        if self._previous is not None:
            # Stale weights are recognized below the threshold as well: one step of a small learning
            # rate changes log-probs by less.
            to_previous = self._distance(np.abs(actual - self._previous))
            # Differences of rounding alone may have any ratio.
            floor = self._threshold.value * _ROUNDING_SHARE
            if distance > max(floor, _STALE_RATIO * to_previous):
                raise WeightSyncError(
                    f"{title}: {summary}, and to the previous weights it is {to_previous:.3g}. The"
                    " update had no effect in this replica"
                )
        if distance > self._threshold.value:
            limited = "mean" if self._threshold.uses_mean else "largest"
            raise WeightSyncError(
                f"{title}: {summary}; the limit of the {limited} difference is"
                f" {self._threshold.value:g}. {self._cause(policy, logprobs)}"
            )
        return errors

    def _cause(self, policy: Jagged, logprobs: Jagged) -> str:
        """Return the likely cause of differences between float32 log-probs of equal lengths."""
        wrong = []
        for row, (expected, actual) in enumerate(zip(policy, logprobs, strict=True)):
            errors = np.abs(actual[1:].astype(np.float64) - expected[1:])
            if self._distance(errors) > self._threshold.value:
                wrong.append(row)
        if len(wrong) == len(policy):
            return (
                "All rows differ: the replica's weights are stale or only partly loaded, for"
                " example a tied output head that was not refreshed"
            )
        rows = ", ".join(map(str, wrong)) or "none alone"
        return (
            f"Only some rows differ ({rows}): the weights are probably loaded, and attention or"
            " positions differ between policy and replica, or a cached prefix of older weights was"
            " used"
        )

    def _distance(self, errors: np.ndarray) -> float:
        """Return the statistic that the threshold limits, of absolute differences float64 [n]."""
        return float(errors.mean() if self._threshold.uses_mean else errors.max())


def _scored(logprobs: Jagged) -> np.ndarray:
    """Return the log-probs of all tokens but the first of each row, float64 [n]."""
    return np.concatenate([row[1:] for row in logprobs]).astype(np.float64)
