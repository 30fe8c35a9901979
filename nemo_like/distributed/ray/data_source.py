"""Samples of one data-parallel rank from a Ray Dataset that is split over the ranks as it streams.

For training loops without the driver of this package, in plain PyTorch or Ray Train. Reading and
preprocessing run as tasks of Ray Data on the cluster; each rank receives its blocks as they become
ready, so ranks have different numbers of rows and `AlignedPlanner` aligns their steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

if TYPE_CHECKING:
    from ray.data import DataIterator, Dataset

Sample = dict[str, np.ndarray]
"""One row: the value of each column, of any shape and dtype."""


class RayDataSource(IterableDataset[Sample]):
    """Iterable dataset of the samples of one rank; each iteration is one pass over the dataset.

    All ranks must iterate at the same time: Ray Data begins a pass when every rank has. It can be
    sent to another process. In Ray Train: `RayDataSource(ray.train.get_dataset_shard("train"))`.

    It has no `state_dict`: Ray Data assigns blocks to ranks as they become ready, so a pass cannot
    be continued after a restart.
    """

    def __init__(
        self, iterator: DataIterator, *, rows_per_batch: int = 64, prefetch_batches: int = 1
    ) -> None:
        """Fetch `rows_per_batch` rows at once, and `prefetch_batches` of them ahead.

        Raises ValueError for numbers that are too small.
        """
        if rows_per_batch < 1 or prefetch_batches < 0:
            raise ValueError(
                f"rows_per_batch is {rows_per_batch} and prefetch_batches {prefetch_batches}; they"
                " must be at least 1 and 0"
            )
        self.rows_per_batch = rows_per_batch
        self.prefetch_batches = prefetch_batches
        self._iterator = iterator

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples of one pass. Raises ValueError in a DataLoader worker."""
        if get_worker_info() is not None:
            raise ValueError(
                "a RayDataSource is read in the process of its rank, because Ray Data prefetches"
                " and preprocesses: set num_workers=0"
            )
        batches = self._iterator.iter_batches(
            batch_size=self.rows_per_batch,
            prefetch_batches=self.prefetch_batches,
            batch_format="numpy",
        )
        for batch in batches:
            # Ray's annotation has the types of all formats.
            columns: dict[str, np.ndarray] = batch  # pyright: ignore[reportAssignmentType]
            num_rows = len(next(iter(columns.values()), ()))
            for row in range(num_rows):
                yield {name: np.asarray(values[row]) for name, values in columns.items()}


def split_over_ranks(
    dataset: Dataset,
    num_ranks: int,
    *,
    max_bytes: int | None = None,
    rows_per_batch: int = 64,
    prefetch_batches: int = 1,
) -> list[RayDataSource]:
    """Split a dataset over ranks as it streams; return the source of each rank.

    Every row is in one source. `max_bytes` limits the bytes that the pipeline keeps in the object
    store; None is the limit of Ray Data. It must be several times the bytes of the ranks' windows:
    a rank that waits for the others takes no rows, and its blocks stay in the store. Raises
    ValueError for less than one rank.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; it must be at least 1")
    if max_bytes is not None:
        limits = dataset.context.execution_options.resource_limits
        dataset.context.execution_options.resource_limits = limits.copy(
            object_store_memory=max_bytes
        )
    # Equal shards would drop the rest of the rows.
    iterators = dataset.streaming_split(num_ranks, equal=False)
    sources = []
    for iterator in iterators:
        source = RayDataSource(
            iterator, rows_per_batch=rows_per_batch, prefetch_batches=prefetch_batches
        )
        sources.append(source)
    return sources
