"""Batch formation after preprocessing and augmentation, aligned over ranks (ODB).

DataLoader workers fetch single samples. This process keeps the window of waiting samples, plans
microbatches from their lengths, and exchanges a few integers per step with the other ranks.
docs/batching_online.md has the protocol and its proof.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np

from nemo_like.data.streaming.alignment import (
    AlignedPlanner,
    AlignedStep,
    Coordinator,
    SingleCoordinator,
    waiting_rows,
)
from nemo_like.data.streaming.group_stream import MapStyle, Numbered, check_same_length
from nemo_like.data.streaming.row_feeds import (
    IterableFeed,
    MapFeed,
    StartMethod,
    WorkerOptions,
    is_iterable_dataset,
)
from nemo_like.data.streaming.sample_memory import num_bytes
from nemo_like.data.streaming.sample_numbers import ColumnLength, count_trained
from nemo_like.data.streaming.sharding import ShardedOrder
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.data.streaming.token_mean import token_mean_scale
from nemo_like.integer_math import check_integer

Sample = TypeVar("Sample")
Batch = TypeVar("Batch")

_VERSION = 1


@dataclass(frozen=True, eq=False)
class OnlineStep(Generic[Batch]):
    """The microbatches of this rank in one optimizer step."""

    step: int
    """Number of steps before it, over all epochs."""
    microbatches: tuple[Batch, ...]
    """Results of `collate_fn` or `dummy`. Every rank has equally many."""
    is_dummy: tuple[bool, ...]
    """Microbatches whose loss must not count, see `scaled`."""
    rows: tuple[tuple[int, ...], ...]
    """Numbers of the rows of each microbatch: indices of a map-style dataset."""
    num_rows: int
    """Rows of all ranks."""
    num_trained: int
    """Tokens with loss of all ranks."""
    loss_scale: float
    """Number of ranks / `num_trained`: the factor of summed token losses where gradients are
    averaged over ranks, as DDP and FSDP do. 0 in a step without tokens with loss.
    """
    metrics: dict[str, float]

    def scaled(self) -> Iterator[tuple[Batch, float]]:
        """Iterate over (microbatch, factor of the sum of its token losses); 0 for a dummy.

        A dummy needs forward and backward, so that all ranks take part in every collective.
        """
        for batch, is_dummy in zip(self.microbatches, self.is_dummy, strict=True):
            yield batch, 0.0 if is_dummy else self.loss_scale


class OnlineBatchLoader(Generic[Sample, Batch]):
    """Optimizer steps of one rank, one epoch per iteration.

    Every row of the epoch is in one step of one rank (with `join`), and all ranks have the same
    number of steps and microbatches, for any number of rows per rank. At most
    `spec.window_rows` rows wait, and `num_workers * prefetch_factor` are fetched in advance.

    `state_dict` restores the position exactly. Only waiting rows are fetched again. A map-style
    dataset may continue with another number of workers, or on another number of ranks
    (`load_global_state`).
    """

    def __init__(
        self,
        dataset: MapStyle[Sample] | Iterable[Sample],
        spec: StreamSpec,
        *,
        collate_fn: Callable[[list[Sample]], Batch],
        length_of: Callable[[Sample], int] | None = None,
        num_trained_of: Callable[[Sample], int | None] | None = None,
        extra_of: Callable[[Sample], int] | None = None,
        coordinator: Coordinator | None = None,
        num_workers: int = 0,
        multiprocessing_context: StartMethod | None = None,
        prefetch_factor: int = 2,
        seed: int = 0,
        shuffle: bool = True,
        join: bool = True,
        dummy: Callable[[], Batch] | None = None,
        max_window_bytes: int | None = None,
        seed_rows: bool = True,
    ) -> None:
        """Form microbatches of `dataset`: map-style, of which every rank has the rows of its shard,
        or iterable, which shards itself over ranks and workers.

        `spec` describes one rank (`plan.num_ranks=1`). `length_of` counts the tokens of a sample
        (default: its `input_ids`), `num_trained_of` those with loss (default: `labels` but the
        first that are not -100, or all but the first token without labels), `extra_of` its use of
        `spec.max_extra`. `coordinator` is that of all data-parallel ranks; None is a single rank.

        `dummy` returns a microbatch without loss, for example `PackingCollator.dummy`. Without it a
        rank with fewer rows than the others repeats its last row with factor 0. When the waiting
        rows have `max_window_bytes`, a microbatch is formed without waiting for more. With
        `seed_rows` the random augmentation of a row depends on (seed, epoch, row) only. Raises
        ValueError for wrong values.
        """
        if not isinstance(spec, StreamSpec):
            raise ValueError(f"spec is a {type(spec).__name__}; give a StreamSpec of one rank")
        if spec.plan.oversize == "truncate":
            raise ValueError(
                "plan.oversize is truncate, but only the dataset can shorten a sample; truncate"
                " there, or set oversize to drop, singleton or error"
            )
        if spec.tail == "wrap":
            raise ValueError(
                "tail is wrap, but an iteration is one epoch; set tail to emit or drop, or use"
                " LoadBalancedDataset with infinite_loop"
            )
        if max_window_bytes is not None:
            check_integer("max_window_bytes", max_window_bytes, 1)
        self.spec = spec
        self.join = join
        self._coordinator = coordinator or SingleCoordinator()
        self._collate_fn = collate_fn
        self._length_of = length_of or ColumnLength("input_ids")
        self._num_trained_of = num_trained_of or count_trained
        self._extra_of = extra_of
        self._dummy = dummy
        self._max_window_bytes = max_window_bytes
        options = WorkerOptions(
            num_workers=num_workers,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
        )
        self._feed: MapFeed[Sample] | IterableFeed[Sample]
        if is_iterable_dataset(dataset):
            self._feed = IterableFeed(dataset, options, seed)  # pyright: ignore[reportArgumentType]
        else:
            order = ShardedOrder(
                len(dataset),  # pyright: ignore[reportArgumentType]
                rank=self._coordinator.rank,
                num_ranks=self._coordinator.num_ranks,
                seed=seed,
                shuffle=shuffle,
            )
            self._feed = MapFeed(dataset, order, options, seed_rows=seed_rows)  # pyright: ignore[reportArgumentType]
        self._planner = AlignedPlanner(spec, self._coordinator, join=join)
        self._samples: dict[int, Sample] = {}
        self._num_bytes: dict[int, int] = {}
        self._spare: Numbered[Sample] | None = None
        self._loaded: dict[str, Any] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the current position. It advances at the end of an iteration."""
        return self._feed.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the begin of `epoch`; without effect if it is the epoch of a loaded state."""
        if epoch != self.epoch:
            self._begin_epoch(epoch)

    def __iter__(self) -> Iterator[OnlineStep[Batch]]:
        """Iterate over the steps of the epoch from its begin, or over the rest after a state was
        loaded. Every rank must do so.

        An error of the dataset is raised here, and on the other ranks as AlignmentError.
        """
        if self._loaded is None:
            self._begin_epoch(self.epoch)
        try:
            samples = self._begin()
        except Exception:
            self._planner.fail()
            raise
        return self._steps(self._planner, samples)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last step: epoch, rows taken, rows that wait.

        JSON values for a map-style dataset. For an iterable dataset the waiting samples are
        included; raises ValueError if its position cannot be saved.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        samples = dict(self._samples)
        if self._spare is not None:
            samples[self._spare.number] = self._spare.sample
        return {
            "version": _VERSION,
            "feed": self._feed.state_dict(samples),
            "planner": self._planner.state_dict(),
            "spare": None if self._spare is None else self._spare.number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after `state` of this rank in the next iteration.

        Raises ValueError for a state of another dataset, rank or number of ranks.
        """
        _check_version(state)
        num_ranks = state["planner"]["num_ranks"]
        if num_ranks != self._coordinator.num_ranks:
            raise ValueError(
                f"the state was written by {num_ranks} ranks, here are"
                f" {self._coordinator.num_ranks}; pass the states of all ranks to load_global_state"
            )
        planner = AlignedPlanner(self.spec, self._coordinator, join=self.join)
        planner.load_state_dict(state["planner"])
        self._feed.load_state_dict(state["feed"])
        self._planner = planner
        self._clear_samples()
        self._spare = None
        self._loaded = dict(state)

    def load_global_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue after the `states` of all ranks of a group of any size. Every rank calls it.

        Rows that no step had are distributed again. Counts of rows begin at 0. Raises ValueError
        for an iterable dataset, and for states that are not those of one group.
        """
        if not isinstance(self._feed, MapFeed):
            raise ValueError(
                "an iterable dataset shards itself, so its position cannot be continued on another"
                " number of ranks; use a map-style dataset"
            )
        for state in states:
            _check_version(state)
        states = sorted(states, key=lambda state: state["planner"]["rank"])
        planner = AlignedPlanner(self.spec, self._coordinator, join=self.join)
        planner.load_global_state([state["planner"] for state in states])
        waiting = [waiting_rows(state["planner"]) for state in states]
        self._feed.load_global_state([state["feed"] for state in states], waiting)
        self._planner = planner
        self._clear_samples()
        self._spare = None
        self._loaded = None
        # Any rank can fetch any row of a map-style dataset.
        spares = [state["spare"] for state in states if state["spare"] is not None]
        self._loaded = {**self.state_dict(), "spare": min(spares, default=None)}

    def _begin_epoch(self, epoch: int) -> None:
        self._feed.start_epoch(epoch)
        self._planner = self._empty_planner(self._planner.state_dict())
        self._clear_samples()
        self._loaded = None

    def _empty_planner(self, state: Mapping[str, Any]) -> AlignedPlanner:
        """Return a planner without rows, which continues the number of steps of `state`."""
        planner = AlignedPlanner(self.spec, self._coordinator, join=self.join)
        own = planner.state_dict()
        continued = {name: state[name] for name in ("num_steps", "counts")}
        planner.load_state_dict({**own, **continued})
        return planner

    def _clear_samples(self) -> None:
        self._samples = {}
        self._num_bytes = {}

    def _steps(
        self, planner: AlignedPlanner, samples: Iterator[Numbered[Sample]]
    ) -> Iterator[OnlineStep[Batch]]:
        while True:
            if planner is not self._planner:
                raise RuntimeError(
                    "a new iteration or a state replaced this one; iterate over the new one"
                )
            started = time.perf_counter()
            try:
                self._fill(samples)
            except Exception:
                planner.fail()
                raise
            wait_s = time.perf_counter() - started
            aligned = planner.next_step()
            if aligned is None:
                break
            yield self._collated(aligned, wait_s)
        self._begin_epoch(self.epoch + 1)

    def _begin(self) -> Iterator[Numbered[Sample]]:
        """Return the samples of the epoch that follow; after a load, fetch the waiting ones."""
        if self._loaded is None:
            return self._feed.samples(())
        loaded = self._loaded
        waiting = list(self._planner.waiting)
        spare = loaded["spare"]
        restored = waiting if spare is None else [*waiting, spare]
        samples = self._feed.samples(restored)
        rows = chain(*loaded["planner"]["bins"], loaded["planner"]["window"])
        planned = {row[0]: row[1] for row in rows}
        for number in waiting:
            sample = next(samples).sample
            check_same_length(number, planned[number], self._length_of(sample))
            self._keep(number, sample)
        if spare is not None:
            self._spare = next(samples)
        self._loaded = None
        return samples

    def _fill(self, samples: Iterator[Numbered[Sample]]) -> None:
        """Push samples until a step is complete, or the shard ends."""
        while self._planner.needs_rows:
            if self._is_window_full():
                self._planner.form_now()
                continue
            entry = next(samples, None)
            if entry is None:
                self._planner.close()
                continue
            number, sample = entry
            extra = 0 if self._extra_of is None else self._extra_of(sample)
            length = self._length_of(sample)
            if self._planner.push(number, length, self._num_trained_of(sample), extra):
                self._keep(number, sample)
        self._check_dummy()

    def _keep(self, number: int, sample: Sample) -> None:
        self._samples[number] = sample
        if self._max_window_bytes is not None:
            self._num_bytes[number] = num_bytes(sample)

    def _is_window_full(self) -> bool:
        """Return True if the samples in the window have `max_window_bytes`."""
        if self._max_window_bytes is None:
            return False
        window = self._planner.in_window
        size = sum(self._num_bytes[number] for number in window)
        return len(window) > 0 and size >= self._max_window_bytes

    def _check_dummy(self) -> None:
        """Raise ValueError if this rank may need a dummy and has nothing to make one of."""
        ends_early = not self.join or self.spec.tail == "drop"
        is_alone = self._coordinator.num_ranks == 1
        if ends_early or is_alone or self._dummy is not None:
            return
        if self._spare is None and not self._samples:
            raise ValueError(
                f"rank {self._coordinator.rank} has no row, so it has no microbatch to repeat while"
                " other ranks train theirs; pass dummy, for example PackingCollator.dummy, or give"
                " every rank a row"
            )

    def _collated(self, aligned: AlignedStep, wait_s: float) -> OnlineStep[Batch]:
        microbatches = []
        rows = []
        for microbatch in aligned.own.plan.ranks[0]:
            numbers = tuple(aligned.own.rows[row] for row in microbatch.rows)
            samples = [self._samples.pop(number) for number in numbers]
            if samples:
                # The shortest one costs the least if it is repeated.
                shortest = int(np.argmin(microbatch.lengths))
                self._spare = Numbered(numbers[shortest], samples[shortest])
            microbatches.append(self._collate_fn(samples) if samples else None)
            rows.append(numbers)
            for number in numbers:
                self._num_bytes.pop(number, None)
        filled = [self._dummy_batch() if batch is None else batch for batch in microbatches]
        num_trained = aligned.own.num_trained
        loss_scale = 0.0
        if num_trained:
            loss_scale = token_mean_scale(num_trained, self._coordinator.num_ranks)
        return OnlineStep(
            step=aligned.own.step,
            microbatches=tuple(filled),
            is_dummy=tuple(not numbers for numbers in rows),
            rows=tuple(rows),
            num_rows=aligned.num_rows,
            num_trained=num_trained,
            loss_scale=loss_scale,
            metrics={**aligned.metrics(), "packing/window_wait_s": wait_s},
        )

    def _dummy_batch(self) -> Batch:
        if self._dummy is not None:
            return self._dummy()
        assert self._spare is not None, "checked before the exchange"
        return self._collate_fn([self._spare.sample])


def _check_version(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise ValueError(f"a state is a {type(state).__name__}; give what `state_dict` returned")
    if state.get("version") != _VERSION:
        raise ValueError(
            f"the state of the loader has version {state.get('version')}, this is version"
            f" {_VERSION}; continue with the version that wrote it"
        )
