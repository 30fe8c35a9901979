"""Reward functions for the tests: one that is smooth, one that breaks."""

from nemo_like.environments.interface import RewardSample


def digit_share(sample: RewardSample) -> float:
    """Share of characters that are digits: differs within nearly every group, so every step has a gradient."""
    return sum(character.isdigit() for character in sample.completion) / max(len(sample.completion), 1)


def broken(sample: RewardSample) -> float:
    raise KeyError("no such key in the verifier")
