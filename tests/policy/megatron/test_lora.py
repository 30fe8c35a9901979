"""LoRA with Megatron-Core: gradients, outputs and files are those of PEFT in every layout, and
checkpoints go to and come from the other engine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import AdapterConfig, ParallelConfig
from nemo_like.models.spec import load_spec
from nemo_like.policy.megatron.families import family_of
from nemo_like.policy.megatron.lora import check_lora
from nemo_like.policy.megatron.param_map import ModelSharding
from tests.exhaustive import usually
from tests.policy.adapters import TRAINED, Part, of_architecture, train
from tests.policy.dtensor.adapter_ranks import DTensorSide
from tests.policy.megatron.adapter_ranks import build_worker, program
from tests.policy.peft_reference import (
    Reference,
    RewardReference,
    assert_look,
    assert_scores,
    assert_use,
)
from tests.policy.test_gradient_equality import TOLERANCE
from tests.policy.tiny import context

PARTS = {
    "one rank": Part(("qwen2_tied", "llama", "qwen3_moe"), uses=True, scores=True),
    "dp2": Part(("qwen2_tied",), uses=True, scores=True),
    "tp2": Part(("qwen2_tied", "llama"), scores=True),
    "tp2 + sp": Part(("qwen3", "llama")),
    "pp2": Part(("qwen2_tied", "qwen3"), scores=True),
    "cp2": Part(("qwen2_tied",), uses=True, scores=True),
    "tp2 x pp2 + sp": Part(("qwen2_tied",), uses=True),
    "tp2 x cp2 + sp": Part(("llama",)),
    "tp2 x ep2 + sp": Part(("qwen3_moe_mixed", "gpt_oss"), uses=True),
    "tp2 x dp2 x ep2 + sp": Part(("qwen3_moe_mixed", "deepseek_v3"), scores=True),
    "pp2 x v2": Part(("llama_deep",), uses=True, scores=True),
}
"""Each axis of a layout is used in full once."""


@pytest.fixture(scope="module")
def reference(model_dir) -> Callable[[str], Reference]:
    """`reference(architecture)`: what PEFT computes, once."""
    return cache(lambda architecture: Reference(architecture, model_dir(architecture)))


@pytest.fixture(scope="module")
def reward_reference(model_dir) -> Callable[[str], RewardReference]:
    """`reward_reference(architecture)`: what PEFT computes of a reward model, once."""
    return cache(lambda architecture: RewardReference(architecture, model_dir(architecture)))


@pytest.fixture(scope="module")
def straight(model_dir, tmp_path_factory) -> Callable[[str], tuple[list[float], Path]]:
    """`straight(architecture)`: losses of four steps of one process of the other engine, and the
    folder of its checkpoint after two, `half`.
    """

    @cache
    def run(architecture: str) -> tuple[list[float], Path]:
        out = tmp_path_factory.mktemp("straight")
        side = DTensorSide(context(), ParallelConfig())
        worker = side.worker(of_architecture(TRAINED, architecture, model_dir(architecture)))
        losses = train(side, worker, range(2))
        worker.save(out / "half")
        return losses + train(side, worker, range(2, 4)), out

    return run


@pytest.mark.parametrize("parallel", usually(PARTS, "pp2", "cp2"))
def test_every_layout_has_the_gradients_of_peft(
    parallel, reference, reward_reference, straight, model_dir, on_ranks, tmp_path
):
    names, uses, scores = PARTS[parallel]
    used = names[0]
    models = {name: model_dir(name) for name in names}
    losses, folder = straight(used) if uses else ([], None)
    ranks = on_ranks(program, parallel, models, folder, tmp_path, scores)
    for name in names:
        assert_look([rank[name] for rank in ranks], reference(name), (parallel, name))
    if scores:
        assert_scores([rank["scores"] for rank in ranks], reward_reference(used), used, tmp_path)
    if not uses:
        return
    assert_use([rank["use"] for rank in ranks], reference(used), losses, tmp_path)
    side = DTensorSide(context(), ParallelConfig())
    other_engine = side.worker(of_architecture(TRAINED, used, model_dir(used)))
    other_engine.load(tmp_path / "half")
    assert train(side, other_engine, range(2, 4)) == pytest.approx(losses[2:], rel=TOLERANCE)


def test_heads_of_keys_and_values_that_tensor_ranks_share_are_refused(on_ranks, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        initializer_range=0.2,
    )
    model = str(tmp_path / "model")
    LlamaForCausalLM(config).save_pretrained(model)
    with pytest.raises(ConfigError, match="does not divide the 1 key-value heads"):
        on_ranks(build_worker, "tp2", model)


@pytest.mark.parametrize(
    ("architecture", "target", "message"),
    [
        ("qwen3", "layers.1.self_attn.q_proj", "no layer of pipeline stage 0"),
        ("qwen3", "lm_head", "'lm_head' is not a linear layer"),
        ("qwen3_moe_mixed", "down_proj", "'down_proj' is not a linear layer"),
    ],
)
def test_targets_of_all_stages_are_checked(architecture, target, message, model_dir):
    spec = load_spec(model_dir(architecture))
    assert spec is not None
    lora = AdapterConfig(enabled=True, target_modules=(target,))
    with pytest.raises(ConfigError, match=message):
        check_lora(family_of(spec, ""), ModelSharding(spec, pp=2), lora)
