"""Losses: pure functions of flat tensors that return sums and counts."""

from nemo_like.losses.likelihood import NllLoss
from nemo_like.losses.policy_gradient import ClippedPolicyGradientLoss
from nemo_like.losses.reduce import GlobalCounts, Loss, LossInputs, LossTerms

__all__ = [
    "ClippedPolicyGradientLoss",
    "GlobalCounts",
    "Loss",
    "LossInputs",
    "LossTerms",
    "NllLoss",
]
