"""Distillation on Megatron-Core: pipeline stages, tensor and context parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.config.schema import ParallelConfig
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses.likelihood import DistillationLoss
from nemo_like.policy.worker import PolicyWorker
from tests.policy.distillation import (
    SETTINGS,
    SFT_WEIGHT,
    gradients_by_definition,
    save_teachers,
    taught_batch,
)
from tests.policy.megatron.ranks import RecordingEngine, StepResult, joined, of_model
from tests.policy.megatron.reference import assert_step_is
from tests.policy.test_gradient_equality import dynamic, packed, sharing

BATCHING = {"packed": packed(48), "dynamic": dynamic(48), "shared": sharing(28)}
CHOSEN = ("jsd", "top-k")
LOSS = DistillationLoss(sft_weight=SFT_WEIGHT)


def program(
    context: WorkerContext, parallel: ParallelConfig, model: str, teachers: list[str]
) -> list[StepResult]:
    """A step for each way of batching and each divergence, in one process group."""
    results = []
    with joined(context, parallel) as rank:
        for batching in BATCHING.values():
            config = of_model(batching, model)
            engines = [rank.engine(config.frozen(name), trainable=False) for name in teachers]
            for name in CHOSEN:
                worker = PolicyWorker(config, rank.engine(config), None, engines)
                shard = rank.shard(config, worker, taught_batch())
                handle = worker.compute_targets(shard, SETTINGS[name])
                (metrics,) = worker.train(shard, None, LOSS, handle)
                engine = worker.engine
                assert isinstance(engine, RecordingEngine)
                values = {key: metric.value for key, metric in metrics.items()}
                results.append(StepResult(engine.gradients, values))
    return results


@pytest.mark.parametrize("parallel", ["tp2", "pp2"])
def test_a_layout_does_not_change_the_gradient(parallel, model_dir, on_ranks, tmp_path: Path):
    model = model_dir("llama_tied")
    teachers = save_teachers(tmp_path)
    ranks = on_ranks(program, parallel, model, teachers)
    for index, name in enumerate(CHOSEN * len(BATCHING)):
        gradients, loss = gradients_by_definition(model, teachers, taught_batch(), SETTINGS[name])
        results = [steps[index] for steps in ranks]
        assert_step_is(results, gradients, loss, (parallel, name))
