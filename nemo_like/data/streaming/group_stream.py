"""Groups of batches formed from one stream of samples: what `LoadBalancedDataset` runs in a worker.

A source gives samples one by one, a planner chooses them for batches by their lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from nemo_like.data.streaming.alignment import AlignedPlanner, Coordinator
from nemo_like.data.streaming.row_seeding import seeded_row
from nemo_like.data.streaming.sharding import ShardedOrder
from nemo_like.data.streaming.spec import StreamSpec

Sample = TypeVar("Sample")
SampleOut_co = TypeVar("SampleOut_co", covariant=True)


class MapStyle(Protocol[SampleOut_co]):
    """A map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> SampleOut_co: ...


class Numbered(NamedTuple, Generic[Sample]):
    """A sample with the id that a planner knows it by."""

    number: int
    sample: Sample


class ShardSource(Generic[Sample]):
    """Samples of one shard of a map-style dataset, epoch after epoch.

    The number of a sample is `epoch * N + index`, so its row is known from it.
    """

    def __init__(
        self, dataset: MapStyle[Sample], order: ShardedOrder, *, max_rows: int, seed_rows: bool
    ) -> None:
        """Visit at most `max_rows` rows of the shard of `order` in each epoch."""
        self._dataset = dataset
        self._order = order
        self._num_unused = max(order.num_left - max_rows, 0)
        self._seed_rows = seed_rows

    @property
    def is_ended(self) -> bool:
        """True if all rows of the epoch were taken."""
        return self._order.num_left <= self._num_unused

    def take(self) -> Numbered[Sample] | None:
        """Return the next sample of the epoch; errors of the dataset leave the position as it is.

        Never None before `is_ended`.
        """
        index = int(self._order.left[0])
        number = self._order.epoch * self._order.num_rows + index
        entry = self.restored(number)
        self._order.take(1)
        return entry

    def restored(self, number: int) -> Numbered[Sample]:
        """Return a sample taken before, fetched again."""
        epoch, index = divmod(number, self._order.num_rows)
        if not self._seed_rows:
            return Numbered(number, self._dataset[index])
        with seeded_row(self._order.seed, epoch, index):
            return Numbered(number, self._dataset[index])

    def is_blocked(self, window: Iterable[int]) -> bool:
        """Return True if the next sample may not join the samples `window`: the same row of the
        epoch before waits there, and both in one batch would count it twice.
        """
        if self.is_ended:
            return False
        index = int(self._order.left[0])
        return index in {number % self._order.num_rows for number in window}

    def start_epoch(self) -> None:
        """Begin the next epoch."""
        self._order.start_epoch()

    def state_dict(self, waiting: Mapping[int, Sample]) -> dict[str, Any]:
        """Return the position as JSON values. The samples `waiting` are fetched again on resume."""
        del waiting
        return self._order.state_dict()

    def load_state_dict(
        self, state: Mapping[str, Any], waiting: Iterable[int]
    ) -> dict[int, Sample]:
        """Continue after `state`; return the samples `waiting`."""
        self._order.load_state_dict(state)
        return dict(map(self.restored, waiting))


class IterableSource(Generic[Sample]):
    """Samples of an iterable dataset, which shards itself over ranks and workers.

    For a resume it needs `state_dict` and `load_state_dict`; `set_epoch` is called if it exists.
    Samples are numbered in order of arrival.
    """

    def __init__(self, dataset: Iterable[Sample], epoch: int) -> None:
        self.is_ended = False
        self._dataset = dataset
        self._epoch = epoch
        self._next_number = 0
        self._iterator: Iterator[Sample] | None = None

    def take(self) -> Numbered[Sample] | None:
        """Return the next sample; None at the end of the epoch."""
        if self._iterator is None:
            self._iterator = self._begin()
        try:
            sample = next(self._iterator)
        except StopIteration:
            self.is_ended = True
            return None
        self._next_number += 1
        return Numbered(self._next_number - 1, sample)

    def is_blocked(self, window: Iterable[int]) -> bool:
        """Return True if samples of the last epoch wait: which rows they are is not known, so no
        sample of the next epoch may join them.
        """
        return self.is_ended and any(True for _ in window)

    def start_epoch(self) -> None:
        """Begin the next epoch."""
        self._epoch += 1
        self.is_ended = False
        self._iterator = None

    def state_dict(self, waiting: Mapping[int, Sample]) -> dict[str, Any]:
        """Return the state of the dataset and the samples `waiting`, which it cannot give again.

        Raises ValueError for a dataset without `state_dict` and `load_state_dict`.
        """
        check_stateful(self._dataset)
        position = None
        if self._iterator is not None:
            position = self._dataset.state_dict()  # pyright: ignore[reportAttributeAccessIssue]
        return {
            "epoch": self._epoch,
            "is_ended": self.is_ended,
            "next_number": self._next_number,
            "position": position,
            "samples": dict(waiting),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], waiting: Iterable[int]
    ) -> dict[int, Sample]:
        """Continue after `state`; return the samples `waiting`."""
        check_stateful(self._dataset)
        self._epoch = state["epoch"]
        self.is_ended = state["is_ended"]
        self._next_number = state["next_number"]
        self._iterator = None
        if state["position"] is not None:
            self._iterator = self._begin(state["position"])
        return {number: state["samples"][number] for number in waiting}

    def _begin(self, position: Any = None) -> Iterator[Sample]:
        """Begin the epoch, or continue it after `position`."""
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._epoch)
        if position is not None:
            self._dataset.load_state_dict(position)  # pyright: ignore[reportAttributeAccessIssue]
        return iter(self._dataset)


def check_stateful(dataset: object) -> None:
    """Raise ValueError unless `dataset` can save and restore its position."""
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        raise ValueError(
            f"{type(dataset).__name__} is an iterable dataset without state_dict and"
            " load_state_dict, so its position cannot be saved; implement both, or use a map-style"
            " dataset"
        )


class GroupStream(Generic[Sample]):
    """One group of batches after the other."""

    def __init__(
        self,
        source: ShardSource[Sample] | IterableSource[Sample],
        spec: StreamSpec,
        length_of: Callable[[Sample], int],
        coordinator: Coordinator,
        *,
        infinite_loop: bool,
    ) -> None:
        self.num_groups = 0
        """Groups returned so far."""
        self._source = source
        self._length_of = length_of
        self._planner = AlignedPlanner(spec, coordinator)
        self._infinite_loop = infinite_loop
        self._samples: dict[int, Sample] = {}
        self._num_epochs_without_rows = 0

    def next_group(self) -> list[list[Sample]] | None:
        """Return the next group, lists of samples; None after the last one.

        Batches are empty where other ranks of the coordinator have more rows. An error before the
        exchange of the ranks is reported to them, so that they raise AlignmentError.
        """
        try:
            self._fill()
        except Exception:
            self._planner.fail()
            raise
        step = self._planner.next_step()
        if step is None:
            return None
        self.num_groups += 1
        group = []
        for microbatch in step.own.plan.ranks[0]:
            numbers = [step.own.rows[row] for row in microbatch.rows]
            group.append([self._samples.pop(number) for number in numbers])
        return group

    def state_dict(self) -> dict[str, Any]:
        """Return the position. JSON values for a map-style dataset."""
        return {
            "num_groups": self.num_groups,
            "planner": self._planner.state_dict(),
            "source": self._source.state_dict(self._samples),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after `state`. Raises ValueError if a waiting sample has another length now."""
        rows = [*chain(*state["planner"]["bins"]), *state["planner"]["window"]]
        self._samples = self._source.load_state_dict(state["source"], [row[0] for row in rows])
        for row in rows:
            check_same_length(row[0], row[1], self._length_of(self._samples[row[0]]))
        self._planner.load_state_dict(state["planner"])
        self.num_groups = state["num_groups"]

    def _fill(self) -> None:
        """Push samples until a step is complete."""
        while self._planner.needs_rows:
            if self._infinite_loop and self._source.is_blocked(self._planner.in_window):
                self._planner.form_now()
            elif not self._source.is_ended:
                self._push()
            elif self._infinite_loop:
                self._start_epoch()
            else:
                self._planner.close()

    def _push(self) -> None:
        entry = self._source.take()
        if entry is None:
            return
        number, sample = entry
        if self._planner.push(number, self._length_of(sample)):
            self._samples[number] = sample
            self._num_epochs_without_rows = 0

    def _start_epoch(self) -> None:
        # The first epoch may have begun in the middle.
        self._num_epochs_without_rows += 1
        if self._num_epochs_without_rows > 2:
            raise ValueError(
                "the dataset gave no sample in an epoch, or all were dropped as oversize, so an"
                " infinite loop would not end; check the dataset and max_tokens_for_batch"
            )
        self._source.start_epoch()


def check_same_length(number: int, expected: int, length: int) -> None:
    """Raise ValueError if a sample that was fetched again has another length than when planned."""
    if length != expected:
        raise ValueError(
            f"row {number} waited for its step with {expected} tokens and has {length} tokens when"
            " fetched again, so the state does not match the dataset; use the same data, and draw"
            " random numbers from the global generators of random, numpy or torch, which"
            " seed_rows=True seeds"
        )
