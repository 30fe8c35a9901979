"""Reward models on Megatron-Core: scores and gradients in every kind of layout, and their files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.algorithms.preferences.loss import BradleyTerryLoss
from nemo_like.config.schema import ParallelConfig
from nemo_like.distributed.worker_group import WorkerContext
from tests.exhaustive import usually
from tests.policy.megatron.ranks import RecordingEngine, as_tensors, joined, of_model
from tests.policy.preferences import PAIR_LENGTHS
from tests.policy.scores import (
    CENTER,
    open_reward_model,
    reward_batch,
    reward_gradients,
    scores_by_definition,
)
from tests.policy.test_gradient_equality import TOLERANCE, dynamic, packed, sharing
from tests.policy.tiny import relative_error, saved_tensors

LOSS = BradleyTerryLoss(center_coefficient=CENTER)
BATCHING = {"packed": packed(48), "dynamic": dynamic(48), "shared": sharing(32)}
LAYOUTS = ("one rank", "dp2", "tp2", "cp2", "pp2", "tp2 x cp2 + sp", "pp2 x ep2", "pp2 x v2")


def program(
    context: WorkerContext, parallel: ParallelConfig, models: dict[str, str], out: Path
) -> dict[tuple[str, str], Any]:
    """Scores, gradients and loss of each model for each way of batching, and its files."""
    found: dict[tuple[str, str], Any] = {}
    with joined(context, parallel) as rank:
        for model, directory in models.items():
            for batching, keys in BATCHING.items():
                config = of_model(keys, directory)
                assert config.train_global_batch_size == len(PAIR_LENGTHS)
                worker = rank.worker(config, head="scores")
                shard = rank.shard(config, worker, reward_batch())
                worker.probe_isolation()
                scores = worker.compute_scores(shard)
                if batching == "packed":
                    worker.save(out / f"checkpoint_{model}")
                    worker.export_hf(out / model)
                    engine = worker.engine
                    assert isinstance(engine, RecordingEngine)
                    engine.ranks.barrier()
                    served = of_model(dataclasses.replace(config), str(out / model))
                    frozen = rank.worker(served, head="scores", trainable=False)
                    served_scores = frozen.compute_scores(shard)
                    assert (served_scores is None) == (scores is None)
                    if scores is not None and served_scores is not None:
                        np.testing.assert_allclose(served_scores, scores, rtol=1e-5, atol=1e-5)
                (metrics,) = worker.train(shard, None, LOSS)
                engine = worker.engine
                assert isinstance(engine, RecordingEngine)
                rows = [row.tolist() for row in shard["input_ids"]]
                found[model, batching] = (rows, scores, engine.gradients, metrics)
    return found


@pytest.fixture(scope="module")
def definition() -> Callable[[str], tuple[dict[str, torch.Tensor], float, np.ndarray]]:
    """`definition(directory)`: gradients, loss and scores of transformers, computed once."""
    return cache(lambda directory: reward_gradients(directory, reward_batch()))


@pytest.mark.parametrize("layout", usually(LAYOUTS, "cp2", "pp2 x ep2"))
def test_a_layout_does_not_change_scores_and_gradient(
    layout, model_dir, definition, on_ranks, tmp_path
):
    models = {"llama_tied": model_dir("llama_tied")}
    if layout in ("one rank", "pp2 x ep2"):
        models["qwen3_moe"] = model_dir("qwen3_moe")
    if layout == "pp2 x ep2":
        del models["llama_tied"]
    if layout == "pp2 x v2":
        models = {"llama_deep": model_dir("llama_deep")}
    results = on_ranks(program, layout, models, tmp_path)
    batch = reward_batch()
    all_rows = [row.tolist() for row in batch["input_ids"]]
    for model, directory in models.items():
        expected, loss, scores = definition(directory)
        for batching in BATCHING:
            _, _, gradients, _ = results[0][model, batching]
            error = relative_error(as_tensors(gradients), expected)
            assert error < TOLERANCE, (layout, model, batching)
            # The last rank is on the last pipeline stage, which has scores and loss.
            rows, of_rank, _, metrics = results[-1][model, batching]
            assert metrics["policy/loss"].value == pytest.approx(loss, rel=TOLERANCE)
            index = [all_rows.index(row) for row in rows]
            np.testing.assert_allclose(of_rank, scores[index], rtol=1e-5, atol=1e-5)
        saved = saved_tensors(tmp_path / f"checkpoint_{model}", "weight")
        assert saved["score.weight"].shape == (1, 32)
        with torch.no_grad():
            exported = open_reward_model(str(tmp_path / model))
            stored = scores_by_definition(exported, batch).numpy()
        np.testing.assert_allclose(stored, scores, rtol=1e-5, atol=1e-5)
