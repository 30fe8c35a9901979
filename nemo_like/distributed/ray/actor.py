"""The actor class of a `RayWorkerGroup`: one process with one worker."""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_like.console import quiet_libraries
from nemo_like.distributed import activity, stacks
from nemo_like.distributed.activity import count_oom_kills, machine_id, set_variables
from nemo_like.distributed.errors import ClusterError
from nemo_like.distributed.ray.failures import Location, ProgressMonitor, Raised, start_heartbeat
from nemo_like.distributed.ray.virtual_cluster import Bundle, BundleSet, RayVirtualCluster
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.parallel_layout import ParallelLayout


class WorkerActor:
    """Constructs one worker and calls its methods.

    Exceptions are returned as values: Ray would wrap them, and fail for those it cannot pickle.
    """

    def __init__(
        self,
        label: str,
        num_threads: int,
        heartbeat_key: str,
        progress_timeout_s: float,
        environment: Mapping[str, str | None],
    ) -> None:
        """Prepare the process. With `progress_timeout_s` 0 no heartbeat is sent."""
        # Before the worker's class is imported, and with it the libraries that read them. Not as a
        # runtime environment of Ray, which its logs and its dashboard show: values may be secrets.
        set_variables(environment)
        quiet_libraries()
        # Before the first import of torch, which reads these once. Ray would set them to the
        # actor's share of the bundle.
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        os.environ["MKL_NUM_THREADS"] = str(num_threads)
        # Only the driver handles Ctrl-C and the end of a terminal: it finishes the step with its
        # workers.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        stacks.register()
        if progress_timeout_s > 0:
            start_heartbeat(heartbeat_key, progress_timeout_s)
        self._label = label
        self._worker: Any = None

    def __repr__(self) -> str:
        # Ray prints it in front of every line of the worker's output.
        return self._label

    def locate(self) -> Location:
        """Return the location of this process."""
        return Location(
            pid=os.getpid(),
            node_id=ray.get_runtime_context().get_node_id(),
            ip=ray.util.get_node_ip_address(),
            log_path=os.path.realpath("/proc/self/fd/2"),
            num_oom_kills=count_oom_kills(),
            machine=machine_id(),
            raylet_pid=_raylet_pid(),
        )

    def choose_port(self) -> int:
        """Return a port of this node that is free now."""
        # Below the kernel's range for outgoing connections (ip_local_port_range), so that none of
        # those takes the port before the rendezvous listens on it.
        candidates = random.SystemRandom().sample(range(20000, 32000), 200)
        return next(port for port in candidates if _is_free(port))

    @ray.method(num_returns=2)
    def build(
        self, worker_class: type, context: WorkerContext, kwargs: Mapping[str, Any]
    ) -> tuple[Raised | None, None]:
        """Construct the worker; return its exception, if any."""
        activity.note("__init__")
        try:
            self._worker = worker_class(context, **kwargs)
        except Exception as error:  # noqa: BLE001 (the driver raises it)
            return Raised.from_exception(error), None
        return None, None

    @ray.method(num_returns=2)
    def call(
        self, method: str, returns: bool, indices: Mapping[int, int], /, *args: Any, **kwargs: Any
    ) -> tuple[Raised | None, Any]:
        """Call a method of the worker; return (exception or None, result).

        The result is None unless it `returns`. `indices` selects an item of the sequence at a
        position of `args`.
        """
        activity.note(method)
        selected = list(args)
        for position, index in indices.items():
            selected[position] = args[position][index]
        try:
            result = getattr(self._worker, method)(*selected, **kwargs)
            return None, result if returns else None
        except Exception as error:  # noqa: BLE001 (the driver raises it)
            return Raised.from_exception(error), None


def _raylet_pid() -> int:
    """Return the process of Ray that started this one; 0 if another program did."""
    parent = os.getppid()
    name = Path(f"/proc/{parent}/comm")
    return parent if name.is_file() and name.read_text().strip() == "raylet" else 0


def _is_free(port: int) -> bool:
    """Return True if a TCP server can listen on the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def choose_bundles(
    cluster: RayVirtualCluster,
    bundles: BundleSet,
    parallel_layout: ParallelLayout,
    name: str,
    first: int,
) -> Sequence[Bundle | None]:
    """Return the bundle of each rank; None for a worker without reserved resources."""
    if bundles == "anywhere":
        return [None] * parallel_layout.world_size
    bundles_of_set = {
        "policy": cluster.policy_bundles,
        "generation": cluster.generation_bundles,
        "extra": cluster.extra_bundles,
    }
    available = bundles_of_set[bundles][first:]
    if parallel_layout.world_size > len(available):
        raise ValueError(
            f"the {name} group has {parallel_layout.world_size} workers ({parallel_layout}); the"
            f" cluster has bundles for {len(available)}"
        )
    return available[: parallel_layout.world_size]


def start_actor(
    name: str,
    rank: int,
    bundle: Bundle | None,
    num_threads: int,
    monitor: ProgressMonitor,
    environment: Mapping[str, str | None],
) -> Any:
    """Start the process of one worker in its bundle, or on any node without one."""
    num_cpus = 0.0
    num_gpus = 0.0
    strategy: Any = "SPREAD"
    if bundle is not None:
        num_cpus = bundle.num_cpus / bundle.num_groups
        num_gpus = bundle.num_gpus / bundle.num_groups
        strategy = PlacementGroupSchedulingStrategy(
            bundle.placement_group, placement_group_bundle_index=bundle.index
        )
    actor_class = ray.remote(WorkerActor).options(
        # Names are unique on a cluster, which several runs may share.
        name=f"{name}-{rank}-{secrets.token_hex(4)}",
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        # A restarted worker would have lost its state.
        max_restarts=0,
        scheduling_strategy=strategy,
    )
    label = f"{name}[{rank}]"
    return actor_class.remote(
        label, num_threads, monitor.key(rank), monitor.timeout_s, dict(environment)
    )


def locate_actors(actors: Sequence[Any], name: str, timeout_s: float) -> tuple[Location, ...]:
    """Return the locations of the actors. Raises ClusterError if one does not start in time."""
    locations = [actor.locate.remote() for actor in actors]
    started, missing = ray.wait(locations, num_returns=len(locations), timeout=timeout_s)
    if missing:
        raise ClusterError(
            f"only {len(started)} of the {len(actors)} workers of the {name} group started within"
            f" {timeout_s:g} s (cluster.placement_timeout_s), although the resources are reserved;"
            " the logs of the Ray nodes have the reason (in logs/ray of the run, or in the"
            " directory of logs that the start of a cluster printed)"
        )
    try:
        return tuple(ray.get(locations))
    except RayError as error:
        raise ClusterError(f"a worker of the {name} group did not start: {error}") from error


def worker_contexts(
    actors: Sequence[Any],
    locations: Sequence[Location],
    bundles: Sequence[Bundle | None],
    num_threads: int,
    collective_timeout_s: float,
) -> list[WorkerContext]:
    """Return the context of each rank; the rendezvous is on the node of rank 0."""
    address = locations[0].ip
    port = ray.get(actors[0].choose_port.remote())
    node_ids = [location.node_id for location in locations]
    host = f"[{address}]" if ":" in address else address  # IPv6
    contexts = []
    for rank, bundle in enumerate(bundles):
        has_gpu = bundle is not None and bundle.num_gpus > 0
        context = WorkerContext(
            rank=rank,
            world_size=len(actors),
            local_rank=node_ids[:rank].count(node_ids[rank]),
            # Ray makes only the worker's own GPU visible to it.
            device="cuda:0" if has_gpu else "cpu",
            init_method=f"tcp://{host}:{port}",
            collective_timeout_s=collective_timeout_s,
            num_threads=num_threads,
            owns_process=True,
        )
        contexts.append(context)
    return contexts
