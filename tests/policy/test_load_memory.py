"""The peak of a rank's memory while it loads a model or a checkpoint is that of its shards and one
bucket, not that of the model.
"""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_like.config.schema import ParallelConfig, PolicyConfig, SequencePackingConfig
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.megatron.worker import MegatronPolicyWorker
from nemo_like.policy.worker import PolicyWorker
from tests.policy.tiny import context, run_ranks, save_tiny_model

BUCKET = 3 * 2**25
"""Bytes of a block that is being read, of the mapped part of a file, and of small objects. A bucket
of a weight update may have 2**28.
"""
SHAPE: dict[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "head_dim": 64,
}


def memory(field: str) -> int:
    """Bytes of `VmRSS` (now) or `VmHWM` (the peak) of this process."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def held_bytes() -> int:
    """Bytes of the tensors that this process made since `gc.freeze`."""
    gc.collect()
    sizes = {}
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor) and value.device.type == "cpu":
            local = value.to_local() if hasattr(value, "to_local") else value
            storage = local.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def build(
    worker_context: WorkerContext, engine: str, parallel: ParallelConfig, model: str
) -> PolicyWorker:
    worker_class = MegatronPolicyWorker if engine == "megatron" else DTensorPolicyWorker
    packing = SequencePackingConfig(enabled=True, train_mb_tokens=32)
    config = PolicyConfig(model_name=model, train_global_batch_size=4, sequence_packing=packing)
    return worker_class(worker_context, config=config, start=PolicyStart(parallel=parallel))


def load_and_measure(
    worker_context: WorkerContext,
    engine: str,
    parallel: ParallelConfig,
    models: tuple[str, str],
    meetings: tuple[Path, Path],
    checkpoint: Path,
) -> list[tuple[int, int]]:
    """(bytes of the tensors, growth of the peak) of loading the model, then of a checkpoint."""
    results = []
    # A tiny model first: modules that are imported, and threads, are no part of the measurement.
    for model, meeting in zip(models, meetings, strict=True):
        again = context(worker_context.rank, worker_context.world_size, meeting)
        gc.collect()
        # Modules have a million objects, which are neither searched nor collected from here on.
        gc.freeze()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = memory("VmRSS")
        worker = build(again, engine, parallel, model)
        peak = memory("VmHWM") - before
        results = [(held_bytes(), peak)]
        worker.save(checkpoint / Path(model).name)
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        worker.load(checkpoint / Path(model).name)
        results.append((held_bytes(), memory("VmHWM") - before))
        process_groups.destroy()
        del worker
    return results


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[str, str]]:
    """(tiny model, model of 200 MB) by kind."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    large = {
        "dense": LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=10)),
        "experts": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS, num_hidden_layers=6)),
    }
    tiny = {"dense": "llama", "experts": "qwen3_moe"}
    paths = {}
    for kind, model in large.items():
        model.save_pretrained(folder / kind)
        save_tiny_model(folder / f"tiny_{kind}", tiny[kind])
        paths[kind] = (str(folder / f"tiny_{kind}"), str(folder / kind))
    return paths


@pytest.mark.parametrize(
    ("engine", "kind", "num_ranks", "parallel", "share", "copies"),
    [
        # share: of the model on one rank; copies: tensors of the size of that share.
        ("dtensor", "dense", 2, ParallelConfig(), 1 / 2, 1),
        pytest.param(
            *("dtensor", "dense", 4, ParallelConfig(tensor=2), 1 / 4, 1),
            marks=pytest.mark.exhaustive,
        ),
        ("megatron", "dense", 4, ParallelConfig(tensor=2, pipeline=2), 1 / 4, 2),
        pytest.param(
            *("megatron", "experts", 2, ParallelConfig(expert=2), 0.64, 2),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_the_peak_of_loading_is_the_shard_and_a_bucket(
    rank_pool, models, tmp_path, engine, kind, num_ranks, parallel, share, copies
):
    meetings = (tmp_path / "first", tmp_path / "second")
    arguments = (engine, parallel, models[kind], meetings, tmp_path / "checkpoint")
    results = run_ranks(rank_pool, load_and_measure, num_ranks, tmp_path / "unused", *arguments)
    num_bytes = (Path(models[kind][1]) / "model.safetensors").stat().st_size
    for (shard, peak), (_, peak_of_checkpoint) in results:
        # Weights, and with Megatron-Core gradients, which it allocates with them.
        assert shard == pytest.approx(copies * share * num_bytes, rel=0.1)
        assert peak <= 1.3 * shard + BUCKET
        # The memory of the shard exists already.
        assert peak_of_checkpoint <= 0.3 * shard + BUCKET
