"""Four steps of Megatron's sharded AdamW are four steps of AdamW, wherever they are taken, saved
and continued.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.config.schema import OptimizerConfig
from nemo_like.policy.checkpoint.sharded_reader import open_checkpoint
from tests.policy.megatron.ranks import NUM_STEPS, as_tensors, of_model, train, train_dtensor
from tests.policy.megatron.reference import TrainedReference, train_transformers
from tests.policy.test_gradient_equality import LAYOUTS, TOLERANCE
from tests.policy.tiny import relative_error

CONFIG = dataclasses.replace(
    LAYOUTS["packed, 2 microbatches"],
    optimizer=OptimizerConfig(lr=0.02, weight_decay=0.5, beta1=0.8, beta2=0.9),
    max_grad_norm=2.0,
)
PLACES = ("one rank", "dp2", "tp2 x cp2 + sp", "tp2 x pp2 x dp2")
DTENSOR = ("one rank", "tp2 x dp2")


@pytest.fixture(scope="module")
def adamw(model_dir: Callable[[str], str]) -> Callable[[str], TrainedReference]:
    """`adamw(architecture)`: `NUM_STEPS` steps of transformers under torch's AdamW."""

    @cache
    def compute(architecture: str) -> TrainedReference:
        return train_transformers(of_model(CONFIG, model_dir(architecture)))

    return compute


@pytest.mark.parametrize("architecture", ["qwen3", "llama_tied"])
def test_four_steps_are_those_of_adamw_with_decay_on_matrices_only(
    architecture, model_dir, adamw, on_ranks
):
    losses, norms, weights = adamw(architecture)
    for place in PLACES:
        config = of_model(CONFIG, model_dir(architecture))
        ranks = on_ranks(train, place, config, NUM_STEPS)
        assert ranks[-1].losses == pytest.approx(losses, rel=TOLERANCE), place
        assert ranks[0].norms == pytest.approx(norms, rel=10 * TOLERANCE), place
        assert relative_error(as_tensors(ranks[0].weights), weights) < 10 * TOLERANCE, place


def test_a_checkpoint_of_one_layout_continues_in_every_other(model_dir, adamw, on_ranks, tmp_path):
    losses, _, weights = adamw("llama_tied")
    config = of_model(CONFIG, model_dir("llama_tied"))
    for saved in ("one rank", "tp2 x pp2 x dp2"):
        on_ranks(train, saved, config, 2, None, tmp_path / saved)
        for place in PLACES:
            ranks = on_ranks(train, place, config, 2, tmp_path / saved)
            assert ranks[-1].losses == pytest.approx(losses[2:], rel=TOLERANCE), (saved, place)
            assert relative_error(as_tensors(ranks[0].weights), weights) < 10 * TOLERANCE, (
                saved,
                place,
            )
            assert set().union(*(rank.counts for rank in ranks)) == {NUM_STEPS}, (
                "no two shards share a step counter"
            )


def test_a_checkpoint_of_either_engine_continues_in_the_other(model_dir, adamw, on_ranks, tmp_path):
    losses, _, _ = adamw("qwen3")
    config = of_model(CONFIG, model_dir("qwen3"))
    saved = tmp_path / "megatron"
    on_ranks(train, "tp2 x pp2 x dp2", config, 2, None, saved)
    for place in DTENSOR:
        ranks = on_ranks(train_dtensor, place, config, saved, None)
        assert ranks[0] == pytest.approx(losses[2:], rel=TOLERANCE), place
        on_ranks(train_dtensor, place, config, None, tmp_path / place)
        back = on_ranks(train, "tp2 x cp2 + sp", config, 2, tmp_path / place)
        assert back[0].losses == pytest.approx(losses[2:], rel=TOLERANCE), place


def test_saving_and_loading_is_exact_and_the_export_is_the_model(model_dir, on_ranks, tmp_path):
    config = of_model(CONFIG, model_dir("qwen2"))
    for place in ("tp2 x cp2 + sp", "tp2 x pp2 x dp2"):
        ranks = on_ranks(train, place, config, 2, None, tmp_path / place)
        loaded = on_ranks(train, "dp2", config, 0, tmp_path / place, tmp_path / f"{place} again")
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


def test_bfloat16_computes_in_half_precision_on_float32_masters(
    model_dir, adamw, on_ranks, tmp_path
):
    losses, _, _ = adamw("qwen3")
    config = dataclasses.replace(of_model(CONFIG, model_dir("qwen3")), precision="bfloat16")
    original = AutoModelForCausalLM.from_pretrained(config.model_name)
    for place in ("dp2", "tp2 x pp2 x dp2"):
        on_ranks(train, place, config, 0, None, tmp_path / f"{place} begun")
        with open_checkpoint(tmp_path / f"{place} begun") as reader:
            assert not reader.has_moments
            for name, parameter in original.named_parameters():
                found = reader.read(f"weight/{name}", (0,) * parameter.ndim, tuple(parameter.shape))
                assert torch.equal(found, parameter.detach()), (
                    "masters are the files' numbers, not rounded ones"
                )
        ranks = on_ranks(train, place, config, NUM_STEPS, None, tmp_path / place)
        assert ranks[-1].losses == pytest.approx(losses, rel=0.05), place
        with open_checkpoint(tmp_path / place) as reader:
            master = reader.read("weight/model.norm.weight", (0,), (32,))
        assert not torch.equal(master, master.bfloat16().float()), "masters keep float32 precision"
        assert torch.equal(
            torch.from_numpy(ranks[0].weights["model.norm.weight"]), master.bfloat16().float()
        )
