"""Compiled layers and log-probs give the gradient of the plain ones, without further compilation
for microbatches of other lengths.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters as torch_counters

from nemo_like.config.schema import ParallelConfig
from nemo_like.distributed import process_groups
from nemo_like.policy import decoder_layers
from tests.policy.dtensor.test_layouts import SHARED, Rank, gradients, worst
from tests.policy.test_gradient_equality import fixed
from tests.policy.tiny import context, grouped_batch, random_batch

BATCHES = [[9, 14, 6], [5, 21, 3, 8], [11, 4]]


@pytest.mark.exhaustive
def test_compiled_layers_have_the_gradient_of_plain_ones(model_dir):
    """With selective checkpointing. Rows are padded: the attention of packed rows on CPU cannot be
    traced.
    """
    config = dataclasses.replace(
        fixed(4), model_name=model_dir("qwen3"), activation_checkpointing="selective"
    )
    rank = Rank(context(), ParallelConfig())
    plain = rank.worker(config)
    compiled = rank.worker(dataclasses.replace(config, compile="layers"))
    counts = []
    for lengths in BATCHES:
        shard = rank.shard(config, random_batch(lengths))
        expected, expected_metrics = gradients(plain, shard)
        found, metrics = gradients(compiled, shard)
        error, weight = worst(found, expected)
        # Fused passes round otherwise.
        assert error < 5e-6, weight
        loss = expected_metrics["policy/loss"]
        assert metrics["policy/loss"] == pytest.approx(loss, rel=1e-6)
        counts.append(metrics["policy/recompilations"])
    # The log-probs have two functions; the layers share a graph.
    assert counts[0] == 3, counts
    assert counts[-1] == 0, counts


def test_layers_are_compiled_under_fsdp_too(model_dir, tmp_path, eager_layers):
    """With FSDP the numbers of modules, such as the head dimension, can become variables."""
    torch_counters["graph_break"].clear()
    config = dataclasses.replace(
        fixed(4),
        model_name=model_dir("qwen3"),
        precision="bfloat16",
        activation_checkpointing="selective",
        compile="layers",
    )
    process_groups.init_process_group(context(meeting=tmp_path / "meeting"))
    try:
        rank = Rank(context(), ParallelConfig())
        worker = rank.worker(config)
        engine: Any = worker.engine
        assert engine.fsdp_modules
        counts = []
        for lengths in BATCHES:
            _, metrics = gradients(worker, rank.shard(config, random_batch(lengths)))
            counts.append(metrics["policy/recompilations"])
    finally:
        process_groups.destroy()
    assert counts == [1, 0, 0]
    assert not torch_counters["graph_break"]
    (graph,) = eager_layers
    inputs = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    sizes = [value.node.expr for value in inputs if isinstance(value, torch.SymInt)]
    variables = set().union(*(size.free_symbols for size in sizes))
    assert len(variables) == 2, "rows and tokens of a row"


@pytest.mark.exhaustive
def test_shared_prefixes_need_no_further_graphs(model_dir, eager_layers):
    """The attention of packed rows on CPU divides a layer into several graphs."""
    config = dataclasses.replace(SHARED, model_name=model_dir("qwen3"))
    rank = Rank(context(), ParallelConfig())
    plain = rank.worker(config)
    compiled = rank.worker(dataclasses.replace(config, compile="layers"))
    counts = []
    for seed in range(3):
        shard = rank.shard(config, grouped_batch(seed))
        error, weight = worst(gradients(compiled, shard)[0], gradients(plain, shard)[0])
        assert error < 5e-6, weight
        counts.append(gradients(compiled, shard)[1]["policy/recompilations"])
    assert counts == [0, 0, 0]


def test_many_graphs_give_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(decoder_layers, "MAX_GRAPHS", 0)
    counter = decoder_layers.CompilationCounter()
    assert counter.pop() == 0
    with caplog.at_level(logging.WARNING):
        for size in (3, 4):
            torch.compile(lambda x: x * 2 + 1, backend="eager", dynamic=False)(torch.ones(size))
            assert counter.pop() == 1
    (record,) = caplog.records
    assert "policy.compile has compiled 1 graphs" in record.getMessage()
