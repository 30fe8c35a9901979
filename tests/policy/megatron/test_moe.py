"""A MoE model has the gradient of transformers wherever its experts live, and checkpoints
that go anywhere.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.checkpoint.hf_reader import open_model
from nemo_like.policy.isolation import IsolationError, IsolationReport
from nemo_like.policy.megatron import layers as megatron_layers
from nemo_like.policy.megatron.families import family_of
from nemo_like.policy.megatron.param_map import ModelSharding, parallel_coords
from tests.exhaustive import usually
from tests.policy.megatron.ranks import (
    Step,
    as_tensors,
    joined,
    look_around,
    of_model,
    take_steps,
    train,
    train_dtensor,
)
from tests.policy.megatron.reference import assert_same_logprobs, check_cases, train_transformers
from tests.policy.megatron.test_optimizer import CONFIG
from tests.policy.test_gradient_equality import LAYOUTS, LENGTHS, TOLERANCE
from tests.policy.tiny import MIXTURES, random_batch, relative_error

CALM = dataclasses.replace(CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, lr=0.005))
"""An expert few tokens chose has gradients near 0, of which Adam makes full steps: a faster
learner shows float32's noise.
"""


CASES = (
    ("qwen3_moe", "packed, 4 microbatches"),
    ("qwen3_moe", "dynamic, 4 microbatches, rounded"),
    ("qwen3_moe_mixed", "packed with activation checkpointing"),
    ("qwen3_moe_mixed", "packed, selective checkpointing"),
    ("qwen3_moe_mixed", "shared prefixes, groups divided"),
    ("qwen3_moe", "shared prefixes, selective checkpointing"),
    ("mixtral", "packed, 4 microbatches"),
    ("deepseek_v3", "packed, selective checkpointing"),
    ("deepseek_v3_plain", "shared prefixes, groups divided"),
    ("gpt_oss", "dynamic, 4 microbatches, rounded"),
    ("gpt_oss", "packed, selective checkpointing"),
)
CASES_OF = {
    "one rank": CASES,
    "ep2": (CASES[1], CASES[3], CASES[4], CASES[6]),
    "tp2 + sp": (CASES[0], CASES[2], CASES[5], *CASES[8:]),
    "tp2 x ep2 + sp": (CASES[0], CASES[2], CASES[4], CASES[6], CASES[7], CASES[9]),
    "pp2 x ep2": (CASES[1], CASES[2], CASES[5], CASES[8], CASES[10]),
    "tp2 x dp2 x ep2 + sp": (CASES[0], CASES[3], CASES[4], *CASES[6:]),
    "tp2 x cp2 x ep4 + sp": (CASES[1], CASES[2], CASES[5], CASES[7], CASES[9]),
}
"""Layout -> architectures and ways of batching."""


@pytest.mark.parametrize("parallel", usually(CASES_OF, "ep2", "pp2 x ep2"))
def test_experts_have_the_gradient_of_transformers_wherever_they_live(
    parallel, model_dir, expected, on_ranks
):
    check_cases(CASES_OF[parallel], parallel, model_dir, expected, on_ranks)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_a_rank_without_rows_still_computes_the_experts_others_need(
    architecture, model_dir, on_ranks
):
    steps = [
        Step(
            of_model(LAYOUTS["packed, 2 microbatches"], model_dir(architecture)),
            random_batch(LENGTHS[:1]),
        )
    ]
    (alone,) = on_ranks(take_steps, "one rank", steps)
    ranks = on_ranks(take_steps, "ep2", steps)
    found, wanted = as_tensors(ranks[0][0].gradients), as_tensors(alone[0].gradients)
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():  # an expert that no token chose has a gradient of 0
        assert torch.allclose(
            found[name], gradient, rtol=TOLERANCE, atol=float(TOLERANCE * gradient.norm())
        ), name


def test_steps_and_checkpoints_go_from_shared_experts_to_one_process_of_either_engine(
    model_dir, on_ranks, tmp_path
):
    config = of_model(CALM, model_dir("qwen3_moe"))
    losses, _, weights = train_transformers(config)
    saved = tmp_path / "half way"
    half = on_ranks(train, "tp2 x dp2 x ep2 + sp", config, 2, None, saved)
    assert half[0].losses == pytest.approx(losses[:2], rel=TOLERANCE)
    for place in ("one rank", "pp2 x ep2"):
        ranks = on_ranks(train, place, config, 2, saved)
        assert ranks[-1].losses == pytest.approx(losses[2:], rel=TOLERANCE), place
        assert relative_error(as_tensors(ranks[0].weights), weights) < 10 * TOLERANCE, place
    (other_engine,) = on_ranks(train_dtensor, "one rank", config, saved, None)
    assert other_engine == pytest.approx(losses[2:], rel=TOLERANCE)
    exported = AutoModelForCausalLM.from_pretrained(saved / "hf")
    for name, parameter in exported.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), half[0].weights[name]), name
    exported.save_pretrained(tmp_path / "by transformers")
    found, expected = (
        load_file(folder / "model.safetensors")
        for folder in (saved / "hf", tmp_path / "by transformers")
    )
    assert (
        found.keys() == expected.keys() and "model.layers.0.mlp.experts.3.up_proj.weight" in found
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("architecture", "example"),
    [
        ("mixtral", "block_sparse_moe.experts.3.w3.weight"),
        ("deepseek_v3", "mlp.gate.e_score_correction_bias"),
        ("gpt_oss", "mlp.experts.gate_up_proj_bias"),
    ],
)
def test_the_files_have_the_names_that_transformers_writes(
    architecture, example, model_dir, on_ranks, tmp_path
):
    config = of_model(CALM, model_dir(architecture))
    ranks = on_ranks(train, "tp2 x ep2 + sp", config, 1, None, tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for name, parameter in exported.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), ranks[0].weights[name]), name
    source = load_file(Path(config.model_name) / "model.safetensors")
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written.keys() == source.keys()
    assert f"model.layers.1.{example}" in written
    rows = random_batch(LENGTHS)["input_ids"]
    tokens = torch.from_numpy(rows[3].astype(np.int64))[None]
    found = on_ranks(train, "one rank", of_model(config, str(tmp_path / "hf")), 0)[0].weights
    model = AutoModelForCausalLM.from_pretrained(config.model_name)
    model.load_state_dict(as_tensors(found), strict=False)  # buffers are those of the source
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, exported(tokens).logits)


def test_logprobs_and_full_weights(model_dir, on_ranks):
    config = of_model(LAYOUTS["packed, 2 microbatches"], model_dir("qwen3_moe"))
    model = AutoModelForCausalLM.from_pretrained(config.model_name, attn_implementation="eager")
    ranks = on_ranks(look_around, "tp2 x ep2 + sp", config)
    rows = ranks[0]["rows"]
    for found, row in zip(
        ranks[0]["outputs"]["prev_logprobs"], zip(*rows.values(), strict=True), strict=True
    ):
        assert_same_logprobs(model, found, *row)
    for name, parameter in model.named_parameters():
        assert np.array_equal(ranks[0]["weights"][name], parameter.detach().numpy()), name


def probe(
    context: WorkerContext, parallel: ParallelConfig, config: PolicyConfig, leaks: bool
) -> IsolationReport:
    """The start-up probe, also of a model whose attention ignores where rows end."""
    attend = megatron_layers.varlen_attention

    def leaking(
        query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, max_length: int, **keys: Any
    ) -> Tensor:
        full = torch.tensor([0, len(query)], dtype=bounds.dtype)
        return attend(query, key, value, full, len(query), **keys)

    with joined(context, parallel) as rank, pytest.MonkeyPatch.context() as patch:
        if leaks:
            patch.setattr(megatron_layers, "varlen_attention", leaking)
        return rank.worker(config).probe_isolation()


def test_the_probe_allows_experts_their_rounding_and_no_leak(on_ranks, tmp_path):
    """With many experts a changed token changes the sizes of products that other rows are part of,
    and so their last bits.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 67,
        "hidden_size": 256,
        "intermediate_size": 64,
        "moe_intermediate_size": 128,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 2,
    }
    mixture = Qwen3MoeConfig(
        **sizes,
        **heads,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(mixture).save_pretrained(tmp_path / "model")
    config = of_model(LAYOUTS["shared prefixes, 1 microbatch"], str(tmp_path / "model"))
    (report,) = on_ranks(probe, "one rank", config, False)
    assert report.mean_difference < 1e-5
    with pytest.raises(IsolationError, match="a token of row 0 changed the log-probs of row 1"):
        on_ranks(probe, "one rank", config, True)


@pytest.mark.parametrize("architecture", MIXTURES)
@pytest.mark.parametrize(
    ("pp", "dp", "tp", "ep"), [(1, 1, 1, 1), (1, 2, 1, 2), (2, 1, 2, 2), (1, 2, 2, 2), (2, 2, 2, 4)]
)
def test_the_ranks_slices_cover_the_model_exactly_once(architecture, pp, dp, tp, ep):
    model_class, model_config = MIXTURES[architecture]
    with torch.device("meta"):
        model = model_class(model_config)
    model.tie_weights()
    parallel_layout = ParallelLayout(pp=pp, dp=dp, tp=tp, ep=ep)
    sharding = ModelSharding(ModelSpec.from_config(model_config), pp=pp, tp=tp, ep=ep)
    family = family_of(sharding.spec, "tested")
    counts = {
        name: np.zeros(tuple(parameter.shape), dtype=int)
        for name, parameter in model.named_parameters()
    }
    for rank in range(parallel_layout.world_size):
        coordinates = parallel_coords(parallel_layout, rank)
        for spec in family.param_map(sharding, *coordinates).values():
            for hf_slice in spec.slices if spec.is_owner else ():
                counts[hf_slice.name][hf_slice.hf_index] += 1
    for name, count in counts.items():
        copies = dp * tp // ep if ".experts." in name else dp
        assert (count == copies).all(), name


def test_experts_are_read_one_by_one_or_stacked_and_a_missing_one_is_named(model_dir, tmp_path):
    source = Path(model_dir("qwen3_moe"))
    model = AutoModelForCausalLM.from_pretrained(source)
    weights = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in weights.items()}
    apart = load_file(source / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in apart, (
        "transformers writes experts one by one"
    )
    (tmp_path / "stacked").mkdir()
    save_file(
        {name: parameter.detach() for name, parameter in weights.items()},
        tmp_path / "stacked" / "model.safetensors",
    )
    for directory in (source, tmp_path / "stacked"):
        with open_model(str(directory)) as files:
            files.check(shapes)
            for kind, expert in itertools.product(("gate_up_proj", "down_proj"), (0, 3)):
                name = f"model.layers.1.mlp.experts.{kind}"
                _, rows, columns = shapes[name]
                part = files.read(name, (expert, 2, 1), (1, rows - 3, columns - 1))
                assert torch.equal(part, weights[name][expert : expert + 1, 2 : rows - 1, 1:])
    del apart["model.layers.1.mlp.experts.3.up_proj.weight"]
    (tmp_path / "less").mkdir()
    save_file(apart, tmp_path / "less" / "model.safetensors")
    with (
        open_model(str(tmp_path / "less")) as files,
        pytest.raises(ConfigError, match=r"have no .*experts\.3\.up_proj\.weight"),
    ):
        files.check(shapes)


def test_bfloat16_trains_shared_experts_to_about_the_same_losses(model_dir, on_ranks):
    config = dataclasses.replace(of_model(CALM, model_dir("qwen3_moe_mixed")), precision="bfloat16")
    (exact,) = on_ranks(train, "one rank", dataclasses.replace(config, precision="float32"), 2)
    ranks = on_ranks(train, "ep2", config, 2)
    assert ranks[0].losses == pytest.approx(exact.losses, rel=0.05)
