"""Two training steps of a tiny policy in this process; also a program, for a process of its own.

    python -m tests.gpu.steps WORKER MODEL DEVICE PRECISION

Megatron-Core on the CPU replaces the name `torch` in its modules for the rest of a process, so its
reference values are computed in another process than those of CUDA.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from nemo_like.config.schema import PolicyConfig, SequencePackingConfig
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.losses import NllLoss
from nemo_like.models.spec import load_spec
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.policy import Policy

WORKERS = {
    "dtensor": "nemo_like.policy.dtensor.worker.DTensorPolicyWorker",
    "megatron": "nemo_like.policy.megatron.worker.MegatronPolicyWorker",
}


def open_policy(
    worker: str,
    model: str,
    device: str,
    precision: str,
    mb_tokens: int = 256,
    settings: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Policy:
    """A policy of one worker that packs rows of at most 64 tokens into `mb_tokens`.

    `settings` are further keys of its configuration, `arguments` those of `PolicyStart`.
    """
    packing = SequencePackingConfig(
        enabled=True, train_mb_tokens=mb_tokens, logprob_mb_tokens=mb_tokens
    )
    config = PolicyConfig(
        model_name=model, train_global_batch_size=24, max_total_sequence_length=64
    )
    config = replace(config, precision=precision, sequence_packing=packing, **(settings or {}))  # type: ignore[arg-type]
    module, _, name = WORKERS[worker].rpartition(".")
    worker_class = getattr(importlib.import_module(module), name)
    group = LocalGroup(
        worker_class,
        {"config": config, "start": PolicyStart(**(arguments or {}))},
        local_context(device=device),
        name="policy",
    )
    return Policy(group, config, load_spec(model))


def some_rows() -> BatchedDataDict:
    """24 rows of 2 to 63 tokens, all of them trained."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 64, 24)
    input_ids = Jagged.from_lengths(rng.integers(0, 64, lengths.sum()).astype(np.int32), lengths)
    mask = Jagged(np.ones(len(input_ids.values), dtype=np.uint8), input_ids.offsets)
    return BatchedDataDict(input_ids=input_ids, token_mask=mask, length=lengths)


def two_steps(worker: str, model: str, device: str, precision: str) -> list[float]:
    """Loss and gradient norm of two steps, after the isolation check."""
    policy = open_policy(worker, model, device, precision)
    policy.probe_isolation()
    values = []
    for _ in range(2):
        sharded = policy.shard(some_rows(), policy.plan(some_rows()["length"]))
        metrics = policy.train(sharded, None, NllLoss())[0]
        values += [metrics["policy/loss"].value, metrics["policy/grad_norm"].value]
    policy.shutdown()
    return values


if __name__ == "__main__":
    print(json.dumps(two_steps(*sys.argv[1:])))
