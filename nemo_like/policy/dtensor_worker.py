"""The policy worker over FSDP2: what a worker group starts."""

from __future__ import annotations

import torch
from transformers.utils import logging as transformers_logging

from nemo_like.config.schema import PolicyConfig
from nemo_like.distributed.mesh import init_process_group
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.policy.dtensor_engine import DTensorEngine
from nemo_like.policy.worker import PolicyWorker


class DTensorPolicyWorker(PolicyWorker):
    """Any Hugging Face causal LM of the Llama family's shape, its weights sharded over the dp ranks."""

    def __init__(self, context: WorkerContext, *, config: PolicyConfig, seed: int = 0, needs_reference: bool = False) -> None:
        """Join the process group and load the model, and a frozen copy as it is on disk if `needs_reference`."""
        torch.manual_seed(seed)
        transformers_logging.disable_progress_bar()
        device = _join(context, config)
        policy = DTensorEngine(config, device, context.world_size, trainable=True)
        reference = DTensorEngine(config, device, context.world_size, trainable=False) if needs_reference else None
        super().__init__(config, policy, reference)


def _join(context: WorkerContext, config: PolicyConfig) -> torch.device:
    """This worker's device, in a process group unless one process in float32 needs none."""
    if context.world_size > 1 or config.precision != "float32":
        return init_process_group(context)
    torch.set_num_threads(context.num_threads)
    device = torch.device(context.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
