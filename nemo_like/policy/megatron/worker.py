"""Policy worker on Megatron-Core; the class that a worker group starts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import torch
from transformers.utils import logging as transformers_logging

from nemo_like.config.model_directory import require_model_directory
from nemo_like.config.output_head import OutputHead
from nemo_like.config.parallel import build_layout
from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.distributed.process_groups import init_process_group
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.policy.frozen_models import teacher_config
from nemo_like.policy.worker import PolicyWorker

# Every rank would print these on import and use of Megatron-Core: Apex and Transformer Engine are
# not installed, as they are not needed, and newer releases of torch deprecate names that it uses.
for _message in (
    ".*Apex.* not installed",
    "`torch.distributed.* is deprecated",
    "The .grad attribute of a Tensor",
):
    warnings.filterwarnings("ignore", _message)

from nemo_like.policy.megatron.engine import MegatronEngine  # noqa: E402
from nemo_like.policy.megatron.groups import Groups  # noqa: E402


class MegatronPolicyWorker(PolicyWorker):
    """A model of one of `families.FAMILIES`, with all five kinds of parallelism."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        config: PolicyConfig,
        parallel: ParallelConfig = ParallelConfig(),  # noqa: B008  (immutable)
        seed: int = 0,
        needs_reference: bool = False,
        teachers: Sequence[str] = (),
        head: OutputHead = "vocabulary",
        trainable: bool = True,
    ) -> None:
        """Join the process groups and load the model, and its frozen copy if `needs_reference`.

        `teachers` are the directories of further frozen models. `head` and `trainable`
        are as in `DTensorPolicyWorker`.
        """
        # Megatron-Core relies on this order of communication before the compute that overlaps it,
        # and warns without it.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        require_model_directory("policy.model_name", config.model_name)
        if config.tokenizer_name is not None:
            # For the export, at the end of the run.
            require_model_directory("policy.tokenizer_name", config.tokenizer_name, weights=False)
        torch.manual_seed(seed)
        transformers_logging.disable_progress_bar()
        parallel_layout = build_layout(parallel, context.world_size)
        device = init_process_group(context)
        groups = Groups.join(
            parallel_layout, device, seed=seed, timeout_s=context.collective_timeout_s
        )

        def build_engine(*, trainable: bool, config: PolicyConfig = config) -> MegatronEngine:
            return MegatronEngine(
                config,
                device,
                parallel_layout,
                context.rank,
                groups=groups,
                trainable=trainable,
                seed=seed,
                head=head,
            )

        policy = build_engine(trainable=trainable)
        reference = None
        if needs_reference and config.lora.enabled:
            # The policy without its adapters.
            reference = policy
        elif needs_reference:
            reference = build_engine(trainable=False)
        frozen = []
        for name in teachers:
            require_model_directory("distill.teachers", name)
            teacher = build_engine(trainable=False, config=teacher_config(config, name))
            # Before the next one is loaded, so that one teacher at a time is on the device.
            teacher.offload()
            frozen.append(teacher)
        super().__init__(config, policy, reference, frozen)
