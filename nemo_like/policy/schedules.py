"""Shapes of the learning-rate schedule after warm-up, as fractions between 1 and 0.

WSD is the schedule of MiniCPM (Hu et al. 2024, arXiv 2404.06395), the decay 1 - sqrt that of Hägele
et al. 2024 (arXiv 2405.18392); warm restarts are SGDR (Loshchilov and Hutter 2017, arXiv
1608.03983). With the same lengths the values are those of transformers'
`get_wsd_schedule` and `get_cosine_with_hard_restarts_schedule_with_warmup` after their warm-up.
"""

from __future__ import annotations

import math

from nemo_like.config.optimization import SchedulerConfig
from nemo_like.integer_math import ceil_div

_DEFAULT_WSD_SHARE = 10
"""Without `wsd_decay_steps` the decay has one of so many steps, as in MiniCPM."""


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

    Cycle i has the length T m^i, with the multiplier m, and all of them together have `num_steps`.
    Example: two cycles of 9 steps with m = 2 have 3 and 6 steps.
    """
    multiplier = scheduler.cycle_multiplier
    num_units = sum(multiplier**cycle for cycle in range(scheduler.num_cycles))
    # A cycle has a number of units of num_steps / num_units steps. Steps times num_units are
    # integers, so that a restart is never one step late because of rounding.
    position = step * num_units
    length = num_steps
    while position >= length:
        position -= length
        length *= multiplier
    return position / length
