"""`nemo-like check parity` reports equal for a right layout, DIFFERENT for a wrong one, and copies
what matters of a model.
"""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemo_like.algorithms.registry import load_any_config
from nemo_like.cli import build_parser, main
from nemo_like.commands import check_parity
from nemo_like.commands.check_parity import MODES, ParityReport
from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.demo.task import build_model
from nemo_like.models.layout_check import model_problems
from nemo_like.models.spec import ModelSpec
from nemo_like.models.tiny import save_tiny_copy, tiny_config
from nemo_like.training import parity
from nemo_like.training.parity import Comparison
from tests.recipe import Recipe
from tests.test_docs import PAGE_NAMES, ROOT, commands

LAYOUT = (
    "cluster.backend=ray",
    "cluster.workers_per_node=2",
    "parallel.tensor=2",
    "parallel.sequence=true",
)


def test_a_right_layout_is_equal_in_everything(recipe: Recipe, capsys: pytest.CaptureFixture[str]):
    recipe.grpo()
    assert main(["check", "parity", "--config", str(recipe.folder / "grpo.yaml"), *LAYOUT]) == 0
    printed = capsys.readouterr().out
    assert "dtensor on pp 1 x dp 1 x cp 1 x tp 2, sequence parallel" in printed
    assert printed.count(" equal") - printed.count("all equal") == 7 * len(MODES)


def test_the_layouts_that_the_documentation_checks_fit_the_model_of_the_demo():
    spec = ModelSpec.from_config(build_model(0).config, "runs/demo_sft/hf")
    num_checked = 0
    for words in chain.from_iterable(map(commands, PAGE_NAMES)):
        if words[:2] != ["check", "parity"] or "--config" not in words:
            continue
        arguments = build_parser().parse_args(words)
        config = load_any_config(ROOT / arguments.config, arguments.overrides, arguments.kind)
        layout = policy_layout(config.parallel, config.cluster)
        assert list(model_problems(layout, config.policy.engine, spec)) == [], words
        num_checked += 1
    assert num_checked >= 4


def test_a_wrong_step_is_found(
    recipe: Recipe, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The reference decays weights more than the layout: the first gradient agrees, the steps do
    not.
    """

    class DecaysMore(torch.optim.AdamW):
        def __init__(self, *groups: Any, **options: Any) -> None:
            super().__init__(*groups, **options)
            for group in self.param_groups:
                group["weight_decay"] = 2.0

    # In this process, which has the reference. The layout is computed by workers.
    monkeypatch.setattr(torch.optim, "AdamW", DecaysMore)
    monkeypatch.setattr(check_parity, "MODES", ("packed",))
    recipe.grpo()
    assert (
        main(
            ["check", "parity", "--config", str(recipe.folder / "grpo.yaml"), "cluster.backend=ray"]
        )
        == 1
    )
    verdicts = [
        next(word for word in line.split() if word in ("equal", "rounding", "DIFFERENT"))
        for line in capsys.readouterr().out.splitlines()[1:-1]
    ]
    assert verdicts == ["equal", "equal", "equal", "equal", "DIFFERENT", "DIFFERENT", "equal"]


def test_a_difference_beyond_the_limit_or_not_a_number_is_no_equality():
    findings = tuple(
        Comparison("packed", "loss", difference)
        for difference in (0.0, 9e-6, 2e-5, float("inf"), float("nan"))
    )
    assert [finding.is_equal for finding in findings] == [True, True, False, False, False]
    assert "3 DIFFERENT" in str(ParityReport("title", findings))


def test_a_difference_is_rounding_if_transformers_is_as_far_from_float64(tmp_path: Path):
    model = save_tiny_copy(LlamaConfig(), ParallelConfig(), tmp_path)
    config = parity.tiny_run(PolicyConfig(model_name=""), ParallelConfig(), 1, tmp_path)
    reference = parity.Reference(model, parity.random_batch(model.config), config)
    what = "gradient of every parameter"
    name = "model.norm.weight"
    exact = reference.double.gradients
    assert {each.dtype for each in exact.values()} == {torch.float64}
    errors = parity.differences(reference.single.gradients, exact)
    assert 0 < max(errors.values()) < 1e-6, "float32 against float64"

    def compared(scale: float) -> Comparison:
        gradients = reference.single.gradients | {name: exact[name] * (1 + scale)}
        return reference.compare("packed", what, reference.single._replace(gradients=gradients))

    assert compared(5e-6).is_equal
    wrong = compared(4e-5)
    assert not wrong.is_equal
    assert f"worst at {name}, 4.0e-05 from float64" in wrong.detail
    # The same result against a transformers that is further from float64.
    gradients = reference.single.gradients | {name: exact[name] * (1 - 3e-5)}
    found = reference.single._replace(
        gradients=reference.single.gradients | {name: exact[name] * (1 + 4e-5)}
    )
    reference.single = reference.single._replace(gradients=gradients)
    rounding = reference.compare("packed", what, found)
    assert rounding.is_rounding
    assert "rounding" in str(ParityReport("title", (rounding,)))


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        (
            LlamaConfig(num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True),
            ("tie_word_embeddings",),
        ),
        (Qwen2Config(num_attention_heads=28, num_key_value_heads=4), ("rope_parameters",)),
        (
            Qwen3Config(num_attention_heads=16, num_key_value_heads=8, use_sliding_window=True),
            ("use_sliding_window",),
        ),
        (
            Qwen3MoeConfig(norm_topk_prob=True, mlp_only_layers=[3]),
            ("norm_topk_prob", "decoder_sparse_step"),
        ),
    ],
)
def test_a_tiny_copy_divides_by_the_layout_and_keeps_the_architecture(
    model: Any, kept: tuple[str, ...], tmp_path: Path
):
    parallel = ParallelConfig(tensor=4, pipeline=3)
    tiny: Any = tiny_config(model, parallel)
    assert (
        tiny.num_key_value_heads % 4
        == tiny.num_hidden_layers % 3
        == tiny.intermediate_size % 4
        == 0
    )
    assert tiny.num_attention_heads // tiny.num_key_value_heads == min(
        4, model.num_attention_heads // model.num_key_value_heads
    )
    assert all(
        getattr(tiny, name) == getattr(model, name)
        for name in (*kept, "model_type", "rms_norm_eps")
    )
    saved = save_tiny_copy(model, parallel, tmp_path)
    assert saved.num_parameters() < 2_000_000
    assert AutoConfig.from_pretrained(tmp_path).model_type == model.model_type


@pytest.mark.parametrize("partial", [1.0, 0.75])
def test_a_tiny_copy_has_rows_on_both_sides_of_the_original_length(partial: float, tmp_path: Path):
    """The sizes of Phi-3.5-mini (heads of 96) and, with partial rotation, Phi-4-mini (of 128)."""
    head_dim = 96 if partial == 1.0 else 128
    num_frequencies = int(head_dim * partial) // 2
    heads = 32 if partial == 1.0 else 24
    config = Phi3Config(
        hidden_size=head_dim * heads,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        sliding_window=262144,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": partial,
            "short_factor": [1.0 + 0.02 * index for index in range(num_frequencies)],
            "long_factor": [1.0 + 1.3 * index for index in range(num_frequencies)],
        },
    )
    model: Any = save_tiny_copy(config, ParallelConfig(), tmp_path)
    tiny = model.config
    assert config.rope_parameters is not None
    assert tiny.rope_parameters["original_max_position_embeddings"] == 16
    assert tiny.max_position_embeddings / 16 == 131072 / 4096
    assert tiny.sliding_window >= tiny.max_position_embeddings, "no window, as the real model"
    assert config.rope_parameters["original_max_position_embeddings"] == 4096
    rotary = model.model.rotary_emb
    hidden = torch.zeros(1, 1)
    short, long = (rotary(hidden, torch.arange(length)[None])[0][0, 9] for length in (16, 17))
    assert not torch.equal(short, long)
    scale = (1 + math.log(32) / math.log(16)) ** 0.5
    assert rotary.attention_scaling == pytest.approx(scale)
    lengths = parity.random_batch(model.config)["length"]
    assert min(lengths) < 16 < max(lengths)
