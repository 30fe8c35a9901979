"""Host copies of a generator's weights, so that offloading them copies nothing from the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_ALIGNMENT = 512
"""Each weight starts at a multiple of this many bytes of its host memory."""


class HostWeights:
    """The weights of a frozen model in host memory, in buffers that are allocated once.

    A parameter has either its memory on the device or its host buffer. New weights that arrive
    while the model is offloaded are written to the host buffers and copied to the device by
    `onload`; those on the device are equal to the buffers then, and offloading drops them.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, pinned: bool) -> None:
        self._model = model
        self._device = device
        self._pinned = pinned
        self._buffers: dict[nn.Parameter, Tensor] = {}
        self._is_current = False
        """The buffers have the values of the weights."""
        self.is_offloaded = False

    def note_change(self) -> None:
        """Note that the weights are about to change, on the device or in host memory."""
        # In host memory the buffers are the weights.
        if not self.is_offloaded:
            self._is_current = False

    @torch.no_grad()
    def offload(self) -> None:
        """Free the weights on the device; copies them first if they changed there."""
        if self.is_offloaded:
            return
        if not self._buffers:
            self._allocate()
        for parameter, buffer in self._buffers.items():
            if not self._is_current:
                buffer.copy_(parameter, non_blocking=True)
        self._wait()
        for parameter, buffer in self._buffers.items():
            parameter.data = buffer
        self._is_current = True
        self.is_offloaded = True

    @torch.no_grad()
    def onload(self) -> None:
        """Copy the weights to new memory on the device; the buffers keep their values."""
        if not self.is_offloaded:
            return
        for parameter, buffer in self._buffers.items():
            memory = torch.empty_like(buffer, device=self._device)
            parameter.data = memory.copy_(buffer, non_blocking=True)
        self._wait()
        self.is_offloaded = False

    def _allocate(self) -> None:
        """Allocate the host buffers of all parameters."""
        # The largest first, which leaves the small ones for the ends of the blocks.
        parameters = sorted(self._model.parameters(), key=lambda each: each.nbytes, reverse=True)
        block_sizes, places = place_in_blocks([parameter.nbytes for parameter in parameters])
        blocks = [
            torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned) for size in block_sizes
        ]
        for parameter, (block, start) in zip(parameters, places, strict=True):
            content = blocks[block][start : start + parameter.nbytes]
            self._buffers[parameter] = content.view(parameter.dtype).view(parameter.shape)

    def _wait(self) -> None:
        if self._pinned:
            torch.cuda.current_stream().synchronize()


def place_in_blocks(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Place buffers of `sizes` bytes, the largest first, in blocks whose sizes are powers of two.

    Returns the sizes of the blocks, and of each buffer its block and its first byte. Torch rounds
    page-locked memory up to a power of two, so that one allocation per buffer could take twice the
    memory. Example: buffers of 3072, 1024 and 512 bytes are in blocks of 4096 and 512 bytes.
    """
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    remaining = sum(padded)
    block_sizes: list[int] = []
    num_used: list[int] = []
    places = []
    for size in padded:
        block = _first_with_room(block_sizes, num_used, size)
        if block is None:
            block = len(block_sizes)
            # At most the remaining buffers, but at least this one.
            block_sizes.append(max(_power_above(size), _power_above(remaining + 1) // 2))
            num_used.append(0)
        places.append((block, num_used[block]))
        num_used[block] += size
        remaining -= size
    return block_sizes, places


def _first_with_room(block_sizes: Sequence[int], num_used: Sequence[int], size: int) -> int | None:
    """Return the first block that has `size` free bytes."""
    for block, (capacity, used) in enumerate(zip(block_sizes, num_used, strict=True)):
        if used + size <= capacity:
            return block
    return None


def _power_above(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()
