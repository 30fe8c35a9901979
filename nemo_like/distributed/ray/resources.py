"""What a run asks of a cluster, and the sentences for when there is no room. Pure;
`virtual_cluster` asks Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_like.config.schema import ClusterConfig


@dataclass(frozen=True, slots=True, order=True)
class Resources:
    """CPU cores and GPUs."""

    cpus: float
    gpus: float

    def times(self, count: int) -> Resources:
        return Resources(self.cpus * count, self.gpus * count)

    def minus(self, other: Resources) -> Resources:
        return Resources(self.cpus - other.cpus, self.gpus - other.gpus)

    def holds(self, other: Resources) -> bool:
        # Ray keeps resources to 1e-4; a sum of fractions must not fail by less than that.
        return self.cpus + 1e-5 >= other.cpus and self.gpus + 1e-5 >= other.gpus

    def num_fitting(self, unit: Resources) -> int:
        """How many of `unit` go in."""
        counts = [
            int((own + 1e-5) // asked)
            for own, asked in ((self.cpus, unit.cpus), (self.gpus, unit.gpus))
            if asked > 0
        ]
        return max(0, min(counts)) if counts else 0

    def __str__(self) -> str:
        return f"{self.cpus:g} CPU" + (f" + {self.gpus:g} GPU" if self.gpus else "")


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster: what it has, and what of it nobody has taken."""

    node_id: str
    name: str
    total: Resources
    free: Resources


@dataclass(frozen=True, slots=True)
class Demand:
    """What a run asks: `workers_per_node` bundles on each of `num_nodes` different nodes, and
    `num_anywhere` on any.

    Example: two nodes of four CPU workers and one generator beside them are
    `Demand(num_nodes=2, workers_per_node=4, num_anywhere=1, bundle=Resources(1, 0))`, nine bundles.
    """

    num_nodes: int
    workers_per_node: int
    num_anywhere: int
    bundle: Resources

    @classmethod
    def of(cls, config: ClusterConfig, *, generates: bool) -> Demand:
        """The demand of `cluster.*`; raises ValueError for numbers that name no place."""
        workers_per_node = config.gpus_per_node or config.workers_per_node
        for key, value in (
            ("num_nodes", config.num_nodes),
            ("gpus_per_node" if config.gpus_per_node else "workers_per_node", workers_per_node),
            ("cpus_per_worker", config.cpus_per_worker),
        ):
            if value <= 0:
                raise ValueError(f"cluster.{key} is {value}; it must be above 0")
        bundle = Resources(config.cpus_per_worker, 1.0 if config.gpus_per_node else 0.0)
        return cls(
            config.num_nodes,
            workers_per_node,
            config.generation_workers if generates else 0,
            bundle,
        )

    @property
    def num_workers(self) -> int:
        return self.num_nodes * self.workers_per_node

    @property
    def per_node(self) -> Resources:
        return self.bundle.times(self.workers_per_node)

    def fits(self, nodes: Sequence[Node]) -> bool:
        """Whether these nodes would have room if nobody else used them."""
        left = [node.total for node in nodes]
        fitting = sorted(
            (index for index, room in enumerate(left) if room.holds(self.per_node)),
            key=lambda i: left[i],
        )
        if len(fitting) < self.num_nodes:
            return False
        for index in fitting[: self.num_nodes]:
            left[index] = left[index].minus(self.per_node)
        return sum(room.num_fitting(self.bundle) for room in left) >= self.num_anywhere

    def describe(self, nodes: Sequence[Node]) -> str:
        """Needed and available, with the keys the numbers come from."""
        key = "gpus_per_node" if self.bundle.gpus else "workers_per_node"
        needed = (
            f"{self.num_workers} policy workers = cluster.num_nodes {self.num_nodes} x"
            f" cluster.{key}"
            f" {self.workers_per_node} (cluster.cpus_per_worker {self.bundle.cpus:g}), that is"
            f" {self.per_node} on each of"
            f" {self.num_nodes} node{'s' if self.num_nodes > 1 else ''}"
        )
        if self.num_anywhere:
            needed += f", and {self.bundle.times(self.num_anywhere)} for cluster.generation_workers {self.num_anywhere}"
        available = "; ".join(f"{node.name} has {node.free} free of {node.total}" for node in nodes)
        return f"needed: {needed}. Available: {available or 'no node'}"

    def advise(self, nodes: Sequence[Node]) -> str:
        """Which key to change, with the largest value that these nodes could hold."""
        if self.fits(nodes):
            return "Others hold the missing part: stop them, wait, or ask for less."
        key = "gpus_per_node" if self.bundle.gpus else "workers_per_node"
        sizes = sorted((node.total.num_fitting(self.bundle) for node in nodes), reverse=True)
        if max(sizes, default=0) == 0:
            to_cpu = ", or set cluster.gpus_per_node to 0 to run on CPU" if self.bundle.gpus else ""
            return (
                f"No node has {self.bundle} for one worker: lower cluster.cpus_per_worker{to_cpu}."
            )
        num_large_enough = sum(size >= self.workers_per_node for size in sizes)
        ways = ["add nodes"]
        if 0 < num_large_enough < self.num_nodes:
            ways.append(f"lower cluster.num_nodes to {num_large_enough}")
        if self.num_nodes <= len(sizes) and 0 < sizes[self.num_nodes - 1] < self.workers_per_node:
            ways.append(f"lower cluster.{key} to {sizes[self.num_nodes - 1]}")
        if num_large_enough >= self.num_nodes:
            ways.append(f"lower cluster.generation_workers or cluster.{key}")
        return f"To go on, {', or '.join(ways)}."
