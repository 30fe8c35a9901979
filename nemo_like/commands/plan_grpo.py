"""The GRPO step of a config, as `nemo-like plan` predicts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.config.parallel import num_policy_workers
from nemo_like.prediction.grpo_request import (
    CPU_RATES,
    GPU_RATES,
    GrpoStepRequest,
    RolloutLengths,
    Split,
)
from nemo_like.prediction.rollout_time import Batching

if TYPE_CHECKING:
    from nemo_like.config.schema import GenerationConfig, RunConfig
    from nemo_like.data.planning.spec import PlanSpec
    from nemo_like.models.spec import ModelSpec
    from nemo_like.prediction.lengths import RowLengths
    from nemo_like.prediction.memory import Placement


def grpo_step_request(
    config: RunConfig,
    rollouts: Sequence[RolloutLengths],
    source: str,
    *,
    model: ModelSpec,
    placement: Placement,
    spec: PlanSpec,
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
        num_logprob_passes=config.computes_prev_logprobs + config.needs_reference,
        rates=GPU_RATES if config.cluster.gpus_per_node else CPU_RATES,
    )


def guessed_rollouts(rows: RowLengths, rows_per_step: int) -> list[RolloutLengths]:
    """Return the rollouts of rows whose completions were drawn; none if prompts are unknown."""
    if rows.prompts is None:
        return []
    rollouts = []
    for start in range(0, len(rows.values) - rows_per_step + 1, rows_per_step):
        step = slice(start, start + rows_per_step)
        prompts = rows.prompts[step]
        rollouts.append(RolloutLengths(prompts, rows.values[step] - prompts))
    return rollouts


def _split(config: RunConfig) -> Split:
    """Return the workers of policy and generation."""
    policy = num_policy_workers(config.cluster)
    generation = config.cluster.generation_workers
    if generation == 0:
        return Split(policy=policy, generation=policy, is_colocated=True)
    return Split(policy=policy, generation=generation, is_colocated=False)


def _batching(generation: GenerationConfig) -> Batching:
    """Return how a replica of the backend forms its batch."""
    return Batching(max_running=generation.batch_size, is_static=True, shares_prefix=False)
