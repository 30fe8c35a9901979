"""Frozen weights in both engines: the others are trained as by torch, in every layout."""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import OptimizerConfig, PolicyConfig
from nemo_like.distributed import process_groups
from nemo_like.models.spec import load_spec
from nemo_like.policy.checkpoint.sharded_reader import MOMENTS, open_checkpoint
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.megatron.families import family_of
from nemo_like.policy.megatron.param_map import ModelSharding
from tests.exhaustive import usually
from tests.policy.megatron.ranks import (
    NUM_STEPS,
    Run,
    as_tensors,
    of_model,
    train_dtensor,
    train_runs,
)
from tests.policy.megatron.reference import train_transformers
from tests.policy.test_gradient_equality import LAYOUTS, TOLERANCE
from tests.policy.tiny import context, relative_error, saved_tensors

CONFIG = dataclasses.replace(
    LAYOUTS["packed, 2 microbatches"],
    optimizer=OptimizerConfig(lr=0.02, weight_decay=0.5, beta1=0.8, beta2=0.9),
    max_grad_norm=2.0,
)
GATE_AND_UP = ("model.layers.1.mlp.gate_proj.*", "model.layers.1.mlp.up_proj.*")
CASES = {
    # The output embedding is the input embedding; both pipeline stages have something to train.
    "llama_tied": (
        dataclasses.replace(
            CONFIG, freeze=("lm_head.*", "model.layers.0.self_attn.*", *GATE_AND_UP)
        ),
        ("dp2", "tp2 x pp2 + sp"),
    ),
    "qwen2": (
        dataclasses.replace(
            CONFIG,
            freeze=("model.embed_tokens.*", "model.layers.0.*"),
            activation_checkpointing="full",
        ),
        ("tp2",),
    ),
    # Of both stages all weights of the first chunk.
    "llama_deep": (
        dataclasses.replace(
            CONFIG,
            freeze=("lm_head.*", "model.layers.[0-2].*"),
            optimizer=dataclasses.replace(CONFIG.optimizer, lr=0.005),
        ),
        ("pp2 x v2",),
    ),
}


def names_of(model: str, config: PolicyConfig) -> tuple[set[str], set[str]]:
    """Names of the frozen and of the trained weights."""
    weights = AutoModelForCausalLM.from_pretrained(model)
    frozen = set()
    for name, _ in weights.named_parameters(remove_duplicate=False):
        if any(fnmatchcase(name, pattern) for pattern in config.freeze):
            # Of a tied model the head is the embedding.
            frozen.add(name.replace("lm_head", "model.embed_tokens"))
    return frozen, {name for name, _ in weights.named_parameters()} - frozen


@pytest.mark.parametrize("architecture", usually(CASES, "llama_tied"))
def test_the_other_weights_are_trained_as_by_torch_in_every_layout(
    architecture, model_dir, on_ranks, tmp_path
):
    case, places = CASES[architecture]
    config = of_model(case, model_dir(architecture))
    losses, _, weights = train_transformers(config)
    frozen, trained = names_of(config.model_name, config)
    original = dict(AutoModelForCausalLM.from_pretrained(config.model_name).named_parameters())
    assert frozen and trained
    for place in places:
        saved = tmp_path / place
        runs = [Run(config, 2, None, saved), Run(config, NUM_STEPS - 2, saved)]
        first, ranks = zip(*on_ranks(train_runs, place, runs), strict=True)
        assert first[-1].losses == pytest.approx(losses[:2], rel=TOLERANCE), place
        with open_checkpoint(saved) as reader:
            # A complete model, with the optimizer state of the trained weights.
            assert set(reader.shapes) == frozen | trained
            assert {kind: set(reader.states[kind]) for kind in MOMENTS} == dict.fromkeys(
                MOMENTS, trained
            )
            reader.check_partition()
        assert relative_error(as_tensors(ranks[0].weights), weights) < 10 * TOLERANCE, place
        for name in frozen:
            assert torch.equal(torch.from_numpy(ranks[0].weights[name]), original[name]), name
    # The checkpoint of the last layout continues in the other engine.
    end = tmp_path / "end"
    found = on_ranks(train_dtensor, "tp2 x dp2", config, tmp_path / places[-1], end)
    assert found[0] == pytest.approx(losses[2:], rel=TOLERANCE)
    final = saved_tensors(end, "weight")
    assert relative_error(final, weights) < 10 * TOLERANCE
    assert all(torch.equal(final[name], original[name]) for name in frozen)
    with open_checkpoint(end) as reader:
        assert set(reader.states["exp_avg"]) == trained


def test_frozen_weights_are_stored_in_bfloat16_and_changed_patterns_are_refused(
    model_dir, tmp_path
):
    config = of_model(CASES["qwen2"][0], model_dir("qwen2"))
    frozen, _ = names_of(config.model_name, config)
    config = dataclasses.replace(config, precision="bfloat16")
    worker = DTensorPolicyWorker(context(0, 1, tmp_path / "meeting"), config=config)
    try:
        engine = worker.engine
        for sharded in engine.parameters:  # type: ignore[attr-defined]
            is_frozen = sharded.name in frozen
            assert sharded.parameter.requires_grad != is_frozen
            dtype = torch.bfloat16 if is_frozen else torch.float32
            assert sharded.parameter.dtype == dtype
    finally:
        process_groups.destroy()


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        ({"model.layers.0.self_attn.q_proj.weight"}, "in one parameter with .*k_proj.weight"),
        ({"model.layers.1.mlp.up_proj.weight"}, "in one parameter with .*gate_proj.weight"),
        (
            {f"model.layers.1.self_attn.{each}_proj.weight" for each in "qkv"},
            "k_proj.bias.*cannot train alone",
        ),
    ],
)
def test_a_part_of_a_fused_parameter_is_refused(frozen, message, model_dir):
    spec = load_spec(model_dir("qwen2"))
    family = family_of(spec, "")
    sharding = ModelSharding(spec)
    with pytest.raises(ConfigError, match=message):
        family.frozen_parameters(frozen, sharding, 0, family.param_map(sharding, 0, 0, 0))


def test_experts_of_a_layer_are_one_weight(model_dir):
    model = model_dir("qwen3_moe")
    spec = load_spec(model)
    family = family_of(spec, model)
    sharding = ModelSharding(spec, ep=2)
    for ep_rank in range(2):
        params = family.param_map(sharding, 0, 0, ep_rank)
        experts = {name for name, each in params.items() if each.is_expert and ".0." in name}
        weights = {params[name].slices[0].name for name in experts}
        found = family.frozen_parameters(weights, sharding, 0, params)
        same_layer = {
            name
            for name, each in params.items()
            if each.is_expert and each.slices[0].name in weights
        }
        assert found == same_layer and len(found) >= 2


def test_a_pipeline_stage_without_trained_weights_is_refused(model_dir):
    model = model_dir("qwen3")
    spec = load_spec(model)
    family = family_of(spec, model)
    sharding = ModelSharding(spec, pp=2, tp=2)
    stage = family.param_map(sharding, 0, 0, 0)
    frozen = {part.name for each in stage.values() for part in each.slices}
    for rank_stage in range(2):
        with pytest.raises(ConfigError, match="all weights of pipeline stage 0 of 2"):
            family.frozen_parameters(frozen, sharding, rank_stage, stage)
