"""A custom reward: completions that are short. Named in a config as `brief_reward.brief`."""

from __future__ import annotations

from nemo_like.environments.reward import RewardSample

FREE_CHARACTERS = 60
"""Completions up to this length get the full reward."""
MAX_CHARACTERS = 240
"""Completions from this length on get none."""


def brief(sample: RewardSample) -> float:
    """Return 1 for a completion of up to 60 characters, 0 from 240 on, and a line in between.

    An empty completion gets 0, so that the policy does not learn to write nothing. Use it with a
    small weight beside a reward for the answer.
    """
    length = len(sample.completion.strip())
    if length == 0:
        return 0.0
    share = (MAX_CHARACTERS - length) / (MAX_CHARACTERS - FREE_CHARACTERS)
    return min(1.0, max(0.0, share))
