"""Weight buckets in memory that the processes of one machine share.

The slots are anonymous memory files (memfd_create(2)), whose descriptors the receivers get through
their sockets. They have no name in any directory: the kernel frees them with the last process that
maps them, whatever ends it, and the size of `/dev/shm`, 64 MB by default in containers, does not
limit them.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from nemo_like.weight_sync.channel import (
    ChannelReceiver,
    ChannelRequest,
    ChannelSender,
    ChannelSpec,
    Placement,
    Transport,
)
from nemo_like.weight_sync.slots import NAME, NUM_SLOTS, SlotReceiver, SlotSender


class SharedMemoryTransport(Transport):
    """Slots in host memory of one machine."""

    name = "shared_memory"

    def available(self, placement: Placement) -> bool:
        return placement.is_one_machine and not placement.is_on_gpus

    def sender(
        self, request: ChannelRequest, slot_bytes: int, device: torch.device
    ) -> ChannelSender:
        return SharedMemorySender(slot_bytes, request.timeout_s)

    def receiver(self, spec: ChannelSpec, index: int, device: torch.device) -> ChannelReceiver:
        return SharedMemoryReceiver(spec)


class SharedMemorySender(SlotSender):
    """Two slots of policy rank 0."""

    def __init__(self, slot_bytes: int, timeout_s: float) -> None:
        """Listen for receivers; see `SlotSender`."""
        super().__init__(timeout_s)
        self.address = self.name
        self._slot_bytes = slot_bytes
        self._descriptors: list[int] = []

    def _create_slots(self) -> tuple[list[Tensor], bytes, list[int]]:
        """Create the slots; memory is used only for the bytes that are written."""
        for _ in range(NUM_SLOTS):
            descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
            self._descriptors.append(descriptor)
            os.ftruncate(descriptor, self._slot_bytes)
        slots = [_map_file(each, self._slot_bytes) for each in self._descriptors]
        return slots, NAME.encode(), self._descriptors

    def _release_slots(self) -> int:
        # st_blocks has a unit of 512 bytes. Pages that were never written are not counted.
        num_bytes = sum(os.fstat(descriptor).st_blocks * 512 for descriptor in self._descriptors)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
        return num_bytes


class SharedMemoryReceiver(SlotReceiver):
    """The mapped slots of a sender on this machine."""

    def __init__(self, spec: ChannelSpec) -> None:
        """Call the sender. Raises ChannelBrokenError if its process has ended."""
        super().__init__(spec.address, spec.timeout_s)
        self._slot_bytes = spec.slot_bytes

    def _open_slots(self, message: bytes, descriptors: list[int]) -> list[Tensor]:
        slots = []
        for descriptor in descriptors:
            slots.append(_map_file(descriptor, self._slot_bytes))
            os.close(descriptor)
        return slots


def _map_file(descriptor: int, num_bytes: int) -> Tensor:
    """Map a file as a tensor uint8 [num_bytes]; the mapping ends with the tensor and its views."""
    path = f"/proc/self/fd/{descriptor}"
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
