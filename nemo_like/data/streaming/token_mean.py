"""Loss scaling for the token mean of a step, in plain PyTorch training loops.

The loss of a step is the sum of the losses of its supervised tokens, divided by their number over
all microbatches and ranks. It does not depend on how rows are distributed over microbatches and
ranks. A mean of the means of microbatches does: a token counts more in a shorter microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.data.streaming.packed_batch import IGNORE_INDEX


def count_supervised_tokens(labels: Iterable[Tensor], ignore_index: int = IGNORE_INDEX) -> int:
    """Return the number of supervised tokens of `labels`, integer tensors of any shape, one per
    microbatch.

    Labels of `PackingCollator` give the same number shifted or not. For other unshifted labels, the
    label of the first token of each row must be ignored, as the loss never reads it.
    """
    return sum(int((tensor != ignore_index).sum()) for tensor in labels)


def sum_over_ranks(
    num_tokens: int, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> int:
    """Return the sum of `num_tokens` over the ranks of `group`, or of the default group for None.

    Every rank must call it. `device` is one that the backend of the group supports. Ranks that hold
    copies of the same tokens, as in tensor parallelism, must not be in one group. Raises ValueError
    without a process group.
    """
    if group is None and not dist.is_initialized():
        raise ValueError("no process group: call torch.distributed.init_process_group first")
    total = torch.tensor(num_tokens, dtype=torch.int64, device=device)
    dist.all_reduce(total, group=group)
    return int(total)


def token_mean_scale(global_tokens: int, world_size: int = 1) -> float:
    """Return the factor of a sum of token losses: `world_size / global_tokens`.

    `global_tokens` is the number of supervised tokens of the step over all microbatches and ranks.
    `world_size` is the number of ranks whose gradients are averaged, as DDP and FSDP do: the factor
    cancels their division. It is 1 where gradients are summed. Raises ValueError for numbers below
    1: a step without supervised tokens has no token mean, and every rank must skip it.
    """
    if global_tokens < 1:
        raise ValueError(
            f"the step has {global_tokens} supervised tokens and no token mean; skip it on every"
            " rank"
        )
    if world_size < 1:
        raise ValueError(f"world_size is {world_size} but must be at least 1")
    return world_size / global_tokens


def microbatch_mean_scale(local_tokens: int, global_tokens: int, world_size: int = 1) -> float:
    """Return the factor of the mean loss of a microbatch: `local / global · world_size`.

    `local_tokens` is the number of supervised tokens of the microbatch. It is the formula of ODB
    with supervised instead of input tokens. A microbatch without supervised tokens has the factor
    0, but its mean is NaN: use the sum of its losses and `token_mean_scale`. Raises ValueError for
    a negative `local_tokens`, one above `global_tokens`, and numbers that `token_mean_scale`
    refuses.
    """
    if not 0 <= local_tokens <= global_tokens:
        raise ValueError(
            f"local_tokens is {local_tokens} but must be between 0 and global_tokens ="
            f" {global_tokens}"
        )
    return local_tokens * token_mean_scale(global_tokens, world_size)


def global_token_mean(loss_sum: Tensor, global_tokens: int, world_size: int = 1) -> Tensor:
    """Return the part of the token mean of a step that one microbatch contributes, shape [].

    `loss_sum`, shape [], is the sum of the losses of the supervised tokens of the microbatch. The
    sum of the results over all microbatches, averaged over `world_size` ranks, is the token mean.
    Raises ValueError as `token_mean_scale`.
    """
    return loss_sum * token_mean_scale(global_tokens, world_size)
