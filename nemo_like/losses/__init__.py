"""Losses: pure functions of flat tensors that return sums and counts."""

from nemo_like.losses.likelihood import NllLoss
from nemo_like.losses.policy_gradient import ClippedPolicyGradientLoss, RolloutLoss, rollout_loss
from nemo_like.losses.reduce import (
    GlobalCounts,
    HostRows,
    Loss,
    LossInputs,
    LossMetrics,
    LossTerms,
    TensorMean,
    fetch_metrics,
)

__all__ = [
    "ClippedPolicyGradientLoss",
    "GlobalCounts",
    "HostRows",
    "Loss",
    "LossInputs",
    "LossMetrics",
    "LossTerms",
    "NllLoss",
    "RolloutLoss",
    "TensorMean",
    "fetch_metrics",
    "rollout_loss",
]
