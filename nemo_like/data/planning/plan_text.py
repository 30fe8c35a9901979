"""One line that describes a plan."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_like.config.errors import counted
from nemo_like.data.planning.spec import PlanSpec


def describe(
    spec: PlanSpec,
    num_rows: int,
    num_steps: int,
    num_microbatches: int,
    num_dropped: int,
    metrics: Mapping[str, float],
) -> str:
    """Describe the size, the limits and the balance in one line.

    Example: `64 rows, 4 ranks, 3 microbatches per rank of at most 2,048 tokens (packed), 0.4%
    padding, max-loaded rank 1.02 times the mean work`.
    """
    limits = []
    if spec.max_tokens:
        limits.append(counted(spec.max_tokens, "token"))
    if spec.max_rows:
        limits.append(counted(spec.max_rows, "row"))
    size = counted(num_rows, "row")
    microbatches = counted(num_microbatches, "microbatch", "microbatches")
    if num_steps != 1:
        size += f", {counted(num_steps, 'optimizer step')}"
    balance = ""
    if spec.num_ranks > 1:
        size += f", {spec.num_ranks} ranks"
        microbatches += " per rank"
        imbalance = metrics["packing/rank_imbalance_flops"]
        balance = f", max-loaded rank {imbalance:.2f} times the mean work"
    if "packing/shared_token_share" in metrics:
        balance += f", {metrics['packing/shared_token_share']:.1%} of the row tokens shared"
    if num_dropped:
        balance += f", {counted(num_dropped, 'row')} dropped"
    return (
        f"{size}, {microbatches} of at most {' and '.join(limits)} ({spec.layout}),"
        f" {metrics['packing/padding_share']:.1%} padding{balance}"
    )
