"""What both engines' optimizers share: learning rates, checks of gradients, averages of weights.

After the warm-up a schedule is a fraction between 1 and 0 of the learning rate. WSD is the schedule
of MiniCPM (Hu et al. 2024, arXiv 2404.06395), the decay 1 - sqrt is from Hägele et al. 2024 (arXiv
2405.18392); warm restarts are SGDR (Loshchilov and Hutter 2017, arXiv 1608.03983). With the same
lengths the values equal those from transformers' `get_wsd_schedule` and
`get_cosine_with_hard_restarts_schedule_with_warmup` after their warm-up.

The exponential moving average (EMA) after optimizer step n is e_n = d e_(n-1) + (1 - d) w_n with
the decay d (Polyak and Juditsky 1992, in the exponential form of Kingma and Ba 2015, section 7.2).
It is sharded like the weights that are trained.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.config.schema import EmaConfig, OptimizerConfig, PolicyConfig, SchedulerConfig
from nemo_like.integer_math import ceil_div
from nemo_like.learning_rate import batch_size_scale
from nemo_like.losses import GlobalCounts

_DEFAULT_WSD_SHARE = 10
"""Without `wsd_decay_steps` the decay has one of so many steps, as in MiniCPM."""

LARGEST = 0.99 * math.sqrt(torch.finfo(torch.float32).max)
"""About 1.8e19: the square of any number up to this is finite in float32."""

Masters = Iterable[tuple[str, Tensor]]
"""Name and float32 shard [...] of each trained weight, in a fixed order."""


def remaining_rate(step: int, end: int, scheduler: SchedulerConfig) -> float:
    """Return the part of the decay that is left at optimizer step `step`, from 1 to 0.

    `step` is at least `warmup_steps`. It is 0 from step `end` on, for all kinds but `constant`.
    """
    if scheduler.kind == "constant":
        return 1.0
    start = scheduler.warmup_steps
    if step >= end:
        return 0.0
    if scheduler.kind == "wsd":
        start = wsd_decay_start(end, scheduler)
        return _decay(scheduler.wsd_decay_shape, (step - start) / (end - start))
    if scheduler.kind == "cosine_restarts":
        return _decay("cosine", _cycle_progress(step - start, end - start, scheduler))
    return _decay(scheduler.kind, (step - start) / (end - start))


def wsd_decay_start(end: int, scheduler: SchedulerConfig) -> int:
    """Return the last step of `wsd` at the full rate; the decay ends at step `end`.

    A decay that is longer than the steps after warm-up starts after warm-up.
    """
    num_steps = scheduler.wsd_decay_steps
    if num_steps is None:
        num_steps = ceil_div(end, _DEFAULT_WSD_SHARE)
    return max(end - num_steps, scheduler.warmup_steps)


def _decay(shape: str, progress: float) -> float:
    """Return what is left of a decay with this progress; before its start it is 1."""
    progress = max(progress, 0.0)
    if shape == "linear":
        return 1.0 - progress
    if shape == "sqrt":
        return 1.0 - math.sqrt(progress)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _cycle_progress(step: int, num_steps: int, scheduler: SchedulerConfig) -> float:
    """Return the progress of step `step` of `num_steps` within its cycle, from 0 to below 1.

    Example: the third of 3 cycles in 10 steps starts at step 7, with the progress 0.1.
    """
    # In integers, so that a restart is never one step late because of rounding.
    return step * scheduler.num_cycles % num_steps / num_steps


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
    """Return the factor of the learning rate for a step with these rows and trained tokens.

    A step without trained tokens, which changes nothing, has the factor 0.
    """
    if counts.num_tokens == 0:
        return 0.0
    if scheduler.batch_size_scaling == "none":
        return 1.0
    assert scheduler.base_batch_size is not None, "checked with the config"
    scaling = scheduler.batch_size_scaling
    return batch_size_scale(counts.num_rows, scheduler.base_batch_size, scaling)


def resolve_decay_steps(config: PolicyConfig, num_optimizer_steps: int | None) -> PolicyConfig:
    """Replace a null `scheduler.decay_steps` of `config` by the number of steps of the run.

    Without that number the config is returned unchanged; a decaying schedule then has no value.
    """
    if config.scheduler.decay_steps is not None or num_optimizer_steps is None:
        return config
    scheduler = dataclasses.replace(config.scheduler, decay_steps=num_optimizer_steps)
    return dataclasses.replace(config, scheduler=scheduler)


def adamw_options(
    parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> dict[str, Any]:
    """Return the arguments of an AdamW with weight decay on matrices only.

    Norms and biases are not decayed; in stacked experts, [experts, size], they are known by name.
    """
    matrices = []
    vectors = []
    for name, parameter in parameters:
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and not name.endswith("bias")
            (matrices if is_matrix else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return {
        "params": [group for group in groups if group["params"]],
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
    }


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> torch.optim.AdamW:
    """Build AdamW with `adamw_options`."""
    # Fused: one pass over memory; ten times faster on the CPU than the unfused loops.
    return torch.optim.AdamW(**adamw_options(parameters, config), fused=True)


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


class WeightCopy:
    """Copies of the shards of one rank, float32."""

    def __init__(self, masters: Masters, device: torch.device | None = None) -> None:
        """Copy `masters`, [...] each, to `device`; None keeps each on its own."""
        self.shards = {}
        for name, weight in masters:
            self.shards[name] = weight.detach().to(device or weight.device, copy=True)

    @torch.no_grad()
    def swap(self, masters: Masters) -> None:
        """Exchange the copies and the weights `masters`, [...] each, bit by bit."""
        for name, weight in masters:
            shard = self.shards[name]
            # One copy at a time.
            current = weight.detach().clone()
            weight.detach().copy_(shard)
            shard.copy_(current)


class WeightEma(WeightCopy):
    """Averages of the shards of one rank, float32."""

    def __init__(self, masters: Masters, config: EmaConfig) -> None:
        """Start with the values of `masters`, [...] each."""
        super().__init__(masters)
        self._decay = config.decay

    @torch.no_grad()
    def update(self, masters: Masters) -> None:
        """Include `masters`, [...] each, the weights after an applied optimizer step."""
        for name, weight in masters:
            self.shards[name].lerp_(weight.detach(), 1.0 - self._decay)
