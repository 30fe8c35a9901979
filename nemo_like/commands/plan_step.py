"""`nemo-like plan RUN --simulate`: the time of a step of other settings, from a past run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from statistics import fmean, median

import numpy as np

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.needs import RunNeeds
from nemo_like.config.parallel import num_generation_workers
from nemo_like.config.schema import ClusterConfig, PolicyConfig
from nemo_like.data.planning.plan import BatchPlan, plan_batch
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.generation.rollout_time import rollout_work
from nemo_like.policy.batching import microbatch_budget
from nemo_like.prediction.lengths import PastRun
from nemo_like.prediction.plan_report import PlanRequest
from nemo_like.prediction.step_time import (
    Phase,
    StepPrediction,
    draw_steps,
    pass_features,
    with_prompt_prefixes,
)

_NUM_WARMUP = 2
"""Steps at the start of a run that are not used, unless there are no others: they compile."""
_MAX_OVER_MEDIAN = 2.0
"""A step that took more than so many times the median was interrupted, and is not used."""
_MEASURED_KEYS = (
    *("needs.job", "policy.model_name", "policy.engine", "policy.precision", "policy.compile"),
    *("policy.lora.enabled", "policy.optimizer.name", "policy.generation.backend"),
    *("grpo.max_staleness", "grpo.oversampling_factor", "grpo.dynamic_sampling.enabled"),
)
"""Keys that change the measured times of a step, without a rule for other values."""
_PASS_RULE = "work of the slowest rank, and a time per microbatch"
_PASS_SHARES = (0.9, 0.1)
"""Assumed shares of work and microbatches in the time of a pass."""
_ROLLOUT_SHARES = (0.5, 0.5)
"""Assumed shares of decoding steps and tokens in the time of a rollout."""


@dataclass(frozen=True, eq=False)
class StepSetting:
    """The settings of a config that a step depends on, and the rows of steps with them."""

    policy: PolicyConfig
    cluster: ClusterConfig
    needs: RunNeeds
    request: PlanRequest
    steps: list[TokenCounts] = field(default_factory=list)
    group_size: int = 1
    """Consecutive rows of a step that have one prompt."""

    @cached_property
    def plans(self) -> list[BatchPlan]:
        """Raises ValueError for rows that cannot be planned."""
        spec, mode = self.request.spec, self.request.shared_prefix
        return [plan_batch(each, spec, shared_prefix=mode, warn=False) for each in self.steps]

    @property
    def training(self) -> np.ndarray:
        """See `pass_features`."""
        num_epochs = self.needs.batch.num_epochs
        return num_epochs * pass_features(self.request, self.plans, is_forward=False)

    @property
    def logprobs(self) -> np.ndarray:
        """See `pass_features`."""
        max_tokens, max_rows = microbatch_budget(self.policy, "evaluate")
        plans = [plan.with_budget(max_tokens, max_rows=max_rows) for plan in self.plans]
        return pass_features(self.request, plans, is_forward=True)

    @property
    def rollout(self) -> np.ndarray:
        """Return decoding steps and tokens of the slowest replica in each step, float64 [S, 2]."""
        generation = self.policy.generation
        num_workers = num_generation_workers(self.cluster)
        num_replicas = max(num_workers // generation.engine.workers_per_replica, 1)
        return np.array(
            [rollout_work(each, self.group_size, num_replicas, generation) for each in self.steps],
            dtype=np.float64,
        )

    @property
    def rows(self) -> np.ndarray:
        """Return the rows of each step, float64 [S, 1]."""
        return np.array([[len(each.lengths)] for each in self.steps], dtype=np.float64)


def simulate(past: PastRun, old: StepSetting, new: StepSetting, seed: int) -> StepPrediction:
    """Predict a step of `new` from the times of a past run with the setting `old`.

    Raises ConfigError without such times, for a run whose steps have other phases, and for rows
    that cannot be planned.
    """
    records, steps = _recorded_steps(past)
    _check(past, old, new)
    old_batch, new_batch = old.needs.batch, new.needs.batch
    old_size = new_size = 1
    limits = [each.policy.generation.max_new_tokens for each in (old, new)]
    if new.needs.rollouts is not None:
        old_size = old_batch.num_rows // old_batch.num_examples
        new_size = new_batch.num_rows // new_batch.num_examples
    if any(len(counts.lengths) % old_size for counts in steps):
        # Single rows were left out, as by grpo.overlong.filter.
        old_size = new_size = 1
    steps = [with_prompt_prefixes(each, old_size) for each in steps]
    num_groups = None
    if (old_batch.num_rows, old_size) != (new_batch.num_rows, new_size):
        # Dynamic sampling leaves as many rows of a step as in the past run.
        kept = fmean(len(counts.lengths) for counts in steps) / old_batch.num_rows
        num_groups = max(round(kept * new_batch.num_rows / new_size), 1)
    recorded = draw_steps(steps, old_size, seed=seed)
    # The completions of several turns may be longer than either limit.
    limit = limits[1] if new.needs.rollouts and limits[1] < limits[0] else None
    drawn = draw_steps(steps, old_size, num_groups, new_size, max_trained=limit, seed=seed)
    old = replace(old, steps=recorded, group_size=old_size)
    new = replace(new, steps=drawn, group_size=new_size)
    num_workers = [each.request.placement.parallel_layout.world_size for each in (old, new)]
    notes = []
    if new.needs.rollouts and limits[1] > limits[0]:
        notes.append(f"completions have at most {limits[0]:,} tokens, as in the past run")
    if num_workers[0] == 1 < num_workers[1]:
        notes.append("the past run had one worker, so communication was not measured")
    try:
        phases = tuple(_phases(records, old, new))
    except ValueError as error:
        # A row above a token budget.
        raise ConfigError(str(error)) from error
    return StepPrediction(
        phases=phases,
        num_recorded=len(records),
        num_tokens=fmean(counts.lengths.sum() for counts in drawn),
        num_workers=num_workers[1],
        notes=tuple(notes),
    )


def check_keys(old: object, new: object) -> None:
    """Raise ConfigError for keys of two configs that change the measured times themselves."""
    for key in _MEASURED_KEYS:
        value, measured = _value(new, key), _value(old, key)
        if value != measured:
            raise ConfigError(
                f"--simulate: {key} is {value}, but the times of the past run were measured with"
                f" {measured}; give a run with the same value"
            )
    if _value(old, _MEASURED_KEYS[-1]):
        raise ConfigError(
            f"--simulate: with {_MEASURED_KEYS[-1]} above 0 the phases of a step overlap, and there"
            " is no rule for that; give a run without it"
        )


def _value(config: object, key: str) -> object:
    """Return the value of a key; None for one of another job."""
    try:
        return attrgetter(key)(config)
    except AttributeError:
        return None


def _phases(
    records: Sequence[dict[str, float]], old: StepSetting, new: StepSetting
) -> Iterator[Phase]:
    """Yield the phases of a step in their order."""

    def seconds(*timers: str) -> np.ndarray:
        """Return the sum of some timers in each step, float64 [S]; 0 for one that did not run."""
        return np.array(
            [sum(each.get(f"timing/{name}_s", 0.0) for name in timers) for each in records]
        )

    logprob_s, train_s = seconds("logprobs"), seconds("train")
    sync_s = seconds("weight_sync", "reference_update")
    rollout_s, reward_s = seconds("generation"), seconds("reward", "reward_model")
    train = Phase("training", _PASS_RULE, train_s, old.training, new.training, _PASS_SHARES)
    has_rollouts = new.needs.rollouts is not None
    if has_rollouts:
        rule = "decoding steps and tokens of the slowest replica"
        yield Phase("rollout", rule, rollout_s, old.rollout, new.rollout, _ROLLOUT_SHARES)
        yield Phase("environment", "rows", reward_s, old.rows, new.rows)
    if new.needs.logprob_pass:
        is_measured = bool(logprob_s.any())
        rule = _PASS_RULE if is_measured else "as the forward pass of training"
        parts = logprob_s, old.logprobs, new.logprobs, _PASS_SHARES
        yield Phase("log-probs", rule, *parts, costs_of=None if is_measured else train)
    yield train
    if has_rollouts:
        yield Phase("weight sync", "bytes", sync_s, old.rows**0, new.rows**0)
    rest = seconds("step") - train_s - logprob_s
    if has_rollouts:
        rest -= rollout_s + reward_s + sync_s
    yield Phase("driver", "rows", np.maximum(rest, 0.0), old.rows, new.rows)


def _recorded_steps(past: PastRun) -> tuple[list[dict[str, float]], list[TokenCounts]]:
    """Return the metrics and the rows of the steps to use. Raises ConfigError without any."""
    timed = []
    for step, counts in past.steps.items():
        metrics = past.metrics.get(step, {})
        if metrics.get("timing/train_s") and "timing/step_s" in metrics:
            timed.append((metrics, counts))
    timed = timed[_NUM_WARMUP:] or timed
    if not timed:
        raise ConfigError(
            f"--simulate: {shown_path(past.path)} has no step with timing/train_s in"
            " metrics.jsonl, so nothing was measured; give a run that has trained a step"
        )
    limit = _MAX_OVER_MEDIAN * median(metrics["timing/step_s"] for metrics, _ in timed)
    used = [each for each in timed if each[0]["timing/step_s"] <= limit]
    return [metrics for metrics, _ in used], [counts for _, counts in used]


def _check(past: PastRun, old: StepSetting, new: StepSetting) -> None:
    """Raise ConfigError for a run without a rule."""
    unknown = {
        "a run with teachers": old.needs.teachers,
        "a run of programs": past.episodes,
        "rows with images": any(each.image_tokens is not None for each in past.steps.values()),
        "batches from a stream (data.batching.kind)": old.request.stream or new.request.stream,
    }
    for what, is_there in unknown.items():
        if is_there:
            raise ConfigError(f"--simulate has no rule for {what}: leave it out")
