"""Resource requests of a run, and messages about missing resources. Pure; does not use Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nemo_like.config.schema import ClusterConfig

BundleSet = Literal["policy", "generation", "extra", "anywhere"]
"""The bundles that a worker group uses; `extra` belong to models beside policy and generator,
`anywhere` reserves none."""

_TOLERANCE = 1e-5
"""Ray stores resources to 1e-4; a sum of fractions must not fail by less than that."""


@dataclass(frozen=True, slots=True, order=True)
class Resources:
    """CPU cores and GPUs."""

    cpus: float
    gpus: float

    def times(self, count: int) -> Resources:
        """Return `count` times these resources."""
        return Resources(self.cpus * count, self.gpus * count)

    def minus(self, other: Resources) -> Resources:
        """Return the difference."""
        return Resources(self.cpus - other.cpus, self.gpus - other.gpus)

    def fits(self, request: Resources) -> bool:
        """Return True if these resources are enough for the request."""
        has_cpus = self.cpus + _TOLERANCE >= request.cpus
        has_gpus = self.gpus + _TOLERANCE >= request.gpus
        return has_cpus and has_gpus

    def num_fitting(self, unit: Resources) -> int:
        """Return how many of `unit` fit; 0 for a unit of no resources."""
        counts = []
        for available, requested in ((self.cpus, unit.cpus), (self.gpus, unit.gpus)):
            if requested > 0:
                counts.append(int((available + _TOLERANCE) // requested))
        return max(0, min(counts, default=0))

    def __str__(self) -> str:
        if not self.gpus:
            return f"{self.cpus:g} CPU"
        return f"{self.cpus:g} CPU + {self.gpus:g} GPU"


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster with its total and its free resources."""

    node_id: str
    name: str
    total: Resources
    free: Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """The bundles of a run: `workers_per_node` on each of `num_nodes` nodes, and unpinned ones.

    Example: two nodes of four CPU workers and one generator beside them are
    `ResourceRequest(num_nodes=2, workers_per_node=4, num_unpinned=1, bundle=Resources(1, 0))`, nine
    bundles.
    """

    num_nodes: int
    workers_per_node: int
    num_unpinned: int
    """Bundles of generation replicas, which can be on any node."""
    bundle: Resources
    """One worker."""
    workers_per_unpinned: int = 1
    """Workers whose resources one bundle of a generation replica has."""
    num_extra: int = 0
    """Bundles of one worker each on any node, for `num_workers` of reward models."""

    @classmethod
    def from_config(
        cls,
        config: ClusterConfig,
        *,
        generates: bool,
        workers_per_replica: int = 1,
        num_extra_workers: int = 0,
    ) -> ResourceRequest:
        """Return the request of `cluster.*`. Raises ValueError for counts that are not above 0.

        A generation replica of `workers_per_replica` generation workers is one bundle.
        `num_extra_workers` have one bundle each.
        """
        workers_key = "gpus_per_node" if config.gpus_per_node else "workers_per_node"
        workers_per_node = config.gpus_per_node or config.workers_per_node
        counts = {
            "num_nodes": config.num_nodes,
            workers_key: workers_per_node,
            "cpus_per_worker": config.cpus_per_worker,
        }
        for key, value in counts.items():
            if value <= 0:
                raise ValueError(f"cluster.{key} is {value}; it must be above 0")
        gpus_per_worker = 1.0 if config.gpus_per_node else 0.0
        return cls(
            num_nodes=config.num_nodes,
            workers_per_node=workers_per_node,
            num_unpinned=config.generation_workers // workers_per_replica if generates else 0,
            bundle=Resources(config.cpus_per_worker, gpus_per_worker),
            workers_per_unpinned=workers_per_replica,
            num_extra=num_extra_workers,
        )

    @property
    def unpinned(self) -> Resources:
        """The resources of one generation replica."""
        return self.bundle.times(self.workers_per_unpinned)

    @property
    def num_workers(self) -> int:
        """Policy workers, which are pinned to the nodes."""
        return self.num_nodes * self.workers_per_node

    @property
    def per_node(self) -> Resources:
        """The resources of the policy workers of one node."""
        return self.bundle.times(self.workers_per_node)

    @property
    def _workers_key(self) -> str:
        return "gpus_per_node" if self.bundle.gpus else "workers_per_node"

    def fits(self, nodes: Sequence[Node]) -> bool:
        """Return True if the total resources of these nodes are enough, whoever uses them now."""
        left = [node.total for node in nodes]
        candidates = [index for index, total in enumerate(left) if total.fits(self.per_node)]
        if len(candidates) < self.num_nodes:
            return False
        # The smallest sufficient nodes first, which leaves the most room for unpinned bundles.
        candidates.sort(key=lambda index: left[index])
        for index in candidates[: self.num_nodes]:
            left[index] = left[index].minus(self.per_node)
        # Replicas before single workers, which fit wherever a part of a replica does.
        for unit, count in ((self.unpinned, self.num_unpinned), (self.bundle, self.num_extra)):
            num_missing = count
            for index, rest in enumerate(left):
                num_placed = min(num_missing, rest.num_fitting(unit))
                left[index] = rest.minus(unit.times(num_placed))
                num_missing -= num_placed
            if num_missing > 0:
                return False
        return True

    def describe(self, nodes: Sequence[Node]) -> str:
        """Return needed and available resources, with the keys the numbers come from."""
        plural = "s" if self.num_nodes > 1 else ""
        needed = (
            f"{self.num_workers} policy workers = cluster.num_nodes {self.num_nodes} x"
            f" cluster.{self._workers_key} {self.workers_per_node}"
            f" (cluster.cpus_per_worker {self.bundle.cpus:g}), that is {self.per_node} on each of"
            f" {self.num_nodes} node{plural}"
        )
        if self.num_unpinned:
            needed += (
                f", and {self.unpinned.times(self.num_unpinned)} for cluster.generation_workers"
                f" {self.num_unpinned * self.workers_per_unpinned}"
            )
        if self.num_extra:
            needed += (
                f", and {self.bundle.times(self.num_extra)} for reward.models.NAME.num_workers"
                f" {self.num_extra} in all"
            )
        available = "; ".join(f"{node.name} has {node.free} free of {node.total}" for node in nodes)
        return f"needed: {needed}. Available: {available or 'no node'}"

    def advise(self, nodes: Sequence[Node]) -> str:
        """Return which key to change, with the largest value that fits these nodes."""
        if self.fits(nodes):
            return "Other runs use the missing resources: stop them, wait, or request less."
        # Workers per node, largest node first.
        sizes = [node.total.num_fitting(self.bundle) for node in nodes]
        sizes.sort(reverse=True)
        # More nodes of this kind would not help.
        if max(sizes, default=0) == 0:
            to_cpu = ", or set cluster.gpus_per_node to 0 to run on CPU" if self.bundle.gpus else ""
            return (
                f"No node has {self.bundle} for one worker: lower cluster.cpus_per_worker{to_cpu}."
            )
        num_large_enough = sum(size >= self.workers_per_node for size in sizes)
        options = ["add nodes"]
        if 0 < num_large_enough < self.num_nodes:
            options.append(f"lower cluster.num_nodes to {num_large_enough}")
        if self.num_nodes <= len(sizes):
            # The num_nodes largest nodes all have room for as many workers as the smallest of them.
            max_workers = sizes[self.num_nodes - 1]
            if 0 < max_workers < self.workers_per_node:
                options.append(f"lower cluster.{self._workers_key} to {max_workers}")
        if num_large_enough >= self.num_nodes:
            # The policy workers fit, so the unpinned generation workers do not.
            extra = ", reward.models.NAME.num_workers" if self.num_extra else ""
            options.append(
                f"lower cluster.generation_workers{extra} or cluster.{self._workers_key}"
            )
        return f"To continue, {', or '.join(options)}."
