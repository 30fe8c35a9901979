"""Batch formation after preprocessing and augmentation, aligned over ranks (ODB).

DataLoader workers fetch single samples. This process keeps the window of waiting samples, plans
microbatches from their lengths, and exchanges a few integers per step with the other ranks.
docs/batching_online.md has the protocol and its proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from torch.utils.data import IterableDataset

from nemo_like.data.row_order import ShardedOrder
from nemo_like.data.streaming.alignment import AlignedStep, Coordinator, SingleCoordinator
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.integer_math import check_integer
from nemo_like.torch_data.feeds import IterableFeed, MapFeed, MapStyle, StartMethod, WorkerOptions
from nemo_like.torch_data.packed_batch import token_mean_scale
from nemo_like.torch_data.sample_stream import ColumnLength, SampleStream, count_trained

Sample = TypeVar("Sample")
Batch = TypeVar("Batch")

_VERSION = 2


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
        `spec.max_extra`. `coordinator` connects all data-parallel ranks; None is a single rank.

        `dummy` returns a microbatch without loss, for example `PackingCollator.dummy`. Without it a
        rank with fewer rows than the others repeats its last row with factor 0. When the waiting
        rows have `max_window_bytes`, a microbatch is formed without waiting for more. With
        `seed_rows` the random augmentation of a row depends on (seed, epoch, row) only. Raises
        ValueError for wrong values.
        """
        _check_spec(spec)
        if max_window_bytes is not None:
            check_integer("max_window_bytes", max_window_bytes, 1)
        self.spec = spec
        self.join = join
        self._coordinator = coordinator or SingleCoordinator()
        self._collate_fn = collate_fn
        self._dummy = dummy
        options = WorkerOptions(
            num_workers=num_workers,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
        )
        feed: MapFeed[Sample] | IterableFeed[Sample]
        if isinstance(dataset, IterableDataset):
            feed = IterableFeed(dataset, options, seed=seed)
        else:
            order = ShardedOrder(
                _num_rows(dataset),
                rank=self._coordinator.rank,
                num_ranks=self._coordinator.num_ranks,
                seed=seed,
                shuffle=shuffle,
            )
            feed = MapFeed(dataset, order, options, seed_rows=seed_rows)  # pyright: ignore[reportArgumentType]
        num_tokens = length_of or ColumnLength("input_ids")
        num_trained = num_trained_of or count_trained
        extra = extra_of or (lambda sample: 0)
        self._stream = SampleStream(
            feed,
            spec,
            lambda sample: (num_tokens(sample), num_trained(sample), extra(sample)),
            self._coordinator,
            join=join,
            max_window_bytes=max_window_bytes,
        )
        self._num_iterations = 0
        self._is_loaded = False

    @property
    def epoch(self) -> int:
        """The epoch of the current position. It advances at the end of an iteration."""
        return self._stream.feed.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the begin of `epoch`; without effect if it is the epoch of a loaded state."""
        if epoch != self.epoch:
            self._stream.start_epoch(epoch)
            self._is_loaded = False

    def __iter__(self) -> Iterator[OnlineStep[Batch]]:
        """Iterate over the steps of the epoch from its begin, or over the rest after a state was
        loaded. Every rank must do so.

        An error of the dataset is raised by the iteration, and on the other ranks as
        AlignmentError.
        """
        if not self._is_loaded:
            self._stream.start_epoch(self.epoch)
        self._is_loaded = False
        self._num_iterations += 1
        return self._steps(self._num_iterations)

    def _steps(self, iteration: int) -> Iterator[OnlineStep[Batch]]:
        while True:
            if iteration != self._num_iterations:
                raise RuntimeError(
                    "a new iteration or a state replaced this one; iterate over the new one"
                )
            aligned = self._stream.next_step(self._check_dummy)
            if aligned is None:
                break
            yield self._collated(aligned)
        self._stream.start_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last step: epoch, rows taken, rows that wait.

        JSON values for a map-style dataset. For an iterable dataset the waiting samples are
        included; raises ValueError if its position cannot be saved.
        """
        return {"version": _VERSION, **self._stream.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after `state` of this rank in the next iteration.

        Raises ValueError for a state of another dataset, rank or number of ranks.
        """
        _check_version(state)
        self._stream.load_state_dict(state)
        self._after_load()

    def load_global_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue after the `states` of all ranks of a group of any size. Every rank calls it.

        Rows that no step had are distributed again. Counts of rows begin at 0. Raises ValueError
        for an iterable dataset, and for states that are not from all ranks of one group.
        """
        if not isinstance(self._stream.feed, MapFeed):
            raise ValueError(
                "an iterable dataset shards itself, so its position cannot be continued on another"
                " number of ranks; use a map-style dataset"
            )
        for state in states:
            _check_version(state)
        self._stream.load_global_state(states)
        self._after_load()

    def _after_load(self) -> None:
        self._num_iterations += 1
        self._is_loaded = True

    def _check_dummy(self) -> None:
        """Raise ValueError if this rank may need a dummy and has nothing to make one of."""
        ends_early = not self.join or self.spec.tail == "drop"
        is_alone = self._coordinator.num_ranks == 1
        if ends_early or is_alone or self._dummy is not None:
            return
        if not self._stream.samples:
            raise ValueError(
                f"rank {self._coordinator.rank} has no row, so it has no microbatch to repeat while"
                " other ranks train theirs; pass dummy, for example PackingCollator.dummy, or give"
                " every rank a row"
            )

    def _collated(self, aligned: AlignedStep) -> OnlineStep[Batch]:
        stream = self._stream
        rows = []
        microbatches: list[Batch | None] = []
        lengths = [microbatch.lengths for microbatch in aligned.own.plan.ranks[0]]
        for index, (numbers, samples) in enumerate(stream.take(aligned)):
            rows.append(tuple(map(stream.feed.row_of, numbers)))
            microbatches.append(self._collate_fn(samples) if samples else None)
            if samples:
                # The shortest one costs the least if it is repeated.
                shortest = int(np.argmin(lengths[index]))
                stream.keep_spare(numbers[shortest], samples[shortest])
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
            metrics={**aligned.metrics(), "packing/window_wait_s": stream.wait_s},
        )

    def _dummy_batch(self) -> Batch:
        if self._dummy is not None:
            return self._dummy()
        assert self._stream.spare is not None, "checked before the exchange"
        return self._collate_fn([self._stream.samples[self._stream.spare]])


def _check_spec(spec: StreamSpec) -> None:
    """Raise ValueError unless the loader supports `spec`."""
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


def _num_rows(dataset: Any) -> int:
    """Return the rows of a map-style dataset. Raises ValueError for another object."""
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ValueError(
            f"{type(dataset).__name__} is neither a torch IterableDataset nor a map-style dataset"
            " with __getitem__ and __len__; make it one of them"
        )
    return len(dataset)


def _check_version(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise ValueError(f"a state is a {type(state).__name__}; give what `state_dict` returned")
    if state.get("version") != _VERSION:
        raise ValueError(
            f"the state of the loader has version {state.get('version')}, this is version"
            f" {_VERSION}; continue with the version that wrote it"
        )
