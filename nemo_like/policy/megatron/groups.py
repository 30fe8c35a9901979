"""Megatron-Core's process groups, its timers, and its use on a machine without CUDA.

On the CPU its real code runs over gloo. A few modules of Megatron-Core call
`torch.cuda.current_device()` and allocate with `device="cuda"`; their global name `torch` is
replaced by a proxy that returns the CPU. torch itself and every other library of the process stay
as they are. On CUDA devices nothing is replaced.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_like.config.errors import ConfigError
from nemo_like.distributed.process_groups import context_parts, share_timeout
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.device import ComputeClock
from nemo_like.policy.rank_groups import RankGroups

_COMPUTE = ("forward-compute", "backward-compute")

VERSION = "0.16.1"
"""The release to which MODULES applies; other releases use CUDA in other modules."""

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
"""Modules of Megatron-Core that use CUDA during a training step."""

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "empty_like")


class ScheduleTimers:
    """The `config.timers` of a model: runs `clock` in the forward and backward of a microbatch.

    Pipeline communication and gradient reduction have other names and are not timed.
    """

    def __init__(self, clock: ComputeClock) -> None:
        self._clock = clock

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        return _Timer(self._clock if name in _COMPUTE else None)


class _Timer:
    """Starts and stops a clock; does nothing without one."""

    def __init__(self, clock: ComputeClock | None) -> None:
        self._clock = clock

    def start(self, *_: Any, **__: Any) -> None:
        if self._clock is not None:
            self._clock.start()

    def stop(self, *_: Any, **__: Any) -> None:
        if self._clock is not None:
            self._clock.stop()


def install() -> None:
    """Let Megatron-Core run on the CPU for the rest of this process.

    Raises ConfigError for a release other than VERSION.
    """
    if megatron.core.__version__ != VERSION:
        raise ConfigError(
            f"policy.engine=megatron runs on CPU with megatron-core {VERSION} and"
            f" {megatron.core.__version__} is installed; "
            f"install megatron-core=={VERSION}, or use policy.engine=dtensor"
        )
    for name in MODULES:
        vars(importlib.import_module(name))["torch"] = _Torch()
    # Activation recompute saves and restores the states of CUDA generators, which do not exist.
    random = vars(importlib.import_module("megatron.core.tensor_parallel.random"))
    random["_get_cuda_rng_state"] = lambda *args, **kwargs: None
    random["_set_cuda_rng_state"] = lambda *args, **kwargs: None
    # The dispatcher counts tokens per expert on the device and copies the counts to the host. Here
    # they are on the host already.
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    vars(dispatcher)["maybe_move_tensor_to_cpu"] = _on_host


@contextmanager
def cuda_type_names() -> Iterator[None]:
    """Let `Tensor.type()` report CPU tensors as CUDA tensors inside the block.

    The constructor of the distributed optimizer accepts no other types.
    """
    original_type = Tensor.type

    def cuda_type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return a type name as of a CUDA tensor, or the converted tensor, of the same shape."""
        result = original_type(tensor, *args, **kwargs)
        if isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        # With a dtype argument the method converts and returns a tensor.
        return result

    Tensor.type = cuda_type  # type: ignore[method-assign]
    try:
        yield
    finally:
        # Tensor inherits the method, so deleting the override restores it.
        del Tensor.type


class _Cuda:
    """Proxy of `torch.cuda` for the listed modules."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self, *args: Any) -> None:
        pass

    def Stream(self, *args: Any) -> _Stream:  # noqa: N802 (the name in torch.cuda)
        return _Stream()

    def current_stream(self, *args: Any) -> _Stream:
        return _Stream()

    def stream(self, *args: Any) -> AbstractContextManager[None]:
        return nullcontext()


class _Stream:
    """No-op CUDA stream: on the CPU every operation is synchronous."""

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def record_event(self, *args: Any) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


class _Torch:
    """Proxy of `torch` for the listed modules."""

    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return _on_cpu(value) if name in _FACTORIES else value


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    if as_numpy and isinstance(tensor, Tensor):
        return tensor.numpy()
    return tensor


def _on_cpu(factory: Any) -> Any:
    """Wrap a tensor factory so that it allocates on the CPU instead of CUDA."""

    def make(*args: Any, **kwargs: Any) -> Tensor:
        """Call `factory` with the CPU in place of CUDA; the shape of the result is unchanged."""
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


@dataclass(frozen=True, kw_only=True)
class Groups(RankGroups):
    """Process groups of this rank, named by the axes along which their ranks differ.

    Megatron-Core has each of them, even groups of one rank.
    """

    tp: ProcessGroup
    ep: ProcessGroup
    """Expert-parallel group: consecutive ranks of one pipeline stage."""
    expert_dp: ProcessGroup
    """Ranks of one pipeline stage that have the same experts."""

    @classmethod
    def join(
        cls,
        parallel_layout: ParallelLayout,
        rank: int,
        device: torch.device,
        *,
        seed: int,
        timeout_s: float,
    ) -> Groups:
        """Create the groups of `parallel_layout` in the default process group; every rank calls.

        Expert tensor parallelism is 1: few experts are wide enough to be sharded, and their tokens
        are dispatched anyway.
        """
        if device.type == "cpu":
            install()
        if parallel_state.model_parallel_is_initialized():
            # Groups of an earlier parallel_layout. Their process group is destroyed already.
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel_layout.tp,
            pipeline_model_parallel_size=parallel_layout.pp,
            virtual_pipeline_model_parallel_size=(
                parallel_layout.vpp if parallel_layout.vpp > 1 else None
            ),
            context_parallel_size=parallel_layout.cp,
            expert_model_parallel_size=parallel_layout.ep,
            expert_tensor_parallel_size=1,
            order="tp-cp-ep-dp-pp",  # tp varies fastest, as in ParallelLayout
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
            create_gloo_process_groups=False,
        )
        cp_parts = context_parts(parallel_layout)
        # In seconds, where Megatron-Core takes minutes; and for groups to which it passes none.
        share_timeout()
        # Nothing draws random numbers: weights are read from files and dropout is off. The
        # inference tracker keeps no CUDA generator states, which do not exist on the CPU.
        model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True)
        state: Any = parallel_state
        return cls(
            layout=parallel_layout,
            rank=rank,
            device=device,
            world=dist.group.WORLD,
            tp=state.get_tensor_model_parallel_group(),
            cp=state.get_context_parallel_group(),
            cp_parts=cp_parts,
            dp=state.get_data_parallel_group(),
            dp_cp=state.get_data_parallel_group(with_context_parallel=True),
            ep=state.get_expert_model_parallel_group(),
            expert_dp=state.get_expert_data_parallel_group(),
        )
