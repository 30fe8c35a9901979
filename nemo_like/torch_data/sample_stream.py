"""Steps of samples, aligned over ranks: a feed, the planner of their lengths, and the samples that
wait. `OnlineBatchLoader` and `LoadBalancedDataset` are both built on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from nemo_like.data.streaming.alignment import (
    AlignedPlanner,
    AlignedStep,
    Coordinator,
    SingleCoordinator,
    waiting_rows,
)
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.torch_data.feeds import IterableFeed, MapFeed, Numbered
from nemo_like.torch_data.packed_batch import IGNORE_INDEX

Sample = TypeVar("Sample")
EmptyRows = Literal["error", "drop"]


@dataclass(frozen=True)
class ColumnLength:
    """Length of one column of a sample, [L] or [1, L], for example of `input_ids`."""

    column: str

    def __call__(self, sample: Any) -> int:
        """Return the number of values of the column. Raises ValueError if it is missing."""
        try:
            column = sample[self.column]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"a sample of type {type(sample).__name__} has no column {self.column!r}; pass its"
                " name, or a function of a sample that returns its length"
            ) from error
        return _row_length(column, self.column)


def sample_numbers(sample: Any) -> tuple[int, int | None]:
    """Return the length of a sample and its tokens with loss, see `count_trained`.

    `input_ids` are [L] or [1, L]; tensors, arrays or lists. Raises ValueError for other shapes.
    """
    length = ColumnLength("input_ids")(sample)
    return length, count_trained(sample, length)


def count_trained(sample: Any, length: int) -> int | None:
    """Return the tokens with loss of a sample of `length` tokens; None without labels.

    `labels`, [L] or [1, L], are not shifted: the first one is never predicted, so it does not
    count. Labels of another length, as of an encoder-decoder model, all count; a single one, as of
    a classification, counts once. Raises ValueError for other shapes.
    """
    labels = sample.get("labels") if isinstance(sample, Mapping) else None
    if labels is None:
        return None
    values = np.asarray(labels)
    num_labels = 1 if values.ndim == 0 else _row_length(labels, "labels")
    first = 1 if num_labels == length else 0
    return int((values.reshape(num_labels)[first:] != IGNORE_INDEX).sum())


def _row_length(column: Any, name: str) -> int:
    """Return L of a column of shape [L] or [1, L]."""
    if isinstance(column, list | tuple):
        # The first value tells the shape; to convert all of them takes longer.
        if column and isinstance(column[0], int):
            return len(column)
        inner = np.shape(column[0]) if column else ()
        shape = (len(column), *inner)
    else:
        shape = tuple(np.shape(column))
    if len(shape) == 2 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 1:
        raise ValueError(
            f"{name} of a sample has the shape {list(shape)}; a sample is one row, so give [L] or"
            " [1, L], or pass length_of"
        )
    return shape[0]


class SampleStream(Generic[Sample]):
    """The steps of one rank, with their samples."""

    def __init__(
        self,
        feed: MapFeed[Sample] | IterableFeed[Sample],
        spec: StreamSpec,
        numbers_of: Callable[[Sample], tuple[int, int | None, int]],
        coordinator: Coordinator | None = None,
        *,
        join: bool = True,
        infinite_loop: bool = False,
        empty_rows: EmptyRows = "error",
    ) -> None:
        """Plan the samples of `feed`: of one epoch, or with `infinite_loop` of one after the other.

        `numbers_of` returns the length of a sample, its tokens with loss (None: all but the first)
        and its use of the second resource. Rows without tokens raise ValueError, or are dropped and
        counted.
        """
        self.feed = feed
        self._infinite_loop = infinite_loop
        coordinator = coordinator or SingleCoordinator()
        self.planner = AlignedPlanner(spec, coordinator, join=join)
        self.planner.shard_rows = self._shard_rows()
        if isinstance(feed, MapFeed):
            feed.compares_rows = coordinator.num_ranks > 1
        self.samples: dict[int, Sample] = {}
        """The waiting samples, and the spare one."""
        self.spare: int | None = None
        """Number of a sample of an earlier step that is kept, see `keep_spare`."""
        self.wait_s = 0.0
        """Time that the last step waited for its samples."""
        self._numbers_of = numbers_of
        self._empty_rows = empty_rows
        self._incoming: Iterator[Numbered[Sample]] | None = None
        self._num_epochs_without_rows = 0

    def next_step(self, check: Callable[[], None] = lambda: None) -> AlignedStep | None:
        """Return the next step; None after the last one.

        `check` may raise an error before the exchange with the other ranks. An error before the
        exchange is reported to them, so that they raise AlignmentError.
        """
        started = time.perf_counter()
        try:
            with self.feed.fetching():
                self._fill()
            check()
        except Exception:
            self.planner.fail()
            raise
        self.wait_s = time.perf_counter() - started
        self.planner.source = self.feed.source
        return self.planner.next_step()

    def take(self, step: AlignedStep) -> list[tuple[list[int], list[Sample]]]:
        """Return (numbers, samples) of each microbatch of `step`; empty lists for a dummy."""
        taken = []
        # Most steps have few rows, for which the arrays of the plan suffice.
        order = step.own.plan.rows.tolist()
        for start, stop in pairwise(step.own.plan.offsets.tolist()):
            numbers = [step.own.rows[row] for row in order[start:stop]]
            taken.append((numbers, [self.samples.pop(number) for number in numbers]))
        return taken

    def keep_spare(self, number: int, sample: Sample) -> None:
        """Keep a sample of a step for a dummy, until another one is kept."""
        if self.spare is not None:
            self.samples.pop(self.spare, None)
        self.spare = number
        self.samples[number] = sample

    def start_epoch(self, epoch: int | None = None) -> None:
        """Go to the begin of `epoch`, by default the next one, without the samples that wait."""
        self.feed.start_epoch(epoch)
        self.planner.clear()
        self.planner.shard_rows = self._shard_rows()
        self._clear_samples()

    def _shard_rows(self) -> int | None:
        if isinstance(self.feed, MapFeed) and not self._infinite_loop:
            return self.feed.num_rows
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last step; JSON values for a map-style dataset."""
        return {
            "feed": self.feed.state_dict(self.samples),
            "planner": self.planner.state_dict(),
            "spare": self.spare,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after `state`. The waiting samples are fetched before the next step, which
        raises ValueError if one has another length now.
        """
        self.planner.load_state_dict(state["planner"])
        self.feed.load_state_dict(state["feed"])
        self.planner.shard_rows = self._shard_rows()
        self._clear_samples()
        self.spare = state["spare"]

    def load_global_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue after the `states` of all ranks of a group of any size; see `OnlineBatchLoader`.

        Only for a map-style dataset.
        """
        assert isinstance(self.feed, MapFeed), "checked by the caller"
        states = sorted(states, key=lambda state: state["planner"]["rank"])
        self.planner.load_global_state([state["planner"] for state in states])
        waiting = [waiting_rows(state["planner"]) for state in states]
        self.feed.load_global_state([state["feed"] for state in states], waiting)
        self.planner.shard_rows = self._shard_rows()
        self._clear_samples()
        # Any rank can fetch any row of a map-style dataset.
        spares = [state["spare"] for state in states if state["spare"] is not None]
        self.spare = min(spares, default=None)

    def _clear_samples(self) -> None:
        self.samples = {}
        self.spare = None
        self._incoming = None

    def _fill(self) -> None:
        """Push samples until a step is complete, or the rows end."""
        incoming = self._incoming or self._restore()
        while self.planner.needs_rows:
            if self._must_form():
                self.planner.form_now()
                continue
            entry = next(incoming, None)
            if entry is not None:
                self._push(entry.number, entry.sample)
            elif not self._infinite_loop:
                self.planner.close()
            elif not self._must_form():
                self._start_next_epoch()
                incoming = self._incoming = self.feed.samples()

    def _restore(self) -> Iterator[Numbered[Sample]]:
        """Fetch the waiting samples of a state; return those that follow."""
        lengths = {row.row: row.length for row in chain(*self.planner.bins, self.planner.window)}
        spare = [] if self.spare is None else [self.spare]
        incoming = self.feed.samples([*lengths, *spare])
        for number, expected in lengths.items():
            sample = next(incoming).sample
            _check_same_length(number, expected, self._numbers_of(sample)[0])
            self.samples[number] = sample
        for number in spare:
            self.samples[number] = next(incoming).sample
        self._incoming = incoming
        return incoming

    def _push(self, number: int, sample: Sample) -> None:
        numbers = self._numbers_of(sample)
        if numbers[0] == 0 and self._empty_rows == "drop":
            self.planner.drop_row()
        elif self.planner.push(number, *numbers):
            self.samples[number] = sample
            self._num_epochs_without_rows = 0

    def _must_form(self) -> bool:
        """Return True if the next sample may not join the window, as it waits there since the last
        epoch.
        """
        return self._infinite_loop and self.feed.is_blocked(self.planner.window)

    def _start_next_epoch(self) -> None:
        # The first epoch may have begun in the middle.
        self._num_epochs_without_rows += 1
        if self._num_epochs_without_rows > 2:
            raise ValueError(
                "the dataset gave no sample in an epoch, or all were dropped as oversize, so an"
                " infinite loop would not end; check the dataset and max_tokens_for_batch"
            )
        self.feed.start_epoch()


def _check_same_length(number: int, expected: int, length: int) -> None:
    """Raise ValueError if a sample that was fetched again has another length than when planned."""
    if length != expected:
        raise ValueError(
            f"row {number} waited for its step with {expected} tokens and has {length} tokens when"
            " fetched again, so the state does not match the dataset; use the same data, and draw"
            " random numbers from the global generators of random, numpy or torch, which"
            " seed_rows=True seeds"
        )
