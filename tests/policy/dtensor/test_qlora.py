"""QLoRA: gradients, outputs and files are those of PEFT on a model in NF4, in every layout of
ranks. The reference is rounded by NumPy, and the adapter is loaded on a model of bitsandbytes.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import ParallelConfig
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.models.adapters import BYTES_PER_VALUE
from nemo_like.policy.checkpoint.sharded_reader import open_checkpoint
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.lora import dequantize, open_merged
from tests.exhaustive import usually
from tests.policy.adapters import NF4, PACKED, TRAINED, look, of_architecture, train, use
from tests.policy.dtensor.adapter_ranks import DTensorSide
from tests.policy.peft_reference import Reference, assert_look, assert_use, nf4_values
from tests.policy.test_gradient_equality import TOLERANCE
from tests.policy.tiny import context, run_ranks

pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed")

MODEL = "qwen2_blocks"
LAYOUTS = {
    "dp 2": ParallelConfig(),
    "tp 2, sequence": ParallelConfig(tensor=2, sequence=True),
    "cp 2": ParallelConfig(context=2),
}


def program(
    worker_context: WorkerContext, parallel: ParallelConfig, model: str, straight: Path, out: Path
) -> dict[str, Any]:
    """Every operation of a layout, in one process group."""
    if worker_context.world_size > 1:
        process_groups.init_process_group(worker_context)
    try:
        side = DTensorSide(worker_context, parallel)
        found = look(side, MODEL, model, recomputes=worker_context.world_size == 1)
        # Ranks of context parallelism store weights as those of data parallelism do.
        if parallel.context == 1:
            found["use"] = use(side, MODEL, model, straight, out)
        return found
    finally:
        if worker_context.world_size > 1:
            process_groups.destroy()


@pytest.fixture(scope="module")
def reference(model_dir) -> Reference:
    return Reference(MODEL, model_dir(MODEL))


@pytest.fixture(scope="module")
def straight(model_dir, tmp_path_factory) -> tuple[dict[str, Any], Path]:
    """What one process finds, and its checkpoints."""
    out = tmp_path_factory.mktemp("straight")
    return program(context(), ParallelConfig(), model_dir(MODEL), out, out), out


def test_one_process_has_the_gradients_of_peft_on_nf4(reference, straight):
    found, out = straight
    assert_look([found], reference, MODEL)
    assert_use([found["use"]], reference, found["use"]["losses"], out)
    assert found["use"]["losses"][-1] != found["use"]["losses"][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_have_the_published_values(dtype):
    """The library has other kernels for CPUs with AVX-512."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (5, 96), dtype=np.uint8)
    scales = rng.uniform(0.01, 3.0, (5, 3)).astype(np.float32)
    found = dequantize(torch.from_numpy(codes), torch.from_numpy(scales), dtype)
    expected = torch.from_numpy(nf4_values(codes, scales).reshape(5, 192))
    torch.testing.assert_close(found, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("layout", usually(LAYOUTS, "dp 2", "tp 2, sequence"))
def test_a_layout_changes_nothing(
    layout, reference, straight, model_dir, rank_pool, meeting, tmp_path
):
    single, folder = straight
    arguments = (LAYOUTS[layout], model_dir(MODEL), folder, tmp_path)
    ranks = run_ranks(rank_pool, program, 2, meeting, *arguments)
    assert_look(ranks, reference, layout)
    if "use" not in ranks[0]:
        return
    losses = single["use"]["losses"]
    assert_use([rank["use"] for rank in ranks], reference, losses, tmp_path)
    side = DTensorSide(context(), ParallelConfig())
    alone = side.worker(of_architecture(TRAINED, MODEL, model_dir(MODEL)))
    alone.load(tmp_path / "half")
    assert train(side, alone, range(2, 4)) == pytest.approx(losses[2:], rel=TOLERANCE)


def test_an_export_merges_what_the_run_sends(straight, model_dir):
    found, out = straight
    model = model_dir(MODEL)
    model_config = AutoConfig.from_pretrained(model)
    policy = dataclasses.replace(PACKED, model_name=model, lora=NF4)
    with (
        open_checkpoint(out / "start") as reader,
        open_merged(policy, model_config, reader) as merged,
    ):
        exported = dict(merged.full_weights(list(merged.weight_shapes())))
    sent = found["use"]["weights"]
    assert exported.keys() == sent.keys()
    for name, weight in exported.items():
        np.testing.assert_allclose(weight.numpy(), sent[name], rtol=1e-5, atol=1e-6)


def test_weights_in_4_bits_are_no_parameters_and_take_their_bytes(model_dir):
    model = model_dir(MODEL)
    worker = DTensorPolicyWorker(context(), config=of_architecture(PACKED, MODEL, model))
    engine: Any = worker.engine
    names = {each.name for each in engine.parameters}
    assert not any("_proj.weight" in name for name in names)
    stored = {each.name: each.stored for each in engine.quantized}
    assert len(stored) == 14
    for name, shape in engine.weight_shapes().items():
        if name in stored:
            codes, scales = stored[name]
            num_values = math.prod(shape)
            assert codes.nbytes + scales.nbytes == BYTES_PER_VALUE * num_values


def test_incomplete_blocks_are_refused_by_the_engine(model_dir):
    config = dataclasses.replace(PACKED, model_name=model_dir("llama"), lora=NF4)
    with pytest.raises(ConfigError, match=r"q_proj has 32 on a tensor-parallel rank"):
        DTensorPolicyWorker(context(), config=config)
