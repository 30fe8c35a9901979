"""Samples for `OnlineBatchLoader`, fetched one by one by a DataLoader, with a position to resume.

Workers only fetch and preprocess. The order of the samples is that of one process, whatever the
number of workers, unless an iterable dataset divides its samples among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from nemo_like.data.streaming.group_stream import MapStyle, Numbered, check_stateful
from nemo_like.data.streaming.row_seeding import seeded_row
from nemo_like.data.streaming.sample_memory import from_pipe, to_pipe
from nemo_like.data.streaming.sharding import ShardedOrder

Sample = TypeVar("Sample")
StartMethod = Literal["spawn", "forkserver", "fork"]


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """DataLoader workers. Every start method works, as only the dataset is sent to a worker."""

    num_workers: int = 0
    multiprocessing_context: StartMethod | None = None
    """None is the default of the platform."""
    prefetch_factor: int = 2
    """Rows that each worker fetches in advance."""

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ValueError(f"num_workers is {self.num_workers}; it must not be negative")
        if self.prefetch_factor < 1:
            raise ValueError(f"prefetch_factor is {self.prefetch_factor}; it must be at least 1")

    def arguments(self, seed: int, epoch: int) -> dict[str, Any]:
        """Return the arguments of a DataLoader of single samples."""
        # Without a generator of its own the DataLoader would draw a number from the global one, and
        # the dropout of a resumed run would differ.
        generator = torch.Generator()
        generator.manual_seed(seed + epoch)
        arguments = {
            "batch_size": None,
            "collate_fn": _collate,
            "num_workers": self.num_workers,
            "generator": generator,
        }
        if self.num_workers:
            arguments["prefetch_factor"] = self.prefetch_factor
            arguments["multiprocessing_context"] = self.multiprocessing_context
        return arguments

    def iterate(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over the samples of a DataLoader with these options."""
        iterator: Iterator[Any] | None = iter(loader)
        while True:
            try:
                sample = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                if self.num_workers == 0:
                    raise
                # The traceback is part of a reference cycle with the workers' queues. Without it
                # the workers are stopped now, and not by a time limit of 5 s each. The message of
                # an error of a worker has the traceback of the worker.
                iterator = None
                raise error.with_traceback(None) from None
            yield from_pipe(sample) if self.num_workers else sample


class MapFeed(Generic[Sample]):
    """Rows of a shard of a map-style dataset. The number of a row is its index."""

    def __init__(
        self,
        dataset: MapStyle[Sample],
        order: ShardedOrder,
        options: WorkerOptions,
        *,
        seed_rows: bool,
    ) -> None:
        self._dataset = dataset
        self._order = order
        self._options = options
        self._seed_rows = seed_rows

    @property
    def epoch(self) -> int:
        """The epoch whose rows are fetched."""
        return self._order.epoch

    def start_epoch(self, epoch: int) -> None:
        """Go to the begin of `epoch`."""
        self._order.start_epoch(epoch)

    def samples(self, waiting: Sequence[int]) -> Iterator[Numbered[Sample]]:
        """Fetch the rows `waiting`, which were taken before, and then the rest of the epoch."""
        seed = self._order.seed if self._seed_rows else None
        rows = np.concatenate([np.array(waiting, dtype=np.int64), self._order.left])
        loader = DataLoader(
            _RowFetcher(self._dataset, seed, self.epoch),
            sampler=rows,  # pyright: ignore[reportArgumentType]
            **self._options.arguments(self._order.seed, self.epoch),
        )
        for position, (row, sample) in enumerate(self._options.iterate(loader)):
            if position >= len(waiting):
                self._order.take(1)
            yield Numbered(row, sample)

    def state_dict(self, samples: Mapping[int, Sample]) -> dict[str, Any]:
        """Return the position as JSON values; the rows `samples` are fetched again on resume."""
        del samples
        return {"order": self._order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after `state` of the same rank and number of ranks."""
        if "order" not in state:
            raise ValueError("the state belongs to an iterable dataset, but this one is map-style")
        self._order.load_state_dict(state["order"])

    def load_global_state(
        self, states: Sequence[Mapping[str, Any]], waiting: Sequence[Sequence[int]]
    ) -> None:
        """Continue after the states of all ranks, whose rows `waiting` are untrained."""
        self._order.load_global_state([state["order"] for state in states], waiting)


class IterableFeed(Generic[Sample]):
    """Samples of an iterable dataset, which shards itself over ranks and DataLoader workers.

    Samples are numbered in order of arrival, and those that wait are part of the state. With
    workers torchdata's StatefulDataLoader is used if it is installed and the dataset has a state.
    """

    def __init__(self, dataset: Iterable[Sample], options: WorkerOptions, seed: int) -> None:
        self.epoch = 0
        self._dataset = dataset
        self._options = options
        self._seed = seed
        self._next_number = 0
        self._restored: dict[int, Sample] = {}
        self._is_ended = False
        self._has_begun = False
        self._loaded_position: Any = None
        self._loader: Any = None

    def start_epoch(self, epoch: int) -> None:
        """Go to the begin of `epoch`."""
        self.epoch = epoch
        self._is_ended = False
        self._has_begun = False
        self._loaded_position = None
        self._restored = {}

    def samples(self, waiting: Sequence[int]) -> Iterator[Numbered[Sample]]:
        """Give the samples `waiting` of a state, and then the rest of the epoch."""
        for number in waiting:
            yield Numbered(number, self._restored[number])
        self._restored = {}
        if self._is_ended:
            return
        for sample in self._options.iterate(self._begin()):
            self._has_begun = True
            self._next_number += 1
            yield Numbered(self._next_number - 1, sample)
        self._is_ended = True

    def state_dict(self, samples: Mapping[int, Sample]) -> dict[str, Any]:
        """Return the position and the waiting `samples`.

        Raises ValueError if the dataset or the DataLoader cannot save its position.
        """
        check_stateful(self._dataset)
        position = self._loaded_position
        if self._has_begun and not self._is_ended:
            position = self._position()
        return {
            "epoch": self.epoch,
            "num_workers": self._options.num_workers,
            "next_number": self._next_number,
            "is_ended": self._is_ended,
            "position": position,
            "samples": {**self._restored, **samples},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after `state`, with the same number of workers."""
        check_stateful(self._dataset)
        if "order" in state:
            raise ValueError("the state belongs to a map-style dataset, but this one is iterable")
        if state["num_workers"] != self._options.num_workers:
            raise ValueError(
                f"the state was written with num_workers={state['num_workers']}, here it is"
                f" {self._options.num_workers}; an iterable dataset needs the same number, a"
                " map-style dataset any"
            )
        self.start_epoch(state["epoch"])
        self._next_number = state["next_number"]
        self._is_ended = state["is_ended"]
        self._loaded_position = state["position"]
        self._restored = dict(state["samples"])

    def _begin(self) -> Iterable[Sample]:
        """Return a DataLoader that begins the epoch, or continues it after the loaded position."""
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        position = self._loaded_position
        # The dataset itself has the position where no worker has a copy of it.
        target: Any = self._dataset
        self._loader = self._new_loader()
        if self._options.num_workers:
            target = self._loader
        if position is not None:
            target.load_state_dict(position)
        return self._loader

    def _new_loader(self) -> Any:
        arguments = self._options.arguments(self._seed, self.epoch)
        stateful = _stateful_data_loader()
        is_stateful = hasattr(self._dataset, "state_dict")
        if self._options.num_workers and stateful is not None and is_stateful:
            return stateful(self._dataset, **arguments)
        return DataLoader(self._dataset, **arguments)  # pyright: ignore[reportArgumentType]

    def _position(self) -> Any:
        if self._options.num_workers == 0:
            return self._dataset.state_dict()  # pyright: ignore[reportAttributeAccessIssue]
        if not hasattr(self._loader, "state_dict"):
            raise ValueError(
                "the positions of DataLoader workers in an iterable dataset need torchdata: install"
                " nemo-like[data], or use num_workers=0 or a map-style dataset"
            )
        return self._loader.state_dict()


class _RowFetcher(Dataset[tuple[int, Any]]):
    """Fetches rows in a worker or in this process, each with the random state of its row."""

    def __init__(self, dataset: MapStyle[Any], seed: int | None, epoch: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._epoch = epoch

    def __getitem__(self, index: int) -> tuple[int, Any]:
        row = int(index)
        context = nullcontext()
        if self._seed is not None:
            context = seeded_row(self._seed, self._epoch, row)
        try:
            with context:
                return row, self._dataset[row]
        except StopIteration as error:
            # It would end the epoch without a message.
            raise RuntimeError(f"the dataset raised StopIteration for row {row}") from error


def is_iterable_dataset(dataset: object) -> bool:
    """Return True for an IterableDataset, False for a map-style dataset. Raises ValueError else."""
    if isinstance(dataset, IterableDataset):
        return True
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ValueError(
            f"{type(dataset).__name__} is neither a torch IterableDataset nor a map-style dataset"
            " with __getitem__ and __len__; make it one of them"
        )
    return False


def _collate(sample: Any) -> Any:
    """Prepare a single sample for its way to the training process."""
    return sample if get_worker_info() is None else to_pipe(sample)


def _stateful_data_loader() -> Any | None:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return None
    return StatefulDataLoader
