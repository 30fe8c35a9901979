"""Weight buckets in GPU memory that a policy rank shares with the generator on the same GPU.

A CUDA IPC handle can be opened only on the GPU of its memory. So every policy rank has the two
slots on its own GPU: rank 0 gathers a bucket, the policy's default process group broadcasts it to
the other ranks, and each receiver opens the slots of the policy rank that shares its GPU. The slots
exist during an update only; their handles are sent through the sockets of `slots`.

Not run: no GPU was available. Only the choice of the rank and the turns of both sides are tested,
on CPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

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
from nemo_like.weight_sync.slots import NUM_SLOTS, SlotReceiver, SlotSender

_DEVICE_ARGUMENT = 6
"""Position of the device index in the arguments of `rebuild_cuda_tensor`."""


@dataclass(frozen=True, slots=True)
class CudaIpcAddress:
    """The policy ranks that have slots."""

    names: Mapping[str, str]
    """GPU UUID -> `SlotSender.name` of the policy rank on this GPU."""

    def on_gpu(self, gpu: str) -> str:
        """Return the name of the policy rank on the GPU with this UUID; raises WeightSyncError."""
        if gpu not in self.names:
            raise WeightSyncError(
                f"no policy rank uses GPU {gpu} of this generator, but {', '.join(self.names)};"
                " with the transport cuda_ipc each generator shares its GPU with a policy rank"
            )
        return self.names[gpu]


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
        return CudaIpcSender(slot_bytes, request.timeout_s, device)

    def receiver(self, spec: ChannelSpec, index: int, device: torch.device) -> ChannelReceiver:
        return CudaIpcReceiver(spec, device)


class CudaIpcSender(SlotSender):
    """The slots of one policy rank; every rank constructs one at the same time."""

    def __init__(self, slot_bytes: int, timeout_s: float, device: torch.device) -> None:
        """Listen for receivers, and exchange the names with the other policy ranks."""
        super().__init__(timeout_s)
        self._slot_bytes = slot_bytes
        self._device = device
        own = (gpu_uuid(device), self.name)
        gathered: list[tuple[str, str]] = [own]
        if _has_other_ranks():
            gathered = [own] * dist.get_world_size()
            dist.all_gather_object(gathered, own)
        self.address = CudaIpcAddress(dict(gathered))

    def publish(self, index: int, num_bytes: int) -> None:
        """Copy `num_bytes` of rank 0's slot to the slots of all policy ranks; every rank calls."""
        if _has_other_ranks():
            dist.broadcast(self._slots[index % NUM_SLOTS][:num_bytes], src=0)
        # Other processes do not wait for this process's streams.
        torch.cuda.synchronize(self._device)
        super().publish(index, num_bytes)

    def _create_slots(self) -> tuple[list[Tensor], bytes, list[int]]:
        from torch.multiprocessing.reductions import reduce_tensor

        slots = [
            torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device)
            for _ in range(NUM_SLOTS)
        ]
        handles = []
        for slot in slots:
            values = reduce_tensor(slot)[1][_DEVICE_ARGUMENT + 1 :]
            handles.append([each.hex() if isinstance(each, bytes) else each for each in values])
        return slots, json.dumps(handles).encode(), []

    def _release_slots(self) -> int:
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        return NUM_SLOTS * self._slot_bytes


class CudaIpcReceiver(SlotReceiver):
    """The opened slots of the policy rank on this GPU."""

    def __init__(self, spec: ChannelSpec, device: torch.device) -> None:
        """Call the policy rank. Raises WeightSyncError if none is on this GPU."""
        address: CudaIpcAddress = spec.address
        super().__init__(address.on_gpu(gpu_uuid(device)), spec.timeout_s)
        self._device = device
        self._slot_bytes = spec.slot_bytes

    def loaded(self) -> None:
        """Wait until the copies out of the slot are done; the sender may then reuse it."""
        torch.cuda.synchronize(self._device)
        super().loaded()

    def _open_slots(self, message: bytes, descriptors: list[int]) -> list[Tensor]:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        # The index of one GPU differs between processes that see different sets of GPUs.
        device = self._device.index
        if device is None:
            device = torch.cuda.current_device()
        shape = (self._slot_bytes,)
        first = (torch.Tensor, shape, (1,), 0, torch.TypedStorage, torch.uint8, device)
        slots = []
        for values in json.loads(message):
            handle = [bytes.fromhex(each) if isinstance(each, str) else each for each in values]
            slots.append(rebuild_cuda_tensor(*first, *handle))
        return slots

    def _close_slots(self) -> None:
        torch.cuda.ipc_collect()


def _has_other_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1
