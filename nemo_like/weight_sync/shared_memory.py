"""Weight buckets in memory that the processes of one machine share.

The slots are anonymous memory files (memfd_create(2)), which receivers open through
`/proc/<pid>/fd`. They have no name in any directory: the kernel frees them with the last process
that maps them, whatever ends it, and the size of `/dev/shm`, 64 MB by default in containers, does
not limit them.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.weight_sync.channel import (
    ChannelBrokenError,
    ChannelReceiver,
    ChannelRequest,
    ChannelSender,
    ChannelSpec,
    Placement,
    Transport,
)

NAME = "nemo_like_weights"
"""Beginning of the slots' names in `/proc/<pid>/maps`."""

NUM_SLOTS = 2
"""One bucket is loaded while the next is gathered."""


@dataclass(frozen=True, slots=True)
class SharedMemoryAddress:
    """The slots of a sender on the same machine."""

    pid: int
    descriptors: tuple[int, ...]
    """File descriptors of the slots in process `pid`."""
    token: str
    """Part of the name of both slots, so that descriptors of another process are recognized."""


class SharedMemoryTransport(Transport):
    """Slots in host memory of one machine."""

    name = "shared_memory"

    def available(self, placement: Placement) -> bool:
        return placement.is_one_machine and not placement.is_on_gpus

    def sender(
        self, request: ChannelRequest, slot_bytes: int, device: torch.device
    ) -> ChannelSender:
        return SharedMemorySender(slot_bytes)

    def receiver(self, spec: ChannelSpec, index: int, device: torch.device) -> ChannelReceiver:
        return SharedMemoryReceiver(spec)


class SharedMemorySender(ChannelSender):
    """Two slots of policy rank 0; bucket i is in slot i mod 2.

    The driver calls `send` of bucket i after all receivers have loaded bucket i - 2.
    """

    def __init__(self, slot_bytes: int) -> None:
        """Create slots of `slot_bytes`; memory is used only for the bytes that are written."""
        token = f"{NAME}_{secrets.token_hex(8)}"
        self._descriptors = []
        for _ in range(NUM_SLOTS):
            descriptor = os.memfd_create(token, os.MFD_CLOEXEC)
            self._descriptors.append(descriptor)
            os.ftruncate(descriptor, slot_bytes)
        self.address = SharedMemoryAddress(os.getpid(), tuple(self._descriptors), token)
        self._slots = [
            _map_file(f"/proc/self/fd/{descriptor}", slot_bytes) for descriptor in self._descriptors
        ]

    def buffer(self, index: int) -> Tensor:
        """Return the slot of bucket `index`, uint8 [slot_bytes]."""
        return self._slots[index % NUM_SLOTS]

    def close(self) -> int:
        """Release the slots; returns the bytes of memory that they occupied."""
        # st_blocks has a unit of 512 bytes. Pages that were never written are not counted.
        num_bytes = sum(os.fstat(descriptor).st_blocks * 512 for descriptor in self._descriptors)
        self._slots = []
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
        return num_bytes


class SharedMemoryReceiver(ChannelReceiver):
    """The mapped slots of a sender on this machine."""

    def __init__(self, spec: ChannelSpec) -> None:
        """Map the slots. Raises ChannelBrokenError if the sender's process has ended."""
        address: SharedMemoryAddress = spec.address
        self._slots = [
            _map_slot(address, descriptor, spec.slot_bytes) for descriptor in address.descriptors
        ]

    def receive(self, index: int) -> Tensor:
        """Return the slot with bucket `index`, uint8 [slot_bytes]."""
        return self._slots[index % NUM_SLOTS]

    def close(self) -> int:
        """Release the mapping; returns 0, because the memory is the sender's."""
        self._slots = []
        return 0


def _map_slot(address: SharedMemoryAddress, descriptor: int, num_bytes: int) -> Tensor:
    """Return the sender's slot as uint8 [num_bytes]."""
    path = f"/proc/{address.pid}/fd/{descriptor}"
    try:
        # Another process may have the number of a sender that ended.
        is_slot = address.token in os.readlink(path)
    except FileNotFoundError:
        is_slot = False
    except PermissionError as error:
        raise WeightPermissionError(
            f"{path} cannot be opened: policy and generator run on one machine as different users,"
            " or the kernel hides processes from each other; start both as the same user"
        ) from error
    if not is_slot:
        raise ChannelBrokenError(f"the policy's process {address.pid} has ended or its slots have")
    return _map_file(path, num_bytes)


class WeightPermissionError(PermissionError):
    """This process may not map the memory of the policy's process."""


def _map_file(path: str, num_bytes: int) -> Tensor:
    """Map a file as a tensor uint8 [num_bytes]; the mapping ends with the tensor and its views."""
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
