"""KL divergence from the reference: estimators per token with an unbiased gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_like.losses.mismatch import MAX_EXPONENT

_MAX_KL = 10.0
"""Limit of the magnitude of a token's KL estimate, and separately of its derivative."""


def reference_kl(
    policy_logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, kind: str
) -> Tensor:
    """Estimate KL(policy || reference) per token, float32 [T]; 0 where `mask` is False.

    With d = l_ref - l, the value is that of the estimator `kind`, clamped to [-10, 10]:
    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d, where |d| is at most 20.

    The gradient with respect to `policy_logprobs` is -d clamped to [-10, 10], for every `kind`.
    It is the derivative of k2, and of k3 times the score-function factor exp(l - sg(l)); over
    samples from the policy it is an unbiased gradient of the KL, which the derivatives of k1 (the
    constant 1) and of k3 alone are not. Gradient descent therefore moves l towards l_ref at any
    d. The gradient is continuous and monotone in d, it is 0 only at d = 0, and the clamp of the
    value does not affect it.

    Sources: Schulman 2020 (values), arXiv 2506.09477 (gradients).
    """
    policy_logprobs = torch.where(mask, policy_logprobs, 0.0)
    with torch.no_grad():
        difference = reference_logprobs - policy_logprobs
        # Masked positions may have no reference value.
        difference = torch.where(mask, difference, 0.0)
        gradient = -difference.clamp(-_MAX_KL, _MAX_KL)
        difference = difference.clamp(-MAX_EXPONENT, MAX_EXPONENT)
        if kind == "k1":
            value = -difference
        elif kind == "k2":
            value = difference.square() / 2
        else:
            value = torch.exp(difference) - 1 - difference
        value = value.clamp(-_MAX_KL, _MAX_KL)
    return _WithGradient.apply(policy_logprobs, value, gradient)  # type: ignore[return-value]


class _WithGradient(torch.autograd.Function):
    """Returns `value`, with `derivative` as its derivative with respect to `variable`."""

    @staticmethod
    def forward(ctx: Any, variable: Tensor, value: Tensor, derivative: Tensor) -> Tensor:
        """Return `value`, of the same shape as `variable`."""
        ctx.save_for_backward(derivative)
        return value.clone()

    @staticmethod
    @once_differentiable
    # torch declares `*grad_outputs`; a fixed signature checks their number.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_value: Tensor
    ) -> tuple[Tensor, None, None]:
        """Multiply `grad_value` by the derivative; both have the same shape."""
        (derivative,) = ctx.saved_tensors
        return grad_value * derivative, None, None
