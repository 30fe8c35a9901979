"""The keys of `loss_fn` of GRPO: the policy-gradient loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from nemo_like.config.constraints import Above, AtLeast, AtMost
from nemo_like.config.importance_correction import ImportanceCorrectionConfig


@dataclass(frozen=True, kw_only=True)
class PolicyGradientLossConfig:
    """The clipped policy-gradient loss of GRPO."""

    ratio_clip_min: Annotated[float, AtLeast(0), AtMost(1)] = 0.2
    """Lower clip: the ratio of policy to previous probability is clipped at 1 - this."""
    ratio_clip_max: Annotated[float, AtLeast(0)] = 0.2
    """Upper clip: the ratio is clipped at 1 + this. DAPO uses 0.28."""
    ratio_clip_c: Annotated[float | None, Above(1, "about 3; null turns the dual clip off")] = None
    """Dual clip: for negative advantages the loss of a token is at most this x |advantage|; null
    turns it off."""
    normalization: Literal["token", "sequence"] = "token"
    """Denominator of the loss: `token` is the mean over all completion tokens of the global batch,
    `sequence` the mean over rows of each row's token mean."""
    reference_policy_kl_penalty: Annotated[float, AtLeast(0)] = 0.0
    """Weight of the KL divergence to the frozen initial policy. Above 0 the workers keep a copy of
    that model and run one more log-prob pass per step."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the reported KL divergence; the gradient is that of k2 for all three."""
    entropy_coefficient: Annotated[float, AtLeast(0)] = 0.0
    """Weight of the entropy bonus."""
    log_entropy: bool = False
    """Log `policy/entropy`, the exact entropy over the complete vocabulary, which takes about three
    more passes over the logits of each chunk. An entropy bonus logs it as well.
    `policy/entropy_estimate` costs nothing and is always logged."""
    importance_correction: ImportanceCorrectionConfig = field(
        default_factory=ImportanceCorrectionConfig
    )
