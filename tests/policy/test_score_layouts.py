"""A reward model has the scores and the gradient of transformers in every layout of rows and ranks,
and its files are those of transformers.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nemo_like.algorithms.preferences.loss import BradleyTerryLoss
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import ParallelConfig
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.models.spec import load_spec
from nemo_like.models.weight_files import weight_sizes
from tests.exhaustive import usually
from tests.policy.dtensor.test_layouts import DYNAMIC, PACKED, SHARED, Rank, gradients
from tests.policy.preferences import PAIR_LENGTHS
from tests.policy.scores import (
    CENTER,
    SEED,
    open_reward_model,
    reward_batch,
    reward_gradients,
    scores_by_definition,
)
from tests.policy.tiny import context, relative_error, run_ranks, saved_tensors

TOLERANCE = 1e-5
LOSS = BradleyTerryLoss(center_coefficient=CENTER)
BATCHING = {"packed": PACKED, "dynamic": DYNAMIC, "shared": SHARED}
LAYOUTS = {
    "one rank": (1, ParallelConfig()),
    "dp 2": (2, ParallelConfig()),
    "tp 2": (2, ParallelConfig(tensor=2)),
    "cp 2": (2, ParallelConfig(context=2)),
    "cp 2, dynamic": (2, ParallelConfig(context=2, dynamic_context=True)),
    "tp 2 x cp 2, sequence": (4, ParallelConfig(tensor=2, context=2, sequence=True)),
}
MODELS = {
    "one rank": ("qwen3", "llama_tied"),
    "dp 2": ("llama_tied",),
    "tp 2": ("qwen3",),
    "cp 2": ("llama_tied",),
    "cp 2, dynamic": ("llama_tied",),
    "tp 2 x cp 2, sequence": ("qwen3",),
}
Found = dict[tuple[str, str], Any]
"""By model and way of batching: rows of the rank, their scores, gradients, metrics."""


def program(
    worker_context: WorkerContext, parallel: ParallelConfig, models: dict[str, str], out: Path
) -> Found:
    """Scores, gradients and metrics of each model for each way of batching; files of the last."""
    process_groups.init_process_group(worker_context)
    torch.set_num_threads(1)
    rank = Rank(worker_context, parallel)
    found: Found = {}
    for model, directory in models.items():
        for batching, batching_config in BATCHING.items():
            config = dataclasses.replace(
                batching_config, model_name=directory, train_global_batch_size=len(PAIR_LENGTHS)
            )
            worker = rank.worker(config, head="scores", seed=SEED)
            shard = rank.shard(config, reward_batch())
            scores = worker.compute_scores(shard)
            rows = [np.asarray(row) for row in shard["input_ids"]]
            found[model, batching] = (rows, scores, *gradients(worker, shard, LOSS))
            worker.probe_isolation()
            evaluated = worker.evaluate(shard, LOSS)
            assert evaluated["rm/accuracy"].value == found[model, batching][-1]["rm/accuracy"]
            if batching != "packed":
                continue
            worker.save(out / f"checkpoint_{model}")
            worker.export_hf(out / model)
            # Rank 0 writes the files that the others read next.
            worker.engine.ranks.gather_over_world(0)
            # The exported model without gradients, as it is served.
            served = dataclasses.replace(config, model_name=str(out / model))
            frozen = rank.worker(served, head="scores", trainable=False)
            served_scores = frozen.compute_scores(shard)
            assert served_scores is not None and scores is not None
            np.testing.assert_allclose(served_scores, scores, rtol=1e-5, atol=1e-5)
    process_groups.destroy()
    return found


@pytest.mark.parametrize("layout", usually(LAYOUTS, "tp 2", "cp 2"))
def test_a_layout_does_not_change_scores_and_gradient(
    layout, model_dir, rank_pool, meeting, tmp_path
):
    world_size, parallel = LAYOUTS[layout]
    models = {name: model_dir(name) for name in MODELS[layout]}
    if world_size == 1:
        results = [program(context(0, 1, meeting), parallel, models, tmp_path)]
    else:
        results = run_ranks(rank_pool, program, world_size, meeting, parallel, models, tmp_path)
    batch = reward_batch()
    rows = [row.tolist() for row in batch["input_ids"]]
    for model, directory in models.items():
        expected, loss, scores = reward_gradients(directory, batch)
        for batching in BATCHING:
            _, _, values, metrics = results[0][model, batching]
            found = {key: torch.from_numpy(value) for key, value in values.items()}
            assert relative_error(found, expected) < TOLERANCE, (layout, model, batching)
            assert metrics["policy/loss"] == pytest.approx(loss, rel=TOLERANCE)
            for result in results:
                ids, of_rank, _, _ = result[model, batching]
                index = [rows.index(row.tolist()) for row in ids]
                np.testing.assert_allclose(of_rank, scores[index], rtol=1e-5, atol=1e-5)
        exported = open_reward_model(str(tmp_path / model))
        assert type(exported).__name__.endswith("ForSequenceClassification")
        assert "score.weight" in saved_tensors(tmp_path / f"checkpoint_{model}", "weight")
        with torch.no_grad():
            stored = scores_by_definition(exported, batch).numpy()
        np.testing.assert_allclose(stored, scores, rtol=1e-5, atol=1e-5)
        assert_padded_batch(tmp_path / model, scores, batch)


@torch.no_grad()
def assert_padded_batch(directory: Path, scores: np.ndarray, batch: Any) -> None:
    """The exported tokenizer pads a batch so that transformers returns the same scores."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.config.num_labels == 1
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    rows = [row.tolist() for row in batch["input_ids"]]
    assert all(row[-1] != tokenizer.pad_token_id for row in rows)
    padded = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    found = model(**padded).logits[:, 0].numpy()
    np.testing.assert_allclose(found, scores, rtol=1e-5, atol=1e-5)


def test_a_head_that_the_files_do_not_fit_is_an_error(model_dir, meeting, tmp_path):
    """A reward model cannot be trained on tokens, nor a causal model be served as a reward model;
    the loss and the head must fit.
    """
    process_groups.init_process_group(context(0, 1, meeting))
    rank = Rank(context(0, 1, meeting), ParallelConfig())
    causal = dataclasses.replace(PACKED, model_name=model_dir("qwen3"))
    worker = rank.worker(causal, head="scores")
    worker.export_hf(tmp_path / "reward_model")
    reward = dataclasses.replace(PACKED, model_name=str(tmp_path / "reward_model"))
    spec = load_spec(reward.model_name)
    assert spec.head == "scores"
    shapes = worker.engine.weight_shapes()
    assert weight_sizes(spec) == {name: math.prod(shape) for name, shape in shapes.items()}
    with pytest.raises(ConfigError, match="a reward model, which has a score head"):
        rank.worker(reward)
    with pytest.raises(ConfigError, match="a language model without a score head"):
        rank.worker(causal, head="scores", trainable=False)
    # Served in bfloat16 a reward model has no float32 weights.
    half = dataclasses.replace(reward, precision="bfloat16", train_global_batch_size=8)
    served = rank.worker(half, head="scores", trainable=False)
    weights = list(served.engine.local_weights())
    assert all(weight.dtype == torch.bfloat16 for weight in weights)
    shard = rank.shard(half, reward_batch())
    exact = worker.compute_scores(shard)
    found = served.compute_scores(shard)
    assert exact is not None and found is not None
    np.testing.assert_allclose(found, exact, atol=0.1)
    language_model = rank.worker(causal)
    shard = rank.shard(dataclasses.replace(causal, train_global_batch_size=8), reward_batch())
    with pytest.raises(ValueError, match="no score head"):
        language_model.compute_scores(shard)
    with pytest.raises(ValueError, match="needs scores"):
        language_model.evaluate(shard, LOSS)
    process_groups.destroy()
