"""Counts the calls that would make the host wait for a CUDA device, in a run on the CPU."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_CPU_ONLY = ("segment_attention.py",)
"""Files that only run on the CPU: a varlen kernel takes their place on CUDA."""
_OPERATORS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::is_nonzero",
}
"""Their results are values, or tensors whose shapes depend on values."""


class HostWaits:
    """Context manager; `places` has one entry, `file:line operation`, per wait in the block.

    Counted are operators whose result or shape depends on values, indexing by a boolean mask,
    transfers to the host, and tensors built from Python values on a device. A transfer counts once:
    reading the tensor that it returned does not wait again, but copying it to the device does.
    Other copies to the device cannot be seen on the CPU; `nemo_like.device_transfer` makes those.
    """

    def __init__(self) -> None:
        self.places: list[str] = []
        # With the tensors, so that their memory is not used again for others.
        self._on_host: dict[int, Tensor] = {}
        self._modes = (_Functions(self), _Operators(self))

    def __enter__(self) -> HostWaits:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def add(self, operation: str) -> None:
        for frame in reversed(traceback.extract_stack()):
            name = frame.filename.rsplit("/", 1)[-1]
            if name in _CPU_ONLY:
                return
        place = next(
            frame
            for frame in reversed(traceback.extract_stack())
            if "/torch/" not in frame.filename and frame.filename != __file__
        )
        self.places.append(f"{place.filename.rsplit('/', 1)[-1]}:{place.lineno} {operation}")

    def mark_on_host(self, tensor: Tensor) -> None:
        self._on_host[tensor.untyped_storage().data_ptr()] = tensor

    def is_on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._on_host


class _Functions(TorchFunctionMode):
    """Calls that read memory without an operator where the tensor is on the CPU."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        result = func(*args, **kwargs)
        if name in ("tolist", "numpy") and not self._waits.is_on_host(args[0]):
            self._waits.add(name)
        elif name == "cpu" or (name == "to" and _has_cpu([*args[1:], *kwargs.values()])):
            if not self._waits.is_on_host(args[0]):
                self._waits.add(name)
            self._waits.mark_on_host(result)
        elif name == "to" and self._waits.is_on_host(args[0]) and not _is_in_device_transfer():
            self._waits.add("to the device")
        elif name in ("tensor", "as_tensor") and kwargs.get("device") is not None:
            self._waits.add(name)
        return result


class _Operators(TorchDispatchMode):
    """Operators whose result or shape depends on values."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if name in _OPERATORS and not any(map(self._waits.is_on_host, tensors)):
            self._waits.add(name)
        elif name in ("aten::index", "aten::index_put", "aten::index_put_"):
            if any(index is not None and index.dtype == torch.bool for index in args[1]):
                self._waits.add(f"{name} by a mask")
        elif name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
            self._waits.add(name)
        return func(*args, **kwargs)


def _is_in_device_transfer() -> bool:
    names = [frame.filename.rsplit("/", 1)[-1] for frame in traceback.extract_stack()]
    return "device_transfer.py" in names


def _has_cpu(arguments: Iterable[Any]) -> bool:
    # A device object is that of the run itself, here the CPU in the place of CUDA.
    return any(isinstance(argument, str) and argument == "cpu" for argument in arguments)
