"""The plan of the first step, as `validate` describes it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from nemo_like.config.check import batching_section
from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import PolicyConfig, RunConfig
from nemo_like.config.text import counted
from nemo_like.data.jagged import TokenCounts
from nemo_like.data.planning.balance import few_plans
from nemo_like.data.planning.plan import plan_batch
from nemo_like.diagnostics.report import Diagnostics
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.batching import plan_spec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe_plan(
    config: RunConfig,
    title: str,
    counts: TokenCounts,
    model: PretrainedConfig | None,
    diagnostics: Diagnostics,
) -> None:
    """Add one line about the plan of a step with these rows.

    The rows of an example are consecutive; `model` gives the work of a row. With packing or dynamic
    batching the line also has the padding without them.
    """
    lengths = counts.lengths
    if len(lengths) == 0:
        return
    policy = config.policy_in_rows
    spec = None if model is None else ModelSpec.from_config(model)
    plain = replace(
        policy,
        sequence_packing=replace(policy.sequence_packing, enabled=False),
        dynamic_batching=replace(policy.dynamic_batching, enabled=False),
    )
    try:
        # Two plans do not pay for the import of numba.
        with few_plans():
            metrics = _plan_metrics(config, policy, counts, spec)
            plain_metrics = _plan_metrics(config, plain, counts, spec)
    except ValueError as error:
        diagnostics.problems.append(f"{title} cannot be planned: {error}")
        return
    padding = f"{metrics['packing/padding_share']:.1%} padding"
    if batching_section(config) is not None:
        padding_share = plain_metrics["packing/padding_share"]
        num_rows = policy.train_micro_batch_size
        padding += f" ({padding_share:.1%} if padded {counted(num_rows, 'row')} at a time)"
    diagnostics.add_lines(
        "plan",
        f"{title}: {counted(len(lengths), 'row')}, {int(lengths.sum()):,} tokens, {padding};"
        f" microbatches per worker and optimizer step: {metrics['packing/num_microbatches']:g}",
    )


def _plan_metrics(
    config: RunConfig, policy: PolicyConfig, counts: TokenCounts, model: ModelSpec | None
) -> dict[str, float]:
    """Return the metrics `packing/*` of a training step; ValueError if it cannot be planned."""
    spec = plan_spec(
        policy,
        purpose="train",
        parallel_layout=policy_layout(config),
        model=model,
        seed=config.seed,
    )
    groups = None
    # The rows of a preference pair must share a microbatch.
    if config.rows_per_example > 1:
        groups = np.arange(len(counts.lengths)) // config.rows_per_example
    return plan_batch(counts.lengths, spec, groups, counts.num_trained).metrics()
