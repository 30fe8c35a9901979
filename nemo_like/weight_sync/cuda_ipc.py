"""Weight buckets in GPU memory that a policy rank shares with the generator on the same GPU.

A CUDA IPC handle can be opened only on the GPU of its memory. So every policy rank has the two
slots on its own GPU: rank 0 gathers a bucket, the policy's default process group broadcasts it to
the other ranks, and each receiver opens the slots of the policy rank that shares its GPU. Handles
are exchanged once per update.

Not run: no GPU was available. Only the choice of the handle and the slots are tested, on CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.weight_sync.channel import (
    ChannelReceiver,
    ChannelRequest,
    ChannelSender,
    ChannelSpec,
    Placement,
    Transport,
    WeightSyncError,
    gpu_uuid,
)

NUM_SLOTS = 2

_DEVICE_ARGUMENT = 6
"""Position of the device index in the arguments of `rebuild_cuda_tensor`."""


@dataclass(frozen=True, slots=True)
class CudaIpcAddress:
    """Slots in GPU memory of the policy's processes."""

    handles: Mapping[str, tuple[tuple[Any, ...], ...]]
    """GPU UUID -> for each slot the arguments of torch's `rebuild_cuda_tensor`."""


class CudaIpcTransport(Transport):
    """Slots in GPU memory, where each receiver shares its GPU with a policy rank."""

    name = "cuda_ipc"
    needs_gpu = True
    every_rank_sends = True

    def available(self, placement: Placement) -> bool:
        return placement.is_on_gpus and placement.num_on_policy_gpus == len(placement.receivers)

    def sender(
        self, request: ChannelRequest, slot_bytes: int, device: torch.device
    ) -> ChannelSender:
        return CudaIpcSender(slot_bytes, device)

    def receiver(self, spec: ChannelSpec, index: int, device: torch.device) -> ChannelReceiver:
        return CudaIpcReceiver(spec, device)


class CudaIpcSender(ChannelSender):
    """The slots of one policy rank; every rank constructs one at the same time."""

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        """Allocate the slots and exchange their handles with the other policy ranks."""
        from torch.multiprocessing.reductions import reduce_tensor

        self._device = device
        self._slots = [
            torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)
        ]
        handles = tuple(reduce_tensor(slot)[1] for slot in self._slots)
        self.address = CudaIpcAddress(_gather_handles(gpu_uuid(device), handles))

    def buffer(self, index: int) -> Tensor:
        """Return the slot of bucket `index`, uint8 [slot_bytes]."""
        return self._slots[index % NUM_SLOTS]

    def publish(self, index: int, num_bytes: int) -> None:
        """Copy `num_bytes` of rank 0's slot to the slots of all policy ranks; every rank calls."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(self.buffer(index)[:num_bytes], src=0)
        # Other processes do not wait for this process's streams.
        torch.cuda.synchronize(self._device)

    def close(self) -> int:
        """Release the slots; returns their bytes on this GPU."""
        num_bytes = sum(slot.numel() for slot in self._slots)
        self._slots = []
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        return num_bytes


class CudaIpcReceiver(ChannelReceiver):
    """The opened slots of the policy rank on this GPU."""

    def __init__(self, spec: ChannelSpec, device: torch.device) -> None:
        """Open the slots. Raises WeightSyncError if no policy rank is on this GPU."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        address: CudaIpcAddress = spec.address
        self._device = device
        self._slots = []
        for arguments in handles_of_gpu(address, gpu_uuid(device)):
            # The index of one GPU differs between processes that see different sets of GPUs.
            own = list(arguments)
            own[_DEVICE_ARGUMENT] = torch.cuda.current_device()
            if device.index is not None:
                own[_DEVICE_ARGUMENT] = device.index
            self._slots.append(rebuild_cuda_tensor(*own))

    def receive(self, index: int) -> Tensor:
        """Return the slot with bucket `index`, uint8 [slot_bytes]."""
        return self._slots[index % NUM_SLOTS]

    def loaded(self) -> None:
        """Wait until the copies out of the slot are done; the sender may then reuse it."""
        torch.cuda.synchronize(self._device)

    def close(self) -> int:
        """Release the mapping; returns 0, because the memory is the policy's."""
        self._slots = []
        torch.cuda.ipc_collect()
        return 0


def handles_of_gpu(address: CudaIpcAddress, gpu: str) -> tuple[tuple[Any, ...], ...]:
    """Return the handles of the policy rank on the GPU with UUID `gpu`; raises WeightSyncError."""
    handles = address.handles.get(gpu)
    if handles is None:
        raise WeightSyncError(
            f"no policy rank uses GPU {gpu} of this generator, but {', '.join(address.handles)};"
            " with the transport cuda_ipc each generator shares its GPU with a policy rank"
        )
    return handles


def _gather_handles(
    gpu: str, handles: tuple[tuple[Any, ...], ...]
) -> dict[str, tuple[tuple[Any, ...], ...]]:
    """Return the handles of all policy ranks by GPU UUID; every rank calls."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {gpu: handles}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (gpu, handles))
    return dict(gathered)
