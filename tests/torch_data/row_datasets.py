"""Small data sets for DataLoader workers. Imported by the started processes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Rows(Dataset[dict[str, Any]]):
    """Rows of given lengths. `number` is the index of a row, `input_ids` its tokens."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.fetched.append(index)
        tokens = torch.arange(index, index + self.lengths[index]) % 11
        return {"number": index, "input_ids": tokens, "labels": tokens}


class AugmentedRows(Rows):
    """Rows whose length and tokens are random, from all three global generators."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        length = random.randint(1, self.lengths[index])
        shift = int(np.random.randint(11)) + int(torch.randint(11, (1,)))
        tokens = (row["input_ids"][:length] + shift) % 11
        return {"number": index, "input_ids": tokens, "labels": tokens}


class FailingRows(Rows):
    """Raises an error for one row."""

    def __init__(self, lengths: Sequence[int], bad_row: int, error: type[Exception]) -> None:
        super().__init__(lengths)
        self.bad_row = bad_row
        self.error = error

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.bad_row:
            raise self.error(f"row {index} is bad")
        return super().__getitem__(index)


class StatelessStream(IterableDataset[dict[str, Any]]):
    """An iterable data set that shards itself over DataLoader workers and ranks."""

    def __init__(self, lengths: Sequence[int], rank: int = 0, num_ranks: int = 1) -> None:
        self.rows = Rows(lengths)
        self.rank = rank
        self.num_ranks = num_ranks
        self.epoch = 0
        self.position = 0
        self.loaded = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        shard = range(len(self.rows))[self.rank :: self.num_ranks][worker::num_workers]
        order = [(row + self.epoch) % len(self.rows) for row in shard]
        self.position = self.loaded
        self.loaded = 0
        return self.samples(order)

    def samples(self, order: list[int]) -> Iterator[dict[str, Any]]:
        while self.position < len(order):
            self.position += 1
            yield self.rows[order[self.position - 1]]


class Stream(StatelessStream):
    """The same with a position that can be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state["position"]


def length_of(sample: Mapping[str, Any]) -> int:
    return len(sample["input_ids"])


def numbers_of(groups: Any) -> list[list[list[int]]]:
    """Row numbers of every batch of groups of batches."""
    return [[[row["number"] for row in batch] for batch in group] for group in groups]


def tokens_of(sample: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    tokens: Tensor = sample["input_ids"]
    return sample["number"], tuple(tokens.tolist())


def as_they_are(samples: Any) -> Any:
    """A `collate_fn` that every start method of processes can send to a worker."""
    return samples
