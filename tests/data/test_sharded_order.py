"""Shards of an epoch partition its permutation for any number of ranks, also when it changes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.row_order import ShardedOrder, epoch_permutation


def order_of_rank(
    num_rows: int, rank: int, num_ranks: int, seed: int, *, shuffle: bool
) -> ShardedOrder:
    return ShardedOrder(num_rows, rank=rank, num_ranks=num_ranks, seed=seed, shuffle=shuffle)


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


@settings(max_examples=200, deadline=None)
@given(
    num_rows=st.integers(0, 200),
    num_ranks=st.integers(1, 16),
    num_workers=st.integers(1, 5),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 3),
)
def test_ranks_and_workers_partition_the_permutation(
    num_rows: int, num_ranks: int, num_workers: int, seed: int, epoch: int
) -> None:
    permutation = epoch_permutation(num_rows, seed, epoch)
    assert sorted(permutation.tolist()) == list(range(num_rows))
    found = []
    for rank in range(num_ranks):
        order = ShardedOrder(num_rows, rank=rank, num_ranks=num_ranks, seed=seed)
        order.start_epoch(epoch)
        own = order.left.tolist()
        assert own == permutation[rank::num_ranks].tolist()
        # Sizes differ by at most one row.
        assert len(own) in (num_rows // num_ranks, -(-num_rows // num_ranks))
        of_workers = []
        for worker in range(num_workers):
            shard = rank + worker * num_ranks
            part = ShardedOrder(num_rows, rank=shard, num_ranks=num_ranks * num_workers, seed=seed)
            part.start_epoch(epoch)
            of_workers.append(part.left.tolist())
        # Rows taken from the workers in turns are those of the rank in order.
        in_turns = [of_workers[i % num_workers][i // num_workers] for i in range(len(own))]
        assert in_turns == own
        assert sum(map(len, of_workers)) == len(own)
        found += own
    assert sorted(found) == list(range(num_rows))


def test_the_permutation_depends_on_seed_and_epoch_only() -> None:
    np.random.seed(1)
    first = epoch_permutation(50, 3, 1).tolist()
    np.random.seed(2)
    assert epoch_permutation(50, 3, 1).tolist() == first
    assert epoch_permutation(50, 3, 2).tolist() != first
    assert epoch_permutation(50, 4, 1).tolist() != first
    # The pairs (seed, epoch) are not added up.
    assert epoch_permutation(50, 2, 2).tolist() != first
    assert epoch_permutation(50, 3, 1, shuffle=False).tolist() == list(range(50))


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_rows=st.integers(0, 60), num_ranks=st.integers(1, 6))
def test_a_rank_resumes_at_every_position(
    data: st.DataObject, num_rows: int, num_ranks: int
) -> None:
    rank = data.draw(st.integers(0, num_ranks - 1))
    order = ShardedOrder(num_rows, rank=rank, num_ranks=num_ranks, seed=5)
    other = ShardedOrder(num_rows, rank=rank, num_ranks=num_ranks, seed=5)
    for size in data.draw(st.lists(st.integers(0, 9), max_size=12)):
        state = through_json(other.state_dict())
        other = ShardedOrder(num_rows, rank=rank, num_ranks=num_ranks, seed=5)
        other.load_state_dict(state)
        assert other.epoch == order.epoch
        assert other.num_left == order.num_left
        assert other.take(size).tolist() == order.take(size).tolist()
        if order.num_left == 0:
            order.start_epoch()
            other.start_epoch()


@settings(max_examples=120, deadline=None)
@given(
    data=st.data(),
    num_rows=st.integers(0, 120),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    shuffle=st.booleans(),
)
def test_an_epoch_that_changes_its_number_of_ranks_trains_each_row_once(
    data: st.DataObject, num_rows: int, sizes: list[int], shuffle: bool
) -> None:
    """Each part of the epoch runs on another number of ranks; some taken rows stay untrained."""
    trained: list[int] = []
    states: list[dict[str, Any]] = []
    untrained: list[list[int]] = []
    for part, num_ranks in enumerate(sizes):
        orders = [
            order_of_rank(num_rows, rank, num_ranks, 7, shuffle=shuffle)
            for rank in range(num_ranks)
        ]
        for order in orders:
            if part == 0:
                order.start_epoch(2)
            else:
                order.load_global_state(data.draw(st.permutations(states)), untrained)
            assert order.epoch == 2
        untrained = []
        for order in orders:
            taken = order.take(data.draw(st.integers(0, order.num_left))).tolist()
            waiting = set(data.draw(st.permutations(taken))[: data.draw(st.integers(0, 3))])
            trained += [row for row in taken if row not in waiting]
            untrained.append([row for row in taken if row in waiting])
        states = [through_json(order.state_dict()) for order in orders]
        # A rank of the same size resumes in the middle of a part with a history.
        again = order_of_rank(num_rows, num_ranks - 1, num_ranks, 7, shuffle=shuffle)
        again.load_state_dict(states[-1])
        assert again.left.tolist() == orders[-1].left.tolist()
    last = ShardedOrder(num_rows, seed=7, shuffle=shuffle)
    last.load_global_state(states, untrained)
    left = last.take(num_rows).tolist()
    # Rows that were taken and not trained are the next ones.
    num_untrained = sum(map(len, untrained))
    assert sorted(left[:num_untrained]) == sorted(row for rows in untrained for row in rows)
    assert sorted(trained + left) == list(range(num_rows))
    last.start_epoch()
    expected = epoch_permutation(num_rows, 7, 3, shuffle=shuffle)
    assert last.left.tolist() == expected.tolist()


def states_of(num_ranks: int, num_rows: int = 12) -> list[dict[str, Any]]:
    """States of all ranks after each took two rows."""
    states = []
    for rank in range(num_ranks):
        order = ShardedOrder(num_rows, rank=rank, num_ranks=num_ranks)
        order.take(2)
        states.append(order.state_dict())
    return states


def test_states_that_are_not_those_of_one_group_are_errors() -> None:
    order = ShardedOrder(12)
    first, second, third = states_of(3)
    with pytest.raises(ValueError, match="2 states were given"):
        order.load_global_state([first, second])
    with pytest.raises(ValueError, match="0 states were given"):
        order.load_global_state([])
    with pytest.raises(ValueError, match=r"ranks \[0, 1, 1\]"):
        order.load_global_state([first, second, second])
    with pytest.raises(ValueError, match=r"different epochs \[0, 1\]"):
        order.load_global_state([first, second, {**third, "epoch": 1}])
    with pytest.raises(ValueError, match="seed=4, here seed=0"):
        order.load_global_state([first, second, {**third, "seed": 4}])
    part = {"taken": [0], "left": [[]]}
    with pytest.raises(ValueError, match="another part of the epoch"):
        order.load_global_state([first, second, {**third, "history": [part]}])
    assert order.left.tolist() == ShardedOrder(12).left.tolist()


def test_untrained_rows_are_the_next_ones() -> None:
    order = ShardedOrder(12, shuffle=False)
    states = []
    for rank in range(2):
        shard = ShardedOrder(12, rank=rank, num_ranks=2, shuffle=False)
        shard.take(2)
        states.append(shard.state_dict())
    # Rows 0 and 2 were taken by rank 0, rows 1 and 3 by rank 1.
    order.load_global_state(states, [[2], [1]])
    assert order.left.tolist() == [2, 1, 4, 5, 6, 7, 8, 9, 10, 11]
    with pytest.raises(ValueError, match="1 lists of rows for 2 ranks"):
        order.load_global_state(states, [[2]])


def test_a_state_of_another_order_or_rank_is_an_error() -> None:
    state = ShardedOrder(12, rank=1, num_ranks=2).state_dict()
    with pytest.raises(ValueError, match="num_rows=12, here num_rows=13"):
        ShardedOrder(13, rank=1, num_ranks=2).load_state_dict(state)
    with pytest.raises(ValueError, match="shuffle=True, here shuffle=False"):
        ShardedOrder(12, rank=1, num_ranks=2, shuffle=False).load_state_dict(state)
    with pytest.raises(ValueError, match=r"rank=1.*load_global_state"):
        ShardedOrder(12, rank=0, num_ranks=2).load_state_dict(state)
    with pytest.raises(ValueError, match=r"num_ranks=2.*load_global_state"):
        ShardedOrder(12, rank=1, num_ranks=3).load_state_dict(state)
    with pytest.raises(ValueError, match="version 0"):
        ShardedOrder(12, rank=1, num_ranks=2).load_state_dict({**state, "version": 0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((2, 2), "rank 2 of 2"), ((-1, 2), "rank is -1"), ((0, 0), "num_ranks is 0")],
)
def test_a_rank_out_of_range_is_an_error(arguments: tuple[int, int], message: str) -> None:
    rank, num_ranks = arguments
    with pytest.raises(ValueError, match=message):
        ShardedOrder(9, rank=rank, num_ranks=num_ranks)


def test_a_negative_number_of_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_rows is -1"):
        ShardedOrder(-1)
