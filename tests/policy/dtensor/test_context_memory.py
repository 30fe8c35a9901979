"""What context parallelism keeps for the backward pass: with activation checkpointing not the keys
and values of other ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_like.config.schema import ParallelConfig, PolicyConfig, SequencePackingConfig
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.policy.outputs import TokenLogprobs
from tests.policy.dtensor.test_layouts import BASE, Rank
from tests.policy.tiny import random_batch, run_ranks

NUM_TOKENS = 512
"""On each rank."""
KINDS = ("none", "selective", "full")


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made inside the block that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[Any, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else [result]
        for tensor in results:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def count(self) -> int:
        return sum(size for storage, size in self._storages.items() if not storage.expired())


def bytes_after_forward(
    worker_context: WorkerContext, parallel: ParallelConfig, configs: list[PolicyConfig]
) -> list[int]:
    """Of one row, as many tokens per rank in every layout."""
    process_groups.init_process_group(worker_context)
    rank = Rank(worker_context, parallel)
    batch = random_batch([NUM_TOKENS * parallel.context])
    found = []
    for config in configs:
        worker = rank.worker(config)
        shard = rank.shard(config, batch)
        assert shard.plan is not None
        rows = worker.rows(shard, shard.plan.spec)
        microbatches = list(map(rows.inputs, shard.plan.microbatches))

        def loss(inputs: Any, outputs: TokenLogprobs) -> tuple[Tensor, None]:
            found.append(live.count())
            return -(outputs.logprobs * inputs.label_mask).sum(), None

        with LiveBytes() as live:
            worker.engine.run(microbatches, loss, backward=True)
    process_groups.destroy()
    return found


def test_gathered_keys_and_values_are_not_kept_with_checkpointing(
    model_dir, rank_pool, tmp_path
) -> None:
    found = {}
    for context in (1, 2):
        packing = SequencePackingConfig(enabled=True, train_mb_tokens=NUM_TOKENS * context)
        configs = [
            dataclasses.replace(
                BASE,
                model_name=model_dir("llama"),
                train_global_batch_size=1,
                max_total_sequence_length=NUM_TOKENS * context,
                sequence_packing=packing,
                activation_checkpointing=kind,
            )
            for kind in KINDS
        ]
        meeting = tmp_path / str(context)
        parallel = ParallelConfig(context=context)
        results = run_ranks(rank_pool, bytes_after_forward, context, meeting, parallel, configs)
        found[context] = dict(zip(KINDS, results[0], strict=True))
    growth = {kind: found[2][kind] / found[1][kind] for kind in KINDS}
    assert growth["none"] > 1.2
    assert growth["selective"] < 1.1
    assert growth["full"] < 1.1
