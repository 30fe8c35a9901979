"""Warnings about settings of a model's files that a run does not use."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.commands.validate import validate
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import RunConfig
from nemo_like.models import spec
from nemo_like.training.model_files import open_encoder, open_model_config
from nemo_like.training.model_warnings import check_new_tokens, model_warnings
from tests.policy.tiny import save_tiny_model
from tests.recipe import Recipe


def open_config(config: RunConfig) -> None:
    open_model_config(config.policy, config.parallel, config.cluster, config.needs)


def change(model: Path, **settings: Any) -> None:
    """Change settings of config.json."""
    content = json.loads((model / "config.json").read_text()) | settings
    (model / "config.json").write_text(json.dumps(content))


def warnings(config: Any, model: Path, **settings: Any) -> list[str]:
    change(model, **settings)
    policy = replace(config.policy, model_name=str(model))
    return list(model_warnings(policy, needs_reference=config.needs.reference))


def test_losses_and_noise_of_the_source_are_named(recipe: Recipe, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "qwen3_moe")
    config = recipe.sft()
    assert warnings(config, model, router_aux_loss_coef=0.5) == []
    (text,) = warnings(config, model, output_router_logits=True)
    assert "output_router_logits true, router_aux_loss_coef 0.5" in text
    (text,) = warnings(config, model, output_router_logits=False, attention_dropout=0.1)
    assert "has attention_dropout 0.1, which is not applied" in text


def test_an_untied_head_is_named(recipe: Recipe, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "llama_tied")
    assert warnings(recipe.sft(), model) == []
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (text,) = warnings(recipe.sft(), model)
    assert "ties the embeddings, but its files have an lm_head.weight of other values" in text
    assert warnings(recipe.sft(), model, tie_word_embeddings=False) == []


def test_the_reference_of_a_run_from_an_adapter_is_named(recipe: Recipe, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    lora = ("policy.lora.enabled=true", f"policy.lora.adapter_path={tmp_path}")
    (text,) = warnings(recipe.dpo(*lora), model)
    assert "the reference is the model without adapters" in text
    assert "set policy.lora.reference to adapter" in text
    assert warnings(recipe.dpo(*lora, "policy.lora.reference=adapter"), model) == []
    assert warnings(recipe.dpo(*lora, "loss_fn.kind=simpo"), model) == []
    assert warnings(recipe.dpo(lora[0]), model) == []


def test_estimated_sizes_are_in_the_log_of_a_run_and_once_in_its_check(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "FLOPs and parameters of model type llama are estimated"
    config = recipe.sft("sft.max_num_steps=1", "checkpointing.enabled=false")
    assert not [each for each in validate(config).warnings if text in each]
    monkeypatch.setattr(spec, "COUNTED_TYPES", frozenset())
    assert len([each for each in validate(config).warnings if text in each]) == 1
    log = run_sft(config).directory.logs / "driver.log"
    assert log.read_text().count(text) == 1


@pytest.mark.parametrize(
    ("dtype", "method"),
    [
        (torch.float8_e4m3fn, "fp8"),
        (torch.int32, "gptq"),
        (torch.uint8, "bitsandbytes"),
        (torch.int8, "compressed-tensors"),
    ],
)
def test_quantized_weights_are_refused_with_one_text(
    dtype: torch.dtype, method: str, recipe: Recipe, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    config = recipe.sft(f"policy.model_name={model}")
    # Left by another tool: the weights are not quantized.
    change(model, quantization_config={"quant_method": method})
    open_config(config)
    weights = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = torch.ones(2, 2).to(dtype)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=rf"quantized weights \(quantization_config .* {method}\)"
    ):
        open_config(config)


def test_new_tokens_need_a_larger_model_and_trained_embeddings(
    recipe: Recipe, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    size = len(tokenizer)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    tokens = f"policy.tokenizer_name={tmp_path / 'tokenizer'}"
    config = recipe.sft(f"policy.model_name={model}", tokens)
    encoder = open_encoder(config.policy, config.data, size)
    check_new_tokens(config.policy, encoder)
    with pytest.raises(ConfigError, match="enlarge the model with resize_token_embeddings"):
        encoder.checked_ids([size])
    config = recipe.sft(f"policy.model_name={model}", tokens, "policy.lora.enabled=true")
    with pytest.raises(ConfigError, match=r"has 1 token that .* such as '<new>'\. Adapters"):
        check_new_tokens(config.policy, encoder)
