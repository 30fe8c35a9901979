"""What a user can change after an exception in a worker."""

from __future__ import annotations

import re

SAVE_MEMORY = (
    "Give a microbatch fewer tokens (policy.sequence_packing.train_mb_tokens,"
    " policy.dynamic_batching.train_mb_tokens,"
    " or policy.train_micro_batch_size without either; for scoring their logprob_ twins), turn"
    " policy.activation_checkpointing on, or put fewer workers on a node"
    " (cluster.workers_per_node)."
)
_COLLECTIVE = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|socket (timeout|closed)|timed"
    r" out",
    re.IGNORECASE,
)


def is_collective_error(error: BaseException) -> bool:
    """Whether `error` comes from torch.distributed's communication rather than from the worker's
    own work.
    """
    if any(
        kind.__name__ in ("DistError", "DistBackendError", "DistNetworkError")
        for kind in type(error).__mro__
    ):
        return True
    return type(error) is RuntimeError and _COLLECTIVE.search(str(error)) is not None


def advise(error: Exception) -> str:
    """What to change for an exception that has a known way out; empty for others."""
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return SAVE_MEMORY
    if is_collective_error(error) and re.search("timed? ?out", str(error), re.IGNORECASE):
        return "A worker waited in vain for the others; if they were only slow, raise cluster.collective_timeout_s."
    return ""
