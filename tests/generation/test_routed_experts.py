"""Completions have the experts of the forward passes that sampled them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.config.errors import ConfigError
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.local_group import local_context
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.generation.requests import GenerationRequests, GenerationStart, SamplingParams
from nemo_like.generation.vllm_engine import to_completions
from nemo_like.models.routers import RouteRecorder
from nemo_like.models.spec import load_spec
from nemo_like.rollout.conversations import ConversationRow, Prompt
from tests.generation.driven import generate
from tests.policy.tiny import save_tiny_model

PROMPTS = Jagged.from_rows([[5, 6, 7], [9], [11, 12, 13, 14, 15, 16], [5, 6, 7]], np.int32)
SEEDS = np.arange(4, dtype=np.uint64)
SAMPLING = SamplingParams(max_new_tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its first layer is dense."""
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe_mixed")


def start(model: Path, **options: Any) -> HFGenerationWorker:
    start = GenerationStart(model_name=str(model), **options)
    return HFGenerationWorker(local_context(num_threads=1), start)


@torch.no_grad()
def experts_of(model: Any, token_ids: np.ndarray) -> np.ndarray:
    """Experts of a row in one forward pass."""
    recorder = RouteRecorder(model)
    with recorder:
        model(torch.from_numpy(token_ids.astype(np.int64))[None])
    return recorder.take()


def test_recorded_experts_are_those_of_the_complete_row(model):
    completions = generate(start(model, router_replay="auto"), PROMPTS, SEEDS, SAMPLING, 64)
    plain = AutoModelForCausalLM.from_pretrained(model)
    assert completions.routed_experts is not None
    for prompt, tokens, experts in zip(
        PROMPTS, completions.token_ids, completions.routed_experts, strict=True
    ):
        row = np.concatenate([prompt, tokens])
        assert np.array_equal(experts, experts_of(plain, row)[:-1])


def test_tokens_keep_the_experts_with_which_they_were_sampled(model):
    """After a weight update the cache is computed again, with other experts."""
    worker = start(model, router_replay=True)
    requests = GenerationRequests(np.arange(4), PROMPTS, SEEDS, SAMPLING, 64)
    worker.submit(requests)
    assert worker.poll(0.0).num_unfinished == 4
    worker.poll(0.0)
    assert worker.batch is not None
    with torch.no_grad():
        for layer in worker.model.model.layers[1:]:
            layer.mlp.gate.weight.mul_(-1.0)
        worker.batch.recompute()
    (progress,) = [worker.poll(60.0)]
    plain = AutoModelForCausalLM.from_pretrained(model)
    completions = progress.completions.take(np.argsort(progress.request_ids))
    assert completions.routed_experts is not None
    for prompt, tokens, experts in zip(
        PROMPTS, completions.token_ids, completions.routed_experts, strict=True
    ):
        row = np.concatenate([prompt, tokens])
        before, after = experts_of(plain, row), experts_of(worker.model, row)
        # Two tokens were sampled, and the second was not yet passed to the model.
        num_old = len(prompt) + 1
        assert np.array_equal(experts[:num_old], before[:num_old])
        assert np.array_equal(experts[num_old:], after[num_old:-1])


def test_experts_of_the_turns_of_a_conversation(model):
    completions = generate(start(model, router_replay=True), PROMPTS, SEEDS, SAMPLING, 64)
    row = ConversationRow.start(Prompt(token_ids=PROMPTS[0], text="", answer=None), seed=0)
    row.add_turn(completions, 0)
    first = np.concatenate(row.routed_experts)
    row.segments.append(np.array([20, 21], dtype=np.int32))
    again = Jagged.from_rows([np.concatenate(row.segments)], np.int32)
    worker = start(model, router_replay=True)
    row.add_turn(generate(worker, again, SEEDS[:1], SAMPLING, 64), 0)
    token_ids = np.concatenate(row.segments)
    experts = np.concatenate(row.routed_experts)
    assert np.array_equal(experts[: len(first)], first)
    assert np.array_equal(experts, experts_of(worker.model, token_ids)[:-1])


def test_without_the_option_and_without_routers_there_are_none(model, tmp_path):
    assert generate(start(model), PROMPTS, SEEDS, SAMPLING, 64).routed_experts is None
    dense = save_tiny_model(tmp_path, "llama")
    worker = start(dense, router_replay="auto")
    assert generate(worker, PROMPTS, SEEDS, SAMPLING, 64).routed_experts is None
    with pytest.raises(ConfigError, match=r"policy.router_replay is true, but LlamaForCausalLM"):
        start(dense, router_replay=True)


def test_layers_without_experts_are_left_out_of_vllms_output(model):
    """VLLM returns an entry for every layer."""
    moe = load_spec(str(model)).moe
    routed = np.array([[[0, 0], [3, 1]], [[0, 0], [2, 0]]], dtype=np.uint8)
    output = SimpleNamespace(
        finish_reason="stop",
        logprobs=SimpleNamespace(logprobs=[-0.5, -1.0]),
        token_ids=[4, 5],
        weight_versions=[],
        routed_experts=routed,
    )
    completions = to_completions([output], 0, moe)
    assert completions.routed_experts is not None
    assert completions.routed_experts[0].tolist() == [[[3, 1]], [[2, 0]]]
    assert to_completions([output], 0).routed_experts is None
