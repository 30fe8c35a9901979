"""Batch formation after preprocessing and augmentation, aligned over ranks (ODB).

DataLoader workers fetch single samples. This process keeps the window of waiting samples, plans
microbatches from their lengths, and exchanges a few integers per step with the other ranks.
docs/batching_methods.md has the protocol.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, TypeVar, get_args

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from nemo_like.data.planning.oversize import OversizeWarning
from nemo_like.data.row_order import ShardedOrder
from nemo_like.data.streaming.alignment import (
    AlignedPlanner,
    AlignedStep,
    AlignmentError,
    Coordinator,
    SingleCoordinator,
)
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.torch_data.feeds import IterableFeed, MapFeed, MapStyle, SamplerOrder, WorkerOptions
from nemo_like.torch_data.packed_batch import IGNORE_INDEX, token_mean_scale
from nemo_like.torch_data.sample_stream import (
    EmptyRows,
    SampleStream,
    count_trained,
    sample_numbers,
)

Sample = TypeVar("Sample")
Batch = TypeVar("Batch")

LossScaling = Literal["exact", "approx", "none"]

_VERSION = 3
_MAX_DUMMY_SHARE = 0.1
"""Share of dummies in an epoch above which a warning tells that ranks wait for each other.
"""
_MIN_DUMMIES = 10
"""Dummies of the last steps of any epoch, which do not need a warning."""


@dataclass(frozen=True, eq=False)
class OnlineStep(Generic[Batch]):
    """The microbatches of this rank in one optimizer step."""

    step: int
    """Number of steps before it, over all epochs."""
    microbatches: tuple[Batch, ...] = field(repr=False)
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
    averaged over ranks, as DDP and FSDP do. 0 in a step without tokens with loss, and 1 with
    `loss_scaling="none"`.
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
    number of steps and microbatches, for any number of rows per rank. At most `spec.window_rows`
    rows wait, or as many as a full microbatch needs, and `num_workers * prefetch_factor` are
    fetched in advance.

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
        sampler: Any = None,
        seed: int = 0,
        shuffle: bool = True,
        join: bool = True,
        dummy: Callable[[], Batch] | None = None,
        loss_scaling: LossScaling = "approx",
        empty_rows: EmptyRows = "error",
        seed_rows: bool = True,
        **workers: Any,
    ) -> None:
        """Form microbatches of `dataset`: map-style, of which every rank has the rows of its shard,
        or iterable, which shards itself over ranks and workers.

        `spec` describes one rank (`plan.num_ranks=1`). `length_of` counts the tokens of a sample
        (default: its `input_ids`), `num_trained_of` those with loss (default: `labels` but the
        first that are not -100, or all but the first token without labels). A `collate_fn` with a
        method `sample_numbers`, as `PackingCollator` has, counts what it keeps. `extra_of` is the
        use of `spec.max_extra`. `coordinator` connects all data-parallel ranks; None is a single
        rank. `sampler`, a sampler or batch sampler of torch, replaces `shuffle`.

        `dummy` returns a microbatch without loss, for example `PackingCollator.dummy`. Without it a
        rank with fewer rows than the others repeats its last row with factor 0. `loss_scaling` is
        the count in `loss_scale`: the `labels` with loss of the collated microbatches (`exact`, one
        more exchange per step), or what `num_trained_of` counts (`approx`, equal unless the
        collator changes labels), or `none`. Rows without tokens are an error, or dropped and
        counted (`empty_rows`). With `seed_rows` the random augmentation of a row depends on (seed,
        epoch, row) only. `workers` are fields of `WorkerOptions`. Raises ValueError for wrong
        values.
        """
        _check_spec(spec)
        for name, value, kind in (
            ("loss_scaling", loss_scaling, LossScaling),
            ("empty_rows", empty_rows, EmptyRows),
        ):
            if value not in get_args(kind):
                raise ValueError(f"{name} is one of {', '.join(get_args(kind))}; got {value!r}")
        self.spec = spec
        self.join = join
        self.loss_scaling = loss_scaling
        self.coordinator = coordinator or SingleCoordinator()
        self._collate_fn = collate_fn
        self._dummy = dummy
        options = WorkerOptions(**workers)
        self.dataset = dataset
        feed: MapFeed[Sample] | IterableFeed[Sample]
        if isinstance(dataset, IterableDataset):
            feed = IterableFeed(dataset, options, seed=seed)
        else:
            self._order_of = partial(_row_order, dataset, sampler, seed, shuffle=shuffle)
            order = self._order_of(self.coordinator.rank, self.coordinator.num_ranks)
            feed = MapFeed(dataset, order, options, seed_rows=seed_rows)  # pyright: ignore[reportArgumentType]
        self._stream = SampleStream(
            feed,
            spec,
            _numbers_of(collate_fn, length_of, num_trained_of, extra_of),
            self.coordinator,
            join=join,
            empty_rows=empty_rows,
        )
        self._num_dummies = np.zeros(2, dtype=np.int64)
        """Dummy microbatches of all ranks in this epoch, and all microbatches."""
        self._num_iterations = 0
        self._is_loaded = False
        self._peeked: AlignedStep | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the current position. It advances at the end of an iteration."""
        return self._stream.feed.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the begin of `epoch`; without effect if it is the epoch of a loaded state."""
        if epoch != self.epoch:
            self._stream.start_epoch(epoch)
            self._is_loaded = False
            self._peeked = None

    def peek(self) -> None:
        """Go to the next epoch if the loaded state has no step left, which all ranks together know.

        Every rank calls it before the iteration. The next step is aligned, but not collated.
        """
        self._peeked = self._stream.next_step(self._check_dummy)
        if self._peeked is None:
            self._stream.start_epoch()

    def __iter__(self) -> Iterator[OnlineStep[Batch]]:
        """Iterate over the steps of the epoch from its begin, or over the rest after a state was
        loaded. Every rank must do so.

        An error of the dataset is raised by the iteration, and on the other ranks as
        AlignmentError.
        """
        if not self._is_loaded:
            self._stream.start_epoch(self.epoch)
            self._peeked = None
        self._is_loaded = False
        self._num_iterations += 1
        return self._steps(self._num_iterations)

    def _steps(self, iteration: int) -> Iterator[OnlineStep[Batch]]:
        while True:
            if iteration != self._num_iterations:
                raise RuntimeError(
                    "a new iteration or a state replaced this one; iterate over the new one"
                )
            aligned = self._peeked or self._stream.next_step(self._check_dummy)
            self._peeked = None
            if aligned is None:
                break
            yield self._collated(aligned)
        self._warn_of_dummies()
        self._stream.start_epoch()

    def count_steps(self, lengths: Sequence[int], epoch: int) -> int:
        """Return the number of steps of `epoch` on every rank, from the `lengths` of all rows.

        The steps of all ranks are planned for it. Raises TypeError for an iterable dataset, and if
        other numbers than lengths limit a microbatch.
        """
        spec = self.spec
        if not isinstance(self._stream.feed, MapFeed):
            raise TypeError("the number of steps over an iterable dataset is not known")
        if spec.count_mode == "effective" or spec.max_extra is not None:
            raise TypeError("the number of steps depends on more than lengths with this spec")
        num_ranks = self.coordinator.num_ranks
        orders = [self._order_of(rank, num_ranks) for rank in range(num_ranks)]
        planners = [
            AlignedPlanner(spec, _SimulatedRank(rank, num_ranks), join=self.join)
            for rank in range(num_ranks)
        ]
        if num_ranks > 1 and any(map(_has_own_ranks, orders)):
            raise TypeError(
                "the sampler divides its rows over ranks; the rows of other ranks are not known"
            )
        num_before = 0
        # The token limit of a warmup depends on the steps of the epochs before.
        for planned_epoch in range(0 if spec.warmup_steps else epoch, epoch + 1):
            num_before = planners[0].num_steps
            _plan_epoch(planners, orders, lengths, planned_epoch)
        return planners[0].num_steps - num_before

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last step: epoch, rows taken, rows that wait.

        JSON values for a map-style dataset. For an iterable dataset the waiting samples are
        included; raises ValueError if its position cannot be saved.
        """
        if self._peeked is not None:
            raise ValueError("the next step is formed already; save the position after it")
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
        self._peeked = None
        self._num_iterations += 1
        self._is_loaded = True

    def _check_dummy(self) -> None:
        """Raise ValueError if this rank may need a dummy and has nothing to make one of."""
        ends_early = not self.join or self.spec.tail == "drop"
        is_alone = self.coordinator.num_ranks == 1
        can_fetch = isinstance(self._stream.feed, MapFeed)
        if ends_early or is_alone or can_fetch or self._dummy is not None:
            return
        if not self._stream.samples:
            raise ValueError(
                f"rank {self.coordinator.rank} has no row, so it has no microbatch to repeat while"
                " other ranks train theirs; pass dummy, for example PackingCollator.dummy, or give"
                " every rank a row"
            )

    def _collated(self, aligned: AlignedStep) -> OnlineStep[Batch]:
        stream = self._stream
        rows = []
        microbatches: list[Batch | None] = []
        lengths = [microbatch.lengths for microbatch in aligned.own.plan.ranks[0]]
        failure: Exception | None = None
        for index, (numbers, samples) in enumerate(stream.take(aligned)):
            rows.append(tuple(map(stream.feed.row_of, numbers)))
            if samples:
                # The shortest one costs the least if it is repeated. A collator may modify it.
                shortest = int(np.argmin(lengths[index]))
                stream.keep_spare(numbers[shortest], copy.copy(samples[shortest]))
            try:
                microbatches.append(self._collate_fn(samples) if samples else None)
            except Exception as error:  # noqa: BLE001 - raised after the exchange
                failure = error
                break
        num_trained = self._count_trained(aligned, microbatches, failure)
        filled = [self._dummy_batch() if batch is None else batch for batch in microbatches]
        self._num_dummies += aligned.num_dummies, len(filled) * self.coordinator.num_ranks
        loss_scale = 1.0 if self.loss_scaling == "none" else 0.0
        if num_trained and self.loss_scaling != "none":
            loss_scale = token_mean_scale(num_trained, self.coordinator.num_ranks)
        elif not num_trained:
            warnings.warn(
                f"step {aligned.own.step} has no token with loss, so its gradient is 0; check the"
                " labels (-100 is a token without loss)",
                stacklevel=3,
            )
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

    def _count_trained(
        self, aligned: AlignedStep, batches: list[Batch | None], failure: Exception | None
    ) -> int:
        """Return the tokens with loss of all ranks; raise `failure`, on the others its report."""
        if self.loss_scaling != "exact":
            if failure is not None:
                raise failure
            return aligned.own.num_trained
        own = 0
        try:
            own = sum(count_labels(batch) for batch in batches if batch is not None)
        except ValueError as error:
            failure = failure or error
        counts = self.coordinator.all_gather([own, int(failure is not None)])
        if failure is not None:
            raise failure
        if counts[:, 1].any():
            raise AlignmentError(
                f"rank {np.flatnonzero(counts[:, 1]).tolist()} could not collate its microbatches;"
                " its own error message has the cause"
            )
        return int(counts[:, 0].sum())

    def _warn_of_dummies(self) -> None:
        num_dummies, num_microbatches = self._num_dummies.tolist()
        self._num_dummies[:] = 0
        is_many = num_dummies > max(_MAX_DUMMY_SHARE * num_microbatches, _MIN_DUMMIES)
        if is_many and self.coordinator.rank == 0:
            warnings.warn(
                f"{num_dummies} of {num_microbatches} microbatches of this epoch were dummies: some"
                " ranks have fewer or shorter rows, and waited for the others; shuffle the rows"
                " over ranks (a map-style dataset is balanced by itself)",
                stacklevel=3,
            )

    def _dummy_batch(self) -> Batch:
        if self._dummy is not None:
            return self._dummy()
        if self._stream.spare is not None:
            return self._collate_fn([copy.copy(self._stream.samples[self._stream.spare])])
        # A rank without rows. An iterable dataset was refused before the exchange.
        dataset: Any = self.dataset
        return self._collate_fn([dataset[0]])


def count_labels(batch: Any) -> int:
    """Return the tokens with loss of a collated microbatch, a mapping.

    `shift_labels` count as they are. `labels` of the shape of `input_ids` are not shifted, so the
    first of each row does not count; others, as of a classification, all count. Raises ValueError
    without labels.
    """
    if not isinstance(batch, Mapping) or ("labels" not in batch and "shift_labels" not in batch):
        raise ValueError(
            f"the collate_fn returned a {type(batch).__name__} without labels, whose tokens with"
            ' loss cannot be counted; return a mapping with labels, or use loss_scaling="approx"'
        )
    if "shift_labels" in batch:
        labels = batch["shift_labels"]
    else:
        labels = batch["labels"]
        input_ids = batch.get("input_ids")
        if isinstance(input_ids, Tensor) and labels.ndim > 1 and labels.shape == input_ids.shape:
            labels = labels[..., 1:]
    return int((labels != IGNORE_INDEX).sum())


def _numbers_of(
    collate_fn: Any,
    length_of: Callable[[Any], int] | None,
    num_trained_of: Callable[[Any], int | None] | None,
    extra_of: Callable[[Any], int] | None,
) -> Callable[[Any], tuple[int, int | None, int]]:
    """Return the function that counts the length, the tokens with loss and the second resource."""
    default = getattr(collate_fn, "sample_numbers", sample_numbers)

    def numbers(sample: Any) -> tuple[int, int | None, int]:
        extra = 0 if extra_of is None else extra_of(sample)
        if length_of is None and num_trained_of is None:
            length, num_trained = default(sample)
            return length, num_trained, extra
        length = default(sample)[0] if length_of is None else length_of(sample)
        if num_trained_of is None:
            return length, count_trained(sample, length), extra
        return length, num_trained_of(sample), extra

    return numbers


def _row_order(
    dataset: Any, sampler: Any, seed: int, rank: int, num_ranks: int, *, shuffle: bool
) -> ShardedOrder | SamplerOrder:
    num_rows = _num_rows(dataset)
    if sampler is not None:
        return SamplerOrder(sampler, rank=rank, num_ranks=num_ranks, seed=seed)
    return ShardedOrder(num_rows, rank=rank, num_ranks=num_ranks, seed=seed, shuffle=shuffle)


@dataclass(frozen=True)
class _SimulatedRank(SingleCoordinator):
    """A rank whose proposals are collected by `OnlineBatchLoader.count_steps`."""

    rank: int
    num_ranks: int


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


def _has_own_ranks(order: ShardedOrder | SamplerOrder) -> bool:
    return isinstance(order, SamplerOrder) and hasattr(order.sampler, "num_replicas")


def _plan_epoch(
    planners: Sequence[AlignedPlanner],
    orders: Sequence[ShardedOrder | SamplerOrder],
    lengths: Sequence[int],
    epoch: int,
) -> None:
    """Plan the steps of `epoch` on all ranks."""
    shards = []
    for planner, order in zip(planners, orders, strict=True):
        order.start_epoch(epoch)
        planner.clear()
        rows = order.order if isinstance(order, ShardedOrder) else order.indices
        planner.shard_rows = len(rows)
        shards.append(enumerate([int(lengths[row]) for row in rows]))
    with warnings.catch_warnings(category=OversizeWarning, action="ignore"):
        while True:
            for planner, shard in zip(planners, shards, strict=True):
                _fill(planner, shard)
            ranks = np.array([planner.proposal() for planner in planners])
            steps = [planner.resolve(ranks) for planner in planners]
            if steps[0] is None:
                return


def _fill(planner: AlignedPlanner, shard: Iterator[tuple[int, int]]) -> None:
    """Push the lengths of `shard` until the step of `planner` is complete."""
    while planner.needs_rows:
        number, length = next(shard, (-1, 0))
        if number < 0:
            planner.close()
        elif length == 0:
            planner.drop_row()
        else:
            planner.push(number, length)


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
