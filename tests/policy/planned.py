"""The plan of a batch's columns under any spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_like.data.planning.plan import BatchPlan, PlanSpec, plan_batch
from nemo_like.data.planning.prefixes import SharedPrefixMode
from nemo_like.data.planning.token_counts import TokenCounts


def planned(
    batch: Mapping[str, Any], spec: PlanSpec, shared_prefix: SharedPrefixMode = "auto"
) -> BatchPlan:
    """Plan as `Policy.plan_rows` does, which derives the spec from its configuration."""
    counts = TokenCounts.of_batch(batch, with_prefixes=spec.layout == "packed")
    return plan_batch(
        counts, spec, batch.get("pair"), episodes=batch.get("episode"), shared_prefix=shared_prefix
    )
