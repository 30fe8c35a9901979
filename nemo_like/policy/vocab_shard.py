"""The part of the output embedding that one rank of tensor parallelism has."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class VocabShard:
    """Rows of the output embedding on this rank; each row is on one rank of `group`.

    Shards may differ in size and may be empty.
    """

    group: dist.ProcessGroup
    start: int
    """First vocabulary row of this rank."""
    partial_hidden_grad: bool = False
    """Do not all-reduce the gradient of the hidden states, because the caller does: the backward of
    sequence parallelism reduce-scatters it.
    """
