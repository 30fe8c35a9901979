"""Search for the fastest layout and activation checkpointing that fit into the memory of a GPU.

Of settings with nearly equal times the one with the smallest layout is recommended. A setting whose
lower bound of the step time is further above the best time found is not planned, so the result is
the one of planning every setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, get_args

import numpy as np

from nemo_like.config.schema import ActivationCheckpointing
from nemo_like.prediction.memory import GIB, MemoryModel, usable_bytes
from nemo_like.prediction.plan_report import (
    BUDGET_MULTIPLE,
    PlanRequest,
    max_useful_tokens,
    plan_configured,
    seconds_per_step,
)

_NUM_STEPS = 4
"""Optimizer steps that are planned of each setting."""
NODE_GPUS = 8
"""Tensor- and context-parallel groups stay within a node of so many GPUs."""
_SIZES = (1, 2, 4, 8)
_NEAR_TIE = 1.02
"""Ratio of two predicted times below which the smaller layout is preferred."""


class Setting(NamedTuple):
    """A parallel layout and the activation checkpointing."""

    checkpointing: ActivationCheckpointing
    tensor: int
    context: int
    pipeline: int
    expert: int


KEYS = (
    *("policy.activation_checkpointing", "parallel.tensor", "parallel.context"),
    *("parallel.pipeline", "parallel.expert"),
)
"""The key of each field."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A setting, and what is predicted for it."""

    setting: Setting
    request: PlanRequest
    """With the largest token budget that fits and makes a difference."""
    peak_gib: float
    """With that budget; for a setting that does not fit, of the longest row alone."""
    seconds: float
    """Of an optimizer step; infinite if the longest row does not fit."""
    is_bound: bool = False
    """`seconds` is a lower bound, and more than a near tie above the time of the fastest."""

    @property
    def fits(self) -> bool:
        return math.isfinite(self.seconds)


def all_settings(num_gpus: int, *, has_experts: bool, fixed: dict[str, Any]) -> list[Setting]:
    """Return the settings of `num_gpus` GPUs, of which those with `fixed` keys have its values."""
    axes: list[Iterable[Any]] = [get_args(ActivationCheckpointing), *[_SIZES] * 4]
    if not has_experts:
        axes[4] = (1,)
    values = [(fixed[key],) if key in fixed else axis for key, axis in zip(KEYS, axes, strict=True)]
    found = []
    for setting in map(Setting._make, product(*values)):
        group = setting.tensor * setting.context
        if num_gpus % (group * setting.pipeline) == 0 and group <= NODE_GPUS:
            found.append(setting)
    return found


def search(
    settings: Iterable[Setting], request_of: Callable[[Setting], PlanRequest | None]
) -> list[Candidate]:
    """Return a candidate for each setting that is possible: the recommended one, then by time.

    `request_of` returns None for a setting that model, engine or batch do not allow.
    """
    requests = ((setting, request_of(setting)) for setting in settings)
    found = [_candidate(setting, request) for setting, request in requests if request is not None]
    planned = []
    best = math.inf
    for each in sorted(found, key=_order):
        candidate = each
        if each.fits and each.seconds < best * _NEAR_TIE:
            seconds = seconds_per_step(each.request, plan_configured(each.request))
            candidate = replace(each, seconds=seconds, is_bound=False)
            best = min(best, seconds)
        planned.append(candidate)
    planned.sort(key=_order)
    near = [each for each in planned if not each.is_bound and each.seconds <= best * _NEAR_TIE]
    recommended = min(near or planned, key=lambda each: math.prod(each.setting[1:]), default=None)
    return sorted(planned, key=lambda each: each is not recommended)


def alternatives(candidates: list[Candidate]) -> list[Candidate]:
    """Return the best candidate, the best ones with other values, and those without any axis."""
    best = candidates[0]
    found = {best.setting: best}
    for each in candidates:
        if each.setting[1:] == (1, 1, 1, 1):
            found[each.setting] = each
    for index, value in enumerate(best.setting):
        values = {each.setting[index] for each in candidates} - {value}
        for other in sorted(values):
            each = next(each for each in candidates if each.setting[index] == other)
            found.setdefault(each.setting, each)
    return sorted(found.values(), key=lambda each: (each is not best, *_order(each)))


def truncation(found: Iterable[Candidate], current: Mapping[str, Any]) -> str:
    """Return the proposal to truncate rows to the largest length that fits; empty if none does.

    `current` has the values of `KEYS`; the proposal names those that differ.
    """
    limits: dict[int, Candidate] = {}
    for each in found:
        request = each.request
        memory = MemoryModel(request.model, request.placement)
        multiple = math.lcm(BUDGET_MULTIPLE, request.spec.total_multiple)
        limit = memory.largest_budget(usable_bytes(request.memory_gib or 0.0), multiple)
        limits.setdefault(limit, each)
    longest = max(limits, default=0)
    if longest == 0:
        return ""
    lengths = f"policy.max_total_sequence_length={longest} {PlanRequest.budget_name}={longest}"
    others = changed_keys(limits[longest], current)
    return f"set {lengths} policy.oversize_rows=truncate{others and ' '}{others}, "


def changed_keys(candidate: Candidate, current: Mapping[str, Any]) -> str:
    """Return the keys of a candidate that differ from `current`, as overrides."""
    values = zip(KEYS, candidate.setting, strict=True)
    return " ".join(f"{key}={value}" for key, value in values if value != current[key])


def _order(candidate: Candidate) -> tuple[float, float, Setting]:
    # Of equal times the one with less memory.
    return candidate.seconds, candidate.peak_gib, candidate.setting


def _candidate(setting: Setting, request: PlanRequest) -> Candidate:
    """Return a candidate with the lower bound of its time."""
    lengths = request.rows.values
    num_rows = min(len(lengths), _NUM_STEPS * request.batch_size)
    rows = replace(
        request.rows,
        counts=request.rows.counts.take(np.arange(num_rows)),
        is_ordered=request.rows.is_ordered or num_rows < len(lengths),
    )
    spec = request.spec
    memory = MemoryModel(request.model, request.placement)
    needed = spec.padding_multiples.tokens_of_row(int(lengths.max()))
    usable = usable_bytes(request.memory_gib or 0.0)
    multiple = math.lcm(BUDGET_MULTIPLE, spec.total_multiple)
    budget = memory.largest_budget(usable, multiple)
    if budget < needed:
        return Candidate(setting, request, memory.peak(needed) / GIB, math.inf)
    budget = min(budget, max_useful_tokens(lengths, spec, multiple))
    chosen = replace(
        request, rows=rows, max_tokens=budget, spec=spec.with_budget(budget, None), oversize="error"
    )
    return Candidate(
        setting, chosen, memory.peak(budget) / GIB, _bound_seconds(chosen), is_bound=True
    )


def _bound_seconds(request: PlanRequest) -> float:
    """Return a lower bound of the seconds per step: balanced rows without padding."""
    duration = request.duration
    counts = request.rows.counts
    work = request.spec.cost.of(counts.lengths, counts.num_trained).sum()
    work += 0.0 if counts.image_work is None else counts.image_work.sum()
    work += request.overheads["token_work"] * counts.lengths.sum()
    num_steps = math.ceil(len(counts.lengths) / request.batch_size)
    num_flops = work / request.spec.cost.linear * duration.token_flops
    seconds = float(num_flops) / request.spec.num_ranks / duration.flops_per_s / num_steps
    return seconds * request.time_scale
