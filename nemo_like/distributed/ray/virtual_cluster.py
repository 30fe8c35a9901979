"""The resources of one run on a Ray cluster: a placement group with one bundle per worker.

A bundle is one worker's CPU cores, and its GPU if there are any. Policy and generation share
bundles when they are colocated. The bundles of a node are reserved together, and the bundles of all
nodes at once or not at all.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from nemo_like.config.schema import ClusterConfig
from nemo_like.distributed.errors import ClusterError
from nemo_like.distributed.ray.connection import connect, disconnect

logger = logging.getLogger(__name__)

COLOCATED_GROUPS = 4
"""Maximum number of groups that share a bundle; each gets an equal share of its resources."""

_POLL_S = 0.5
_FIRST_REPORT_S = 2.0
_REPORT_S = 5.0
_RESERVE_S = 10.0
"""Ray places a group that fits within this time."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """One worker's resources on one node."""

    placement_group: PlacementGroup
    index: int
    node_id: str
    num_cpus: float
    num_gpus: float
    num_groups: int
    """Worker groups that share it; each gets an equal share."""


class RayVirtualCluster:
    """Reserved resources for the workers of one run on a Ray cluster.

    Connects to the cluster of `RAY_ADDRESS`, which Ray itself sets inside a submitted job; without
    it, starts one on this machine that listens on loopback only. If this process is connected to a
    Ray already, that one is used unchanged.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        generates: bool = True,
        workers_per_replica: int = 1,
        num_extra_workers: int = 0,
        report: Callable[[str], None] = logger.warning,
        logs: Path | None = None,
    ) -> None:
        """Reserve the bundles of `config`; `generation_workers` count if `generates` is True.

        `workers_per_replica` generation workers share one bundle, on one node. Further
        `num_extra_workers` have the resources of a policy worker each, on any node.

        A Ray that is started here writes under /tmp and is removed at the end. After a failure
        its logs are copied to the directory `logs`, if one is given.

        While resources are missing, `report` is called every few seconds with the needed and the
        available resources. Raises ClusterError after `placement_timeout_s`, or at once if this
        process started the cluster, to which no node can be added.
        """
        self.config = config
        self._request = ResourceRequest.from_config(
            config,
            generates=generates,
            workers_per_replica=workers_per_replica,
            num_extra_workers=num_extra_workers,
        )
        self._report = report
        self._placement_group: PlacementGroup | None = None
        self._logs = logs
        # A thread that still starts a worker when the run ends must not start another Ray.
        os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
        self._was_connected = ray.is_initialized()
        self._session = None if self._was_connected else connect(logs)
        try:
            node_ids = self._reserve()
        except BaseException:
            self.shutdown()
            raise
        bundles = []
        for index, node_id in enumerate(node_ids):
            bundles.append(self._bundle(index, node_id))
        num_workers = self._request.num_workers
        self.policy_bundles = tuple(bundles[:num_workers])
        """Node by node, so consecutive ranks share a node."""
        first_extra = num_workers + self._request.num_unpinned
        self.generation_bundles = tuple(bundles[num_workers:first_extra]) or self.policy_bundles
        """The policy's bundles if policy and generation are colocated."""
        self.extra_bundles = tuple(bundles[first_extra:])

    def shutdown(self, *, keep_logs: bool = False) -> None:
        """Release the bundles, disconnect from a Ray that was joined, and stop one started here."""
        if ray.is_initialized():
            if self._placement_group is not None and self._session is None:
                remove_placement_group(self._placement_group)
            self._placement_group = None
            if not self._was_connected:
                disconnect()
        if self._session is not None:
            self._session.close(self._logs if keep_logs else None)
            self._session = None

    def __enter__(self) -> RayVirtualCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Failures of workers and of Ray; for other exceptions the logs of Ray are of no use.
        self.shutdown(keep_logs=isinstance(error, RuntimeError | RayError))

    def _bundle(self, index: int, node_id: str) -> Bundle:
        assert self._placement_group is not None
        request = self._request
        is_pinned = index < request.num_workers
        is_replica = not is_pinned and index < request.num_workers + request.num_unpinned
        unit = request.unpinned if is_replica else request.bundle
        # A generation replica needs every GPU of its own bundle.
        num_groups = COLOCATED_GROUPS if is_pinned else 1
        return Bundle(self._placement_group, index, node_id, unit.cpus, unit.gpus, num_groups)

    def _reserve(self) -> list[str]:
        """Reserve every bundle, waiting for free resources; return the node id of each."""
        deadline = time.monotonic() + self.config.placement_timeout_s
        nodes = self._nodes()
        if self._session is not None and not self._request.fits(nodes):
            reason = "this machine is the only node of the cluster, and no node can be added to it"
            raise self._resources_error(reason, nodes)
        while True:
            node_ids = self._await_resources(deadline)
            # Another run can take the resources between the two steps; then both are repeated.
            if self._place(node_ids):
                return node_ids

    def _await_resources(self, deadline: float) -> list[str]:
        """Wait until all bundles fit; return the node id of each. Raises ClusterError.

        The resources are claimed with one large bundle per node: this expresses that the nodes
        differ, and an autoscaler sees what to add. The claim is released at once, because only
        bundles of one GPU each give every worker a GPU of its own.
        """
        request = self._request
        requested = [([_as_dict(request.per_node)] * request.num_nodes, "STRICT_SPREAD")]
        if request.num_unpinned:
            # Second, or they could be placed so that no node has enough for the policy workers.
            requested.append(([_as_dict(request.unpinned)] * request.num_unpinned, "PACK"))
        if request.num_extra:
            requested.append(([_as_dict(request.bundle)] * request.num_extra, "PACK"))
        excluded = self._excluded_ids()
        selector = {"ray.io/node-id": f"!in({','.join(excluded)})"} if excluded else {}
        claims: list[PlacementGroup] = []
        try:
            for bundles, strategy in requested:
                claim = placement_group(
                    bundles, strategy=strategy, bundle_label_selector=[selector] * len(bundles)
                )
                claims.append(claim)
                self._await_claim(claim, deadline)
            nodes_of_claims = [_nodes_of(claim) for claim in claims]
        finally:
            for claim in claims:
                remove_placement_group(claim)
        node_ids: list[str] = []
        for node_id in nodes_of_claims[0]:
            node_ids.extend([node_id] * request.workers_per_node)
        for unpinned_node_ids in nodes_of_claims[1:]:
            node_ids.extend(unpinned_node_ids)
        return node_ids

    def _await_claim(self, claim: PlacementGroup, deadline: float) -> None:
        next_report = time.monotonic() + _FIRST_REPORT_S
        while not claim.wait(_POLL_S):
            now = time.monotonic()
            if now >= deadline:
                limit_s = self.config.placement_timeout_s
                reason = f"timed out after {limit_s:g} s (cluster.placement_timeout_s)"
                raise self._resources_error(reason, self._nodes())
            if now >= next_report:
                self._report(self._waiting_text(self._nodes(), deadline - now))
                next_report = now + _REPORT_S

    def _place(self, node_ids: list[str]) -> bool:
        """Reserve one bundle on each of `node_ids`; return False if resources are taken."""
        # Pinned by the label of the node: the strategy alone could choose other nodes.
        bundles = [_as_dict(self._request.bundle)] * self._request.num_workers
        bundles += [_as_dict(self._request.unpinned)] * self._request.num_unpinned
        bundles += [_as_dict(self._request.bundle)] * self._request.num_extra
        group = placement_group(
            bundles,
            strategy="PACK",
            bundle_label_selector=[{"ray.io/node-id": node_id} for node_id in node_ids],
        )
        if group.wait(_RESERVE_S):
            self._placement_group = group
            return True
        remove_placement_group(group)
        return False

    def _nodes(self) -> list[Node]:
        """Return the alive nodes that this run may use."""
        return _list_nodes(self.config.exclude_nodes)

    def _excluded_ids(self) -> list[str]:
        """Return the ids of the alive nodes that `cluster.exclude_nodes` names."""
        nodes = _list_nodes()
        known = sorted({node.name for node in nodes})
        for name in self.config.exclude_nodes:
            if name not in known:
                self._report(
                    f"cluster.exclude_nodes: no node has the address {name}; the addresses are"
                    f" {', '.join(known)}"
                )
        return [node.node_id for node in nodes if node.name in self.config.exclude_nodes]

    def _waiting_text(self, nodes: list[Node], seconds_left: float) -> str:
        state = "" if self._request.fits(nodes) else ", to which nodes must be added"
        return (
            f"waiting for resources on the Ray cluster{state}; {self._request.describe(nodes)}."
            f" Timeout in {seconds_left:.0f} s (cluster.placement_timeout_s)"
        )

    def _resources_error(self, reason: str, nodes: list[Node]) -> ClusterError:
        error = ClusterError(
            f"not enough resources for the workers: {reason}; {self._request.describe(nodes)}."
            f" {self._request.advise(nodes)}"
        )
        error.num_nodes = sum(node.total.fits(self._request.per_node) for node in nodes)
        return error


def _list_nodes(excluded: Sequence[str] = ()) -> list[Node]:
    """Return the alive nodes of the cluster without those at the addresses `excluded`."""
    free = available_resources_per_node()
    nodes = []
    for node in ray.nodes():
        if not node["Alive"] or node["NodeManagerAddress"] in excluded:
            continue
        nodes.append(
            Node(
                node_id=node["NodeID"],
                name=node["NodeManagerAddress"],
                total=_resources(node["Resources"]),
                free=_resources(free.get(node["NodeID"], {})),
            )
        )
    return nodes


def num_free_nodes(config: ClusterConfig) -> int:
    """Return the nodes of the connected cluster that have room for the policy workers of a node."""
    per_node = ResourceRequest.from_config(config, generates=False).per_node
    nodes = _list_nodes(config.exclude_nodes)
    return sum(node.free.fits(per_node) for node in nodes)


def _nodes_of(group: PlacementGroup) -> list[str]:
    """Return the node id of each bundle, in bundle order."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [nodes[index] for index in sorted(nodes)]


def _as_dict(resources: Resources) -> dict[str, float]:
    amounts = {"CPU": resources.cpus}
    if resources.gpus:
        amounts["GPU"] = resources.gpus
    return amounts


def _resources(amounts: dict[str, float]) -> Resources:
    return Resources(amounts.get("CPU", 0.0), amounts.get("GPU", 0.0))


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
        if self.bundle.gpus and nodes and not any(node.total.gpus for node in nodes):
            return (
                "No node has a GPU: add nodes with GPUs, or set cluster.gpus_per_node to 0 to run"
                " on CPU."
            )
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
