"""Runs of a model with experts use the generator's experts, and repeat to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.algorithms.grpo.replay import replay_step
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.config.check import find_problems
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import RunConfig
from nemo_like.data.jagged import Jagged
from nemo_like.data.routed_experts import ROUTED_EXPERTS
from nemo_like.rollout.records import RolloutRecord
from nemo_like.training.model_files import open_model_config
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.recipe import Recipe

HEADS: dict[str, Any] = {"head_dim": 16}
OPTIONS = (
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=4",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "policy.generation.max_new_tokens=6",
    "data.max_train_rows=64",
    "data.validation_path=null",
    "checkpointing.save_period=1",
    "checkpointing.keep_latest=5",
    "checkpointing.export_hf=false",
)
BYTES = "generation/routed_experts_bytes_per_token"


def open_config(config: RunConfig) -> None:
    open_model_config(config.policy, config.parallel, config.cluster, config.needs)


@pytest.fixture
def model(recipe: Recipe) -> Path:
    """A random model with experts and the tokenizer of the demo."""
    torch.manual_seed(0)
    source = recipe.demo / "model"
    config = Qwen3MoeConfig(
        vocab_size=AutoConfig.from_pretrained(source).vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        **HEADS,
    )
    folder = recipe.folder / "model"
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("engine", ["dtensor", "megatron"])
def test_resumed_and_replayed_steps_are_those_of_the_run(recipe: Recipe, model: Path, engine: str):
    options = (
        *OPTIONS,
        f"policy.model_name={model}",
        f"policy.engine={engine}",
        "policy.router_replay=true",
    )
    run = run_grpo(recipe.grpo(*options)).directory
    expected = read_metrics(run.path)
    assert [line[BYTES] for line in expected] == [4.0, 4.0]
    record = RolloutRecord.load(run.rollout_tokens(2))
    assert record.columns[ROUTED_EXPERTS].dtype == "uint8"
    interrupt_at(run.path, 1)
    resumed = run_grpo(recipe.grpo(*options, "resume=true")).directory
    assert read_metrics(resumed.path) == expected

    report = replay_step(run.path, 2, ["policy.router_replay=false"])
    for name in ("policy/loss", "policy/grad_norm", "mismatch/logprob_diff_max"):
        assert report.replayed[name] == report.logged[name], name
    assert report.overridden is not None


def test_a_replay_computes_the_recorded_experts(recipe: Recipe, model: Path) -> None:
    """Other experts in the record give another loss; without them the policy chooses by itself."""
    options = (*OPTIONS, "grpo.max_num_steps=1", f"policy.model_name={model}")
    run = run_grpo(recipe.grpo(*options)).directory
    path = run.rollout_tokens(1)
    record = RolloutRecord.load(path)
    # Three of ten tokens have the next experts.
    column = record.columns[ROUTED_EXPERTS]
    assert isinstance(column, Jagged)
    values = column.values
    values[::3] = (values[::3] + 1) % 8
    record.save(path)
    report = replay_step(run.path, 1, ["policy.router_replay=false"])
    assert report.overridden is not None
    name = "mismatch/logprob_diff_max"
    assert report.overridden[name] == pytest.approx(report.logged[name], abs=1e-5)
    assert report.replayed[name] > 100 * report.overridden[name]
    logged = json.loads(run.metrics.read_text().splitlines()[0])
    assert logged["mismatch/logprob_diff_max"] < 1e-4


def problems_of(config: RunConfig) -> str:
    return "; ".join(problem.text for problem in find_problems(config))


def test_a_run_that_cannot_replay_names_the_reason(recipe: Recipe) -> None:
    replay = "policy.router_replay=true"
    sft: SftRunConfig = recipe.sft()
    assert sft.policy.router_replay == "auto"
    for config, message in (
        (lambda: recipe.sft(replay), "only GRPO uses the experts of completions"),
        (lambda: recipe.grpo(replay, "policy.compile=layers"), "compiled layers"),
    ):
        try:
            text = problems_of(config())
        except ConfigError as error:
            text = str(error)
        assert message in text
    with pytest.raises(ConfigError, match="has no experts: set it to auto or false"):
        open_config(recipe.grpo(replay))
    with pytest.raises(ConfigError, match="vLLM on CPU does not return the experts"):
        open_config(recipe.grpo(replay, "policy.generation.backend=vllm"))
