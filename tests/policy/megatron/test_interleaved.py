"""The interleaved schedule: every pipeline stage has two parts of the layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.config.schema import AdapterConfig, ParallelConfig
from nemo_like.data.planning.plan import plan_batch
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import LayoutError, ParallelLayout
from nemo_like.policy.batching import plan_spec
from nemo_like.prediction.comparison import step_times
from tests.exhaustive import usually
from tests.policy.megatron.ranks import Run, as_tensors, look_around, of_model, train, train_runs
from tests.policy.megatron.reference import assert_same_logprobs, check_cases, train_transformers
from tests.policy.megatron.test_optimizer import CONFIG
from tests.policy.test_gradient_equality import LAYOUTS, TOLERANCE
from tests.policy.tiny import grouped_batch, relative_error

CASES = (
    ("qwen2_deep", "packed, 4 microbatches"),
    ("qwen2_deep", "packed with activation checkpointing"),
    ("qwen3_moe_deep", "shared prefixes, groups divided"),
    ("qwen3_moe_deep", "packed, selective checkpointing"),
    # One microbatch for two stages: the plan adds a dummy.
    ("qwen3_moe_deep", "packed, 1 microbatch"),
)


@pytest.mark.parametrize(
    "parallel",
    usually(
        ("pp2 x vp2", "tp2 x pp2 x vp2 + sp", "pp2 x vp2 x ep2"), "pp2 x vp2", "pp2 x vp2 x ep2"
    ),
)
def test_virtual_stages_have_the_gradient_of_transformers(parallel, model_dir, expected, on_ranks):
    cases = [case for case in CASES if "ep" not in parallel or "moe" in case[0]]
    check_cases(cases, parallel, model_dir, expected, on_ranks)


def test_logprobs_and_weights(model_dir, on_ranks):
    """Any number of microbatches; the start-up probe has one."""
    config = of_model(LAYOUTS["packed, 2 microbatches"], model_dir("qwen2_deep"))
    model = AutoModelForCausalLM.from_pretrained(config.model_name, attn_implementation="eager")
    first, last = on_ranks(look_around, "pp2 x vp2", config)
    for found, row in zip(
        last["outputs"]["prev_logprobs"], zip(*last["rows"].values(), strict=True), strict=True
    ):
        assert_same_logprobs(model, found, *row)
    for name, parameter in model.named_parameters():
        assert np.array_equal(first["weights"][name], parameter.detach().numpy()), name


def test_steps_and_checkpoints_of_virtual_stages(model_dir, on_ranks, tmp_path):
    config = of_model(CONFIG, model_dir("qwen2_deep"))
    losses, _, weights = train_transformers(config)
    saved = tmp_path / "half way"
    half = on_ranks(train, "pp2 x vp2", config, 2, None, saved)
    assert half[-1].losses == pytest.approx(losses[:2], rel=TOLERANCE)
    for place in ("one rank", "pp2 x vp2"):
        ranks = on_ranks(train, place, config, 2, saved)
        assert ranks[-1].losses == pytest.approx(losses[2:], rel=TOLERANCE), place
        assert relative_error(as_tensors(ranks[0].weights), weights) < 10 * TOLERANCE, place
    exported = AutoModelForCausalLM.from_pretrained(saved / "hf")
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter.detach(), as_tensors(half[0].weights)[name]), name


def test_adapters_and_frozen_weights_on_virtual_stages(model_dir, on_ranks):
    config = of_model(CONFIG, model_dir("qwen2_deep"))
    lora = AdapterConfig(enabled=True, rank=3, target_modules=("q_proj", "down_proj"))
    runs = [
        Run(dataclasses.replace(config, lora=lora), 2),
        Run(dataclasses.replace(config, freeze=("model.layers.[13].*",)), 2),
    ]
    (alone,) = on_ranks(train_runs, "one rank", runs)
    ranks = on_ranks(train_runs, "pp2 x vp2", runs)
    for index in range(len(runs)):
        wanted = as_tensors(alone[index].weights)
        assert relative_error(as_tensors(ranks[0][index].weights), wanted) < 10 * TOLERANCE
        assert ranks[-1][index].losses == pytest.approx(alone[index].losses, rel=TOLERANCE)


def bubble(pp: int, vp: int, model: str) -> tuple[float, float]:
    """Return the share of the bubble in the metrics, and in the predicted time of a step."""
    spec = plan_spec(
        LAYOUTS["packed, 4 microbatches"],
        purpose="train",
        parallel_layout=ParallelLayout(pp=pp, vp=vp),
        model=load_spec(model),
    )
    plan = plan_batch(grouped_batch()["length"], spec)
    assert plan.num_microbatches % (pp if vp > 1 else 1) == 0
    work = np.ones((1, plan.num_microbatches))
    layout = ParallelLayout(pp=pp, vp=vp)
    predicted = step_times(work, plan, num_idle=layout.num_idle)
    without = step_times(work, plan)
    return plan.metrics()["packing/pipeline_bubble_share"], float(1 - without / predicted)


def test_the_bubble_in_the_metrics_is_the_predicted_one(model_dir):
    shares: dict[tuple[int, int], Any] = {}
    for pp, vp in ((2, 1), (2, 2), (4, 1), (4, 4)):
        logged, predicted = bubble(pp, vp, model_dir("qwen2_deep"))
        assert logged == pytest.approx(predicted)
        shares[pp, vp] = logged
    assert shares[2, 1] == pytest.approx(1 / 5)
    assert shares[2, 2] == pytest.approx(0.5 / 4.5)
    assert shares[4, 4] == pytest.approx(0.75 / 4.75)


def test_virtual_stages_need_several_stages():
    with pytest.raises(LayoutError, match=r"virtual_pipeline is 2, but parallel\.pipeline is 1"):
        ParallelLayout(vp=2)
    assert ParallelConfig().virtual_pipeline == 1
