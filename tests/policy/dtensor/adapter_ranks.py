"""LoRA with FSDP2: what the processes of a layout run, in one process group."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from nemo_like import parallel_layout as parallel_layout_module
from nemo_like.config.schema import OutputHead, ParallelConfig, PolicyConfig
from nemo_like.distributed import process_groups
from nemo_like.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.policy.dtensor.parameters import local_shard
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.worker import PolicyWorker
from tests.policy.adapters import (
    LORA,
    PACKED,
    adapter_values,
    is_trained,
    look,
    of_architecture,
    step_gradients,
    use,
    use_scores,
)
from tests.policy.dtensor.test_layouts import Rank, full_gradients
from tests.policy.tiny import grouped_batch

USED = "qwen2_tied"
"""Of this architecture a layout does more than compute gradients."""


class DTensorSide:
    """See `Side`."""

    def __init__(self, worker_context: WorkerContext, parallel: ParallelConfig) -> None:
        self._rank = Rank(worker_context, parallel)

    def worker(
        self, config: PolicyConfig, head: OutputHead = "vocabulary", *, initial: bool = False
    ) -> PolicyWorker:
        engine = self._rank.engine(config, head=head)
        for sharded in () if initial else engine.trained:
            full = adapter_values(sharded.name, sharded.spec.full_shape)
            offset, shape = sharded.block()
            rows, columns = (slice(o, o + s) for o, s in zip(offset, shape, strict=True))
            local_shard(sharded.parameter).copy_(full[rows, columns])
        return PolicyWorker(config, engine, engine)

    def shard(self, config: PolicyConfig, batch: BatchedDataDict) -> SlicedDataDict:
        return self._rank.shard(config, batch)

    def gradients(self, engine: Any) -> dict[str, np.ndarray]:
        found = {}
        trained = {each.name for each in engine.trained}
        for name, gradient in full_gradients(engine):
            if name in trained:
                found[name] = gradient.clone().numpy()
        return found

    def frozen(self, engine: Any) -> Iterable[Tensor]:
        return [each.parameter for each in engine.parameters if not is_trained(each.name)]

    def masters(self, engine: Any) -> Iterable[Tensor]:
        return [local_shard(each.parameter) for each in engine.trained]


def program(
    worker_context: WorkerContext,
    parallel: ParallelConfig,
    models: dict[str, str],
    straight: Path | None,
    out: Path,
    scores: bool,
) -> dict[str, Any]:
    """Gradients of all models in one process group; of `USED` also `use` if there are checkpoints
    `straight`, and `use_scores` with `scores`.
    """
    uses = straight is not None
    if worker_context.world_size > 1:
        process_groups.init_process_group(worker_context)
    try:
        side = DTensorSide(worker_context, parallel)
        found: dict[str, Any] = {}
        for name, model in models.items():
            found[name] = look(side, name, model, recomputes=uses and name == USED)
        with pytest.MonkeyPatch.context() as patch:
            # As a model too large to stay unsharded does it.
            patch.setattr(parallel_layout_module, "MAX_UNSHARDED_BYTES", 0)
            config = of_architecture(PACKED, USED, models[USED])
            shard = side.shard(config, grouped_batch())
            found[USED]["steps"]["sharded"] = step_gradients(side, side.worker(config), shard)
        if straight is not None:
            found["use"] = use(side, USED, models[USED], straight, out)
        if scores:
            found["scores"] = use_scores(side, USED, models[USED], out)
        return found
    finally:
        if worker_context.world_size > 1:
            process_groups.destroy()


def save_initial(
    worker_context: WorkerContext, parallel: ParallelConfig, model: str, out: Path
) -> None:
    """Save the adapters of a new worker."""
    config = dataclasses.replace(PACKED, lora=LORA, model_name=model)
    worker = DTensorPolicyWorker(
        worker_context, config=config, start=PolicyStart(parallel=parallel, seed=3)
    )
    worker.save(out)
    if worker_context.world_size > 1:
        process_groups.destroy()
