"""Several copies of the weights (HSDP), and every choice of `parallel.reshard`, train alike."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from tests.policy.dtensor.test_layouts import PACKED, Rank, gradients, worst
from tests.policy.tiny import random_batch, run_ranks

VARIANTS = {
    "one copy": ParallelConfig(),
    "one copy, resharded": ParallelConfig(reshard=True),
    "2 x 2": ParallelConfig(replicas=2),
    "2 x 2, resharded": ParallelConfig(replicas=2, reshard=True),
    "2 x 2, kept": ParallelConfig(replicas=2, reshard=False),
    "4 x 1": ParallelConfig(replicas=4),
    "2 x (cp 2)": ParallelConfig(replicas=2, context=2),
    "2 x (tp 2)": ParallelConfig(replicas=2, tensor=2),
}


def gradients_of_variants(
    worker_context: WorkerContext, config: PolicyConfig
) -> dict[str, dict[str, np.ndarray]]:
    """Return the gradient of one step by variant and weight; on rank 0."""
    process_groups.init_process_group(worker_context)
    found = {}
    for name, parallel in VARIANTS.items():
        rank = Rank(worker_context, parallel)
        shard = rank.shard(config, random_batch([9, 14, 6, 23, 2, 17, 1, 12]))
        found[name], metrics = gradients(rank.worker(config), shard)
        found[name]["norm"] = np.array([metrics["policy/grad_norm"]])
    process_groups.destroy()
    return found


@pytest.mark.exhaustive
def test_copies_of_the_weights_have_the_gradient_of_one(model_dir, rank_pool, meeting):
    """Over several microbatches, and with the norm that clips them."""
    config: Any = dataclasses.replace(
        PACKED,
        model_name=model_dir("qwen3_tied"),
        sequence_packing=dataclasses.replace(PACKED.sequence_packing, train_mb_tokens=24),
    )
    found, *_ = run_ranks(rank_pool, gradients_of_variants, 4, meeting, config)
    expected = found.pop("one copy")
    for name, of_variant in found.items():
        # Other axes than dp compute the layers in other products, which round otherwise.
        tolerance = 1e-5 if "(" in name else 1e-6
        error, weight = worst(of_variant, expected)
        assert error < tolerance, (name, weight)
