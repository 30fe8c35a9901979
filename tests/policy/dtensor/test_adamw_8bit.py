"""AdamW with 8-bit moments: torchao's update on the shards of every layout, exact when resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nemo_like.config.schema import OptimizerConfig, ParallelConfig, PolicyConfig
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.policy.checkpoint.sharded_reader import MOMENTS
from tests.policy.dtensor.test_layouts import PACKED, Rank, train
from tests.policy.dtensor.test_muon import assert_same, gradient_of, take_steps
from tests.policy.tiny import context, relative_error, run_ranks, saved_tensors

torchao = pytest.importorskip("torchao.optim", reason="the extra optim is not installed")

NUM_STEPS = 3
ADAMW = OptimizerConfig(name="adamw_8bit", lr=2e-3, weight_decay=0.1, beta1=0.8, beta2=0.9)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> PolicyConfig:
    """A model whose matrices are quantized, as halves over two ranks too."""
    directory = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(sizes).save_pretrained(directory)
    return dataclasses.replace(PACKED, model_name=str(directory), optimizer=ADAMW)


def expected_weights(model: str) -> dict[str, Tensor]:
    """`NUM_STEPS` steps of torchao's AdamW8bit on complete weights."""
    weights = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    groups = []
    for weight in weights.values():
        decay = ADAMW.weight_decay if weight.ndim == 2 else 0.0
        groups.append({"params": [weight], "weight_decay": decay})
    adamw = torchao.AdamW8bit(groups, lr=ADAMW.lr, betas=(ADAMW.beta1, ADAMW.beta2))
    with torch.compiler.set_stance("force_eager"):
        for step in range(NUM_STEPS):
            for name, weight in weights.items():
                weight.grad = gradient_of(name, tuple(weight.shape), step)
            adamw.step()
    return {name: weight.detach() for name, weight in weights.items()}


def program(
    worker_context: WorkerContext, parallel: ParallelConfig, config: PolicyConfig, out: Path
) -> dict[str, Any]:
    """Steps with given gradients, and a resumed run."""
    rank = Rank(worker_context, parallel)
    if worker_context.world_size > 1:
        process_groups.init_process_group(worker_context)
    try:
        worker = rank.worker(config)
        engine: Any = worker.engine
        take_steps(engine, range(2))
        worker.save(out / "half")
        take_steps(engine, range(2, NUM_STEPS))
        worker.save(out / "straight")
        num_codes = sum(each.dtype == torch.uint8 for each in engine.optimizer.moments())
        resumed = rank.worker(config)
        resumed.load(out / "half")
        resumed.save(out / "loaded")
        take_steps(resumed.engine, range(2, NUM_STEPS))
        resumed.save(out / "resumed")
        return {"num_codes": num_codes, "finite": engine.is_finite(with_moments=True)}
    finally:
        if worker_context.world_size > 1:
            process_groups.destroy()


def test_updates_are_those_of_torchao_and_resume_is_exact(config, rank_pool, tmp_path):
    weights = expected_weights(config.model_name)
    results = [program(context(), ParallelConfig(), config, tmp_path / "one")]
    for name, parallel in (("dp 2", ParallelConfig()), ("tp 2", ParallelConfig(tensor=2))):
        meeting = tmp_path / f"meeting {name}"
        results += run_ranks(rank_pool, program, 2, meeting, parallel, config, tmp_path / name)
    for result in results:
        assert result["num_codes"] >= 10
        assert result["finite"]
    for name in ("one", "dp 2", "tp 2"):
        out = tmp_path / name
        for first, second in (("loaded", "half"), ("resumed", "straight")):
            assert_same(out / first, out / second, ("weight", *MOMENTS))
    # The blocks of a matrix are the same on one rank and in halves of its rows.
    for name, tolerance in (("one", 1e-6), ("dp 2", 1e-6), ("tp 2", 1e-2)):
        found = saved_tensors(tmp_path / name / "straight", "weight")
        assert relative_error(found, weights) < tolerance, name


def test_losses_are_near_those_of_float32_moments_and_checkpoints_are_exchanged(config, tmp_path):
    plain = dataclasses.replace(config, optimizer=dataclasses.replace(ADAMW, name="adamw"))
    losses = {}
    rank = Rank(context(), ParallelConfig())
    for each in (config, plain):
        worker = rank.worker(each)
        losses[each.optimizer.name] = [train(worker, rank, range(1))[0] for _ in range(4)]
        worker.save(tmp_path / each.optimizer.name)
    assert losses["adamw_8bit"] == pytest.approx(losses["adamw"], rel=0.02)
    assert losses["adamw"][-1] < losses["adamw"][0]
    for each, other in ((config, "adamw"), (plain, "adamw_8bit")):
        worker = rank.worker(each)
        worker.load(tmp_path / other)
        assert train(worker, rank, range(1))[0] < losses["adamw"][-1]
