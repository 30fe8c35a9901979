"""A worker's process group and device mesh. Does not set seeds."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_like.distributed.worker_group import IN_MEMORY, WorkerContext
from nemo_like.parallel_layout import AXES, ParallelLayout

logger = logging.getLogger(__name__)

_NUM_ATTEMPTS = 3
"""Attempts to connect all ranks."""
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def init_process_group(context: WorkerContext) -> torch.device:
    """Join the process group of the worker group and return this worker's device.

    CPU tensors use gloo, CUDA tensors NCCL. Collectives fail after `context.collective_timeout_s`.
    Raises RuntimeError if this process is in a process group.
    """
    if is_joined():
        raise RuntimeError(
            "this process already belongs to a process group; call process_groups.destroy() first"
        )
    torch.set_num_threads(context.num_threads)
    device = torch.device(context.device)
    # Before the group: gloo reads the interface when it is created.
    bind_gloo(context.init_method)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _join(context, device)
    return device


def _join(context: WorkerContext, device: torch.device) -> None:
    """Create the default group; all ranks try again if a connection of gloo breaks meanwhile.

    That happens while many processes start on a busy machine.
    """
    timeout = timedelta(seconds=context.collective_timeout_s)
    store = _store(context, timeout)
    for attempt in range(1, _NUM_ATTEMPTS + 1):
        # A failed attempt leaves addresses behind.
        own = dist.PrefixStore(f"attempt{attempt}", store)  # pyright: ignore[reportPrivateImportUsage]
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=own,
                rank=context.rank,
                world_size=context.world_size,
                timeout=timeout,
                # A communicator for one rank serves nothing, and starting it can fail.
                device_id=device if device.type == "cuda" and context.world_size > 1 else None,
            )
        except RuntimeError as error:
            if attempt == _NUM_ATTEMPTS or "connectFullMesh" not in str(error):
                raise
            logger.warning("gloo could not connect the ranks and tries again: %s", error)
            own.add("failed", 1)
        if attempt == _NUM_ATTEMPTS:
            return
        if own.add("done", 1) == context.world_size:
            own.set("all", "done")
        own.wait(["all"], timeout)
        if own.add("failed", 0) == 0:
            return
        destroy()
        # A group that was not created has counted; the names of the groups must agree.
        c10d._world.group_count = 0


def build_device_mesh(parallel_layout: ParallelLayout, device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks, [pp, dp, cp, tp]; `mesh["dp"]` is the mesh of one axis.

    Its groups have torch's timeout until `share_timeout` is called.
    """
    return init_device_mesh(device_type, tuple(parallel_layout.shape), mesh_dim_names=AXES)


def build_replica_mesh(parallel_layout: ParallelLayout, device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks of a layout without a pipeline, [replica, shard, tp]."""
    sizes = (parallel_layout.num_replicas, parallel_layout.num_shards, parallel_layout.tp)
    # Row-major like the layout: dp is outermost, cp and tp are inside.
    return init_device_mesh(device_type, sizes, mesh_dim_names=("replica", "shard", "tp"))


def build_expert_mesh(parallel_layout: ParallelLayout, device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks of a layout without a pipeline, [replica, shard, expert, tp].

    Ranks along `shard` have the same experts.
    """
    ep = parallel_layout.ep
    num_shards = parallel_layout.num_shards // ep
    sizes = (parallel_layout.num_replicas, num_shards, ep, parallel_layout.tp)
    names = ("replica", "shard", "expert", "tp")
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def context_parts(parallel_layout: ParallelLayout) -> dict[int, dist.ProcessGroup]:
    """Create the groups of smaller context-parallel sizes: this rank's group of each size.

    Every rank calls. Empty without dynamic context parallelism.
    """
    parts: dict[int, dist.ProcessGroup] = {}
    for groups in parallel_layout.context_groups:
        own, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
        assert isinstance(own, dist.ProcessGroup), "each rank is in one group of a size"
        parts[len(groups[0])] = own
    return parts


def share_timeout() -> None:
    """Give all process groups of this process the collective timeout of the default group.

    torch gives a group that is created later, such as the groups of a mesh, 10 or 30 minutes.
    """
    default = c10d._get_default_group()
    # Every default group of `init_process_group` has gloo for CPU tensors.
    backend: Any = default._get_backend(torch.device("cpu"))
    timeout = backend.options._timeout
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timeout, group)


def is_joined() -> bool:
    """Return True if this process is in a process group."""
    return dist.is_initialized()


def destroy() -> None:
    """Leave the process group, if this process is in one."""
    if is_joined():
        dist.destroy_process_group()


def _store(context: WorkerContext, timeout: timedelta) -> Store:
    """Return the store of the rendezvous."""
    if context.init_method == IN_MEMORY:
        return HashStore()
    if context.init_method.startswith("tcp://"):
        return _tcp_store(context, timeout)
    path = urlsplit(context.init_method).path
    return dist.FileStore(path, context.world_size)  # pyright: ignore[reportPrivateImportUsage]


def _tcp_store(context: WorkerContext, timeout: timedelta) -> TCPStore:
    """Return the store of the rendezvous, which rank 0 serves at the address of `init_method`."""
    url = urlsplit(context.init_method)
    host = str(url.hostname)
    port = url.port or 0
    if context.rank == 0:
        # The other ranks wait for the server, so it may start after them.
        return serve_store(host, port, context.world_size, timeout, wait_for_workers=True)
    return TCPStore(host, port, context.world_size, is_master=False, timeout=timeout)


def serve_store(
    host: str, port: int, world_size: int, timeout: timedelta, *, wait_for_workers: bool
) -> TCPStore:
    """Serve a store at `port` of `host`; port 0 chooses a free one, which is its `port` then."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # torch's own server socket would listen on every interface.
    server = socket.create_server((host, port), family=family, backlog=max(128, world_size))
    return TCPStore(
        host,
        server.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=wait_for_workers,
        master_listen_fd=server.detach(),
    )


def bind_gloo(init_method: str) -> None:
    """Have gloo use the network interface that reaches the rendezvous.

    By default it uses the address of the host name, which on many machines is 127.0.0.1 or
    127.0.1.1 and cannot be reached from other nodes. An existing `GLOO_SOCKET_IFNAME` is kept.
    """
    url = urlsplit(init_method)
    if url.scheme != "tcp" or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    interface = _interface_towards(str(url.hostname), url.port or 0)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def _interface_towards(host: str, port: int) -> str | None:
    """Return the interface whose IPv4 address reaches `host`; None for IPv6."""
    own_address = address_towards(host, port)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            if _address_of(probe, name) == own_address:
                return name
    return None


def address_towards(host: str, port: int) -> str:
    """Return the address of this node from which `host` is reached."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # a datagram socket: chooses the route, sends nothing
        return probe.getsockname()[0]


def _address_of(probe: socket.socket, interface: str) -> str | None:
    """Return the IPv4 address of an interface, see netdevice(7)."""
    request = struct.pack("256s", interface.encode()[:15])
    try:
        reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:  # an interface without an IPv4 address
        return None
    # struct ifreq: 16 bytes of name, then a sockaddr_in with the address after family and port.
    return socket.inet_ntoa(reply[20:24])
