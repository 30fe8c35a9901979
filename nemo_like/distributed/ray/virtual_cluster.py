"""The part of a Ray cluster that one run uses: the connection, and a placement group with one
bundle per worker.

A bundle is one worker's CPU cores, and its GPU if there are any. Policy and generation share
bundles when they are colocated. A node's share is never taken in parts, and the shares of all nodes
are taken at once or none.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
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
from nemo_like.distributed.ray.head_monitor import HeadMonitor, end_process
from nemo_like.distributed.ray.raylet_watch import RayletWatch
from nemo_like.distributed.ray.resources import Demand, Node, Resources
from nemo_like.distributed.ray.session_guard import SessionFolder
from nemo_like.distributed.ray.startup_watch import StartupWatch

logger = logging.getLogger(__name__)

COLOCATED_GROUPS = 4
"""Groups that can share a bundle (policy, generator and what later runs add); each takes an equal
share.
"""

_CONNECT_S = 10.0
_START_ATTEMPTS = 3
"""Ray gives its processes 30 s to start, which a busy machine may exceed."""
_POLL_S = 0.5
_FIRST_REPORT_S = 2.0
_REPORT_S = 5.0
_RESERVE_S = 10.0
"""Within this long Ray places a group for which there is room."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """One worker's resources on one node."""

    placement_group: PlacementGroup
    index: int
    node_id: str
    num_cpus: float
    num_gpus: float


class RayVirtualCluster:
    """Room for the workers of one run on a Ray cluster.

    Connects to the cluster of `RAY_ADDRESS`, which Ray itself sets inside a submitted job; without
    it, starts one on this machine that listens on loopback only. A Ray this process is connected to
    already is used as it is.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        generates: bool = True,
        report: Callable[[str], None] = logger.warning,
        logs: Path | None = None,
    ) -> None:
        """Reserve room as `config` asks; `generates` says whether `generation_workers` counts.

        A Ray that is started here writes under /tmp and is removed at the end. After a failure
        its logs are copied to the folder `logs`, if one is given.

        While there is no room, `report` is told every few seconds what is needed and what is
        available. Raises ClusterError after `placement_timeout_s`, or at once if this process
        started the cluster, to which nothing can be added.
        """
        self.config = config
        self._demand = Demand.of(config, generates=generates)
        self._report = report
        self._placement_group: PlacementGroup | None = None
        self._logs = logs
        self._was_given = ray.is_initialized()
        self._session = None if self._was_given else _connect(logs)
        self._raylet_watch = (
            None if self._session is None else RayletWatch(self._session, _raylet_pid())
        )
        self.head = HeadMonitor(ray.get_runtime_context().gcs_address)
        try:
            node_ids = self._reserve()
        except BaseException:
            self.shutdown()
            raise
        bundles = tuple(self._bundle(index, node_id) for index, node_id in enumerate(node_ids))
        self.policy_bundles = bundles[: self._demand.num_workers]
        """Node by node, so the ranks of a node are neighbours."""
        self.generation_bundles = bundles[self._demand.num_workers :] or self.policy_bundles
        """Those of the policy when they are shared."""

    @property
    def num_policy_workers(self) -> int:
        return len(self.policy_bundles)

    @property
    def num_generation_workers(self) -> int:
        return len(self.generation_bundles)

    def shutdown(self, *, keep_logs: bool = False) -> None:
        """Give the room back, disconnect from a Ray that this object joined, and stop one that it
        started.
        """
        self.head.stop()
        if self._raylet_watch is not None:
            self._raylet_watch.stop()
        if self.head.is_lost:
            # Ray's shutdown, here or at the end of the process, would wait for the head and then
            # end the process with a message of its own or a segmentation fault.
            atexit.register(end_process)
        elif ray.is_initialized():
            if self._placement_group is not None and self._session is None:
                remove_placement_group(self._placement_group)
            self._placement_group = None
            if not self._was_given:
                ray.shutdown()
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
        self.shutdown(keep_logs=isinstance(error, RuntimeError | RayError))

    def _bundle(self, index: int, node_id: str) -> Bundle:
        assert self._placement_group is not None
        return Bundle(
            self._placement_group,
            index,
            node_id,
            self._demand.bundle.cpus,
            self._demand.bundle.gpus,
        )

    def _reserve(self) -> list[str]:
        """Take every bundle, waiting for room if need be; returns the node id of each."""
        deadline = time.monotonic() + self.config.placement_timeout_s
        nodes = _list_nodes()
        if self._session is not None and not self._demand.fits(nodes):
            raise self._no_room(
                "this machine is the whole cluster, and nothing can be added to it", nodes
            )
        while True:
            node_ids = self._await_room(deadline)
            if self._place(node_ids):
                return node_ids

    def _await_room(self, deadline: float) -> list[str]:
        """The node id of each bundle, once there is room for all. Raises ClusterError after the
        deadline.

        The room is claimed with one bundle per node, which states the need for different nodes and
        shows an autoscaler what to add. It is given back at once: only bundles of one GPU each keep
        every worker on a GPU of its own.
        """
        demand = self._demand
        wanted = [([_as_dict(demand.per_node)] * demand.num_nodes, "STRICT_SPREAD")]
        if demand.num_anywhere:
            # Second, or they could end up spread so that no node has the policy's share left.
            wanted.append(([_as_dict(demand.bundle)] * demand.num_anywhere, "PACK"))
        claims: list[PlacementGroup] = []
        try:
            for bundles, strategy in wanted:
                claims.append(placement_group(bundles, strategy=strategy))
                self._await_claim(claims[-1], deadline)
            policy_nodes, *other_nodes = map(_nodes_of, claims)
        finally:
            for claim in claims:
                remove_placement_group(claim)
        per_bundle = [node_id for node_id in policy_nodes for _ in range(demand.workers_per_node)]
        return per_bundle + [node_id for node_ids in other_nodes for node_id in node_ids]

    def _await_claim(self, claim: PlacementGroup, deadline: float) -> None:
        next_report = time.monotonic() + _FIRST_REPORT_S
        while not claim.wait(_POLL_S):
            now = time.monotonic()
            if now >= deadline:
                limit = f"gave up after {self.config.placement_timeout_s:g} s (cluster.placement_timeout_s)"
                raise self._no_room(limit, _list_nodes())
            if now >= next_report:
                self._report(self._progress(_list_nodes(), deadline - now))
                next_report = now + _REPORT_S

    def _place(self, node_ids: list[str]) -> bool:
        """Take one bundle on each of `node_ids`; False if somebody else was faster."""
        group = placement_group(
            [_as_dict(self._demand.bundle)] * len(node_ids),
            strategy="PACK",
            bundle_label_selector=[{"ray.io/node-id": node_id} for node_id in node_ids],
        )
        if group.wait(_RESERVE_S):
            self._placement_group = group
            return True
        remove_placement_group(group)
        return False

    def _progress(self, nodes: list[Node], seconds_left: float) -> str:
        state = "" if self._demand.fits(nodes) else ", for which nodes must join the cluster"
        return (
            f"waiting for room on the Ray cluster{state}; {self._demand.describe(nodes)}."
            f" Giving up in {seconds_left:.0f} s (cluster.placement_timeout_s)"
        )

    def _no_room(self, what: str, nodes: list[Node]) -> ClusterError:
        return ClusterError(
            f"no room for the workers: {what}; {self._demand.describe(nodes)}."
            f" {self._demand.advise(nodes)}"
        )


def _connect(logs: Path | None) -> SessionFolder | None:
    """Join the cluster of RAY_ADDRESS, or start one and return its folder."""
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        return _start(logs)
    if "://" in address:
        raise ClusterError(
            f"RAY_ADDRESS is {address}, not the address of a cluster's head (host:port, or auto)."
            f" To run on the cluster"
            " behind that URL use `ray job submit`, as ray_jobs/submit.sh does; to run on this"
            " machine, unset it"
        )
    try:
        with ExitStack() as stack:
            stack.enter_context(_keep_sigterm_handler())
            if address != "auto":
                _check_listening(address)
                # If the head dies now, Ray ends the process after 60 s without a message; the
                # monitor does so earlier.
                stack.callback(HeadMonitor(address).stop)
            ray.init(address=address, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises RuntimeError, ValueError, OSError and types of its own
        ray.shutdown()
        advice = (
            "Install the same versions of Ray and Python here and on the cluster"
            if "ersion mismatch" in str(error)
            else "The head must run (`ray status` says so there; after it ended, start it again or unset RAY_ADDRESS), and"
            " if it was started with RAY_AUTH_MODE=token this needs RAY_AUTH_MODE=token and the"
            " same"
            " token, in ~/.ray/auth_token or RAY_AUTH_TOKEN"
        )
        raise ClusterError(
            f"cannot connect to the Ray cluster of RAY_ADDRESS={address}: {_one_line(error)}."
            f" {advice}"
        ) from error
    return None


def _raylet_pid() -> int:
    """The raylet that this process started."""
    node: Any = ray_worker._global_node
    assert node is not None, "a Ray was started"
    return node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process.pid


def _start(logs: Path | None) -> SessionFolder:
    """Start a Ray cluster on this machine that ends with this process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    attempt = 1
    while True:
        try:
            session = SessionFolder()
        except OSError as error:
            raise ClusterError(
                f"Ray cannot be started on this machine: its folder cannot be made ({error}). Free"
                f" some"
                " space there, or set RAY_TMPDIR to a short path that can be written"
            ) from error
        try:
            with (
                _loopback_only(),
                _keep_sigterm_handler(),
                _blocked(signal.SIGINT, signal.SIGHUP),
                StartupWatch(session, logs),
            ):
                ray.init(
                    address="local",
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(session.path),
                )
        except BaseException as error:
            ray.shutdown()
            session.close(logs)
            if not isinstance(error, Exception):
                raise
            if "timed out during startup" in str(error) and attempt < _START_ATTEMPTS:
                attempt += 1
                continue
            kept = f"; the logs of Ray are in {logs}" if logs is not None and logs.is_dir() else ""
            raise ClusterError(
                f"Ray could not be started on this machine (attempt {attempt}):"
                f" {_one_line(error)}{kept}."
                " All its processes were stopped. Try again when the machine is less busy, or run"
                " without Ray with cluster.backend=local (one worker)"
            ) from error
        return session


@contextmanager
def _blocked(*signals: signal.Signals) -> Iterator[None]:
    """Have processes that start inside the block ignore these signals; here they are delivered
    after it.

    Ctrl-C and the end of a terminal reach every process of the terminal's foreground group. Workers
    must survive them, so that the driver can finish the step and save. Processes inherit the mask.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Have Ray leave the handler of SIGTERM as it is: its own ends the driver without a message."""
    replaced = ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda sigterm_handler: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = replaced


def _one_line(error: Exception) -> str:
    text = re.sub(r"\x1b\[\d+m", "", str(error)) or type(error).__name__
    return " ".join(text.split()).rstrip(".")


def _check_listening(address: str) -> None:
    """Fail soon, with OSError or ValueError, where Ray would try for many minutes."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError("it is not of the form host:port")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Have a Ray that starts inside the block listen on 127.0.0.1 alone.

    Ray turns a loopback address it is given into the machine's own, except where it is not to form
    clusters, as on a laptop; its processes read that from the environment, this one has read it
    already.
    """
    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before, before_here = os.environ.get(name), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before_here
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _list_nodes() -> list[Node]:
    free = available_resources_per_node()
    return [
        Node(
            node_id=node["NodeID"],
            name=node["NodeManagerAddress"],
            total=_resources(node["Resources"]),
            free=_resources(free.get(node["NodeID"], {})),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _nodes_of(group: PlacementGroup) -> list[str]:
    """The node id of each bundle, in bundle order."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [nodes[index] for index in sorted(nodes)]


def _as_dict(resources: Resources) -> dict[str, float]:
    return {"CPU": resources.cpus} | ({"GPU": resources.gpus} if resources.gpus else {})


def _resources(amounts: dict[str, float]) -> Resources:
    return Resources(amounts.get("CPU", 0.0), amounts.get("GPU", 0.0))
