"""Completions whose reward functions failed: their limit, their metrics, and which are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import get_args

import numpy as np

from nemo_like.config.reward import RewardConfig
from nemo_like.environments.reward import BadRewardKind, RewardError, RewardProblem
from nemo_like.metrics import Metrics, Sum

_NUM_SHOWN = 3
"""Different problems that the error shows."""


def check_error_share(
    problems: Collection[RewardProblem], num_rows: int, config: RewardConfig
) -> None:
    """Raise RewardError if more completions of a rollout failed than `max_error_share` allows.

    `problems` has one entry per completion that failed so far, of `num_rows` in all.
    """
    # Not the product with the share, which may be rounded below a number of rows.
    if len(problems) / num_rows <= config.max_error_share:
        return
    counts = Counter(str(problem) for problem in problems)
    frequent_first = sorted(counts.items(), key=lambda item: -item[1])
    lines = [f"  {count} x {text}" for text, count in frequent_first[:_NUM_SHOWN]]
    if len(counts) > _NUM_SHOWN:
        lines.append(f"  and {len(counts) - _NUM_SHOWN} other problems")
    raise RewardError(
        f"the rewards of {len(problems)} of {num_rows} completions failed, above"
        f" reward.max_error_share {config.max_error_share:g}: correct the functions, or raise the"
        " limit. Problems:\n" + "\n".join(lines)
    )


def reward_mask(problems: Sequence[RewardProblem | None], *, drops: bool) -> np.ndarray:
    """Return True for the rows that have a reward, bool [B]; with `drops` failed ones have none."""
    return np.array([problem is None or not drops for problem in problems], dtype=bool)


def problem_metrics(problems: Sequence[RewardProblem | None], mask: np.ndarray) -> Metrics:
    """Return the numbers of failed completions, in all and by kind, and of the rows left out.

    `mask` is that of `reward_mask`, bool [B].
    """
    kinds = Counter(problem.kind for problem in problems if problem is not None)
    metrics: Metrics = {
        "reward/num_errors": Sum(float(kinds.total())),
        "reward/num_dropped": Sum(float((~mask).sum())),
    }
    for kind in get_args(BadRewardKind):
        metrics[f"reward/num_errors_{kind}"] = Sum(float(kinds[kind]))
    return metrics
