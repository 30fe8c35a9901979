"""AdamW, the learning-rate schedule, and the checks that gradients and weights are finite."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nemo_like.config.schema import OptimizerConfig, PolicyConfig, SchedulerConfig
from nemo_like.data.streaming.learning_rate import batch_size_scale
from nemo_like.losses import GlobalCounts
from nemo_like.policy.schedules import remaining_rate

LARGEST = 0.99 * math.sqrt(torch.finfo(torch.float32).max)
"""About 1.8e19: the square of any number up to this is finite in float32."""


def learning_rate(step: int, optimizer: OptimizerConfig, scheduler: SchedulerConfig) -> float:
    """Return the learning rate of optimizer step `step` (0 is the first).

    Warm-up rises linearly so that step `warmup_steps` is the first at full rate; the other kinds
    than `constant` then fall to `min_ratio`, reached at step `decay_steps` and kept. `schedules`
    defines their shapes.

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
    remaining = remaining_rate(step, scheduler.decay_steps, scheduler)
    return optimizer.lr * (scheduler.min_ratio + (1.0 - scheduler.min_ratio) * remaining)


def learning_rate_scale(scheduler: SchedulerConfig, counts: GlobalCounts) -> float:
    """Return the factor of the learning rate for a step with these rows and trained tokens."""
    # A step without trained tokens has no gradient to scale.
    if scheduler.batch_size_scaling == "none" or counts.num_tokens == 0:
        return 1.0
    assert scheduler.base_batch_size is not None, "checked with the config"
    is_in_rows = scheduler.batch_size_unit == "rows"
    batch_size = counts.num_rows if is_in_rows else counts.num_tokens
    return batch_size_scale(batch_size, scheduler.base_batch_size, scheduler.batch_size_scaling)


def resolve_decay_steps(config: PolicyConfig, num_optimizer_steps: int | None) -> PolicyConfig:
    """Replace a null `scheduler.decay_steps` of `config` by the number of steps of the run.

    Without that number the config is returned unchanged; a decaying schedule then has no value.
    """
    if config.scheduler.decay_steps is not None or num_optimizer_steps is None:
        return config
    scheduler = dataclasses.replace(config.scheduler, decay_steps=num_optimizer_steps)
    return dataclasses.replace(config, scheduler=scheduler)


def build_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig
) -> torch.optim.AdamW:
    """Build AdamW with weight decay on matrices only; norms and biases are not decayed."""
    matrices = []
    vectors = []
    for parameter in parameters:
        if parameter.requires_grad:
            (matrices if parameter.ndim >= 2 else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,  # one pass over memory; ten times faster on the CPU than the unfused loops,
    )


class NonFiniteError(RuntimeError):
    """Weights or optimizer state are not finite or about to overflow.

    Such a model is neither saved nor exported.
    """


def clip_factor(norm: float, max_norm: float) -> float | None:
    """Return the factor, at most 1, that scales gradients of norm `norm` down to `max_norm`.

    A `max_norm` of 0 never clips. None means that the gradients must not be applied: `norm` is not
    finite, or above LARGEST, where Adam's second moment would overflow in float32.
    """
    if not norm <= LARGEST:  # NaN compares false
        return None
    if 0 < max_norm < norm:
        # As torch.nn.utils.clip_grad_norm_ does.
        return max_norm / (norm + 1e-6)
    return 1.0


def all_within(tensors: Iterable[Tensor], largest: float = torch.finfo(torch.float32).max) -> bool:
    """Return True if every element is finite and its magnitude at most `largest`.

    The tensors need not have the same shape and may be empty.
    """
    extremes: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel() > 0:
            # One pass over the tensor; NaN propagates to both.
            lowest, highest = tensor.detach().aminmax()
            extremes += [lowest.float(), highest.float()]
    if not extremes:
        return True
    # One transfer from the device for all tensors. A comparison with NaN is False.
    return bool((torch.stack(extremes).abs() <= largest).all())
