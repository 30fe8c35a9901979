"""Policy worker on FSDP2; the class that a worker group starts."""

from __future__ import annotations

import torch

from nemo_like.config.schema import PolicyConfig
from nemo_like.distributed.process_groups import init_process_group, is_joined
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.dtensor.engine import DTensorEngine
from nemo_like.policy.dtensor.model import not_callable
from nemo_like.policy.dtensor.parallel import Groups
from nemo_like.policy.engine_worker import BuildEngine, EngineWorker, PolicyStart
from nemo_like.policy.isolation import IsolationReport


class DTensorPolicyWorker(EngineWorker):
    """Any dense Hugging Face causal LM of the Llama family's shape."""

    @staticmethod
    def engine_builder(
        context: WorkerContext, config: PolicyConfig, layout: ParallelLayout, start: PolicyStart
    ) -> BuildEngine:
        """See `EngineWorker.engine_builder`."""
        device = _init_device(context, config)
        # FSDP implements mixed precision, also for one rank.
        mixed_precision = config.precision != "float32"
        groups = Groups.join(layout, context.rank, device, mixed_precision=mixed_precision)

        def build(config: PolicyConfig, trainable: bool) -> DTensorEngine:
            return DTensorEngine(
                config, groups, trainable=trainable, seed=start.seed, head=start.head
            )

        return build

    def probe_isolation(self) -> IsolationReport:
        """See `PolicyWorker.probe_isolation`.

        These are the first forward passes. Raises ConfigError for a model that cannot be called.
        """
        try:
            return super().probe_isolation()
        except (AttributeError, TypeError) as error:
            assert isinstance(self.engine, DTensorEngine)
            raise not_callable(self.engine.model.causal_lm, error) from error


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
