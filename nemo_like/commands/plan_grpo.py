"""The GRPO step of a config, as `nemo-like plan` predicts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.config.errors import ConfigError
from nemo_like.config.parallel import (
    num_generation_workers,
    num_policy_workers,
    workers_per_replica,
)
from nemo_like.prediction.grpo_request import (
    CPU_RATES,
    GPU_RATES,
    GrpoStepRequest,
    MeasuredTimes,
    RolloutLengths,
    ScoringModel,
    Split,
)
from nemo_like.prediction.rollout_time import Batching

if TYPE_CHECKING:
    from nemo_like.config.generation import GenerationConfig
    from nemo_like.config.schema import RunConfig
    from nemo_like.data.planning.spec import PlanSpec
    from nemo_like.models.spec import ModelSpec
    from nemo_like.prediction.lengths import RowLengths
    from nemo_like.prediction.placement import Placement


def grpo_step_request(
    config: RunConfig,
    rollouts: Sequence[RolloutLengths],
    source: str,
    *,
    model: ModelSpec,
    placement: Placement,
    spec: PlanSpec,
    reward_models: Sequence[ScoringModel],
) -> GrpoStepRequest | None:
    """Return the request of a GRPO config; None for other jobs and without rollouts."""
    if not isinstance(config, GrpoRunConfig) or not rollouts:
        return None
    return GrpoStepRequest(
        rollouts=tuple(rollouts),
        source=source,
        group_size=config.grpo.num_generations_per_prompt,
        model=model,
        placement=placement,
        spec=spec,
        split=_split(config),
        batching=_batching(config.policy.generation),
        workers_per_replica=workers_per_replica(config),
        num_logprob_passes=config.computes_prev_logprobs + config.needs_reference,
        num_epochs=config.grpo.num_epochs_per_rollout,
        rates=GPU_RATES if config.cluster.gpus_per_node else CPU_RATES,
        reward_models=tuple(reward_models),
    )


def comparable_times(
    config: RunConfig, measured: MeasuredTimes | None
) -> tuple[MeasuredTimes | None, str]:
    """Return the measured times of the phases that the prediction has as well, and a note.

    With `grpo.max_staleness` above 1 several rollouts share the generator, so that the time of one
    is not that of a rollout by itself.
    """
    if measured is None or not isinstance(config, GrpoRunConfig):
        return None, ""
    if config.grpo.max_staleness <= 1:
        return measured, ""
    seconds = {phase: value for phase, value in measured.seconds.items() if phase != "rollout"}
    note = (
        f"grpo.max_staleness is {config.grpo.max_staleness}: rollouts overlapped, so their times do"
        " not calibrate the rollout of a step"
    )
    return replace(measured, seconds=seconds), note


def guessed_rollouts(rows: RowLengths, rows_per_step: int) -> list[RolloutLengths]:
    """Return the rollouts of rows whose completions, the tokens with loss, were drawn."""
    if rows.num_trained is None:
        return []
    rollouts = []
    for start in range(0, len(rows.values) - rows_per_step + 1, rows_per_step):
        step = slice(start, start + rows_per_step)
        completions = rows.num_trained[step]
        rollouts.append(RolloutLengths(rows.values[step] - completions, completions))
    return rollouts


def with_rates(
    request: GrpoStepRequest | None,
    *,
    tflops: float | None,
    memory_gb_per_s: float | None,
    link_gb_per_s: float | None,
) -> GrpoStepRequest | None:
    """Return the request with the rates that are not None.

    Raises ConfigError if there are rates, but no GRPO step that they are for.
    """
    changes: dict[str, float] = {}
    if tflops is not None:
        changes["flops"] = tflops * 1e12
    if memory_gb_per_s is not None:
        changes["memory_bytes_per_s"] = memory_gb_per_s * 1e9
    if link_gb_per_s is not None:
        changes["link_bytes_per_s"] = link_gb_per_s * 1e9
    if not changes:
        return request
    if request is None:
        raise ConfigError(
            "--tflops, --memory-gb-per-s and --link-gb-per-s are for the GRPO step; name a GRPO"
            " config with --config or a GRPO run with --metrics"
        )
    return replace(request, rates=replace(request.rates, name="given by flags", **changes))


def _split(config: RunConfig) -> Split:
    """Return the workers of policy and generation."""
    return Split(
        policy=num_policy_workers(config.cluster),
        generation=num_generation_workers(config.cluster),
        is_colocated=config.cluster.generation_workers == 0,
    )


def _batching(generation: GenerationConfig) -> Batching:
    """Return how a replica of the backend forms its batch."""
    if generation.backend == "hf":
        # The embedded generator decodes a batch to its end and computes every prompt.
        return Batching(max_running=generation.hf.batch_size, is_static=True, shares_prefix=False)
    return Batching(
        max_running=generation.vllm.max_num_seqs, shares_prefix=generation.vllm.prefix_caching
    )
