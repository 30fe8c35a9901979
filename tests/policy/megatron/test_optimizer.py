"""Four steps of Megatron's sharded AdamW are four steps of AdamW, wherever they are taken, saved
and continued.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_like.config.schema import OptimizerConfig, ParallelConfig, PolicyConfig
from nemo_like.data.planning.plan import plan_batch
from nemo_like.distributed import process_groups
from nemo_like.distributed.parallel_layout import Topology
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import NllLoss
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.checkpoint.sharded_reader import open_checkpoint
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.megatron.engine import MegatronEngine
from tests.policy.megatron.ranks import as_tensors, joined, meeting_in, of_model, open_pool
from tests.policy.test_gradient_equality import LAYOUTS, LENGTHS, TOLERANCE
from tests.policy.tiny import random_batch, relative_error, row_loss, run_ranks

CONFIG = dataclasses.replace(
    LAYOUTS["packed, 2 microbatches"],
    optimizer=OptimizerConfig(lr=0.02, weight_decay=0.5, beta1=0.8, beta2=0.9),
    max_grad_norm=2.0,
)
NUM_STEPS = 4
PLACES: dict[str, tuple[int, ParallelConfig]] = {
    "one rank": (1, ParallelConfig()),
    "dp2": (2, ParallelConfig()),
    "tp2 x cp2 + sp": (4, ParallelConfig(tensor=2, context=2, sequence=True)),
    "tp2 x pp2 x dp2": (8, ParallelConfig(tensor=2, pipeline=2)),
}


DTENSOR: dict[str, tuple[int, ParallelConfig]] = {
    "one rank": (1, ParallelConfig()),
    "tp2 x dp2": (4, ParallelConfig(tensor=2)),
}


@dataclasses.dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float]
    weights: dict[str, np.ndarray]
    """On rank 0."""
    counts: set[float]
    """Step counters of the optimizer shards."""


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with open_pool() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def adamw(model_dir: Callable[[str], str]) -> Callable[[str], Any]:
    """`adamw(architecture)`: losses, gradient norms and weights of transformers under torch's
    AdamW.
    """

    @cache
    def compute(architecture: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
        model = AutoModelForCausalLM.from_pretrained(
            model_dir(architecture), attn_implementation="eager"
        )
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}],
            lr=0.02,
            betas=(0.8, 0.9),
        )
        losses, norms = [], []
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = row_loss(model, random_batch(LENGTHS))
            loss.backward()
            norms.append(
                float(torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG.max_grad_norm))
            )
            optimizer.step()
            losses.append(loss.item())
        return (
            losses,
            norms,
            {name: parameter.detach() for name, parameter in model.named_parameters()},
        )

    return compute


def train(
    context: WorkerContext,
    parallel: ParallelConfig,
    config: PolicyConfig,
    num_steps: int,
    start: Path | None = None,
    out: Path | None = None,
) -> Trained:
    """Steps from the checkpoint `start`, or from the model as it is; left as checkpoint and model
    in `out`.
    """
    with joined(context, parallel) as rank:
        worker = rank.worker(config)
        if start is not None:
            worker.load(start)
        shard = rank.shard(config, worker, random_batch(LENGTHS))
        metrics = [worker.train(shard, None, NllLoss())[0] for _ in range(num_steps)]
        if out is not None:
            worker.save(out)
            worker.export_hf(out / "hf")
        engine = worker._policy
        assert isinstance(engine, MegatronEngine)
        return Trained(
            losses=[each["policy/loss"].value for each in metrics if "policy/loss" in each],
            norms=[each["policy/grad_norm"].value for each in metrics],
            weights={
                name: tensor.float().numpy()
                for name, tensor in engine.full_weights(list(engine.weight_shapes()))
            },
            counts={
                float(state["step"])
                for part in engine.optimizer.sub_optimizers
                for state in part.adamw.state.values()
            },
        )


@pytest.mark.parametrize("architecture", ["qwen3", "llama_tied"])
def test_four_steps_are_those_of_adamw_with_decay_on_matrices_only(
    architecture, model_dir, adamw, pool, tmp_path
):
    losses, norms, weights = adamw(architecture)
    for place, (world_size, parallel) in PLACES.items():
        config = of_model(CONFIG, model_dir(architecture))
        ranks = run_ranks(
            pool, train, world_size, meeting_in(tmp_path), parallel, config, NUM_STEPS
        )
        assert ranks[-1].losses == pytest.approx(losses, rel=TOLERANCE), place
        assert ranks[0].norms == pytest.approx(norms, rel=10 * TOLERANCE), place
        assert relative_error(as_tensors(ranks[0].weights), weights) < 10 * TOLERANCE, place


def test_a_checkpoint_of_one_layout_continues_in_every_other(model_dir, adamw, pool, tmp_path):
    losses, _, weights = adamw("llama_tied")
    config = of_model(CONFIG, model_dir("llama_tied"))
    for saved in ("one rank", "tp2 x pp2 x dp2"):
        world_size, parallel = PLACES[saved]
        run_ranks(
            pool,
            train,
            world_size,
            meeting_in(tmp_path),
            parallel,
            config,
            2,
            None,
            tmp_path / saved,
        )
        for place, (num_ranks, degrees) in PLACES.items():
            ranks = run_ranks(
                pool, train, num_ranks, meeting_in(tmp_path), degrees, config, 2, tmp_path / saved
            )
            assert ranks[-1].losses == pytest.approx(losses[2:], rel=TOLERANCE), (saved, place)
            assert relative_error(as_tensors(ranks[0].weights), weights) < 10 * TOLERANCE, (
                saved,
                place,
            )
            assert set().union(*(rank.counts for rank in ranks)) == {NUM_STEPS}, (
                "no two shards share a step counter"
            )


def train_dtensor(
    context: WorkerContext,
    parallel: ParallelConfig,
    config: PolicyConfig,
    start: Path | None,
    out: Path | None,
) -> list[float]:
    """The losses of two steps of the other engine."""
    worker = DTensorPolicyWorker(context, config=config, parallel=parallel)
    try:
        if start is not None:
            worker.load(start)
        topology = Topology.from_world_size(
            context.world_size, cp=parallel.context, tp=parallel.tensor
        )
        batch = random_batch(LENGTHS)
        spec = plan_spec(config, purpose="train", topology=topology, cost=worker.info().cost)
        shard = batch.shard(plan_batch(batch["length"], spec))[topology.dp_rank(context.rank)]
        losses = [worker.train(shard, None, NllLoss())[0]["policy/loss"].value for _ in range(2)]
        if out is not None:
            worker.save(out)
    finally:
        process_groups.destroy()
    return losses


def test_a_checkpoint_of_either_engine_continues_in_the_other(model_dir, adamw, pool, tmp_path):
    losses, _, _ = adamw("qwen3")
    config = of_model(CONFIG, model_dir("qwen3"))
    saved = tmp_path / "megatron"
    run_ranks(
        pool, train, 8, meeting_in(tmp_path), PLACES["tp2 x pp2 x dp2"][1], config, 2, None, saved
    )
    for place, (world_size, parallel) in DTENSOR.items():
        ranks = run_ranks(
            pool, train_dtensor, world_size, meeting_in(tmp_path), parallel, config, saved, None
        )
        assert ranks[0] == pytest.approx(losses[2:], rel=TOLERANCE), place
        run_ranks(
            pool,
            train_dtensor,
            world_size,
            meeting_in(tmp_path),
            parallel,
            config,
            None,
            tmp_path / place,
        )
        degrees = PLACES["tp2 x cp2 + sp"][1]
        back = run_ranks(pool, train, 4, meeting_in(tmp_path), degrees, config, 2, tmp_path / place)
        assert back[0].losses == pytest.approx(losses[2:], rel=TOLERANCE), place


def test_saving_and_loading_is_exact_and_the_export_is_the_model(model_dir, pool, tmp_path):
    config = of_model(CONFIG, model_dir("qwen2"))
    for place in ("tp2 x cp2 + sp", "tp2 x pp2 x dp2"):
        world_size, parallel = PLACES[place]
        ranks = run_ranks(
            pool,
            train,
            world_size,
            meeting_in(tmp_path),
            parallel,
            config,
            2,
            None,
            tmp_path / place,
        )
        other_size, other = PLACES["dp2"]
        loaded = run_ranks(
            pool,
            train,
            other_size,
            meeting_in(tmp_path),
            other,
            config,
            0,
            tmp_path / place,
            tmp_path / f"{place} again",
        )
        model = AutoModelForCausalLM.from_pretrained(tmp_path / place / "hf")
        for name, parameter in model.named_parameters():
            assert np.array_equal(parameter.detach().numpy(), ranks[0].weights[name]), name
            assert np.array_equal(loaded[0].weights[name], ranks[0].weights[name]), name
        with (
            open_checkpoint(tmp_path / place) as first,
            open_checkpoint(tmp_path / f"{place} again") as second,
        ):
            assert first.num_optimizer_steps == second.num_optimizer_steps == 2
            for name, shape in first.shapes.items():
                for kind in ("weight", "exp_avg", "exp_avg_sq"):
                    parts = [
                        reader.read(f"{kind}/{name}", (0,) * len(shape), shape)
                        for reader in (first, second)
                    ]
                    assert torch.equal(*parts), (kind, name)


def test_bfloat16_computes_in_half_precision_on_float32_masters(model_dir, adamw, pool, tmp_path):
    losses, _, _ = adamw("qwen3")
    config = dataclasses.replace(of_model(CONFIG, model_dir("qwen3")), precision="bfloat16")
    original = AutoModelForCausalLM.from_pretrained(config.model_name)
    for place in ("dp2", "tp2 x pp2 x dp2"):
        world_size, parallel = PLACES[place]
        run_ranks(
            pool,
            train,
            world_size,
            meeting_in(tmp_path),
            parallel,
            config,
            0,
            None,
            tmp_path / f"{place} begun",
        )
        with open_checkpoint(tmp_path / f"{place} begun") as reader:
            assert not reader.has_moments
            for name, parameter in original.named_parameters():
                found = reader.read(f"weight/{name}", (0,) * parameter.ndim, tuple(parameter.shape))
                assert torch.equal(found, parameter.detach()), (
                    "masters are the files' numbers, not rounded ones"
                )
        ranks = run_ranks(
            pool,
            train,
            world_size,
            meeting_in(tmp_path),
            parallel,
            config,
            NUM_STEPS,
            None,
            tmp_path / place,
        )
        assert ranks[-1].losses == pytest.approx(losses, rel=0.05), place
        with open_checkpoint(tmp_path / place) as reader:
            master = reader.read("weight/model.norm.weight", (0,), (32,))
        assert not torch.equal(master, master.bfloat16().float()), "masters keep float32 precision"
        assert torch.equal(
            torch.from_numpy(ranks[0].weights["model.norm.weight"]), master.bfloat16().float()
        )
