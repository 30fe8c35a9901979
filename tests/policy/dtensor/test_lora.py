"""LoRA: gradients, outputs and files are those of PEFT in every layout of ranks; the reference is
the model without adapters; checkpoints have the adapters only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters as torch_counters

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import AdapterConfig, ParallelConfig
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from tests.exhaustive import usually
from tests.policy.adapters import (
    LORA,
    LORA_OF,
    PACKED,
    TRAINED,
    Part,
    of_architecture,
    step_gradients,
    train,
)
from tests.policy.dtensor.adapter_ranks import USED, DTensorSide, program, save_initial
from tests.policy.dtensor.test_layouts import Rank
from tests.policy.peft_reference import (
    Reference,
    RewardReference,
    assert_look,
    assert_scores,
    assert_use,
)
from tests.policy.test_gradient_equality import LENGTHS, TOLERANCE, fixed
from tests.policy.tiny import (
    compute_and_fetch,
    context,
    grouped_batch,
    random_batch,
    run_ranks,
    saved_tensors,
)

LAYOUTS = {
    "dp 2": (2, ParallelConfig()),
    "tp 2": (2, ParallelConfig(tensor=2)),
    "tp 2, sequence": (2, ParallelConfig(tensor=2, sequence=True)),
    "cp 2": (2, ParallelConfig(context=2)),
    "tp 2 x cp 2": (4, ParallelConfig(tensor=2, context=2)),
    "dp 4, replicas 2": (4, ParallelConfig(replicas=2)),
}
PARTS = {
    "dp 2": Part((USED,), uses=True, scores=True),
    "tp 2": Part((USED, "qwen3"), scores=True),
    "tp 2, sequence": Part((USED, "llama"), uses=True),
    "cp 2": Part((USED,), uses=True, scores=True),
    "tp 2 x cp 2": Part((USED,)),
    "dp 4, replicas 2": Part((USED,), uses=True),
}
"""Each axis of a layout is used in full once."""
NOT_QUANTIZED = [name for name, lora in LORA_OF.items() if not lora.is_quantized]
"""Of the others is `test_qlora`."""


@pytest.fixture(scope="module")
def reference(model_dir) -> Callable[[str], Reference]:
    """`reference(architecture)`: what PEFT computes, once."""
    return cache(lambda architecture: Reference(architecture, model_dir(architecture)))


@pytest.fixture(scope="module")
def reward_reference(model_dir) -> RewardReference:
    """What PEFT computes of a reward model, once."""
    return RewardReference(USED, model_dir(USED))


@pytest.fixture(scope="module")
def straight(model_dir, tmp_path_factory) -> tuple[dict[str, Any], Path]:
    """What one process finds, and its checkpoints."""
    out = tmp_path_factory.mktemp("straight")
    models = {name: model_dir(name) for name in NOT_QUANTIZED}
    return program(context(), ParallelConfig(), models, out, out, True), out


def test_one_process_has_the_gradients_of_peft(reference, reward_reference, straight):
    found, out = straight
    for name in NOT_QUANTIZED:
        assert_look([found[name]], reference(name), name)
    assert_use([found["use"]], reference(USED), found["use"]["losses"], out)
    assert found["use"]["losses"][-1] != found["use"]["losses"][0]
    assert_scores([found["scores"]], reward_reference, USED, out)
    settings = json.loads((out / "hf" / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["use_rslora"]) == (5, 8.0, True)
    assert settings["target_modules"] == list(LORA.target_modules)


@pytest.mark.parametrize("layout", usually(LAYOUTS, "tp 2, sequence", "cp 2"))
def test_a_layout_changes_nothing(
    layout, reference, reward_reference, straight, model_dir, rank_pool, meeting, tmp_path
):
    world_size, parallel = LAYOUTS[layout]
    names, uses, scores = PARTS[layout]
    models = {name: model_dir(name) for name in names}
    single, folder = straight
    arguments = (parallel, models, folder if uses else None, tmp_path, scores)
    ranks = run_ranks(rank_pool, program, world_size, meeting, *arguments)
    for name in names:
        assert_look([rank[name] for rank in ranks], reference(name), (layout, name))
    if scores:
        assert_scores([rank["scores"] for rank in ranks], reward_reference, USED, tmp_path)
    if not uses:
        return
    losses = single["use"]["losses"]
    assert_use([rank["use"] for rank in ranks], reference(USED), losses, tmp_path)
    side = DTensorSide(context(), ParallelConfig())
    alone = side.worker(of_architecture(TRAINED, USED, model_dir(USED)))
    alone.load(tmp_path / "half")
    assert train(side, alone, range(2, 4)) == pytest.approx(losses[2:], rel=TOLERANCE)


def test_initial_adapters_change_no_output_and_do_not_depend_on_the_layout(
    model_dir, rank_pool, meeting, tmp_path
):
    model = model_dir("qwen2")
    save_initial(context(), ParallelConfig(), model, tmp_path / "one")
    run_ranks(
        rank_pool, save_initial, 2, meeting, ParallelConfig(tensor=2), model, tmp_path / "two"
    )
    one = saved_tensors(tmp_path / "one", "weight")
    two = saved_tensors(tmp_path / "two", "weight")
    assert all(torch.equal(one[name], two[name]) for name in one)
    for name, tensor in one.items():
        if ".lora_B." in name:
            assert not tensor.any()
        else:
            bound = tensor.shape[1] ** -0.5
            assert 0.8 * bound < float(tensor.abs().max()) <= bound
    config = dataclasses.replace(PACKED, lora=LORA, model_name=model)
    worker = DTensorPolicyWorker(context(), config=config, start=PolicyStart(needs_reference=True))
    shard = Rank(context(), ParallelConfig()).shard(config, random_batch(LENGTHS))
    outputs = compute_and_fetch(worker, shard)
    assert np.array_equal(outputs["prev_logprobs"].values, outputs["reference_logprobs"].values)
    with pytest.raises(ValueError, match="cannot be updated"):
        worker.update_reference()


def test_a_resumed_run_equals_a_straight_one_bit_for_bit(model_dir, tmp_path):
    config = dataclasses.replace(TRAINED, lora=LORA, model_name=model_dir("qwen2"))
    side = DTensorSide(context(), ParallelConfig())
    straight = DTensorPolicyWorker(context(), config=config)
    losses = train(side, straight, range(2))
    straight.save(tmp_path / "half")
    losses += train(side, straight, range(2, 4))
    resumed = DTensorPolicyWorker(context(), config=config, start=PolicyStart(seed=7))
    resumed.load(tmp_path / "half")
    assert train(side, resumed, range(2, 4)) == losses[2:]
    full = dataclasses.replace(config, lora=AdapterConfig())
    with pytest.raises(ConfigError, match=r"another model.*policy\.lora"):
        DTensorPolicyWorker(context(), config=full).load(tmp_path / "half")


@pytest.mark.parametrize(
    ("architecture", "target"),
    [("qwen2", "lm_head"), ("qwen2", "q_projection"), ("qwen3_moe_mixed", "down_proj")],
)
def test_a_target_that_is_no_layer_is_refused(architecture, target, model_dir):
    lora = AdapterConfig(enabled=True, target_modules=("q_proj", "all-linear", target))
    config = dataclasses.replace(PACKED, model_name=model_dir(architecture), lora=lora)
    with pytest.raises(ConfigError, match=rf"'{target}' is not a linear layer that.*v_proj"):
        DTensorPolicyWorker(context(), config=config)


def test_only_target_layers_have_adapters(model_dir):
    lora = AdapterConfig(enabled=True, target_modules=("self_attn.q_proj", "down_proj"))
    config = dataclasses.replace(PACKED, model_name=model_dir("qwen2"), lora=lora)
    worker = DTensorPolicyWorker(context(), config=config)
    engine: Any = worker.engine
    trained = {each.name for each in engine.parameters if each.parameter.requires_grad}
    expected = set()
    for layer in range(2):
        for target in ("self_attn.q_proj", "mlp.down_proj"):
            for matrix in ("lora_A", "lora_B"):
                expected.add(f"model.layers.{layer}.{target}.{matrix}.weight")
    assert trained == expected
    spec_names = set(engine.weight_shapes())
    assert not spec_names & trained


@pytest.mark.parametrize("architecture", usually([USED, "qwen2_blocks"]))
def test_compiled_layers_have_the_gradients_of_peft(
    architecture, reference, model_dir, eager_layers
):
    """The number of graphs does not depend on the backend, and `eager` is fast. Rows are padded:
    the attention of packed rows on CPU cannot be traced.
    """
    if LORA_OF[architecture].is_quantized:
        pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed")
    torch_counters["graph_break"].clear()
    side = DTensorSide(context(), ParallelConfig())
    plain = dataclasses.replace(fixed(4), activation_checkpointing="selective", compile="layers")
    config = of_architecture(plain, architecture, model_dir(architecture))
    worker = side.worker(config)
    shard = side.shard(config, grouped_batch())
    found, metrics = step_gradients(side, worker, shard)
    for name, gradient in reference(architecture).gradient.items():
        error = float((torch.from_numpy(found[name]) - gradient).norm() / gradient.norm())
        assert error < TOLERANCE, name
    assert not torch_counters["graph_break"]
    # The input of the first layer has no gradient, those of the others have one.
    assert metrics["policy/recompilations"] == 2
    if LORA_OF[architecture].is_quantized:
        # What follows does not depend on the weights.
        return
    outputs = compute_and_fetch(worker, shard)
    for ids, row in zip(shard["input_ids"], outputs["reference_logprobs"], strict=True):
        expected = reference(architecture).base_outputs[np.asarray(ids).tobytes()]
        np.testing.assert_allclose(np.asarray(row), expected, rtol=1e-5, atol=1e-5)
    # Forward passes alone have graphs of their own, with adapters and without.
    _, metrics = step_gradients(side, worker, shard)
    assert 2 <= metrics["policy/recompilations"] <= 4
    compute_and_fetch(worker, shard)
    _, metrics = step_gradients(side, worker, shard)
    assert metrics["policy/recompilations"] == 0
