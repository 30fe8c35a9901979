"""Policy worker on FSDP2; the class that a worker group starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.utils import logging as transformers_logging

from nemo_like.config.model_directory import require_model_directory
from nemo_like.config.output_head import OutputHead
from nemo_like.config.parallel import build_layout
from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.distributed.process_groups import init_process_group, is_joined
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.policy.dtensor.engine import DTensorEngine
from nemo_like.policy.dtensor.parallel import Groups
from nemo_like.policy.frozen_models import teacher_config
from nemo_like.policy.worker import PolicyWorker


class DTensorPolicyWorker(PolicyWorker):
    """Any dense Hugging Face causal LM of the Llama family's shape."""

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
        """Join the process group and load the model, and its frozen copy if `needs_reference`.

        With LoRA adapters no copy is loaded: the reference is the model without them. `teachers`
        are the directories of further frozen models. With `head` `scores` the model is
        a reward model. Without `trainable` it has neither gradients nor an optimizer, and in
        bfloat16 no float32 weights: it computes log-probs or scores only.
        """
        require_model_directory("policy.model_name", config.model_name)
        if config.tokenizer_name is not None:
            # For the export, at the end of the run.
            require_model_directory("policy.tokenizer_name", config.tokenizer_name, weights=False)
        torch.manual_seed(seed)
        transformers_logging.disable_progress_bar()
        parallel_layout = build_layout(parallel, context.world_size)
        device = _init_device(context, config)

        def build_engine(
            *, trainable: bool, groups: Groups | None, config: PolicyConfig = config
        ) -> DTensorEngine:
            return DTensorEngine(
                config,
                device,
                parallel_layout,
                context.rank,
                trainable=trainable,
                groups=groups,
                seed=seed,
                head=head,
            )

        policy = build_engine(trainable=trainable, groups=None)
        reference = None
        if needs_reference and config.lora.enabled:
            reference = policy
        elif needs_reference:
            reference = build_engine(trainable=False, groups=policy.groups)
        frozen = []
        for name in teachers:
            require_model_directory("distill.teachers", name)
            teacher = build_engine(
                trainable=False, groups=policy.groups, config=teacher_config(config, name)
            )
            # Before the next one is loaded, so that one teacher at a time is on the device.
            teacher.offload()
            frozen.append(teacher)
        super().__init__(config, policy, reference, frozen)


def _init_device(context: WorkerContext, config: PolicyConfig) -> torch.device:
    """Return this worker's device, after joining the process group if one is needed."""
    # FSDP implements mixed precision, and FSDP needs a process group even for one rank.
    needs_group = context.world_size > 1 or config.precision != "float32"
    # Several models in the driver's process share its group of one rank.
    has_group = context.world_size == 1 and is_joined()
    if needs_group and not has_group:
        return init_process_group(context)
    torch.set_num_threads(context.num_threads)
    device = torch.device(context.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
