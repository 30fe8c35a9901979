"""What Megatron's worker takes and refuses, and what lets it run without CUDA."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import megatron.core
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemo_like.config.errors import ConfigError
from nemo_like.config.parallel import build_layout
from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.data.planning.plan import plan_batch
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import NllLoss
from nemo_like.models.spec import ModelSpec, load_spec
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.checkpoint.hf_reader import open_model
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.megatron import groups as megatron_cpu
from nemo_like.policy.megatron.families import family_of
from nemo_like.policy.megatron.worker import MegatronPolicyWorker
from tests.policy.megatron.ranks import of_model
from tests.policy.test_gradient_equality import LAYOUTS, LENGTHS
from tests.policy.tiny import compute_and_fetch, random_batch, save_with_value
from tests.weight_sync.received import received_weights

ROPE = {"rope_theta": 1e4, "factor": 2.0}


def test_the_installed_megatron_is_the_release_whose_modules_are_listed():
    assert megatron.core.__version__ == megatron_cpu.VERSION, (
        "walk megatron_cpu.MODULES again for the new release"
    )


@pytest.mark.parametrize("module", megatron_cpu.MODULES)
def test_every_listed_module_still_requires_cuda(module):
    source = inspect.getsource(importlib.import_module(module))
    questions = (
        "current_device()",
        "torch.cuda.synchronize",
        "torch.cuda.Stream()",
        "device='cuda'",
        'device="cuda"',
    )
    assert any(words in source for words in questions), (
        "this release needs no stand-in here: take the module off the list"
    )


def test_another_release_is_refused_on_cpu(monkeypatch):
    monkeypatch.setattr(megatron.core, "__version__", "0.99.0")
    with pytest.raises(
        ConfigError,
        match=r"megatron-core 0\.16\.1 and 0\.99\.0 is installed.*use policy\.engine=dtensor",
    ):
        megatron_cpu.install()


def test_type_names_are_changed_only_inside():
    tensor = torch.zeros(1, dtype=torch.bfloat16)
    with megatron_cpu.cuda_type_names():
        assert tensor.type() == "torch.cuda.BFloat16Tensor"
        assert tensor.type(torch.float32).dtype == torch.float32
    assert tensor.type() == "torch.BFloat16Tensor"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Qwen2MoeConfig(), "model_type qwen2_moe"),
        (
            Qwen3MoeConfig(norm_topk_prob=True, num_experts_per_tok=1),
            "norm_topk_prob with num_experts_per_tok 1",
        ),
        (GemmaConfig(), "model_type gemma"),
        (LlamaConfig(attention_bias=True), "attention_bias true"),
        (LlamaConfig(mlp_bias=True), "mlp_bias true"),
        (GptOssConfig(attention_bias=False), "attention_bias false"),
        (DeepseekV3Config(attention_bias=True), "attention_bias true"),
        (Qwen2Config(attention_dropout=0.1), "attention_dropout 0.1"),
        (Qwen3Config(hidden_act="gelu"), "hidden_act gelu"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", **ROPE}), "rope_type dynamic"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_would_be_computed_otherwise_is_refused(config, said):
    with pytest.raises(
        ConfigError, match=f"policy.model_name=some/model has .*{said}.*use policy.engine=dtensor"
    ):
        family_of(ModelSpec.from_config(config), "some/model")


def test_supported_models_pass():
    for config in (
        LlamaConfig(rope_parameters={"rope_type": "yarn", **ROPE}),
        Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1),
        MistralConfig(sliding_window=8),
        Qwen3Config(tie_word_embeddings=True),
        Qwen3MoeConfig(norm_topk_prob=True),
        DeepseekV3Config(),
        GptOssConfig(),
    ):
        family_of(ModelSpec.from_config(config), "some/model")


def test_a_model_is_read_from_several_files(model_dir, tmp_path):
    tensors = load_file(Path(model_dir("llama")) / "model.safetensors")
    half = len(tensors) // 2
    parts = {"a.safetensors": list(tensors)[:half], "b.safetensors": list(tensors)[half:]}
    for file_name, names in parts.items():
        save_file({name: tensors[name] for name in names}, tmp_path / file_name)
    index = {
        "weight_map": {name: file_name for file_name, names in parts.items() for name in names}
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_model(str(tmp_path)) as files:
        files.check({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            offset, shape = (0,) * tensor.ndim, tuple(tensor.shape)
            assert torch.equal(files.read(name, offset, shape), tensor)
        embedding = tensors["model.embed_tokens.weight"]
        assert torch.equal(
            files.read("model.embed_tokens.weight", (5, 2), (3, 4)), embedding[5:8, 2:6]
        )
        with pytest.raises(
            ConfigError,
            match=r"have model.norm.weight in shape \[32\]; its config.json requires \[33\]",
        ):
            files.check({"model.norm.weight": (33,)})
        with pytest.raises(ConfigError, match="have no lm_head"):
            files.check({"lm_head.bias": (67,)})
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match="lacks b"), open_model(str(tmp_path)):
        pass


def test_a_model_without_safetensors_is_refused(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"neither model\.safetensors nor"),
        open_model(str(tmp_path)),
    ):
        pass


def work(context: WorkerContext, parallel: ParallelConfig, config: PolicyConfig) -> dict[str, Any]:
    """Score, train and score again with a reference; then hand the weights out in buckets."""
    worker = MegatronPolicyWorker(
        context, config=config, start=PolicyStart(parallel=parallel, needs_reference=True)
    )
    try:
        parallel_layout = build_layout(parallel, context.world_size)
        spec = plan_spec(
            config,
            purpose="train",
            parallel_layout=parallel_layout,
            model=load_spec(config.model_name),
        )
        batch = random_batch(LENGTHS)
        shard = batch.shard(plan_batch(batch["length"], spec))[
            parallel_layout.dp_rank(context.rank)
        ]
        before = compute_and_fetch(worker, shard)
        worker.train(shard, None, NllLoss())
        after = compute_and_fetch(worker, shard)
        _, weights = received_weights(worker, "float32", 20_000)
    finally:
        process_groups.destroy()
    return {
        "before": before,
        "after": after,
        "weights": {name: each.numpy() for name, each in weights.items()},
    }


def opening_message(context: WorkerContext, parallel: ParallelConfig, config: PolicyConfig) -> str:
    """The error of a rank that opens a model; "" without one."""
    try:
        MegatronPolicyWorker(context, config=config, start=PolicyStart(parallel=parallel))
    except ConfigError as error:
        return str(error)
    finally:
        process_groups.destroy()
    return ""


def test_the_rank_that_reads_a_weight_that_is_not_finite_names_it(model_dir, on_ranks, tmp_path):
    name = save_with_value(model_dir("llama"), tmp_path / "bad", float("nan"))
    config = of_model(LAYOUTS["packed, 2 microbatches"], str(tmp_path / "bad"))
    first, second = on_ranks(opening_message, "tp2", config)
    assert first == "" and f"{name} has values that are NaN" in second


def test_a_worker_keeps_its_reference_and_hands_out_weights(model_dir, on_ranks):
    config = of_model(LAYOUTS["packed, 2 microbatches"], model_dir("llama_tied"))
    first, last = on_ranks(work, "pp2", config)
    assert first["before"] == {}, "outputs are on the last stage"
    before, after = last["before"], last["after"]
    assert np.array_equal(before["prev_logprobs"].values, before["reference_logprobs"].values)
    assert np.array_equal(after["reference_logprobs"].values, before["reference_logprobs"].values)
    assert not np.array_equal(after["prev_logprobs"].values, before["prev_logprobs"].values)
    assert last["weights"] == {}, "weights are on rank 0"
    model = AutoModelForCausalLM.from_pretrained(config.model_name)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {name: array.shape for name, array in first["weights"].items()} == shapes
    assert not np.array_equal(
        first["weights"]["model.norm.weight"],
        model.get_parameter("model.norm.weight").detach().numpy(),
    )
