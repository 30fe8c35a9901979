"""Weights and LoRA adapters that a generator receives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_like.config.optimization import LoraConfig
from nemo_like.models.adapters import adapter_names, can_have_adapter
from nemo_like.models.pretrained import load_model_config
from nemo_like.models.spec import ModelSpec

_INNER = re.compile(r"\.\d+\.")
"""Part of the name of every layer inside a decoder layer."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class AdapterSettings:
    """The adapters of a model."""

    lora: LoraConfig
    shapes: Shapes
    has_experts: bool = False
    """The model is a mixture of experts."""

    @classmethod
    def of_files(cls, lora: LoraConfig, model_name: str) -> AdapterSettings:
        """Return the adapters of the model `model_name`, of which only config.json is read."""
        config = load_model_config(model_name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        has_experts = ModelSpec.from_config(config).moe is not None
        return cls(lora, adapter_shapes(model, lora), has_experts)


def adapter_shapes(model: PreTrainedModel, lora: LoraConfig) -> Shapes:
    """Return the shapes of A and B of all adapters by name; `model` may be on the meta device."""
    shapes: Shapes = {}
    for name, module in _targets(model, lora):
        num_outputs, num_inputs = module.weight.shape
        names = adapter_names(f"{name}.weight")
        shapes[names.a] = (lora.rank, num_inputs)
        shapes[names.b] = (num_outputs, lora.rank)
    return shapes


def add_adapters(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Let all target layers of `model` compute W x + scale B A x; A and B are 0 at first.

    They have the device and the dtype of the weight, and are frozen.
    """
    for _, module in list(_targets(model, lora)):
        num_outputs, num_inputs = module.weight.shape
        options: dict[str, Any] = {
            "bias": False,
            "device": module.weight.device,
            "dtype": module.weight.dtype,
        }
        adapted: Any = module
        adapted.lora_A = nn.Linear(num_inputs, lora.rank, **options).requires_grad_(False)
        adapted.lora_B = nn.Linear(lora.rank, num_outputs, **options).requires_grad_(False)
        torch.nn.init.zeros_(adapted.lora_A.weight)
        torch.nn.init.zeros_(adapted.lora_B.weight)
        adapted.forward = partial(_adapted_linear, adapted, lora.scale)


def _targets(model: PreTrainedModel, lora: LoraConfig) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the layers with an adapter by name; these are the layers of the policy."""
    spec = ModelSpec.from_config(model.config)
    modules: Iterator[tuple[str, nn.Module]] = model.named_modules()
    for name, module in modules:
        is_inner = _INNER.search(name) is not None
        if not isinstance(module, nn.Linear) or not is_inner:
            continue
        if can_have_adapter(name, spec) and lora.is_target(name):
            yield name, module


def _adapted_linear(module: Any, scale: float, hidden: Tensor) -> Tensor:
    """Return the output [..., outputs] of `module` with its adapter for `hidden` [..., inputs].

    The operations are the same as in the policy, so that both round alike.
    """
    out = F.linear(hidden, module.weight, module.bias)
    return torch.add(out, module.lora_B(module.lora_A(hidden)), alpha=scale)


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
