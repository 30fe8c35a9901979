"""`nemo-like plan RUN --simulate`: the time of a step of other settings, from a past run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from statistics import fmean, median

import numpy as np

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.parallel import num_generation_workers
from nemo_like.config.rollout import HFGenerationConfig
from nemo_like.config.schema import RunConfig
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
    *("policy.model_name", "policy.precision", "policy.compile", "policy.lora.enabled"),
    *("policy.optimizer.name", "policy.generation.backend", "grpo.max_staleness"),
)
"""Keys that change the measured times, without a rule for other values."""
_PASS_RULE = "work of the slowest rank, and a time per microbatch"
_PASS_SHARES = (0.9, 0.1)
"""Assumed shares of work and microbatches in the time of a pass."""
_ROLLOUT_SHARES = (0.5, 0.5)
"""Assumed shares of decoding steps and tokens in the time of a rollout."""


@dataclass(frozen=True, eq=False)
class Setting:
    """A config, and the rows of steps with it."""

    config: RunConfig
    request: PlanRequest
    steps: list[TokenCounts]
    group_size: int
    """Consecutive rows of a step that have one prompt."""

    @cached_property
    def plans(self) -> list[BatchPlan]:
        """Raises ConfigError for rows that cannot be planned."""
        request = self.request
        try:
            return [
                plan_batch(counts, request.spec, shared_prefix=request.shared_prefix, warn=False)
                for counts in self.steps
            ]
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def train_features(self) -> np.ndarray:
        """See `pass_features`."""
        num_epochs = self.config.needs.batch.num_epochs
        return num_epochs * pass_features(self.request, self.plans, is_forward=False)

    @property
    def logprob_features(self) -> np.ndarray:
        """See `pass_features`."""
        max_tokens, max_rows = microbatch_budget(self.config.policy, "evaluate")
        plans = [plan.with_budget(max_tokens, max_rows=max_rows) for plan in self.plans]
        return pass_features(self.request, plans, is_forward=True)

    @property
    def rollout_features(self) -> np.ndarray:
        """Return decoding steps and tokens of the slowest replica in each step, float64 [S, 2]."""
        generation = self.config.policy.generation
        engine = generation.engine
        is_static = isinstance(engine, HFGenerationConfig)
        num_workers = num_generation_workers(self.config.cluster)
        work = []
        for counts in self.steps:
            assert counts.num_trained is not None, "the rows of a run have a token mask"
            found = rollout_work(
                counts.lengths - counts.num_trained,
                counts.num_trained,
                self.group_size,
                num_replicas=max(num_workers // engine.workers_per_replica, 1),
                num_slots=engine.batch_size if is_static else engine.max_num_seqs,
                is_static=is_static,
                max_new_tokens=generation.max_new_tokens,
            )
            work.append(found)
        return np.array(work, dtype=np.float64)

    @property
    def row_features(self) -> np.ndarray:
        """Return the rows of each step, float64 [S, 1]."""
        return np.array([[len(counts.lengths)] for counts in self.steps], dtype=np.float64)


def simulate(
    past: PastRun, measured: tuple[RunConfig, PlanRequest], target: tuple[RunConfig, PlanRequest]
) -> StepPrediction:
    """Predict a step of `target` from the times of a past run with the `measured` config.

    Raises ConfigError without such times, for a run whose steps have other phases, and for keys
    that differ and change the measured times themselves.
    """
    old, new = measured[0], target[0]
    records, steps = _recorded_steps(past)
    _check(past, steps, measured, target)
    old_batch, new_batch = old.needs.batch, new.needs.batch
    old_size = old_batch.num_rows // old_batch.num_examples
    new_size = new_batch.num_rows // new_batch.num_examples
    if any(len(counts.lengths) % old_size for counts in steps):
        # Single rows were left out, as by grpo.overlong.filter.
        old_size = new_size = 1
    steps = [
        with_prompt_prefixes(each, old_size) if each.prefixes is None else each for each in steps
    ]
    num_groups = None
    if (old_batch.num_rows, old_size) != (new_batch.num_rows, new_size):
        # Dynamic sampling leaves as many rows of a step as in the past run.
        kept = fmean(len(counts.lengths) for counts in steps) / old_batch.num_rows
        num_groups = max(round(kept * new_batch.num_rows / new_size), 1)
    rollouts = new.needs.rollouts
    drawn = draw_steps(
        steps,
        old_size,
        num_groups=num_groups,
        new_group_size=new_size,
        max_trained=None if rollouts is None else rollouts.generation.max_new_tokens,
        seed=new.seed,
    )
    recorded = draw_steps(steps, old_size, seed=new.seed)
    phases = _phases(
        records, Setting(*measured, recorded, old_size), Setting(*target, drawn, new_size)
    )
    return StepPrediction(
        phases=tuple(phases),
        num_recorded=len(records),
        num_steps=len(drawn),
        num_tokens=fmean(counts.lengths.sum() for counts in drawn),
        num_workers=target[1].placement.parallel_layout.world_size,
        notes=tuple(_notes(old, new, steps)),
    )


def _phases(records: Sequence[dict[str, float]], old: Setting, new: Setting) -> Iterator[Phase]:
    """Yield the phases of a step in their order."""
    used = ["train"]
    has_rollouts = new.config.needs.rollouts is not None
    by_rows = {"recorded": old.row_features, "target": new.row_features}
    if has_rollouts:
        used += ["generation", "reward", "reward_model", "weight_sync", "reference_update"]
        yield Phase(
            name="rollout",
            rule="decoding steps and tokens of the slowest replica",
            seconds=_seconds(records, "generation"),
            recorded=old.rollout_features,
            target=new.rollout_features,
            shares=_ROLLOUT_SHARES,
        )
        seconds = _seconds(records, "reward", "reward_model")
        yield Phase(name="environment", rule="rows", seconds=seconds, **by_rows)
    train = Phase(
        name="training",
        rule=_PASS_RULE,
        seconds=_seconds(records, "train"),
        recorded=old.train_features,
        target=new.train_features,
        shares=_PASS_SHARES,
    )
    logprob_seconds = _seconds(records, "logprobs")
    used.append("logprobs")
    if new.config.needs.logprob_pass:
        is_measured = bool(logprob_seconds.any())
        yield Phase(
            name="log-probs",
            rule=_PASS_RULE if is_measured else "as the forward pass of training",
            seconds=logprob_seconds,
            recorded=old.logprob_features,
            target=new.logprob_features,
            shares=_PASS_SHARES,
            costs_of=None if is_measured else train,
        )
    yield train
    if has_rollouts:
        seconds = _seconds(records, "weight_sync", "reference_update")
        ones = np.ones((len(records), 1))
        yield Phase(name="weight sync", rule="bytes", seconds=seconds, recorded=ones, target=ones)
    rest = np.maximum(_seconds(records, "step") - _seconds(records, *used), 0.0)
    yield Phase(name="driver", rule="rows", seconds=rest, **by_rows)


def _seconds(records: Sequence[dict[str, float]], *timers: str) -> np.ndarray:
    """Return the sum of some timers in each step, float64 [S]; 0 for one that did not run."""
    return np.array([sum(each.get(f"timing/{name}_s", 0.0) for name in timers) for each in records])


def _recorded_steps(past: PastRun) -> tuple[list[dict[str, float]], list[TokenCounts]]:
    """Return the metrics and the rows of the steps to use. Raises ConfigError without any."""
    timed = [
        (past.metrics[step], counts)
        for step, counts in past.steps.items()
        if past.metrics.get(step, {}).get("timing/train_s", 0.0) > 0.0 and len(counts.lengths)
    ]
    timed = timed[_NUM_WARMUP:] or timed
    if not timed:
        raise ConfigError(
            f"--simulate: {shown_path(past.path)} has no step with timing/train_s in"
            " metrics.jsonl, so nothing was measured; give a run that has trained a step"
        )
    limit = _MAX_OVER_MEDIAN * median(metrics["timing/step_s"] for metrics, _ in timed)
    timed = [each for each in timed if each[0]["timing/step_s"] <= limit]
    return [metrics for metrics, _ in timed], [counts for _, counts in timed]


def _check(
    past: PastRun,
    steps: Sequence[TokenCounts],
    measured: tuple[RunConfig, PlanRequest],
    target: tuple[RunConfig, PlanRequest],
) -> None:
    """Raise ConfigError for runs without a rule, and for other settings than were measured."""
    old, new = measured[0], target[0]
    unknown = {
        "has several teachers or one, whose passes have no rule": old.needs.teachers,
        "is of programs, whose calls have no rule": past.episodes,
        "has images": any(counts.image_tokens is not None for counts in steps),
        "is asynchronous (grpo.max_staleness), so that its phases overlap": _value(
            old, "grpo.max_staleness"
        ),
        "forms batches from a stream (data.batching.kind)": measured[1].stream or target[1].stream,
    }
    for reason, applies in unknown.items():
        if applies:
            raise ConfigError(f"--simulate: {shown_path(past.path)} {reason}; leave --simulate out")
    if old.needs.job != new.needs.job:
        raise ConfigError(
            f"--simulate: the past run is of {old.needs.job} and the config of {new.needs.job};"
            " give a run of the same job"
        )
    for key in _MEASURED_KEYS:
        if _value(old, key) != _value(new, key):
            raise ConfigError(
                f"--simulate: {key} is {_value(new, key)}, but the times were measured with"
                f" {_value(old, key)}; leave it out, or give a run with it"
            )


def _value(config: RunConfig, key: str) -> object:
    """Return the value of a key; None for one of another job."""
    try:
        return attrgetter(key)(config)
    except AttributeError:
        return None


def _notes(old: RunConfig, new: RunConfig, steps: Sequence[TokenCounts]) -> Iterator[str]:
    """Yield what the prediction does not know."""
    if old.policy.engine != new.policy.engine:
        yield f"the training was measured with policy.engine={old.policy.engine}"
    if old.needs.rollouts is None or new.needs.rollouts is None:
        return
    limit = old.needs.rollouts.generation.max_new_tokens
    longest = max(
        int(counts.num_trained.max()) for counts in steps if counts.num_trained is not None
    )
    if new.needs.rollouts.generation.max_new_tokens > limit and longest >= limit:
        yield (
            f"completions ended at policy.generation.max_new_tokens={limit} of the past run, so"
            " longer ones are not predicted"
        )
