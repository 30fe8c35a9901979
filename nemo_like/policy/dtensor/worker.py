"""The policy worker over FSDP2: what a worker group starts."""

from __future__ import annotations

import torch
from transformers.utils import logging as transformers_logging

from nemo_like.config.paths import require_model_directory
from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.distributed.parallel_layout import Topology
from nemo_like.distributed.process_groups import init_process_group
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.policy.dtensor.engine import DTensorEngine
from nemo_like.policy.worker import PolicyWorker


class DTensorPolicyWorker(PolicyWorker):
    """Any dense Hugging Face causal LM of the Llama family's shape, spread over the workers as
    `parallel` says.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        config: PolicyConfig,
        parallel: ParallelConfig = ParallelConfig(),  # noqa: B008  (immutable)
        seed: int = 0,
        needs_reference: bool = False,
    ) -> None:
        """Join the process group and load the model, and a frozen copy as it is on disk if
        `needs_reference`.
        """
        require_model_directory("policy.model_name", config.model_name)
        torch.manual_seed(seed)
        transformers_logging.disable_progress_bar()
        topology = Topology.from_world_size(
            context.world_size, pp=parallel.pipeline, cp=parallel.context, tp=parallel.tensor
        )
        device = _join(context, config)

        layout = {
            "topology": topology,
            "rank": context.rank,
            "sequence_parallel": parallel.sequence,
        }
        policy = DTensorEngine(config, device, **layout, trainable=True)
        reference = (
            DTensorEngine(config, device, **layout, trainable=False, groups=policy.groups)
            if needs_reference
            else None
        )
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
