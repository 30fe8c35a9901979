"""What driver, senders and receivers of a weight update exchange, and the choice of the transport.

All of it is small and picklable; only `BucketMessage.tensors` refers to weights, and exists only
where both sides are one process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from nemo_like.distributed.ray.processes import machine_id
from nemo_like.weight_sync.bucket import BucketLayout

Transport = Literal["in_process", "shared_memory", "gloo", "cuda_ipc", "nccl"]


class WeightSyncError(RuntimeError):
    """Weights did not reach a generator, or the generator computes with other weights."""


class ChannelBrokenError(RuntimeError):
    """The other side of a channel ended or does not answer. Raised in senders and receivers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Process and device that send or load weights."""

    pid: int
    machine: str
    """`machine_id` of the process: equal where process ids and shared memory are common."""
    gpu: str = ""
    """UUID of the process's GPU; empty on the CPU."""

    @classmethod
    def of_process(cls, device: torch.device) -> Endpoint:
        """Return the endpoint of this process with `device`."""
        gpu = ""
        if device.type == "cuda":
            gpu = gpu_uuid(device)
        return cls(pid=os.getpid(), machine=machine_id(), gpu=gpu)


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in every process that sees it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def select_transport(policy: Sequence[Endpoint], receivers: Sequence[Endpoint]) -> Transport:
    """Return the transport from policy rank 0 to all receivers.

    `policy` has the endpoints of the policy's ranks. Weights are passed through host memory unless
    both sides are on GPUs. Raises ValueError for receivers of which only some share a GPU with a
    policy rank: CUDA IPC does not reach all of them and NCCL refuses two ranks on one GPU.
    """
    source = policy[0]
    if all((each.pid, each.machine) == (source.pid, source.machine) for each in receivers):
        return "in_process"
    if source.gpu and all(each.gpu for each in receivers):
        return _select_on_gpus(policy, receivers)
    if all(each.machine == source.machine for each in receivers):
        return "shared_memory"
    return "gloo"


def _select_on_gpus(policy: Sequence[Endpoint], receivers: Sequence[Endpoint]) -> Transport:
    policy_gpus = {each.gpu for each in policy}
    is_shared = [each.gpu in policy_gpus for each in receivers]
    if all(is_shared):
        return "cuda_ipc"
    if any(is_shared):
        raise ValueError(
            f"{sum(is_shared)} of {len(receivers)} generator processes share a GPU with the policy;"
            " set cluster.generation_workers to 0 to place all of them on the policy's GPUs, or"
            " above 0 to place none there"
        )
    return "nccl"


@dataclass(frozen=True, slots=True)
class SharedMemoryAddress:
    """The slots of a sender on the same machine."""

    pid: int
    descriptors: tuple[int, ...]
    """File descriptors of the slots in process `pid`."""
    token: str
    """Part of the name of both slots, so that descriptors of another process are recognized."""


@dataclass(frozen=True, slots=True)
class BroadcastAddress:
    """The rendezvous of a broadcast group; the sender has rank 0."""

    host: str
    port: int
    world_size: int
    """1 + number of receivers."""


@dataclass(frozen=True, slots=True)
class CudaIpcAddress:
    """Slots in GPU memory of the policy's processes."""

    handles: Mapping[str, tuple[tuple[Any, ...], ...]]
    """GPU UUID -> for each slot the arguments of torch's `rebuild_cuda_tensor`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSpec:
    """All that a receiver needs to receive the buckets of one weight update."""

    transport: Transport
    layouts: tuple[BucketLayout, ...]
    slot_bytes: int
    """Bytes of the largest bucket."""
    timeout_s: float
    address: SharedMemoryAddress | BroadcastAddress | CudaIpcAddress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelRequest:
    """The channel that the policy opens for an update."""

    transport: Transport
    num_receivers: int
    host: str
    """Address of policy rank 0's node, for a rendezvous."""
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """The buckets of one weight update."""

    names: tuple[str, ...]
    """Hugging Face names of the weights that are sent."""
    num_buckets: int
    num_bytes: int
    """Bytes of all tensors, without alignment."""
    endpoint: Endpoint
    """This policy rank."""


@dataclass(frozen=True, slots=True)
class BucketMessage:
    """The notice that bucket `index` can be received."""

    index: int
    tensors: tuple[tuple[str, Tensor], ...] | None = None
    """The weights themselves, [*shape] each, where sender and receiver are one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBucket:
    """The result of sending one bucket, on one policy rank."""

    message: BucketMessage
    gather_s: float = 0.0
    """Casting the weights and gathering them from the policy's ranks into the slot."""
    transfer_s: float = 0.0
    """The broadcast; 0 where receivers read the slot itself."""
    broken: str = ""
    """Why a receiver could not be reached; empty if all were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBucket:
    """The result of receiving and loading one bucket."""

    transfer_s: float = 0.0
    """Receiving, the wait for the sender included."""
    load_s: float = 0.0
    """Copying into the model."""
    broken: str = ""
    """Why the bucket could not be received; empty if it was loaded."""

    @staticmethod
    def merge(parts: Sequence[LoadedBucket]) -> LoadedBucket:
        """Return the result of several processes that load the same bucket together."""
        return LoadedBucket(
            transfer_s=min(part.transfer_s for part in parts),
            load_s=max(part.load_s for part in parts),
            broken=next((part.broken for part in parts if part.broken), ""),
        )


class WeightSource(Protocol):
    """The methods of a policy worker that `WeightSync` calls, always on all ranks."""

    def plan_weights(self, dtype: str, max_bytes: int) -> WeightPlan:
        """Plan buckets of the weights in `dtype` of at most `max_bytes`."""
        ...

    def open_weight_channel(self, request: ChannelRequest) -> ChannelSpec | None:
        """Open a channel for the planned buckets; rank 0 returns what receivers need to join it.

        Closes a channel that is still open.
        """
        ...

    def connect_weight_channel(self) -> str:
        """Wait until all receivers have joined; returns why they did not, or an empty string."""
        ...

    def send_weight_bucket(self, index: int) -> SentBucket:
        """Gather bucket `index` of the current weights and send it from rank 0.

        A channel whose receivers cannot be reached is reported and not raised, because the
        policy's workers are intact.
        """
        ...

    def close_weight_channel(self) -> int:
        """Release the buffers of the channel; returns the bytes that they occupied."""
        ...


class WeightTarget(Protocol):
    """The methods of a generation worker that `WeightSync` calls, always on all ranks.

    The order is open_weight_channel, begin_update, load_bucket for each bucket, finish_update,
    close_weight_channel. `WeightReceiver` implements the receiving side. An update that was begun
    and not finished may be begun again, after another receiver failed.
    """

    def weight_endpoints(self) -> tuple[Endpoint, ...]:
        """Return the processes that load weights: this one, or its tensor-parallel children."""
        ...

    def open_weight_channel(self, spec: ChannelSpec, first_index: tuple[int, ...]) -> str:
        """Join a channel; returns why that failed, or an empty string.

        `first_index[r]` is the index, among all receivers, of the first process of rank r; the
        others follow in the order of `weight_endpoints`.
        """
        ...

    def begin_update(self, names: Sequence[str]) -> None:
        """Start an update with weights of these names; the worker generates nothing until its end.

        Raises ValueError for unknown, duplicate or missing names, before a weight changes.
        """
        ...

    def load_bucket(self, message: BucketMessage) -> LoadedBucket:
        """Receive a bucket and copy its tensors over the model's weights of the same names.

        Raises ValueError for a tensor with another shape than the model's weight.
        """
        ...

    def finish_update(self, version: int) -> None:
        """End the update; completions have weight version `version` from now on.

        Raises ValueError if a weight was not loaded.
        """
        ...

    def close_weight_channel(self) -> int:
        """Leave the channel; returns the bytes of the buffers of its own that it needed."""
        ...
