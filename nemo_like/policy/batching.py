"""What a policy's configuration asks of the planner. Nothing is planned here, and neither Ray nor a
model is imported.
"""

from __future__ import annotations

from typing import Literal

from nemo_like.config.parallel import num_replicas
from nemo_like.config.schema import PolicyConfig, RunConfig
from nemo_like.data.planning.cost import CostModel
from nemo_like.data.planning.spec import PlanSpec, Sync
from nemo_like.distributed.parallel_layout import Topology

Purpose = Literal["train", "evaluate"]


def policy_topology(config: RunConfig) -> Topology:
    """How the policy's workers are laid out."""
    parallel = config.parallel
    return Topology(
        pp=parallel.pipeline, dp=num_replicas(config), cp=parallel.context, tp=parallel.tensor
    )


def plan_spec(
    config: PolicyConfig,
    *,
    purpose: Purpose,
    topology: Topology,
    cost: CostModel,
    sequence_parallel: bool = False,
    sync: Sync = "step",
    seed: int = 0,
) -> PlanSpec:
    """What the planner is asked for: packed rows, padded rows under a token budget, or so many rows
    at a time.

    How far rows and microbatches are padded follows from the topology. A pipeline (1F1B) takes any
    number of microbatches.
    """
    max_tokens, max_rows = microbatch_budget(config, purpose)
    packing, dynamic = config.sequence_packing, config.dynamic_batching
    common = {
        "max_tokens": max_tokens,
        "max_rows": max_rows,
        "num_ranks": topology.dp,
        "cp_size": topology.cp,
        "tp_size": topology.tp,
        "sequence_parallel": sequence_parallel,
        "global_batch_size": config.train_global_batch_size if purpose == "train" else None,
        "sync": sync,
        # Rows to be dropped never reach the planner: the loader leaves them out, so that no batch
        # is short of them.
        "oversize": "error" if config.oversize_rows == "drop" else config.oversize_rows,
        "cost": cost,
        "seed": seed,
    }
    if packing.enabled:
        return PlanSpec(
            layout="packed",
            algorithm=packing.algorithm,
            balance=packing.balance,
            microbatch_order=packing.microbatch_order,
            sequence_length_round=packing.sequence_length_round,
            **common,
        )
    if dynamic.enabled:
        return PlanSpec(
            layout="padded", sequence_length_round=dynamic.sequence_length_round, **common
        )
    return PlanSpec(layout="padded", **common)


def microbatch_budget(config: PolicyConfig, purpose: Purpose) -> tuple[int | None, int | None]:
    """(most tokens, most rows) of a microbatch."""
    scoring = purpose == "evaluate"
    for mode in (config.sequence_packing, config.dynamic_batching):
        if mode.enabled:
            return mode.logprob_mb_tokens if scoring else mode.train_mb_tokens, None
    return None, config.logprob_batch_size if scoring else config.train_micro_batch_size
