"""Megatron-Core on a machine without CUDA: its real code over gloo. Nothing here is called where
the device is CUDA.

Megatron-Core asks `torch.cuda` for the current device and allocates with `device="cuda"` in a few
modules. Those see a stand-in for `torch` that answers with the CPU; torch itself and every other
library of the process stay as they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import megatron.core
import torch
from torch import Tensor

from nemo_like.config.errors import ConfigError

VERSION = "0.16.1"
"""The release whose modules are listed below; another one asks for CUDA in other places."""

MODULES = (
    "megatron.core.utils",
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.transformer.moe.token_dispatcher",
)
"""Where a step asks for CUDA."""

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "empty_like")


def install() -> None:
    """Let Megatron-Core run on the CPU, in this process and for good. Raises ConfigError for
    another release of it.
    """
    if megatron.core.__version__ != VERSION:
        raise ConfigError(
            f"policy.engine=megatron runs on CPU with megatron-core {VERSION} and"
            f" {megatron.core.__version__} is installed; "
            f"install megatron-core=={VERSION}, or use policy.engine=dtensor"
        )
    for name in MODULES:
        vars(importlib.import_module(name))["torch"] = _Torch()
    # Activation recompute keeps the states of the CUDA generators, of which there are none.
    random = vars(importlib.import_module("megatron.core.tensor_parallel.random"))
    random["_get_cuda_rng_state"] = random["_set_cuda_rng_state"] = lambda *args, **kwargs: None
    # Where tokens go is counted on the accelerator and then brought to the host; here it is on the
    # host already.
    vars(importlib.import_module("megatron.core.transformer.moe.token_dispatcher"))[
        "maybe_move_tensor_to_cpu"
    ] = _on_host


@contextmanager
def cuda_type_names() -> Iterator[None]:
    """Inside, `Tensor.type()` names CPU tensors as CUDA ones: the distributed optimizer is built
    for no others.
    """
    own_type = Tensor.type

    def cuda_type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        named = own_type(tensor, *args, **kwargs)
        return named.replace("torch.", "torch.cuda.", 1) if isinstance(named, str) else named

    with mock.patch.object(Tensor, "type", cuda_type):
        yield


class _Cuda:
    """`torch.cuda` as the listed modules see it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self, *args: Any) -> None:
        pass

    def Stream(self, *args: Any) -> _Stream:
        return _Stream()

    def current_stream(self, *args: Any) -> _Stream:
        return _Stream()

    def stream(self, *args: Any) -> AbstractContextManager[None]:
        return nullcontext()


class _Stream:
    """What is asked of it has happened by then."""

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def record_event(self, *args: Any) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


class _Torch:
    """`torch` as the listed modules see it."""

    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return _on_cpu(found) if name in _FACTORIES else found


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _on_cpu(factory: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make
