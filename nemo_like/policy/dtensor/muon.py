"""Muon on FSDP2's shards: each rank orthogonalizes some of the matrices, complete ones.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum of a
matrix by a semi-orthogonal matrix near it. Its Newton-Schulz iteration needs the complete matrix.
Matrices of one shape are therefore exchanged in batches of as many as there are FSDP ranks: an
all-to-all gives each rank one matrix of its tensor-parallel rank, an all-gather over the
tensor-parallel ranks completes it, and a second all-to-all returns the rows of each update. The
iteration itself is torch's: torch.optim.Muon applied to DTensors would give other values, as it
does not see tensor parallelism, whose shards are plain tensors here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_like.config.optimization import OptimizerConfig
from nemo_like.integer_math import ceil_div
from nemo_like.policy.collectives import gather_rows
from nemo_like.policy.dtensor.parallel import Groups
from nemo_like.policy.dtensor.parameters import ShardedParameter, local_shard

MOMENTUM = "momentum_buffer"
"""State of Muon of one parameter."""


def hidden_matrices(layers: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Return the matrices of decoder layers, which Muon updates; AdamW updates all other weights.

    These are the weights of attention and feed-forward blocks, and not embeddings and norms.
    """
    matrices = set()
    for layer in layers:
        matrices |= {parameter for parameter in layer.parameters() if parameter.ndim == 2}
    return matrices


def orthogonal_update(momentum: Tensor, lr: float, config: OptimizerConfig) -> Tensor:
    """Return the change, float32 [m, n], that torch.optim.Muon applies for `momentum`, the same.

    Weight decay is not included.
    """
    # From 0, without momentum and decay, one step of torch's optimizer is its update.
    update = nn.Parameter(torch.zeros_like(momentum))
    update.grad = momentum
    torch.optim.Muon(
        [update],
        lr=lr,
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        adjust_lr_fn=config.muon_lr_adjust,
    ).step()
    return update.detach()


class ShardedMuon:
    """Muon of the hidden matrices of one trainable model."""

    def __init__(
        self, parameters: Sequence[ShardedParameter], groups: Groups, config: OptimizerConfig
    ) -> None:
        self.state: dict[nn.Parameter, Tensor] = {}
        """Momentum, sharded like the parameter; empty before the first step."""
        self._groups = groups
        self._config = config
        self._num_ranks = 1 if groups.shard is None else groups.shard.size()
        self._rank = 0 if groups.shard is None else groups.shard.rank()
        by_shape: dict[object, list[ShardedParameter]] = {}
        for sharded in parameters:
            key = (tuple(sharded.parameter.shape), sharded.spec.dim, sharded.spec.full_shape)
            by_shape.setdefault(key, []).append(sharded)
        self._same_shapes = list(by_shape.values())

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the shards of all matrices that have gradients; every rank calls."""
        for batch in self._batches():
            momenta = [self._momentum(sharded) for sharded in batch]
            momentum = self._exchange_rows(momenta, batch[0])
            update = None
            if momentum is not None:
                own = batch[self._rank]
                complete = self._complete(momentum, own)
                update = self._own_part(orthogonal_update(complete, lr, self._config), own)
            updates = self._return_rows(update, batch)
            for sharded, rows in zip(batch, updates, strict=True):
                shard = local_shard(sharded.parameter)
                shard.mul_(1 - lr * self._config.weight_decay)
                shard.add_(rows)

    def _batches(self) -> Iterator[list[ShardedParameter]]:
        """Yield lists of at most one matrix per FSDP rank; all have one shape."""
        for parameters in self._same_shapes:
            trained = [each for each in parameters if each.parameter.grad is not None]
            for start in range(0, len(trained), self._num_ranks):
                yield trained[start : start + self._num_ranks]

    def _momentum(self, sharded: ShardedParameter) -> Tensor:
        """Update the momentum; return this rank's rows [m, ...] of Nesterov's momentum."""
        assert sharded.parameter.grad is not None
        gradient = local_shard(sharded.parameter.grad)
        if sharded.parameter not in self.state:
            zeros = torch.zeros_like(sharded.parameter, requires_grad=False)
            self.state[sharded.parameter] = zeros
        buffer = local_shard(self.state[sharded.parameter])
        decay = self._config.muon_momentum
        buffer.lerp_(gradient, 1 - decay)
        return gradient.lerp(buffer, decay)

    def _exchange_rows(self, rows: Sequence[Tensor], like: ShardedParameter) -> Tensor | None:
        """Send rows [m, k] of matrix i to rank i; return matrix `rank`, [n, k], None without one.

        n and k are the sizes of the tensor-parallel shard `like`.
        """
        if self._groups.shard is None:
            return rows[0]
        num_rows, num_columns = like.parameter.shape
        rows_per_rank = ceil_div(num_rows, self._num_ranks)
        sent = rows[0].new_zeros(self._num_ranks, rows_per_rank, num_columns)
        for index, part in enumerate(rows):
            sent[index, : len(part)] = part
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._groups.shard)
        if self._rank >= len(rows):
            return None
        return received.flatten(0, 1)[:num_rows]

    def _return_rows(self, full: Tensor | None, batch: Sequence[ShardedParameter]) -> list[Tensor]:
        """Undo `_exchange_rows` for `full`, [n, k] or None; return rows [m, k] of each matrix."""
        if self._groups.shard is None:
            assert full is not None, "a single rank has every matrix"
            return [full]
        num_rows, num_columns = batch[0].parameter.shape
        rows_per_rank = ceil_div(num_rows, self._num_ranks)
        device = local_shard(batch[0].parameter).device
        sent = torch.zeros(self._num_ranks * rows_per_rank, num_columns, device=device)
        if full is not None:
            sent[:num_rows] = full
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._groups.shard)
        parts = received.unflatten(0, (self._num_ranks, rows_per_rank))
        num_own = len(local_shard(batch[0].parameter))
        return [parts[index, :num_own] for index in range(len(batch))]

    def _complete(self, shard: Tensor, sharded: ShardedParameter) -> Tensor:
        """All-gather the complete matrix from the tensor-parallel ranks' `shard`, [n, k] each."""
        tensor = self._groups.tensor
        if tensor is None or sharded.spec.dim is None:
            return shard
        if sharded.spec.dim == 0:
            return gather_rows(tensor.group, shard)
        return gather_rows(tensor.group, shard.T).T.contiguous()

    def _own_part(self, full: Tensor, sharded: ShardedParameter) -> Tensor:
        """Return the part [n, k] of `full`, [*full_shape], that this tensor-parallel rank has."""
        if self._groups.tensor is None or sharded.spec.dim is None:
            return full
        start = sharded.spec.start
        return full.narrow(sharded.spec.dim, start, sharded.parameter.shape[sharded.spec.dim])
