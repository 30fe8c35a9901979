"""Planner input from a policy's configuration. Imports neither Ray nor a model."""

from __future__ import annotations

from typing import Literal

from nemo_like.config.parallel import num_replicas
from nemo_like.config.schema import PolicyConfig, RunConfig
from nemo_like.data.planning.cost import CostModel
from nemo_like.data.planning.spec import PlanSpec, Sync
from nemo_like.distributed.parallel_layout import Topology

Purpose = Literal["train", "evaluate"]


def policy_topology(config: RunConfig) -> Topology:
    """Return the parallel layout of the policy's workers."""
    parallel = config.parallel
    return Topology(
        pp=parallel.pipeline,
        dp=num_replicas(config),
        cp=parallel.context,
        tp=parallel.tensor,
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
    """Build the planner's input.

    The layout is packed rows, padded rows under a token budget, or padded rows with a fixed number
    per microbatch. The multiples to which rows and microbatches are padded follow from the
    topology.
    """
    max_tokens, max_rows = microbatch_budget(config, purpose)
    packing = config.sequence_packing
    dynamic = config.dynamic_batching
    common = {
        "max_tokens": max_tokens,
        "max_rows": max_rows,
        "num_ranks": topology.dp,
        "cp_size": topology.cp,
        "tp_size": topology.tp,
        "sequence_parallel": sequence_parallel,
        "global_batch_size": config.train_global_batch_size if purpose == "train" else None,
        "sync": sync,
        # The loader drops oversize rows before it forms batches, so that every batch is full. Such
        # a row here is therefore an error.
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
    """Return (max tokens, max rows) of a microbatch; one of them is None."""
    is_forward_only = purpose == "evaluate"
    for mode in (config.sequence_packing, config.dynamic_batching):
        if mode.enabled:
            max_tokens = mode.logprob_mb_tokens if is_forward_only else mode.train_mb_tokens
            return max_tokens, None
    max_rows = config.logprob_batch_size if is_forward_only else config.train_micro_batch_size
    return None, max_rows
