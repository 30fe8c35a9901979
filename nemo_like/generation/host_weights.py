"""Host copies of a generator's weights, so that offloading them copies nothing from the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class HostWeights:
    """The weights of a frozen model in host memory, in buffers that are allocated once.

    A parameter has either its memory on the device or its host buffer. New weights that arrive
    while the model is offloaded are written to the host buffers and copied to the device by
    `onload`; those on the device are equal to the buffers then, and offloading drops them.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        pinned: bool,
    ) -> None:
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
        for parameter in self._model.parameters():
            if parameter not in self._buffers:
                self._buffers[parameter] = torch.empty(
                    parameter.shape, dtype=parameter.dtype, pin_memory=self._pinned
                )
            if not self._is_current:
                self._buffers[parameter].copy_(parameter, non_blocking=True)
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

    def _wait(self) -> None:
        if self._pinned:
            torch.cuda.current_stream().synchronize()
