"""Broadcast of weight buckets over gloo (host memory) or NCCL (GPU memory).

A channel has a process group of its own, with policy rank 0 as rank 0 and the receivers after it;
the default process group is not used. It is formed in the first update and used by all later ones.
A receiver that ends breaks the group for all members: the sender and the other receivers get
ChannelBrokenError, and the driver opens a channel without it.

The gloo variant is tested on CPU. The NCCL variant was not run: no GPU was available.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroupGloo,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from nemo_like.distributed import activity
from nemo_like.distributed.process_groups import address_towards, serve_store
from nemo_like.weight_sync.channel import (
    ChannelBrokenError,
    ChannelReceiver,
    ChannelRequest,
    ChannelSender,
    ChannelSpec,
    Placement,
    Transport,
)

JOIN_TIMEOUT_S = 60.0
"""Time for all members to join. They answered the driver just before."""

_POLL_S = 0.0005
_JOIN_POLL_S = 0.002
_GLOO_CONNECTIONS = 2
"""Connections between two members. Each has a thread in every member; the halves of a bucket are
sent at the same time. On two cores 1.2 GB/s instead of 1.0; with four it is not faster."""
_STORE_TIMEOUT = timedelta(seconds=JOIN_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class BroadcastAddress:
    """The rendezvous of a broadcast group; the sender has rank 0."""

    host: str
    port: int
    world_size: int
    """1 + number of receivers."""


class GlooTransport(Transport):
    """Broadcast from host memory to host memory."""

    name = "gloo"
    is_collective = True

    def available(self, placement: Placement) -> bool:
        return not placement.is_on_gpus

    def sender(
        self, request: ChannelRequest, slot_bytes: int, device: torch.device
    ) -> ChannelSender:
        return BroadcastSender(request, slot_bytes, torch.device("cpu"))

    def receiver(self, spec: ChannelSpec, index: int, device: torch.device) -> ChannelReceiver:
        return BroadcastReceiver(spec, index, torch.device("cpu"))


class NcclTransport(Transport):
    """Broadcast from GPU memory to GPU memory. NCCL refuses two ranks on one GPU."""

    name = "nccl"
    needs_gpu = True
    is_collective = True

    def available(self, placement: Placement) -> bool:
        return placement.is_on_gpus and placement.num_on_policy_gpus == 0

    def sender(
        self, request: ChannelRequest, slot_bytes: int, device: torch.device
    ) -> ChannelSender:
        return BroadcastSender(request, slot_bytes, device)

    def receiver(self, spec: ChannelSpec, index: int, device: torch.device) -> ChannelReceiver:
        return BroadcastReceiver(spec, index, device)


class _Member:
    """The buffer and the group of a member of a broadcast group."""

    _buffer: Tensor
    _group: Any = None

    def finish(self) -> int:
        """Release the buffer; returns its bytes."""
        num_bytes = self._buffer.numel()
        self._buffer = self._buffer.new_empty(0)
        return num_bytes

    def close(self) -> None:
        """Leave the group and release the buffer."""
        self.finish()
        self._group = None


class BroadcastSender(_Member, ChannelSender):
    """Policy rank 0 of a broadcast group; serves the rendezvous."""

    def __init__(self, request: ChannelRequest, slot_bytes: int, device: torch.device) -> None:
        """Listen at a free port of the requested host; receivers join with `address`.

        The buffer is on `device`, which decides between gloo and NCCL.
        """
        self._timeout_s = request.timeout_s
        world_size = request.num_receivers + 1
        self._store = serve_store(
            request.host, 0, world_size, _STORE_TIMEOUT, wait_for_workers=False
        )
        self.address = BroadcastAddress(request.host, self._store.port, world_size)
        self._device = device
        self._slot_bytes = slot_bytes
        self._buffer = _no_buffer(device)

    def connect(self) -> None:
        """Form the group. Raises ChannelBrokenError if a receiver does not join in time."""
        self._group = _join(self._store, self.address, 0, self._timeout_s, self._device)

    def buffer(self, index: int) -> Tensor:
        """Return the buffer of all buckets, uint8 [slot_bytes]."""
        if index == 0:
            self._buffer = self._buffer.new_empty(self._slot_bytes)
        return self._buffer

    def publish(self, index: int, num_bytes: int) -> None:
        """Send the first `num_bytes` of the buffer to all receivers.

        Raises ChannelBrokenError if one of them is gone.
        """
        name = f"sending weight bucket {index + 1}"
        try:
            _broadcast(self._group, self._buffer[:num_bytes], self._timeout_s, name)
        except ChannelBrokenError:
            # Closes the connections: the other receivers would wait for this sender.
            self._group = None
            raise


class BroadcastReceiver(_Member, ChannelReceiver):
    """A member of a broadcast group."""

    def __init__(self, spec: ChannelSpec, index: int, device: torch.device) -> None:
        """Join as receiver `index`, with the buffer on `device`.

        Raises ChannelBrokenError if a member does not join in time.
        """
        address: BroadcastAddress = spec.address
        self._spec = spec
        self._buffer = _no_buffer(device)
        try:
            store = TCPStore(
                address.host, address.port, address.world_size, False, timeout=_STORE_TIMEOUT
            )
        except RuntimeError as error:
            raise ChannelBrokenError(f"the policy at {address.host} does not answer") from error
        self._group = _join(store, address, index + 1, spec.timeout_s, device)

    def receive(self, index: int) -> Tensor:
        """Return the buffer with bucket `index`, uint8 [slot_bytes]."""
        name = f"receiving weight bucket {index + 1}"
        if index == 0:
            self._buffer = self._buffer.new_empty(self._spec.slot_bytes)
        bucket = self._buffer[: self._spec.layouts[index].num_bytes]
        _broadcast(self._group, bucket, self._spec.timeout_s, name)
        return self._buffer


def _no_buffer(device: torch.device) -> Tensor:
    """Return the empty buffer between two updates, uint8 [0]."""
    return torch.empty(0, dtype=torch.uint8, device=device)


def _join(
    store: TCPStore, address: BroadcastAddress, rank: int, timeout_s: float, device: torch.device
) -> Any:
    """Return the process group of this rank, after all ranks have come."""
    members = PrefixStore("members", store)
    try:
        members.set(str(rank), "")
        # Before the group, whose constructor waits for `timeout_s`, longer than a join may take.
        _wait_for_members(members, address.world_size)
        group_store = PrefixStore("group", store)
        timeout = timedelta(seconds=timeout_s)
        if device.type == "cuda":
            return _nccl_group(group_store, rank, address.world_size, timeout, device)
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = timeout
        # By the address that reaches the sender. The default is the address of the host name, which
        # other nodes may be unable to reach.
        own_address = address_towards(address.host, address.port)
        options._devices = [
            ProcessGroupGloo.create_device(hostname=own_address) for _ in range(_GLOO_CONNECTIONS)
        ]
        options._threads = _GLOO_CONNECTIONS
        return ProcessGroupGloo(group_store, rank, address.world_size, options)
    except RuntimeError as error:
        raise ChannelBrokenError(
            f"not all of the {address.world_size} members of the broadcast group joined"
            f" (rank {rank}: {error})"
        ) from error


def _wait_for_members(members: PrefixStore, world_size: int) -> None:
    """Wait until all ranks have set their key. Raises RuntimeError after `JOIN_TIMEOUT_S`."""
    keys = [str(rank) for rank in range(world_size)]
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    # Not `wait`, which blocks without progress: this member would be taken for a hung one if its
    # progress deadline is shorter.
    while not members.check(keys):
        activity.note("joining a broadcast group")
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out after {JOIN_TIMEOUT_S:g} s")
        time.sleep(_JOIN_POLL_S)


def _nccl_group(
    store: PrefixStore, rank: int, world_size: int, timeout: timedelta, device: torch.device
) -> Any:
    """Return a NCCL process group on `device`. Not run: no GPU was available."""
    from torch.distributed import ProcessGroupNCCL  # type: ignore[attr-defined]  # only in builds with CUDA

    torch.cuda.set_device(device)
    options = ProcessGroupNCCL.Options()
    # NCCL's watchdog ends the process at its timeout: `_broadcast` gives up before that.
    options._timeout = timeout + timedelta(seconds=JOIN_TIMEOUT_S)
    return ProcessGroupNCCL(store, rank, world_size, options)


def _broadcast(group: Any, buffer: Tensor, timeout_s: float, name: str) -> None:
    """Broadcast `buffer`, uint8 [n], from rank 0; raises ChannelBrokenError if a member is gone."""
    deadline = time.monotonic() + timeout_s
    parts = [buffer]
    if buffer.device.type == "cpu":
        # Consecutive operations of a gloo group use its connections in turn.
        parts = list(buffer.chunk(_GLOO_CONNECTIONS))
    try:
        for work in [group.broadcast([part], dist.BroadcastOptions()) for part in parts]:
            while not work.is_completed():
                # A member that waits for another is not hung; the driver finds the one that is.
                activity.note(name)
                if time.monotonic() > deadline:
                    if buffer.device.type == "cuda":
                        # A NCCL operation does not end by itself when a member is gone.
                        group.abort()
                    raise ChannelBrokenError(f"{name} took more than {timeout_s:g} s")
                time.sleep(_POLL_S)
            work.wait()
        if buffer.device.type == "cuda":
            # The group has a stream of its own; the host waits for it.
            torch.cuda.synchronize(buffer.device)
    except RuntimeError as error:
        raise ChannelBrokenError(f"{name}: {error}") from error
