"""Megatron-Core's process groups. They are global to a process: all its engines share them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed import ProcessGroup

from nemo_like.distributed.process_groups import share_timeout
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.megatron import cpu as megatron_cpu


@dataclass(frozen=True)
class Groups:
    """Process groups of this rank, named by the axes along which their ranks differ."""

    world: ProcessGroup | None
    tp: ProcessGroup
    cp: ProcessGroup
    dp: ProcessGroup
    dp_cp: ProcessGroup
    ep: ProcessGroup
    """Expert-parallel group: consecutive ranks of one pipeline stage."""
    expert_dp: ProcessGroup
    """Ranks of one pipeline stage that have the same experts."""

    @classmethod
    def join(
        cls, parallel_layout: ParallelLayout, device: torch.device, *, seed: int, timeout_s: float
    ) -> Groups:
        """Create the groups of `parallel_layout` in the default process group; every rank calls.

        Expert tensor parallelism is 1: few experts are wide enough to be sharded, and their tokens
        are dispatched anyway.
        """
        if device.type == "cpu":
            megatron_cpu.install()
        if parallel_state.model_parallel_is_initialized():
            # Groups of an earlier parallel_layout. Their process group is destroyed already.
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel_layout.tp,
            pipeline_model_parallel_size=parallel_layout.pp,
            context_parallel_size=parallel_layout.cp,
            expert_model_parallel_size=parallel_layout.ep,
            expert_tensor_parallel_size=1,
            order="tp-cp-ep-dp-pp",  # tp varies fastest, as in ParallelLayout
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
            create_gloo_process_groups=False,
        )
        # In seconds, where Megatron-Core takes minutes; and for groups to which it passes none.
        share_timeout()
        # Nothing draws random numbers: weights are read from files and dropout is off. The
        # inference tracker keeps no CUDA generator states, which do not exist on the CPU.
        model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True)
        return cls._from_parallel_state()

    @classmethod
    def _from_parallel_state(cls) -> Groups:
        state: Any = parallel_state
        return cls(
            world=dist.group.WORLD,
            tp=state.get_tensor_model_parallel_group(),
            cp=state.get_context_parallel_group(),
            dp=state.get_data_parallel_group(),
            dp_cp=state.get_data_parallel_group(with_context_parallel=True),
            ep=state.get_expert_model_parallel_group(),
            expert_dp=state.get_expert_data_parallel_group(),
        )
