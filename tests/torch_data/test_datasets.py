"""Shards and load-balanced batches: examples of the reference, coverage, exact resume with any
number of DataLoader workers.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from nemo_like.data.row_order import ShardedOrder
from nemo_like.data.streaming.alignment import AlignmentError, Coordinator, SingleCoordinator
from nemo_like.data.streaming.former import OversizeRowError
from nemo_like.torch_data.datasets import LoadBalancedDataset, ShardedIterableDataset
from nemo_like.torch_data.drop_in import online_batches
from tests.torch_data.online_ranks import run_ranks
from tests.torch_data.row_datasets import (
    AugmentedRows,
    FailingRows,
    Rows,
    StatelessStream,
    Stream,
    as_they_are,
    length_of,
    numbers_of,
    tokens_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::nemo_like.data.planning.oversize.OversizeWarning")

LENGTHS = [4, 2, 4, 9, 3, 7, 1]


def in_order(lengths: list[int], **options: Any) -> LoadBalancedDataset[Any]:
    """The rows in the given order, once."""
    rows = ShardedIterableDataset(Rows(lengths), shuffle=False)
    return LoadBalancedDataset(rows, **{"infinite_loop": False, **options})


def lengths_of(groups: Any) -> list[list[list[int]]]:
    return [[[len(row["input_ids"]) for row in batch] for batch in group] for group in groups]


def loader(dataset: Any, num_workers: int, method: str | None = "fork") -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=None,
        collate_fn=as_they_are,
        num_workers=num_workers,
        multiprocessing_context=method if num_workers else None,
    )


def message_of(groups: Any, error: type[Exception]) -> str:
    """Message of the error of an iteration. Without its traceback, which is part of a reference
    cycle with the workers' queues: workers would be stopped by a time limit of 5 s each.
    """
    try:
        list(groups)
    except error as found:
        found.__traceback__ = None
        return str(found)
    raise AssertionError(f"no {error.__name__}")


def first(groups: Any, num_groups: int) -> list[list[list[int]]]:
    return numbers_of(itertools.islice(groups, num_groups))


# Shards


@given(
    num_rows=st.integers(1, 60),
    world=st.integers(1, 5),
    num_workers=st.integers(1, 4),
    epoch=st.integers(0, 3),
    drop_last=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_shards_divide_one_permutation(
    num_rows: int, world: int, num_workers: int, epoch: int, drop_last: bool
) -> None:
    seen: list[int] = []
    for rank in range(world):
        dataset = ShardedIterableDataset(
            Rows(range(1, num_rows + 1)), rank, world, seed=5, drop_last=drop_last, allow_empty=True
        )
        dataset.set_epoch(epoch)
        order = ShardedOrder(num_rows, rank=rank, num_ranks=world, seed=5)
        order.start_epoch(epoch)
        own = order.left.tolist()
        if drop_last:
            own = own[: num_rows // world]
        assert [row["number"] for row in dataset] == own
        assert len(dataset) == len(own)
        # The workers' rows in turns are those of the rank.
        for worker in range(num_workers):
            feed = dataset.feed(worker, num_workers)
            with feed.fetching():
                rows = [entry.sample["number"] for entry in feed.samples()]
            assert rows == own[worker::num_workers]
        seen += own
    assert len(seen) == len(set(seen))
    assert len(seen) == (num_rows // world * world if drop_last else num_rows)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_the_order_does_not_depend_on_the_number_of_workers(num_workers: int) -> None:
    dataset = ShardedIterableDataset(Rows([3] * 23), 1, 2, seed=1)
    expected = [row["number"] for row in dataset]
    assert [row["number"] for row in loader(dataset, num_workers)] == expected
    dataset.set_epoch(1)
    other = [row["number"] for row in loader(dataset, num_workers)]
    assert len(other) == len(expected) and other != expected


@pytest.mark.parametrize("error", [IndexError, KeyError, ValueError])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_errors_of_a_row_do_not_end_the_data(error: type[Exception], num_workers: int) -> None:
    rows = ShardedIterableDataset(FailingRows([2] * 20, 7, error))
    for dataset in (rows, LoadBalancedDataset(rows, pool_size=4, max_tokens_for_batch=8)):
        assert "row 7 is bad" in message_of(loader(dataset, num_workers), error)


def test_sharded_rows_resume_at_every_position() -> None:
    dataset = ShardedIterableDataset(Rows([2] * 9), 0, 2, seed=3)
    dataset.set_epoch(4)
    expected = [row["number"] for row in dataset]
    for position in range(1, len(expected) + 1):
        iterator = iter(dataset)
        taken = [next(iterator)["number"] for _ in range(position)]
        state = json.loads(json.dumps(dataset.state_dict()))
        other = ShardedIterableDataset(Rows([2] * 9), 0, 2, seed=3)
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert taken + [row["number"] for row in other] == expected
        # The state applies to one iteration.
        assert [row["number"] for row in other] == expected


def test_an_empty_shard_is_an_error_on_every_rank() -> None:
    for rank in range(4):
        with pytest.raises(ValueError, match="3 rows for dp_world_size=4 x 1"):
            ShardedIterableDataset(Rows([1] * 3), rank, 4)
    for rank in range(2):
        dataset = ShardedIterableDataset(Rows([1] * 3), rank, 2)
        assert "3 rows for dp_world_size=2 x 2 DataLoader workers" in message_of(
            loader(LoadBalancedDataset(dataset), 2), ValueError
        )


def test_shards_of_wrong_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        ShardedIterableDataset(Rows([1] * 9), 2, 2)


# Augmentation


def test_rows_have_the_same_augmentation_whoever_fetches_them() -> None:
    dataset = ShardedIterableDataset(AugmentedRows([9] * 16), seed=2)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    expected = [tokens_of(row) for row in dataset]
    assert states[0] == random.getstate()
    assert states[1] == np.random.get_state()[1].tolist()  # type: ignore[index]
    assert torch.equal(states[2], torch.get_rng_state())
    random.random()
    torch.rand(3)
    assert [tokens_of(row) for row in loader(dataset, 2)] == expected
    dataset.set_epoch(1)
    assert {tokens_of(row) for row in dataset} != set(expected)
    lengths = {len(tokens) for _, tokens in expected}
    assert len(lengths) > 3


# Examples of the reference


@pytest.mark.parametrize(
    ("lengths", "options", "expected"),
    [
        (LENGTHS, {}, [[4, 4, 3, 2, 1], [9, 7]]),
        (LENGTHS, {"batching_strategy": "prefer_first"}, [[4, 2, 4, 3, 1], [9, 7]]),
        (LENGTHS, {"seq_packing_enabled": True}, [[4, 2, 4, 9, 1], [3, 7]]),
        ([12, 9, 8, 1], {"seq_packing_enabled": True}, [[12, 8], [9, 1]]),
        ([25, 3, 3], {}, [[25], [3, 3]]),
        ([3, 25, 3], {}, [[3, 3], [25]]),
        ([20, 3], {}, [[20], [3]]),
    ],
)
def test_examples_of_cosmos_rl(
    lengths: list[int], options: dict[str, Any], expected: list[list[int]]
) -> None:
    groups = lengths_of(in_order(lengths, max_tokens_for_batch=20, **options))
    assert [sorted(batch) for group in groups for batch in group] == [
        sorted(batch) for batch in expected
    ]
    assert all(len(group) == 1 for group in groups)


def pool_rule(
    lengths: list[int], pool_size: int, budget: int, strategy: str, *, is_packed: bool
) -> list[list[int]]:
    """Rows of each batch by the rule of Cosmos-RL, each choice a comparison of all rows."""
    left = list(range(len(lengths)))
    pool: list[int] = []
    batches: list[list[int]] = []
    while left or pool:
        while left and len(pool) < pool_size:
            pool.append(left.pop(0))
        batch = [pool.pop(0)]
        while True:
            longest = max(lengths[row] for row in batch)
            costs = {}
            for row in pool:
                if is_packed:
                    cost = sum(lengths[other] for other in (*batch, row))
                    key: tuple[int, ...] = (row,)
                else:
                    cost = max(longest, lengths[row]) * (len(batch) + 1)
                    key = (cost, abs(lengths[row] - longest), row)
                    if strategy == "prefer_first":
                        key = (cost, row)
                if cost <= budget:
                    costs[row] = key
            if not costs:
                break
            batch.append(min(costs, key=costs.__getitem__))
            pool.remove(batch[-1])
        batches.append(batch)
    return batches


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    pool_size=st.integers(1, 20),
    budget=st.integers(1, 90),
    strategy=st.sampled_from(["prefer_closest", "prefer_first"]),
    is_packed=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_batches_are_those_of_the_pool_of_cosmos_rl(
    lengths: list[int], pool_size: int, budget: int, strategy: str, is_packed: bool
) -> None:
    groups = in_order(
        lengths,
        pool_size=pool_size,
        max_tokens_for_batch=budget,
        batching_strategy=strategy,
        seq_packing_enabled=is_packed,
    )
    expected = pool_rule(lengths, pool_size, budget, strategy, is_packed=is_packed)
    assert numbers_of(groups) == [[batch] for batch in expected]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    pool_size=st.integers(1, 12),
    max_tokens_len=st.integers(1, 30),
    is_packed=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_long_rows_are_alone(
    lengths: list[int], pool_size: int, max_tokens_len: int, is_packed: bool
) -> None:
    options = {"max_tokens_for_batch": 60, "seq_packing_enabled": is_packed}
    groups = in_order(lengths, pool_size=pool_size, max_tokens_len=max_tokens_len, **options)
    batches = [batch for group in numbers_of(groups) for batch in group]
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[row] for row in batch) < max_tokens_len
    # Without a long row nothing changes.
    expected = in_order(lengths, pool_size=pool_size, **options)
    unused = in_order(lengths, pool_size=pool_size, max_tokens_len=31, **options)
    assert numbers_of(unused) == numbers_of(expected)


def test_calls_with_the_names_of_cosmos_rl() -> None:
    seen = []
    for rank in range(2):
        named = LoadBalancedDataset(
            base_dataset=Rows(LENGTHS * 4),
            pool_size=4,
            max_tokens_for_batch=20,
            length_key="input_ids",
            batching_strategy="prefer_first",
            max_tokens_len=9,
            seq_packing_enabled=False,
            seed=3,
            dp_rank=rank,
            dp_world_size=2,
            accumulate_steps=2,
            infinite_loop=False,
        )
        shard = ShardedIterableDataset(
            base_dataset=Rows(LENGTHS * 4), dp_rank=rank, dp_world_size=2, seed=3
        )
        own = LoadBalancedDataset(
            shard,
            pool_size=4,
            max_tokens_for_batch=20,
            batching_strategy="prefer_first",
            max_tokens_len=9,
            batches_per_optimizer_step=2,
            infinite_loop=False,
        )
        groups = numbers_of(named)
        assert groups == numbers_of(own)
        assert all(len(group) == 2 for group in groups[:-1])
        seen += [row for group in groups for batch in group for row in batch]
    assert sorted(seen) == list(range(28))
    alone = LoadBalancedDataset(Rows([3] * 5), max_tokens_for_batch=6, infinite_loop=False)
    assert sum(len(batch) for group in alone for batch in group) == 5


def test_groups_of_batches() -> None:
    # Six batches of one row.
    groups = in_order([5] * 6, max_tokens_for_batch=5, batches_per_optimizer_step=3)
    assert numbers_of(groups) == [[[0], [1], [2]], [[3], [4], [5]]]
    groups = in_order([5] * 4, max_tokens_for_batch=5, batches_per_optimizer_step=3)
    assert numbers_of(groups) == [[[0], [1], [2]], [[3]]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches_per_optimizer_step": 0}, "batches_per_optimizer_step is 0"),
        ({"batches_per_optimizer_step": -1}, "batches_per_optimizer_step is -1"),
        ({"accumulate_steps": 0}, "accumulate_steps is 0"),
        ({"accumulate_steps": 2, "batches_per_optimizer_step": 3}, "give one of them"),
        ({"max_tokens_len": 0}, "max_tokens_len is 0"),
        ({"pool_size": 0}, "pool_size is 0"),
        ({"max_tokens_for_batch": 0}, "max_tokens_for_batch is 0"),
        ({"max_num_steps": 0}, "max_num_steps is 0"),
        ({"batching_strategy": "closest"}, "batching_strategy is one of"),
        ({"oversized": "truncate"}, "oversized is one of"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        in_order([1], **options)


def test_sources_that_would_give_all_ranks_the_same_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="dp_rank is 1 and dp_world_size None; give both"):
        LoadBalancedDataset(Rows([1] * 4), dp_rank=1)
    with pytest.raises(ValueError, match="shards itself"):
        LoadBalancedDataset(ShardedIterableDataset(Rows([1] * 4)), dp_rank=1, dp_world_size=2)
    empty = ShardedIterableDataset(Rows([1]), 0, 2, allow_empty=True)
    with pytest.raises(ValueError, match="allow_empty=True"):
        LoadBalancedDataset(empty)
    with pytest.raises(ValueError, match="allow_empty=True"):
        LoadBalancedDataset(empty, coordinator=SingleCoordinator())
    assert "DataLoader workers cannot" in message_of(
        loader(in_order([1], coordinator=SingleCoordinator()), 1), ValueError
    )
    with pytest.raises(TypeError):
        len(in_order([1]))  # type: ignore[arg-type]


def test_columns_without_a_length_are_reported() -> None:
    with pytest.raises(ValueError, match="no column 'text'"):
        list(in_order([1], length_key="text"))
    by_function = in_order([25, 3, 3], max_tokens_for_batch=20, length_key=length_of)
    assert numbers_of(by_function) == [[[0]], [[1, 2]]]


def test_oversize_policies() -> None:
    dropped = in_order([25, 3, 3], max_tokens_for_batch=20, oversized="drop")
    assert numbers_of(dropped) == [[[1, 2]]]
    with pytest.raises(OversizeRowError, match="row 0 has 25 tokens"):
        list(in_order([25, 3, 3], max_tokens_for_batch=20, oversized="error"))
    endless = in_order([25], max_tokens_for_batch=20, oversized="drop", infinite_loop=True)
    with pytest.raises(ValueError, match="infinite loop would not end"):
        next(iter(endless))


# Properties


@st.composite
def pools(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "pool_size": draw(st.integers(1, 12)),
        "max_tokens_for_batch": draw(st.integers(1, 60)),
        "batching_strategy": draw(st.sampled_from(["prefer_closest", "prefer_first"])),
        "seq_packing_enabled": draw(st.booleans()),
        "batches_per_optimizer_step": draw(st.integers(1, 3)),
    }


def check_batch(batch: list[Any], options: dict[str, Any]) -> None:
    lengths = [len(row["input_ids"]) for row in batch]
    tokens = sum(lengths) if options["seq_packing_enabled"] else len(lengths) * max(lengths)
    assert tokens <= options["max_tokens_for_batch"] or len(lengths) == 1
    numbers = [row["number"] for row in batch]
    assert len(set(numbers)) == len(numbers)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    world=st.integers(1, 4),
    options=pools(),
)
@settings(max_examples=150, deadline=None)
def test_finite_streams_have_each_row_once(
    lengths: list[int], world: int, options: dict[str, Any]
) -> None:
    seen: list[int] = []
    for rank in range(min(world, len(lengths))):
        rows = ShardedIterableDataset(Rows(lengths), rank, min(world, len(lengths)), seed=1)
        groups = list(LoadBalancedDataset(rows, infinite_loop=False, **options))
        for number, group in enumerate(groups):
            is_last = number == len(groups) - 1
            assert len(group) == options["batches_per_optimizer_step"] or is_last
            for batch in group:
                check_batch(batch, options)
                seen += [row["number"] for row in batch]
    assert sorted(seen) == list(range(len(lengths)))


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    options=pools(),
    num_steps=st.integers(1, 20),
)
@settings(max_examples=150, deadline=None)
def test_infinite_streams_repeat_all_rows_and_no_row_is_twice_in_a_batch(
    lengths: list[int], options: dict[str, Any], num_steps: int
) -> None:
    rows = ShardedIterableDataset(Rows(lengths), seed=1)
    dataset = LoadBalancedDataset(rows, max_num_steps=num_steps, **options)
    groups = list(dataset)
    assert len(groups) == num_steps
    counts: Counter[int] = Counter()
    for group in groups:
        assert len(group) == options["batches_per_optimizer_step"]
        for batch in group:
            check_batch(batch, options)
            counts.update(row["number"] for row in batch)
    # A row of an epoch waits at most until its next epoch.
    assert max(counts.values()) - min(counts[row] for row in range(len(lengths))) <= 2


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=24),
    options=pools(),
    infinite_loop=st.booleans(),
    is_random=st.booleans(),
    kind=st.sampled_from(["shard", "stream"]),
)
@settings(max_examples=60, deadline=None)
def test_a_resume_at_every_step_equals_the_uninterrupted_stream(
    lengths: list[int], options: dict[str, Any], infinite_loop: bool, is_random: bool, kind: str
) -> None:
    def make() -> LoadBalancedDataset[Any]:
        rows: Any = AugmentedRows(lengths) if is_random else Rows(lengths)
        source: Any = Stream(lengths)
        if kind == "shard":
            source = ShardedIterableDataset(rows, seed=1)
        return LoadBalancedDataset(source, infinite_loop=infinite_loop, max_num_steps=7, **options)

    full = make()
    full.set_epoch(2)
    groups = []
    states = []
    for group in full:
        groups.append([[tokens_of(row) for row in batch] for batch in group])
        states.append(copy.deepcopy(full.state_dict()))
    for number, state in enumerate(states):
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(state)) if kind == "shard" else state)
        rest = [[[tokens_of(row) for row in batch] for batch in group] for group in resumed]
        assert rest == groups[number + 1 :]
        skipping = make()
        skipping.set_epoch(2)
        skipping.skip_batches(number + 1)
        rest = [[[tokens_of(row) for row in batch] for batch in group] for group in skipping]
        assert rest == groups[number + 1 :]


def test_a_resume_reads_only_the_rows_of_the_pool_again() -> None:
    lengths = [3, 9, 5, 4, 6, 2] * 20
    dataset = LoadBalancedDataset(
        ShardedIterableDataset(Rows(lengths)), pool_size=8, max_tokens_for_batch=20
    )
    iterator = iter(dataset)
    for _ in range(20):
        next(iterator)
    state = dataset.state_dict()
    rows = Rows(lengths)
    other = LoadBalancedDataset(ShardedIterableDataset(rows), pool_size=8, max_tokens_for_batch=20)
    other.load_state_dict(state)
    assert numbers_of([next(iter(other))]) == numbers_of([next(iterator)])
    assert len(rows.fetched) <= 8 + 1


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    num_ranks=st.integers(1, 4),
    options=pools(),
)
@settings(max_examples=40, deadline=None)
def test_a_coordinator_aligns_the_groups_of_finite_streams(
    lengths: list[int], num_ranks: int, options: dict[str, Any]
) -> None:
    def work(coordinator: Coordinator) -> list[list[list[int]]]:
        rows = ShardedIterableDataset(
            Rows(lengths), coordinator.rank, coordinator.num_ranks, allow_empty=True
        )
        dataset = LoadBalancedDataset(rows, infinite_loop=False, coordinator=coordinator, **options)
        return numbers_of(dataset)

    ranks = run_ranks(num_ranks, work)
    assert len({len(groups) for groups in ranks}) == 1
    for aligned in zip(*ranks, strict=True):
        assert len({len(group) for group in aligned}) == 1
    seen = [row for groups in ranks for group in groups for batch in group for row in batch]
    assert sorted(seen) == list(range(len(lengths)))


def test_an_error_of_one_rank_reaches_the_others() -> None:
    def work(coordinator: Coordinator) -> str:
        rows = ShardedIterableDataset(
            FailingRows([3] * 20, 7, IndexError), coordinator.rank, 2, shuffle=False
        )
        dataset = LoadBalancedDataset(rows, infinite_loop=False, coordinator=coordinator)
        error = AlignmentError if coordinator.rank == 0 else IndexError
        return message_of(dataset, error)

    assert "rank 1" in run_ranks(2, work)[0]


# DataLoader workers


@pytest.mark.parametrize("infinite_loop", [True, False])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_skipped_groups_are_counted_over_all_workers(num_workers: int, infinite_loop: bool) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 37).tolist()
    # The first worker has fewer groups than the second, as its rows are shorter.
    lengths[::2] = [max(length // 6, 1) for length in lengths[::2]]

    def make(num_skipped: int) -> list[Any]:
        dataset = LoadBalancedDataset(
            ShardedIterableDataset(Rows(lengths), shuffle=False),
            pool_size=4,
            max_tokens_for_batch=40,
            infinite_loop=infinite_loop,
            max_num_steps=14 if infinite_loop else None,
        )
        dataset.skip_batches(num_skipped)
        return numbers_of(loader(dataset, num_workers))

    groups = make(0)
    assert len(groups) == 14 or not infinite_loop
    if not infinite_loop:
        seen = [row for group in groups for batch in group for row in batch]
        assert sorted(seen) == list(range(37))
    for num_skipped in (1, 2, 5, len(groups) - 2, len(groups)):
        assert make(num_skipped) == groups[num_skipped:]


@pytest.mark.exhaustive
def test_processes_that_are_not_forked_give_the_same_groups() -> None:
    rows = ShardedIterableDataset(AugmentedRows([9, 4, 6, 2, 8] * 8), 0, 2, seed=4)
    dataset = LoadBalancedDataset(rows, pool_size=6, max_tokens_for_batch=24, max_num_steps=9)
    expected = numbers_of(loader(dataset, 2, "fork"))
    assert len(expected) == 9
    assert numbers_of(loader(dataset, 2, "spawn")) == expected


def test_the_position_of_workers_is_not_that_of_the_main_process() -> None:
    dataset = in_order([3] * 20, max_tokens_for_batch=6, pool_size=2)
    first(loader(dataset, 1), 2)
    with pytest.raises(ValueError, match="not iterated in this process"):
        dataset.state_dict()
    limited = in_order([3] * 20, max_num_steps=2)
    assert "needs one worker" in message_of(loader(limited, 2), ValueError)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["shard", "stream"])
def test_resume_through_the_stateful_data_loader(num_workers: int, kind: str) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    lengths = np.random.default_rng(1).integers(1, 30, 41).tolist()

    def make() -> Any:
        source: Any = Stream(lengths)
        if kind == "shard":
            source = ShardedIterableDataset(Rows(lengths), seed=2)
        dataset = LoadBalancedDataset(source, pool_size=5, max_tokens_for_batch=40, max_num_steps=9)
        return stateful.StatefulDataLoader(
            dataset,
            batch_size=None,
            collate_fn=as_they_are,
            num_workers=num_workers,
            multiprocessing_context="fork" if num_workers else None,
        )

    groups = numbers_of(make())
    assert len(groups) == 9
    for num_done in (1, 4, 8):
        interrupted = make()
        iterator = iter(interrupted)
        done = first(iterator, num_done)
        state = interrupted.state_dict()
        del iterator
        resumed = make()
        resumed.load_state_dict(state)
        assert done + numbers_of(resumed) == groups


def test_states_of_another_worker_or_data_set_are_refused() -> None:
    dataset = in_order([3] * 20, max_tokens_for_batch=6, pool_size=3)
    next(iter(dataset))
    state = dataset.state_dict()
    dataset.load_state_dict(state)
    assert "worker 0 of 1, this is 0 of 2" in message_of(loader(dataset, 2), ValueError)
    other = in_order([4] * 20, max_tokens_for_batch=6, pool_size=3)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="waited for its step with 3 tokens and has 4"):
        next(iter(other))
    shorter = in_order([3] * 19, max_tokens_for_batch=6, pool_size=3)
    shorter.load_state_dict(state)
    with pytest.raises(ValueError, match="num_rows=20"):
        next(iter(shorter))


# Iterable sources


def test_iterable_sources_without_a_state_say_so_when_it_is_needed() -> None:
    dataset = LoadBalancedDataset(StatelessStream([3] * 7), infinite_loop=False)
    assert numbers_of(dataset) == [[list(range(7))]]
    with pytest.raises(ValueError, match="StatelessStream is an iterable dataset without"):
        dataset.state_dict()
    dataset.skip_batches(1)
    assert "whose shards another worker can continue" in message_of(loader(dataset, 2), ValueError)


def test_iterable_sources_begin_again_with_the_next_epoch() -> None:
    dataset = LoadBalancedDataset(Stream([3] * 5), pool_size=2, max_tokens_for_batch=6)
    batches = [group[0] for group in first(dataset, 6)]
    # No batch has rows of two epochs.
    assert batches == [[0, 1], [2, 3], [4], [1, 2], [3, 4], [0]]
    with pytest.raises(ValueError, match="gave no sample in an epoch"):
        next(iter(LoadBalancedDataset(Stream([]))))


@pytest.mark.parametrize("state", [None, {}, [], {"worker": 0, "num_workers": 1}])
def test_what_is_no_state_is_refused_when_it_is_loaded(state: Any) -> None:
    shard = ShardedIterableDataset([{"input_ids": [1]}], dp_rank=0, dp_world_size=1)
    for dataset in (shard, LoadBalancedDataset(shard, max_tokens_for_batch=4)):
        with pytest.raises(ValueError, match="give what `state_dict` of this dataset returned"):
            dataset.load_state_dict(state)


@pytest.mark.parametrize("epoch", [-1, "2", 0.5])
def test_what_is_no_epoch_is_an_error(epoch: Any) -> None:
    shard = ShardedIterableDataset([{"input_ids": [1]}], dp_rank=0, dp_world_size=1)
    for dataset in (shard, LoadBalancedDataset(shard, max_tokens_for_batch=4)):
        with pytest.raises(ValueError, match="epoch is"):
            dataset.set_epoch(epoch)


@pytest.mark.parametrize("uses_online_batches", [True, False])
@pytest.mark.parametrize("differ", ["size", "contents"])
def test_ranks_with_different_datasets_are_an_error_of_all_ranks(
    uses_online_batches: bool, differ: str
) -> None:
    def work(coordinator: Coordinator) -> str:
        rows: Any = Rows([3] * (12, 4)[coordinator.rank])
        if differ == "contents":
            # Of one length: each rank has rows of its own already.
            rows = [{"input_ids": [coordinator.rank] * 3} for _ in range(12)]
        if uses_online_batches:
            loader = DataLoader(rows, batch_size=1, collate_fn=list)
            steps = online_batches(loader, 8, collate_fn=list, coordinator=coordinator).loader
        else:
            steps = LoadBalancedDataset(
                ShardedIterableDataset(rows, coordinator.rank, 2),
                coordinator=coordinator,
                max_tokens_for_batch=8,
                infinite_loop=False,
            )
        with pytest.raises(AlignmentError, match="so must a map-style dataset") as error:
            next(iter(steps))
        return str(error.value)

    first, second = run_ranks(2, work)
    assert first == second


def test_rows_with_random_numbers_of_their_own_are_not_compared() -> None:
    class Noisy(Rows):
        """Of one length, with contents that no generator determines."""

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**super().__getitem__(index), "noise": os.urandom(8)}

    def work(coordinator: Coordinator) -> list[int]:
        dataset = LoadBalancedDataset(
            ShardedIterableDataset(Noisy([3] * 12), coordinator.rank, 2),
            coordinator=coordinator,
            max_tokens_for_batch=8,
            infinite_loop=False,
        )
        return [row["number"] for group in dataset for batch in group for row in batch]

    assert sorted(itertools.chain(*run_ranks(2, work))) == list(range(12))
