"""Averages of the weights: those of a float64 computation, in both engines and every layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_like.config.parallel import build_layout
from nemo_like.config.schema import (
    AdapterConfig,
    EmaConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
)
from nemo_like.data.planning.plan import plan_batch
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import NllLoss
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.checkpoint.sharded_reader import open_checkpoint
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.megatron.worker import MegatronPolicyWorker
from nemo_like.run.checkpoint import CheckpointError
from tests.policy.megatron.ranks import of_model
from tests.policy.test_gradient_equality import LAYOUTS, LENGTHS, TOLERANCE
from tests.policy.tiny import context, random_batch, relative_error, saved_tensors

NUM_STEPS = 4
CONFIG = dataclasses.replace(
    LAYOUTS["packed, 2 microbatches"],
    optimizer=OptimizerConfig(lr=0.02),
    ema=EmaConfig(enabled=True, decay=0.7),
    freeze=("model.layers.0.mlp.*",),
)


def program(
    worker_context: WorkerContext, parallel: ParallelConfig, config: PolicyConfig, out: Path
) -> dict[str, Any]:
    """Save after every step, and after a skipped one; resume from step 2; export averages."""
    worker_class: Any = DTensorPolicyWorker
    if config.engine == "megatron":
        worker_class = MegatronPolicyWorker
    layout = build_layout(parallel, worker_context.world_size)
    batch = random_batch(LENGTHS)
    spec = plan_spec(
        config, purpose="train", parallel_layout=layout, model=load_spec(config.model_name)
    )
    shard = batch.shard(plan_batch(batch["length"], spec))[layout.dp_rank(worker_context.rank)]
    try:
        worker = worker_class(worker_context, config=config, start=PolicyStart(parallel=parallel))
        worker.save(out / "0")
        for step in range(1, NUM_STEPS + 1):
            worker.train(shard, None, NllLoss())
            worker.save(out / str(step))
        engine = worker.engine
        assert np.isnan(engine.optimizer_step(1.0, is_loss_finite=False))
        worker.save(out / "skipped")
        worker.export_hf(out / "hf_ema", ema=True)
        names = list(engine.weight_shapes())
        after = {name: each.float().clone() for name, each in engine.full_weights(names)}
        worker.load(out / "2")
        for _ in range(2, NUM_STEPS):
            worker.train(shard, None, NllLoss())
        worker.save(out / "resumed")
        weights = {name: each.numpy() for name, each in after.items()}
        return {"weights": weights}
    finally:
        process_groups.destroy()


def averages(out: Path) -> dict[str, Tensor]:
    """Averages from the saved weights, by the definition in float64; those of frozen ones too."""
    expected = {name: each.double() for name, each in saved_tensors(out / "0", "weight").items()}
    for step in range(1, NUM_STEPS + 1):
        for name, weight in saved_tensors(out / str(step), "weight").items():
            expected[name] = 0.7 * expected[name] + 0.3 * weight.double()
    return {name: each.float() for name, each in expected.items()}


def saved_averages(directory: Path) -> dict[str, Tensor]:
    """Averaged weights of a checkpoint; frozen ones as they are."""
    with open_checkpoint(directory) as reader:
        reader.use_ema()
        tensors = {}
        for name, shape in reader.shapes.items():
            tensors[name] = reader.read(f"weight/{name}", (0,) * len(shape), shape)
        return tensors


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit by bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_averages_are_those_of_float64_in_every_layout(model_dir, on_ranks, tmp_path):
    end = {}
    for engine, layout, precision in (
        ("dtensor", "tp2 x dp2", "float32"),
        ("megatron", "tp2", "float32"),
        ("megatron", "tp2 x pp2", "bfloat16"),
    ):
        place = f"{engine} {layout} {precision}"
        out = tmp_path / place
        config = of_model(CONFIG, model_dir("llama_tied"))
        config = dataclasses.replace(config, engine=engine, precision=precision)
        result = on_ranks(program, layout, config, out)[0]
        assert_equal(saved_averages(out / "0"), saved_tensors(out / "0", "weight"))
        found = saved_averages(out / "4")
        assert relative_error(found, averages(out)) < 1e-6
        assert_equal(saved_averages(out / "skipped"), found)
        assert_equal(saved_averages(out / "resumed"), found)
        assert_equal(saved_tensors(out / "resumed", "weight"), saved_tensors(out / "4", "weight"))
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        exported = AutoModelForCausalLM.from_pretrained(out / "hf_ema", dtype=dtype)
        rounded = {name: each.to(dtype) for name, each in found.items()}
        assert_equal(dict(exported.named_parameters()), rounded)
        # The weights are as before the export.
        trained = saved_tensors(out / "4", "weight")
        after = {name: torch.from_numpy(each) for name, each in result["weights"].items()}
        assert_equal(after, {name: each.to(dtype).float() for name, each in trained.items()})
        end[place] = found
    first, second, _ = end.values()
    assert relative_error(first, second) < 10 * TOLERANCE


def test_averages_of_adapters_are_exported_merged_and_as_adapter(model_dir, tmp_path):
    lora = AdapterConfig(enabled=True, rank=2, target_modules=("q_proj",))
    config = of_model(CONFIG, model_dir("qwen3"))
    config = dataclasses.replace(config, lora=lora, freeze=())
    worker = DTensorPolicyWorker(context(), config=config)
    spec = plan_spec(
        config,
        purpose="train",
        parallel_layout=ParallelLayout(),
        model=load_spec(config.model_name),
    )
    batch = random_batch(LENGTHS)
    shard = batch.shard(plan_batch(batch["length"], spec))[0]
    worker.save(tmp_path / "0")
    for step in range(1, NUM_STEPS + 1):
        worker.train(shard, None, NllLoss())
        worker.save(tmp_path / str(step))
    worker.export_hf(tmp_path / "hf_ema", ema=True)
    found = saved_averages(tmp_path / "4")
    assert relative_error(found, averages(tmp_path)) < 1e-6
    adapter = load_file(tmp_path / "hf_ema" / "adapter" / "adapter_model.safetensors")
    assert_equal(adapter, {f"base_model.model.{name}": each for name, each in found.items()})
    merged = load_file(tmp_path / "hf_ema" / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    base = AutoModelForCausalLM.from_pretrained(config.model_name).get_parameter(f"{name}.weight")
    update = found[f"{name}.lora_B.weight"] @ found[f"{name}.lora_A.weight"]
    expected = base.detach() + lora.scale * update
    assert torch.allclose(merged[f"{name}.weight"], expected, rtol=1e-5, atol=1e-6)


def test_averages_that_a_checkpoint_does_not_have(model_dir, tmp_path):
    config = of_model(CONFIG, model_dir("llama_tied"))
    without = dataclasses.replace(config, ema=EmaConfig())
    worker = DTensorPolicyWorker(context(), config=without)
    worker.save(tmp_path / "without")
    with pytest.raises(RuntimeError, match=r"no average of its weights \(policy.ema.enabled\)"):
        worker.export_hf(tmp_path / "hf", ema=True)
    with pytest.raises(CheckpointError, match="has no averaged weights"):
        saved_averages(tmp_path / "without")
    # They begin with the weights of the checkpoint.
    worker = DTensorPolicyWorker(context(), config=config)
    worker.load(tmp_path / "without")
    worker.save(tmp_path / "with")
    assert_equal(saved_averages(tmp_path / "with"), saved_tensors(tmp_path / "without", "weight"))
