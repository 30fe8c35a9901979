"""The plan of a rollout: which replica samples each group, and in which order."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.generation.rollout_plan import plan_rollout


@settings(max_examples=100)
@given(
    costs=st.lists(st.integers(1, 500), max_size=60),
    outstanding=st.lists(st.integers(0, 2000), min_size=1, max_size=5),
)
def test_units_go_to_the_replica_with_the_lowest_load(
    costs: list[int], outstanding: list[int]
) -> None:
    unit_costs, before = np.array(costs, dtype=np.int64), np.array(outstanding, dtype=np.int64)
    owners = plan_rollout(unit_costs, before).replica_of_unit
    after = before + np.bincount(owners, weights=unit_costs, minlength=len(before)).astype(int)
    for replica in set(owners.tolist()):
        # Without its smallest unit, which came last, it had at most the work of every other.
        smallest = unit_costs[owners == replica].min()
        assert after[replica] - smallest <= after.min()


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 500), max_size=60),
    num_replicas=st.integers(1, 8),
    group_size=st.integers(1, 8),
)
def test_each_group_is_planned_once_and_the_longest_begin_first(
    lengths: list[int], num_replicas: int, group_size: int
) -> None:
    predicted = np.array(lengths, dtype=np.float64)
    costs = (predicted * group_size).astype(np.int64)
    idle = np.zeros(num_replicas, dtype=np.int64)
    plan = plan_rollout(costs, idle, predicted)
    units = [plan.units_of(replica) for replica in range(num_replicas)]
    assert sorted(unit for of_replica in units for unit in of_replica) == list(range(len(lengths)))
    for of_replica in units:
        # By length, and in the order of the groups where lengths are equal.
        expected = sorted(of_replica, key=lambda unit: (-lengths[unit], unit))
        assert of_replica == expected
    # Graham's bound of the longest-first rule, from the lower bounds of any assignment.
    lower = max(costs.sum() / num_replicas, costs.max(initial=0))
    loads = np.bincount(plan.replica_of_unit, weights=costs, minlength=num_replicas)
    assert loads.max() <= lower + costs.max(initial=0) * (1 - 1 / num_replicas)
    again = plan_rollout(costs, idle, predicted)
    assert again.order.tolist() == plan.order.tolist()
    assert again.replica_of_unit.tolist() == plan.replica_of_unit.tolist()


def test_without_predictions_the_groups_keep_their_order() -> None:
    costs = np.array([3, 9, 1, 4], dtype=np.int64)
    plan = plan_rollout(costs, np.array([0, 2]))
    # 9 | 2, 9 | 6, 9 | 9, and the last one by the tie to the first replica.
    assert plan.units_of(0) == [1, 2]
    assert plan.units_of(1) == [0, 3]
