"""Predicted time of a GRPO step for every split of the devices between policy and generation.

A step is rollout, rewards, log-probs, training and weight synchronization. Synchronous, they follow
one another. With staleness 1 the next rollout runs while a step trains, which needs devices of its
own: a step takes as long as the slower of the two, the scores of reward models, and the
synchronization.

It is a model, not a measurement. `calibrate` fits its rates to the timings of a past run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from nemo_like.data.planning.plan import PlanSpec, plan_batch
from nemo_like.prediction.adapter_sizes import num_adapter_params
from nemo_like.prediction.grpo_request import (
    MAX_ROLLOUTS,
    Calibration,
    GrpoStepRequest,
    MeasuredTimes,
    Phase,
    RolloutLengths,
    Split,
    assumptions,
)
from nemo_like.prediction.rollout_time import DecodeModel, RolloutTime, rollout_times
from nemo_like.prediction.step_time import (
    microbatch_work,
    min_microbatch_tokens,
    step_times,
    train_passes,
)

_MAX_SPLITS = 8
"""Splits with separate devices that are shown."""


@dataclass(frozen=True, eq=False)
class SplitTimes:
    """Predicted seconds of the phases with one split, float64 [N] for N rollouts."""

    split: Split
    rollout: np.ndarray
    reward: float
    """Of reward functions."""
    reward_model: np.ndarray
    logprobs: np.ndarray
    train: np.ndarray
    weight_sync: float
    idle_share: float
    """Mean share of the replicas' time in a rollout after their last row."""

    @property
    def synchronous(self) -> float:
        """Mean seconds of a step whose phases follow one another."""
        phases = self.rollout + self.reward + self.reward_model + self.logprobs + self.train
        return float(phases.mean()) + self.weight_sync

    @property
    def staleness_1(self) -> float | None:
        """Mean seconds of a step that trains beside the next rollout; None if colocated."""
        if self.split.is_colocated:
            return None
        slower = np.maximum(self.rollout + self.reward, self.logprobs + self.train)
        # The driver scores a rollout after the step before it.
        return float((slower + self.reward_model).mean()) + self.weight_sync


@dataclass(frozen=True, eq=False)
class GrpoStepPrediction:
    """The times of every split, and what they are derived from."""

    request: GrpoStepRequest
    calibration: Calibration
    splits: tuple[SplitTimes, ...]
    """Colocated first, then by the number of generation workers."""

    @property
    def configured(self) -> SplitTimes:
        """The split of the config."""
        return next(times for times in self.splits if times.split == self.request.split)

    @property
    def fastest_synchronous(self) -> SplitTimes:
        return min(self.splits, key=lambda times: times.synchronous)

    @property
    def fastest_overlapped(self) -> SplitTimes | None:
        """The fastest split with staleness 1; None if there is only one device."""
        overlapped = [times for times in self.splits if times.staleness_1 is not None]
        return min(overlapped, key=lambda times: times.staleness_1 or 0.0, default=None)

    def assumptions(self) -> list[str]:
        """Return what the times are computed from, one sentence or more each."""
        return assumptions(self.request, self.calibration)


def predict_grpo_step(
    request: GrpoStepRequest,
    calibration: Calibration | None = None,
    splits: Sequence[Split] | None = None,
) -> GrpoStepPrediction:
    """Predict the phases of a step for `splits`, by default those of `possible_splits`.

    Raises ValueError for a split whose policy workers do not form the layout of `placement`.
    """
    calibration = calibration or Calibration()
    splits = possible_splits(request) if splits is None else splits
    rollouts = _sample(request.rollouts)
    counts = [split.generation // request.workers_per_replica for split in splits]
    # [N][S]: the times of all numbers of replicas for each rollout.
    by_rollout = [_rollout_times(request, rollout, counts) for rollout in rollouts]
    training: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    predicted = []
    for index, split in enumerate(splits):
        if split.policy not in training:
            training[split.policy] = _training_times(request, rollouts, split.policy)
        logprobs, train = training[split.policy]
        simulated = [times[index] for times in by_rollout]
        seconds = np.array([result.seconds for result in simulated])
        predicted.append(
            SplitTimes(
                split,
                calibration.factor("rollout") * seconds,
                calibration.reward_s,
                calibration.factor("reward_model") * _scoring_times(request, rollouts, split),
                calibration.factor("logprobs") * logprobs,
                calibration.factor("train") * train,
                calibration.factor("weight_sync") * _weight_sync_s(request),
                fmean(result.idle_share for result in simulated),
            )
        )
    return GrpoStepPrediction(request, calibration, tuple(predicted))


def calibrate(request: GrpoStepRequest, measured: MeasuredTimes) -> Calibration:
    """Return the factors with which `request`, the past run, has the measured times."""
    (times,) = predict_grpo_step(request, splits=[request.split]).splits
    predicted: dict[Phase, float] = {
        "rollout": float(times.rollout.mean()),
        "reward_model": float(times.reward_model.mean()),
        "logprobs": float(times.logprobs.mean()),
        "train": float(times.train.mean()),
        "weight_sync": times.weight_sync,
    }
    factors: dict[Phase, float] = {}
    for phase, seconds in measured.seconds.items():
        # A run without a log-prob pass has nothing to compare.
        if seconds > 0 and predicted[phase] > 0:
            factors[phase] = seconds / predicted[phase]
    return Calibration(
        factors=factors,
        reward_s=measured.reward_s,
        source=f"{measured.num_steps:,} steps of {measured.source}",
    )


def possible_splits(request: GrpoStepRequest) -> list[Split]:
    """Return the colocated split, and up to 8 with separate devices, of the config's devices.

    The config's own split is always among them.
    """
    num_devices = request.split.num_devices
    model_size = request.placement.parallel_layout.replica_size
    colocated = Split(policy=num_devices, generation=num_devices, is_colocated=True)
    splits = []
    if request.split.is_colocated or _is_trainable(request, num_devices):
        splits.append(colocated)
    separate = []
    step = request.workers_per_replica
    for generation in range(step, num_devices - model_size + 1, step):
        policy = num_devices - generation
        if _is_trainable(request, policy):
            separate.append(Split(policy=policy, generation=generation, is_colocated=False))
    if len(separate) > _MAX_SPLITS:
        indices = np.linspace(0, len(separate) - 1, _MAX_SPLITS).round().astype(int)
        separate = [separate[index] for index in indices]
    if not request.split.is_colocated and request.split not in separate:
        separate.append(request.split)
    return splits + sorted(separate, key=lambda split: split.generation)


def _is_trainable(request: GrpoStepRequest, num_workers: int) -> bool:
    """Return True if so many policy workers form the layout, each with rows to train on."""
    dp, remainder = divmod(num_workers, request.placement.parallel_layout.replica_size)
    batch_size = request.spec.global_batch_size or 0
    if remainder or dp == 0 or dp > batch_size:
        return False
    ep = request.placement.parallel_layout.ep
    layout = request.placement.parallel_layout
    if layout.tp * layout.cp * dp % ep != 0:
        return False
    # Without a token budget every rank trains equally many rows.
    return request.spec.max_tokens is not None or batch_size % dp == 0


def _sample(rollouts: Sequence[RolloutLengths]) -> list[RolloutLengths]:
    """Return up to `MAX_ROLLOUTS` of the rollouts, spread over the run."""
    if len(rollouts) <= MAX_ROLLOUTS:
        return list(rollouts)
    indices = np.linspace(0, len(rollouts) - 1, MAX_ROLLOUTS).round().astype(int)
    return [rollouts[index] for index in indices]


def _rollout_times(
    request: GrpoStepRequest, rollout: RolloutLengths, replica_counts: Sequence[int]
) -> list[RolloutTime]:
    rates = request.rates
    decode = DecodeModel.from_spec(
        request.model,
        bytes_per_value=request.placement.compute_bytes,
        flops_per_s=rates.flops * request.workers_per_replica,
        memory_bytes_per_s=rates.memory_bytes_per_s * request.workers_per_replica,
        step_overhead_s=rates.decode_overhead_s,
    )
    return rollout_times(
        rollout.prompts,
        rollout.completions,
        replica_counts,
        decode,
        request.batching,
        np.arange(len(rollout.prompts)) // request.group_size,
    )


def _training_times(
    request: GrpoStepRequest, rollouts: Sequence[RolloutLengths], num_workers: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of log-probs and of training of each rollout, float64 [N] each."""
    base = request.placement
    size = base.parallel_layout.replica_size
    layout = replace(base.parallel_layout, dp=num_workers // size)
    placement = replace(base, parallel_layout=layout)
    num_params = request.model.num_params
    spec = replace(
        request.spec, num_ranks=layout.dp, sync=layout.sync(placement.engine, num_params)
    )
    if spec.max_tokens is not None:
        # Lengths that a run has had are planned, whatever the budget is.
        spec = replace(spec, oversize="singleton")
    min_work = spec.cost.linear * min_microbatch_tokens(placement, num_params)
    num_passes = train_passes(placement)
    flops_per_s = request.rates.flops * size
    logprobs = []
    train = []
    for rollout in rollouts:
        plan = plan_batch(rollout.rows, spec, num_trained=rollout.completions)
        work = microbatch_work(plan, spec.cost)
        forward = step_times(work, plan, pp_size=layout.pp).sum()
        trained = step_times(work, plan, pp_size=layout.pp, min_work=min_work).sum()
        logprobs.append(request.num_logprob_passes * forward / flops_per_s)
        train.append(request.num_epochs * num_passes * trained / flops_per_s)
    return np.array(logprobs), np.array(train)


def _scoring_times(
    request: GrpoStepRequest, rollouts: Sequence[RolloutLengths], split: Split
) -> np.ndarray:
    """Return the seconds in which the reward models score each rollout, float64 [N]."""
    seconds = np.zeros(len(rollouts))
    for model in request.reward_models:
        spec = PlanSpec(
            max_tokens=model.max_tokens,
            num_ranks=model.num_workers or split.policy,
            oversize="singleton",
            cost=model.cost,
        )
        for index, rollout in enumerate(rollouts):
            plan = plan_batch(rollout.rows, spec)
            work = microbatch_work(plan, model.cost)
            seconds[index] += step_times(work, plan).sum() / request.rates.flops
    return seconds


def _weight_sync_s(request: GrpoStepRequest) -> float:
    """Return the seconds of one copy of the weights, or of the LoRA adapters, over the link."""
    num_params = request.model.num_params
    lora = request.placement.lora
    if lora is not None and lora.sends_adapters(request.placement.precision):
        # The sizes of the adapters of some models are not known.
        num_params = num_adapter_params(request.model, lora) or num_params
    num_bytes = num_params * request.placement.compute_bytes
    return num_bytes / request.rates.link_bytes_per_s
