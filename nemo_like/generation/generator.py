"""Driver side of generation; the workers may use any inference engine."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np

from nemo_like.data.jagged import Jagged
from nemo_like.distributed.worker_calls import call_sharded
from nemo_like.distributed.worker_group import WorkerGroup, onloaded
from nemo_like.generation.worker_protocol import (
    Completions,
    GenerationWorkerProtocol,
    SamplingParams,
)


class Generator:
    """Driver side of generation: distributes prompts over a group of workers."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group

    def onloaded(self) -> AbstractContextManager[None]:
        """Keep the weights on the device inside the block, and in host memory after it."""
        return onloaded(self.group)

    def generate(
        self,
        prompt_ids: Jagged,
        seeds: np.ndarray,
        sampling: SamplingParams,
        *,
        max_total_length: int,
    ) -> Completions:
        """Sample one completion for each row of `prompt_ids` (int32, B rows), in order.

        `seeds` is uint64 [B]; row i draws from the random stream of `seeds[i]`, so rows with equal
        prompt and seed are equal. Prompt and completion together have at most `max_total_length`
        tokens. Raises ValueError for a prompt that leaves no room for a token.
        """
        if len(seeds) != len(prompt_ids):
            raise ValueError(f"{len(prompt_ids)} prompts need as many seeds, got {len(seeds)}")
        _check_room(prompt_ids.lengths, max_total_length)
        seeds = np.asarray(seeds, dtype=np.uint64)
        rows_of_worker = deal_by_length(prompt_ids.lengths, self.group.parallel_layout.dp)
        parts = call_sharded(
            self.group,
            GenerationWorkerProtocol.generate,
            [prompt_ids.take(rows) for rows in rows_of_worker],
            [seeds[rows] for rows in rows_of_worker],
            sampling=sampling,
            max_total_length=max_total_length,
        )
        # Back from the order of the workers to that of the prompts.
        order = np.argsort(np.concatenate(rows_of_worker))
        return Completions.concat(parts).take(order)

    def shutdown(self) -> None:
        """Stop the workers."""
        self.group.shutdown()


def deal_by_length(lengths: np.ndarray, num_workers: int) -> list[np.ndarray]:
    """Return the row indices of each worker, balanced by length.

    Rows sorted by length, longest first, are dealt in alternating directions (serpentine order).

    Example: lengths [5, 1, 3, 4] over 2 workers give [[0, 1], [3, 2]], 6 and 7 tokens.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    position = np.arange(len(order))
    round_index, seat = np.divmod(position, num_workers)
    is_forward = round_index % 2 == 0
    worker = np.where(is_forward, seat, num_workers - 1 - seat)
    return [order[worker == index] for index in range(num_workers)]


def _check_room(lengths: np.ndarray, max_total_length: int) -> None:
    """Raise ValueError for the first prompt that is empty or leaves no room for a token.

    `prompt_ids` has B rows of int32 [L].
    """
    invalid = np.flatnonzero((lengths == 0) | (lengths >= max_total_length))
    if len(invalid) == 0:
        return
    row = invalid[0]
    if lengths[row] == 0:
        raise ValueError(
            f"prompt {row} has no tokens; a completion needs at least one to start from"
        )
    raise ValueError(
        f"prompt {row} has {lengths[row]} tokens and policy.max_total_sequence_length is"
        f" {max_total_length}, which leaves no room for a completion; raise it to at least"
        f" {lengths[row] + 1} or drop the prompt"
    )
