"""Compiled layers and log-probs give the gradient of the plain ones, without further compilation
for microbatches of other lengths.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.policy import compilation
from tests.policy.dtensor.test_layouts import Rank, gradients
from tests.policy.test_gradient_equality import fixed
from tests.policy.tiny import random_batch, relative_error, run_ranks

BATCHES = [[9, 14, 6], [5, 21, 3, 8], [11, 4], [17, 2, 2, 6, 9]]


def train_both_ways(context: WorkerContext, config: PolicyConfig) -> list[dict[str, Any]]:
    """Return the gradients of each batch and its number of compiled graphs, plain and compiled."""
    process_groups.init_process_group(context)
    rank = Rank(context, ParallelConfig())
    plain = rank.worker(config)
    compiled = rank.worker(dataclasses.replace(config, compile="layers"))
    results = []
    for lengths in BATCHES:
        shard = rank.shard(config, random_batch(lengths))
        expected, _ = gradients(plain, shard)
        found, metrics = gradients(compiled, shard)
        results.append(
            {
                "plain": expected,
                "compiled": found,
                "recompilations": metrics["policy/recompilations"],
            }
        )
    process_groups.destroy()
    return results


def test_compiled_layers_have_the_gradient_of_plain_ones(model_dir, rank_pool, tmp_path: Path):
    """With FSDP on two ranks and selective checkpointing. Rows are padded: the attention of packed
    rows on CPU cannot be traced.
    """
    config = dataclasses.replace(
        fixed(2),
        model_name=model_dir("qwen3"),
        activation_checkpointing="selective",
        train_global_batch_size=8,
    )
    first, _ = run_ranks(rank_pool, train_both_ways, 2, tmp_path / "meeting", config)
    for result in first:
        found, expected = (
            {name: torch.from_numpy(np.asarray(array)) for name, array in result[key].items()}
            for key in ("compiled", "plain")
        )
        assert relative_error(found, expected) < 1e-6
    counts = [result["recompilations"] for result in first]
    assert counts[-1] == 0, counts
    # Two functions of log-probs have two graphs each, the layers have one for both.
    assert sum(counts) == 5, counts


def test_many_graphs_give_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(compilation, "MAX_GRAPHS", 0)
    counter = compilation.CompilationCounter()
    assert counter.pop() == 0
    with caplog.at_level(logging.WARNING):
        for size in (3, 4):
            torch.compile(lambda x: x * 2 + 1, backend="eager", dynamic=False)(torch.ones(size))
            assert counter.pop() == 1
    (record,) = caplog.records
    assert "policy.compile has compiled 1 graphs" in record.getMessage()
