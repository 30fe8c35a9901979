"""Policy worker on Megatron-Core; the class that a worker group starts."""

from __future__ import annotations

import os
import warnings

from nemo_like.config.schema import PolicyConfig
from nemo_like.distributed.process_groups import init_process_group
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.engine_worker import BuildEngine, EngineWorker, PolicyStart

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


class MegatronPolicyWorker(EngineWorker):
    """A model of one of `families.FAMILIES`, with all five kinds of parallelism."""

    @staticmethod
    def engine_builder(
        context: WorkerContext, config: PolicyConfig, layout: ParallelLayout, start: PolicyStart
    ) -> BuildEngine:
        """See `EngineWorker.engine_builder`."""
        # Megatron-Core relies on this order of communication before the compute that overlaps it,
        # and warns without it.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        device = init_process_group(context)
        groups = Groups.join(
            layout, context.rank, device, seed=start.seed, timeout_s=context.collective_timeout_s
        )

        def build(config: PolicyConfig, trainable: bool) -> MegatronEngine:
            return MegatronEngine(
                config, groups, trainable=trainable, seed=start.seed, head=start.head
            )

        return build
