"""Shards and load-balanced batches for plain PyTorch training loops (Cosmos-RL's names).

`LoadBalancedDataset(ShardedIterableDataset(rows, dp_rank, dp_world_size))` gives one list of
batches per optimizer step. docs/batching_methods.md explains both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Literal, TypeVar, get_args

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.row_order import ShardedOrder, check_rank
from nemo_like.data.streaming.alignment import Coordinator
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.integer_math import ceil_div, check_integer
from nemo_like.parallel_layout import Oversize
from nemo_like.torch_data.feeds import IterableFeed, MapFeed, MapStyle
from nemo_like.torch_data.sample_stream import ColumnLength, SampleStream

Sample = TypeVar("Sample")
BatchingStrategy = Literal["prefer_closest", "prefer_first"]

_NO_TRUNCATION = ("singleton", "drop", "error")
"""The values of `Oversize` that need no change of a sample."""


class _ResumableDataset(IterableDataset[Any]):
    """A dataset whose position is saved by the process that iterates over it."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self._shard = 0
        self._position_of: Callable[[], dict[str, Any]] | None = None
        self._loaded: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration with `epoch`."""
        self.epoch = check_integer("epoch", epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this process; JSON values for a map-style dataset.

        Raises ValueError before an iteration in this process, as with DataLoader workers, and for
        an iterable dataset without `state_dict`.
        """
        if self._position_of is not None:
            worker, num_workers = worker_number()
            own = {"worker": worker, "num_workers": num_workers, "shard": self._shard}
            return {**own, "position": self._position_of()}
        if self._loaded is None:
            raise ValueError(
                "the dataset was not iterated in this process, so it has no position: DataLoader"
                " workers have their own; use torchdata's StatefulDataLoader, or resume with"
                " skip_batches(number of optimizer steps)"
            )
        return dict(self._loaded)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after `state` in the next iteration, with the same number of workers.

        Raises ValueError for what is not a state of this class.
        """
        expected = ("worker", "num_workers", "shard", "position")
        if not isinstance(state, Mapping) or not all(key in state for key in expected):
            raise ValueError(
                f"the state must be a mapping with {', '.join(expected)}; give what `state_dict` of"
                " this dataset returned"
            )
        self._loaded = dict(state)
        self._position_of = None

    def _take_loaded(self) -> dict[str, Any] | None:
        """Return the loaded state, which applies to one iteration. Raises ValueError if another
        worker wrote it.
        """
        state, self._loaded = self._loaded, None
        worker, num_workers = worker_number()
        if state is not None and (state["worker"], state["num_workers"]) != (worker, num_workers):
            raise ValueError(
                f"the state belongs to DataLoader worker {state['worker']} of"
                f" {state['num_workers']}, this is {worker} of {num_workers}; use the same"
                " num_workers, or resume with skip_batches, which accepts any"
            )
        return state

    def __getstate__(self) -> dict[str, Any]:
        # A worker does not have the position of this process.
        return {**self.__dict__, "_position_of": None}


class ShardedIterableDataset(_ResumableDataset, Generic[Sample]):
    """The rows of one data-parallel rank of a map-style dataset, one epoch per iteration.

    Each (seed, epoch) has one permutation of all rows, of which a rank has every
    `dp_world_size`-th, and a DataLoader worker its part of these, so that the order of a rank does
    not depend on the number of workers. Errors of the dataset, IndexError included, are raised.
    """

    def __init__(
        self,
        base_dataset: MapStyle[Sample],
        dp_rank: int = 0,
        dp_world_size: int = 1,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        allow_empty: bool = False,
        seed_rows: bool = True,
    ) -> None:
        """Shard `base_dataset`.

        `drop_last` leaves out rows so that all ranks have equally many. `allow_empty` permits ranks
        and workers without rows. `seed_rows` seeds the random augmentation of each row, see
        `feeds.RowGenerators`. Every rank gives the same dataset, seed and shuffle: of rows that
        only one rank has, the others' parts would be lost. A `coordinator` of LoadBalancedDataset
        raises AlignmentError for another number of rows or other contents of the first or last row,
        seed or shuffle. Without one nothing is exchanged, so ranks with different datasets are not
        detected. Raises ValueError for a rank out of range and fewer rows than ranks.
        """
        super().__init__()
        check_rank(dp_rank, dp_world_size)
        self.dataset = base_dataset
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.allow_empty = allow_empty
        self.seed_rows = seed_rows
        self._check_not_empty(1)

    def __len__(self) -> int:
        """Number of rows of this rank in an epoch, over all workers."""
        num_rows = len(self.dataset)
        if self.drop_last:
            return num_rows // self.dp_world_size
        return ceil_div(num_rows - self.dp_rank, self.dp_world_size)

    def __iter__(self) -> Iterator[Sample]:
        """Iterate over the rows of the epoch, or over the rest after `load_state_dict`."""
        worker, num_workers = worker_number()
        feed = self.feed(worker, num_workers)
        loaded = self._take_loaded()
        if loaded is not None:
            feed.load_state_dict(loaded["position"])
            self.epoch = feed.epoch
        self._shard = worker
        self._position_of = lambda: feed.state_dict({})
        return _fetched_samples(feed)

    def feed(self, worker: int, num_workers: int, *, is_endless: bool = False) -> MapFeed[Sample]:
        """Return the rows of a DataLoader worker from the begin of the epoch; see `MapFeed`.

        Raises ValueError for fewer rows than ranks times workers, on every rank.
        """
        self._check_not_empty(num_workers)
        order = ShardedOrder(
            len(self.dataset),
            rank=self.dp_rank + worker * self.dp_world_size,
            num_ranks=self.dp_world_size * num_workers,
            seed=self.seed,
            shuffle=self.shuffle,
        )
        order.start_epoch(self.epoch)
        return MapFeed(
            self.dataset,
            order,
            seed_rows=self.seed_rows,
            is_endless=is_endless,
            max_rows=max(ceil_div(len(self) - worker, num_workers), 0),
        )

    def _check_not_empty(self, num_workers: int) -> None:
        num_rows = len(self.dataset)
        num_shards = self.dp_world_size * num_workers
        if self.drop_last:
            num_rows = num_rows // self.dp_world_size * self.dp_world_size
        if num_rows < num_shards and not self.allow_empty:
            raise ValueError(
                f"the dataset has {len(self.dataset)} rows for dp_world_size={self.dp_world_size} x"
                f" {num_workers} DataLoader workers, so some would have none and other ranks would"
                " wait for them; use more rows or fewer workers, or allow_empty=True with a"
                " coordinator"
            )


class LoadBalancedDataset(_ResumableDataset, Generic[Sample]):
    """One list of batches per optimizer step, formed from a pool of samples by their lengths.

    Use it with `DataLoader(dataset, batch_size=None)` and a `collate_fn` for a list of batches. The
    rules of selection are the rules of Cosmos-RL. With workers, each has its own pool, and the
    DataLoader takes their groups in turns.

    A resume is exact: with `state_dict` and `load_state_dict` only the rows of the pool are read
    again (with workers through torchdata's StatefulDataLoader), with `skip_batches` the rows of the
    skipped groups are read and discarded.
    """

    def __init__(
        self,
        base_dataset: IterableDataset[Sample] | MapStyle[Sample],
        *,
        pool_size: int = 32,
        max_tokens_for_batch: int = 32768,
        batching_strategy: BatchingStrategy = "prefer_closest",
        seq_packing_enabled: bool = False,
        batches_per_optimizer_step: int = 1,
        accumulate_steps: int | None = None,
        max_num_steps: int | None = None,
        infinite_loop: bool = True,
        length_key: str | Callable[[Sample], int] = "input_ids",
        max_tokens_len: int | None = None,
        oversized: Oversize = "singleton",
        coordinator: Coordinator | None = None,
        seed: int = 0,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
    ) -> None:
        """Form batches from `base_dataset`: a ShardedIterableDataset, another IterableDataset,
        which shards itself over ranks and workers, or a map-style dataset, which is sharded with
        `seed`, `dp_rank` and `dp_world_size` (the only rank without torch.distributed).

        A batch has at most `max_tokens_for_batch` tokens: rows times the longest row, or with
        `seq_packing_enabled` the sum of lengths (see `packed_collate.check_packing_support`). A
        longer row is alone in its batch, dropped or an error (`oversized`); rows are not truncated.
        A row of `max_tokens_len` tokens or more is also alone. Each group has
        `batches_per_optimizer_step` batches (`accumulate_steps` is another name for it), the last
        one of a finite stream may have fewer. `max_num_steps` limits the groups of all workers,
        skipped ones included.

        With `infinite_loop` epochs follow each other without end. Without it each row is in exactly
        one batch, and ranks have different numbers of groups unless a `coordinator` of all ranks
        aligns them; batches without rows are empty lists then. Raises ValueError for wrong values.
        """
        super().__init__()
        dataset = _sharded(base_dataset, seed, dp_rank, dp_world_size)
        if accumulate_steps is not None:
            if batches_per_optimizer_step not in (1, accumulate_steps):
                raise ValueError(
                    f"accumulate_steps is {accumulate_steps} and batches_per_optimizer_step"
                    f" {batches_per_optimizer_step}; they are the same setting, give one of them"
                )
            batches_per_optimizer_step = check_integer("accumulate_steps", accumulate_steps, 1)
        if max_tokens_len is not None:
            check_integer("max_tokens_len", max_tokens_len, 1)
        _check_choice("oversized", oversized, _NO_TRUNCATION)
        _check_choice("batching_strategy", batching_strategy, get_args(BatchingStrategy))
        check_integer("pool_size", pool_size, 1)
        check_integer("batches_per_optimizer_step", batches_per_optimizer_step, 1)
        check_integer("max_tokens_for_batch", max_tokens_for_batch, 1)
        if max_num_steps is not None:
            check_integer("max_num_steps", max_num_steps, 1)
        may_be_empty = isinstance(dataset, ShardedIterableDataset) and dataset.allow_empty
        if may_be_empty and (infinite_loop or coordinator is None):
            raise ValueError(
                "allow_empty=True gives ranks without rows, which need infinite_loop=False and a"
                " coordinator that aligns their steps; else other ranks wait for them"
            )
        self.dataset = dataset
        self.max_num_steps = max_num_steps
        self.infinite_loop = infinite_loop
        self.coordinator = coordinator
        plan = PlanSpec(
            layout="packed" if seq_packing_enabled else "padded",
            max_tokens=max_tokens_for_batch,
            oversize=oversized,
        )
        self.spec = StreamSpec(
            plan=plan,
            selection=batching_strategy,
            microbatches_per_step=batches_per_optimizer_step,
            window_rows=pool_size,
            window_tokens=0,
            max_extra=None if max_tokens_len is None else pool_size,
        )
        self.max_tokens_len = max_tokens_len
        self.length_of = ColumnLength(length_key) if isinstance(length_key, str) else length_key
        self._num_skipped = 0

    def __iter__(self) -> Iterator[list[list[Sample]]]:
        """Iterate over the groups of this worker, from the begin of the epoch or after the state of
        `load_state_dict`.
        """
        worker, num_workers = worker_number()
        self._check_iteration(num_workers)
        loaded = self._take_loaded()
        if loaded is not None:
            shard = loaded["shard"]
            stream = self._new_stream(shard, num_workers)
            stream.load_state_dict(loaded["position"])
        else:
            stream, shard = self._stream_after_skip(worker, num_workers)
        self._num_skipped = 0
        self._shard = shard
        self._position_of = stream.state_dict
        max_groups = None
        if self.max_num_steps is not None:
            max_groups = share_of_worker(self.max_num_steps, shard, num_workers)
        return _groups(stream, max_groups)

    def skip_batches(self, num_groups: int) -> None:
        """Skip `num_groups` groups at the begin of the next iteration, counted over all workers.

        That is the number of completed optimizer steps. Only the next iteration of this process, or
        of the workers that a DataLoader starts, skips; set 0 before a further one.
        """
        self._num_skipped = check_integer("num_groups", num_groups, 0)
        self._loaded = None

    def _check_iteration(self, num_workers: int) -> None:
        """Raise ValueError for options that DataLoader workers do not support."""
        if self.coordinator is not None and get_worker_info() is not None:
            raise ValueError(
                "a coordinator exchanges numbers between training processes, which DataLoader"
                " workers cannot; use num_workers=0, or OnlineBatchLoader, whose workers read only"
            )
        if not self.infinite_loop and self.max_num_steps is not None and num_workers > 1:
            raise ValueError(
                "max_num_steps with infinite_loop=False needs one worker, as workers end at"
                " different steps; stop the training loop after max_num_steps instead"
            )

    def _new_stream(self, shard: int, num_workers: int) -> SampleStream[Sample]:
        feed: MapFeed[Sample] | IterableFeed[Sample]
        if isinstance(self.dataset, ShardedIterableDataset):
            self.dataset.set_epoch(self.epoch)
            feed = self.dataset.feed(shard, num_workers, is_endless=True)
        else:
            feed = IterableFeed(self.dataset, epoch=self.epoch)
        return SampleStream(
            feed, self.spec, self._numbers_of, self.coordinator, infinite_loop=self.infinite_loop
        )

    def _numbers_of(self, sample: Sample) -> tuple[int, int | None, int]:
        length = self.length_of(sample)
        if self.max_tokens_len is None:
            return length, None, 0
        # The second resource suffices for all rows of the pool, or for one long row alone.
        is_long = length >= self.max_tokens_len
        return length, None, self.spec.window_rows if is_long else 1

    def _stream_after_skip(self, worker: int, num_workers: int) -> tuple[SampleStream[Sample], int]:
        """Return the stream of `worker` after the skipped groups, and the number of its shard.

        A DataLoader begins with worker 0, so that worker continues the shard whose turn it is.
        """
        num_skipped = self._num_skipped
        is_uneven = bool(num_skipped % num_workers) or (num_skipped > 0 and not self.infinite_loop)
        is_sharded = isinstance(self.dataset, ShardedIterableDataset)
        if not is_sharded and num_workers > 1 and is_uneven:
            raise ValueError(
                f"skip_batches({num_skipped}) with {num_workers} workers needs a"
                " ShardedIterableDataset, whose shards another worker can continue; use one"
                " worker, or torchdata's StatefulDataLoader"
            )
        if self.infinite_loop or num_workers == 1:
            shard = (worker + num_skipped) % num_workers
            stream = self._new_stream(shard, num_workers)
            for _ in range(share_of_worker(num_skipped, shard, num_workers)):
                _next_group(stream)
            return stream, shard
        # Shards end at different groups, so the turns of all of them are repeated.
        streams = [self._new_stream(shard, num_workers) for shard in range(num_workers)]
        num_ended = 0
        turn = 0
        while num_skipped and num_ended < num_workers:
            is_ended = _next_group(streams[turn % num_workers]) is None
            num_ended = num_ended + 1 if is_ended else 0
            num_skipped -= not is_ended
            turn += 1
        shard = (worker + turn) % num_workers
        return streams[shard], shard


def _sharded(
    dataset: Any, seed: int, dp_rank: int | None, dp_world_size: int | None
) -> IterableDataset[Any]:
    """Return an iterable dataset, or the shard of a map-style one. Raises ValueError if it is not
    known which shard.
    """
    is_given = dp_rank is not None or dp_world_size is not None or seed != 0
    if isinstance(dataset, IterableDataset):
        if is_given:
            raise ValueError(
                f"seed, dp_rank and dp_world_size shard a map-style dataset; this"
                f" {type(dataset).__name__} shards itself, so give them to it"
            )
        return dataset
    if (dp_rank is None) != (dp_world_size is None) or (dp_rank is None and _num_ranks() > 1):
        raise ValueError(
            f"dp_rank is {dp_rank} and dp_world_size {dp_world_size}; give both for a map-style"
            " dataset, so that ranks have different rows"
        )
    return ShardedIterableDataset(dataset, dp_rank or 0, dp_world_size or 1, seed=seed)


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def worker_number() -> tuple[int, int]:
    """Return (number of this DataLoader worker, number of workers), (0, 1) without workers."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def share_of_worker(num_groups: int, worker: int, num_workers: int) -> int:
    """Return how many of the first `num_groups` groups `worker` has.

    A DataLoader takes the groups of its workers in turns.
    """
    return ceil_div(max(num_groups - worker, 0), num_workers)


def _fetched_samples(feed: MapFeed[Sample]) -> Iterator[Sample]:
    entries = feed.samples()
    while True:
        with feed.fetching():
            entry = next(entries, None)
        if entry is None:
            return
        yield entry.sample


def _next_group(stream: SampleStream[Sample]) -> list[list[Sample]] | None:
    """Return the batches of the next step, empty for a dummy; None after the last one."""
    step = stream.next_step()
    return None if step is None else [samples for _, samples in stream.take(step)]


def _groups(stream: SampleStream[Sample], max_groups: int | None) -> Iterator[list[list[Sample]]]:
    while max_groups is None or stream.planner.num_steps < max_groups:
        group = _next_group(stream)
        if group is None:
            return
        yield group


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is one of {', '.join(choices)}; got {value!r}")
