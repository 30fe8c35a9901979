"""The plan of a rollout: the replica of each group of completions, and the order of the groups.

The planner is longest processing time first (Graham 1969) with predicted lengths: the group with
the most predicted tokens goes to the replica with the least planned work, and each replica begins
with the groups whose completions are predicted to be the longest, so that none of them begins when
the other replicas are about to end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class RolloutPlan:
    """Where and in which order U groups of completions are sampled."""

    replica_of_unit: np.ndarray
    """int64 [U]: index of the replica of each group."""
    order: np.ndarray
    """int64 [U]: the groups in the order in which their replicas begin them."""

    def units_of(self, replica: int) -> list[int]:
        """Return the groups of a replica in their order."""
        return self.order[self.replica_of_unit[self.order] == replica].tolist()


def plan_rollout(
    unit_costs: np.ndarray, outstanding: np.ndarray, lengths: np.ndarray | None = None
) -> RolloutPlan:
    """Plan groups with `unit_costs` predicted tokens, int64 [U].

    `outstanding` int64 [R] is the work that each replica has already. `lengths` float [U] are the
    predicted tokens of one completion of each group, by which they are ordered; None keeps the
    order of the groups. Ties go to the first group and the first replica, so the plan depends on
    the arguments only.
    """
    loads = np.array(outstanding, dtype=np.int64)
    replica_of_unit = np.zeros(len(unit_costs), dtype=np.int64)
    for unit in np.argsort(-unit_costs, kind="stable"):
        replica = int(loads.argmin())
        replica_of_unit[unit] = replica
        loads[replica] += unit_costs[unit]
    order = np.arange(len(unit_costs)) if lengths is None else np.argsort(-lengths, kind="stable")
    return RolloutPlan(replica_of_unit, order)
