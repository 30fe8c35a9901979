"""Losses: pure functions of flat tensors that return sums and counts."""

from nemo_like.losses.likelihood import NllLoss
from nemo_like.losses.policy_gradient import ClippedPolicyGradientLoss
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
from nemo_like.losses.rollout_loss import RolloutLoss, rollout_loss

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
