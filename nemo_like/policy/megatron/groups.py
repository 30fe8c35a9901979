"""Megatron-Core's process groups. They are global to a process, so its policy and its reference
share them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed import ProcessGroup

from nemo_like.distributed.parallel_layout import Topology
from nemo_like.policy.megatron import cpu as megatron_cpu


class Groups(NamedTuple):
    """The groups this rank is in, by the axes along which their ranks differ."""

    tp: ProcessGroup
    cp: ProcessGroup
    dp: ProcessGroup
    dp_cp: ProcessGroup
    ep: ProcessGroup
    """Those of a pipeline stage that share its experts, neighbours whatever tokens they have."""
    expert_dp: ProcessGroup
    """Those of a pipeline stage that hold the same experts."""


def joined() -> Groups:
    """What `join` made."""
    state: Any = parallel_state
    return Groups(
        tp=state.get_tensor_model_parallel_group(),
        cp=state.get_context_parallel_group(),
        dp=state.get_data_parallel_group(),
        dp_cp=state.get_data_parallel_group(with_context_parallel=True),
        ep=state.get_expert_model_parallel_group(),
        expert_dp=state.get_expert_data_parallel_group(),
    )


def join(
    topology: Topology, device: torch.device, *, seed: int, timeout_s: float, expert: int = 1
) -> None:
    """Make the groups of `topology` out of the process group this process is in; every rank calls.

    Each pipeline stage shares its experts among `expert` ranks, whatever its other axes: an expert
    is whole on its rank, as few are wide enough to be worth cutting and tokens come to it anyway.

    Groups of an earlier topology are forgotten: they went with their process group.
    """
    if device.type == "cpu":
        megatron_cpu.install()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        context_parallel_size=topology.cp,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1,
        order="tp-cp-ep-dp-pp",  # tp varies fastest, as in Topology
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
        create_gloo_process_groups=False,
    )
    # Nothing draws random numbers (weights are read, dropout is off), so a tracker that tracks
    # nothing serves.
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True)
