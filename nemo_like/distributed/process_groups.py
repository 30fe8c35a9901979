"""A worker's process group and device mesh. Seeds are the worker's own business."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_like.distributed.parallel_layout import AXES, Topology
from nemo_like.distributed.worker_group import IN_MEMORY, WorkerContext

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def init_process_group(context: WorkerContext) -> torch.device:
    """Join the group's process group, with gloo for CPU tensors and NCCL for CUDA ones; returns
    this worker's device.

    Collectives fail after `context.collective_timeout_s`. Raises RuntimeError if this process is in
    a process group.
    """
    if is_joined():
        raise RuntimeError(
            "this process already belongs to a process group; call mesh.destroy() first"
        )
    torch.set_num_threads(context.num_threads)
    device = torch.device(context.device)
    _bind_gloo(context.init_method)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=context.collective_timeout_s)
    store = _store(context, timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=context.init_method if store is None else None,
        store=store,
        rank=context.rank,
        world_size=context.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return device


def build_device_mesh(topology: Topology, device_type: str) -> DeviceMesh:
    """The mesh of all ranks with the axes pp, dp, cp, tp; `mesh["dp"]` is the sub-mesh of one
    axis.
    """
    return init_device_mesh(device_type, tuple(topology.shape), mesh_dim_names=AXES)


def is_joined() -> bool:
    """Whether this process is in a process group."""
    return dist.is_initialized()


def destroy() -> None:
    """Leave the process group, if this process is in one."""
    if is_joined():
        dist.destroy_process_group()


def _store(context: WorkerContext, timeout: timedelta) -> Store | None:
    """The store through which the ranks find each other; None leaves it to torch (`file://`)."""
    if context.init_method == IN_MEMORY:
        return HashStore()
    return _tcp_store(context, timeout) if context.init_method.startswith("tcp://") else None


def _tcp_store(context: WorkerContext, timeout: timedelta) -> TCPStore:
    """The store on rank 0 through which the ranks find each other.

    It is bound to the address of `init_method` alone; left to torch it would listen on every
    interface.
    """
    url = urlsplit(context.init_method)
    host, port = str(url.hostname), url.port or 0
    if context.rank > 0:
        return TCPStore(host, port, context.world_size, is_master=False, timeout=timeout)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, port), family=family, backlog=max(128, context.world_size))
    return TCPStore(
        host,
        port,
        context.world_size,
        is_master=True,
        timeout=timeout,
        master_listen_fd=server.detach(),
    )


def _bind_gloo(init_method: str) -> None:
    """Have gloo use the network interface that reaches the rendezvous.

    Left alone it uses the address of the host's name, which on many machines is 127.0.0.1 or
    127.0.1.1, out of reach of workers on other nodes. A `GLOO_SOCKET_IFNAME` that is set already is
    kept.
    """
    url = urlsplit(init_method)
    if url.scheme != "tcp" or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    interface = _interface_towards(str(url.hostname), url.port or 0)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def _interface_towards(host: str, port: int) -> str | None:
    """The name of the interface whose IPv4 address is used to reach `host`; None if there is none
    such (IPv6).
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    if family != socket.AF_INET:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # a datagram socket: chooses the route, sends nothing
        own_address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if _address_of(probe, name) == own_address:
                return name
    return None


def _address_of(probe: socket.socket, interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:  # an interface without an IPv4 address
        return None
