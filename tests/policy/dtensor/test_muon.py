"""Muon: the update is that of torch.optim.Muon on one process, in every layout of ranks; its
state is saved, resumed and loaded in other layouts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_like.config.schema import OptimizerConfig, ParallelConfig, PolicyConfig
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.policy.checkpoint.sharded_reader import open_checkpoint
from nemo_like.policy.dtensor.optimizer import DECAY, LR_ADJUST, MOMENTUM
from nemo_like.policy.dtensor.parameters import local_shard
from tests.policy.dtensor.test_layouts import PACKED, Rank, train
from tests.policy.tiny import context, relative_error, run_ranks, saved_tensors

NUM_STEPS = 3
MUON = OptimizerConfig(name="muon", lr=2e-3, muon_lr=5e-3, weight_decay=0.1, beta1=0.8, beta2=0.9)
CONFIG = dataclasses.replace(PACKED, optimizer=MUON, max_grad_norm=0.0)
LAYOUTS = {
    "dp 2": (2, ParallelConfig()),
    "tp 2": (2, ParallelConfig(tensor=2)),
    "dp 2 x tp 2": (4, ParallelConfig(tensor=2)),
}


def gradient_of(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """A gradient that is the same on all ranks of all layouts."""
    seed = sum(map(ord, name)) + 1000 * step
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expected_weights(model: str, config: OptimizerConfig) -> dict[str, Tensor]:
    """`NUM_STEPS` steps of torch.optim.Muon and torch.optim.AdamW on complete weights."""
    weights = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    hidden = [name for name, weight in weights.items() if ".layers." in name and weight.ndim == 2]
    others = [name for name in weights if name not in hidden]
    muon = torch.optim.Muon(
        [weights[name] for name in hidden],
        lr=config.muon_lr or config.lr,
        weight_decay=config.weight_decay,
        momentum=DECAY,
        adjust_lr_fn=LR_ADJUST,
    )
    groups = []
    for name in others:
        decay = config.weight_decay if weights[name].ndim == 2 else 0.0
        groups.append({"params": [weights[name]], "weight_decay": decay})
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2))
    for step in range(NUM_STEPS):
        for name, weight in weights.items():
            weight.grad = gradient_of(name, tuple(weight.shape), step)
        muon.step()
        adamw.step()
    return {name: weight.detach() for name, weight in weights.items()}


def take_steps(engine: Any, steps: range) -> None:
    """Optimizer steps with the gradients of `gradient_of`."""
    for step in steps:
        for sharded in engine.parameters:
            full = gradient_of(sharded.name, sharded.spec.full_shape, step)
            offset, shape = sharded.block()
            index = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
            # The gradient of a DTensor is one of the same placement.
            gradient = torch.zeros_like(sharded.parameter, requires_grad=False)
            local_shard(gradient).copy_(full[index])
            sharded.parameter.grad = gradient
        engine.optimizer.step(MUON.lr)
        engine.num_optimizer_steps += 1


def program(
    worker_context: WorkerContext, parallel: ParallelConfig, config: PolicyConfig, out: Path
) -> dict[str, Any]:
    """Steps with given gradients, a resumed run, and losses of real steps."""
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
        resumed = rank.worker(config)
        resumed.load(out / "half")
        take_steps(resumed.engine, range(2, NUM_STEPS))
        resumed.save(out / "resumed")
        trained = rank.worker(config)
        losses = [loss for _ in range(3) for loss in train(trained, rank, range(1))]
        return {"losses": losses, "finite": trained.engine.is_finite(with_moments=True)}
    finally:
        if worker_context.world_size > 1:
            process_groups.destroy()


def assert_same(found: Path, expected: Path, kinds: tuple[str, ...]) -> None:
    """The checkpoints have the same tensors, bit by bit."""
    with open_checkpoint(found) as first, open_checkpoint(expected) as second:
        assert first.states == second.states
        for kind in kinds:
            for name in first.states.get(kind, first.shapes):
                shape = first.shapes[name]
                start = (0,) * len(shape)
                tensors = [each.read(f"{kind}/{name}", start, shape) for each in (first, second)]
                assert torch.equal(*tensors), (kind, name)


def test_updates_are_those_of_torch_in_every_layout(model_dir, rank_pool, tmp_path):
    config = dataclasses.replace(CONFIG, model_name=model_dir("qwen2_tied"))
    weights = expected_weights(config.model_name, MUON)
    one = tmp_path / "one"
    single = program(context(), ParallelConfig(), config, one)
    assert relative_error(saved_tensors(one / "straight", "weight"), weights) < 1e-6
    for name, (world_size, parallel) in LAYOUTS.items():
        out = tmp_path / name
        ranks = run_ranks(
            rank_pool, program, world_size, tmp_path / f"meeting {name}", parallel, config, out
        )
        assert relative_error(saved_tensors(out / "straight", "weight"), weights) < 1e-6, name
        assert_same(out / "resumed", out / "straight", ("weight", MOMENTUM, "exp_avg"))
        for rank in ranks:
            assert rank["finite"]
            np.testing.assert_allclose(rank["losses"], single["losses"], rtol=1e-3)
    assert single["losses"][-1] < single["losses"][0]
    # The checkpoint of another layout continues on one process.
    worker = Rank(context(), ParallelConfig()).worker(config)
    worker.load(tmp_path / "dp 2 x tp 2" / "half")
    take_steps(worker.engine, range(2, NUM_STEPS))
    worker.save(tmp_path / "taken over")
    assert relative_error(saved_tensors(tmp_path / "taken over", "weight"), weights) < 1e-6
    with open_checkpoint(tmp_path / "taken over") as reader:
        assert all(".layers." in each for each in reader.states[MOMENTUM])
        assert set(reader.states[MOMENTUM]).isdisjoint(reader.states["exp_avg"])
        assert reader.shapes.keys() == {*reader.states[MOMENTUM], *reader.states["exp_avg"]}


def test_one_learning_rate_and_another_optimizer_than_the_checkpoint_has(model_dir, tmp_path):
    optimizer = dataclasses.replace(MUON, muon_lr=None)
    config = dataclasses.replace(CONFIG, model_name=model_dir("qwen3"), optimizer=optimizer)
    worker = Rank(context(), ParallelConfig()).worker(config)
    take_steps(worker.engine, range(NUM_STEPS))
    worker.save(tmp_path / "muon")
    weights = expected_weights(config.model_name, optimizer)
    assert relative_error(saved_tensors(tmp_path / "muon", "weight"), weights) < 1e-6
    adamw = dataclasses.replace(config, optimizer=OptimizerConfig())
    with pytest.raises(ValueError, match=r"has no exp_avg of .*policy\.optimizer\.name"):
        Rank(context(), ParallelConfig()).worker(adamw).load(tmp_path / "muon")
