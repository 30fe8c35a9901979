"""AdamW over whatever parameters an engine has, and the learning rate as a pure function of the
optimizer step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nemo_like.config.schema import OptimizerConfig, PolicyConfig, SchedulerConfig

LARGEST = 0.99 * math.sqrt(torch.finfo(torch.float32).max)
"""Numbers up to this, about 1.8e19, have squares that are finite in float32."""


def learning_rate(step: int, optimizer: OptimizerConfig, scheduler: SchedulerConfig) -> float:
    """The rate of optimizer step `step` (0 is the first).

    Warm-up rises in equal parts so that step `warmup_steps` is the first at full rate; then
    `cosine` and `linear` fall to `min_ratio`, reached at step `decay_steps` and kept.

    Example: lr 1, 3 steps of warm-up, linear, decay_steps 7, min_ratio 0: 0.25, 0.5, 0.75, 1, 0.75,
    0.5, 0.25, 0, 0. Raises ValueError if a decaying schedule has no `decay_steps`.
    """
    if step < scheduler.warmup_steps:
        return optimizer.lr * (step + 1) / (scheduler.warmup_steps + 1)
    if scheduler.kind == "constant":
        return optimizer.lr
    if scheduler.decay_steps is None:
        raise ValueError(
            f"policy.scheduler.kind is {scheduler.kind} and decay_steps is null: it needs the"
            f" number of optimizer steps"
        )
    span = max(scheduler.decay_steps - scheduler.warmup_steps, 1)
    progress = min((step - scheduler.warmup_steps) / span, 1.0)
    remaining = (
        1.0 - progress if scheduler.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    )
    return optimizer.lr * (scheduler.min_ratio + (1.0 - scheduler.min_ratio) * remaining)


def resolve_decay_steps(config: PolicyConfig, num_optimizer_steps: int) -> PolicyConfig:
    """`config` with a null `scheduler.decay_steps` replaced by the length of the whole run."""
    if config.scheduler.decay_steps is not None:
        return config
    scheduler = dataclasses.replace(config.scheduler, decay_steps=num_optimizer_steps)
    return dataclasses.replace(config, scheduler=scheduler)


def build_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig
) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: norms and biases, which have one dim, are not
    decayed.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for parameter in trained if parameter.ndim >= 2],
            "weight_decay": config.weight_decay,
        },
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,  # one pass over memory; on CPU ten times faster than the loops
    )


class NonFiniteError(RuntimeError):
    """Weights or optimizer state are not finite or about to overflow; nothing may be saved or
    exported from them.
    """


def clip_factor(norm: float, max_norm: float) -> float | None:
    """Factor, at most 1, that scales gradients of global norm `norm` down to `max_norm`; a
    `max_norm` of 0 never clips.

    None when the gradients must not be applied: `norm` is not finite, or above LARGEST, where the
    squares that Adam's second moment sums overflow in float32.
    """
    if not norm <= LARGEST:  # NaN compares false
        return None
    return max_norm / (norm + 1e-6) if 0 < max_norm < norm else 1.0


def all_within(tensors: Iterable[Tensor], largest: float = torch.finfo(torch.float32).max) -> bool:
    """Whether each element of each tensor is finite and its magnitude at most `largest`.

    Reads each tensor once and fetches one number from the device.
    """
    extremes = [
        extreme.float()
        for tensor in tensors
        if tensor.numel() > 0
        for extreme in tensor.detach().aminmax()
    ]
    return not extremes or bool(
        (torch.stack(extremes).abs() <= largest).all()
    )  # a comparison with NaN is False
