"""Sizes of a model that the parallel sizes do not divide are problems with the arithmetic."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.config.batching import StreamableDataConfig
from nemo_like.config.parallel import located_problems
from nemo_like.config.rollout import VLLMGenerationConfig
from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.models.layout_check import VLLM_CPU_HEAD_SIZES, model_problems, vllm_problems
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import ParallelLayout

DENSE = {
    "model_type": "llama",
    "hidden_size": 96,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "num_hidden_layers": 10,
    "vocab_size": 100,
}
MOE = {**DENSE, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def problems(config: dict, engine: str = "megatron", **parallel: object) -> list[str]:
    """The texts of the problems, without the name of the model."""
    run = SftRunConfig(
        run_name="x",
        policy=PolicyConfig(model_name="m", engine=engine),  # type: ignore[arg-type]
        data=StreamableDataConfig(train_path="t.jsonl"),
        parallel=ParallelConfig(**parallel),  # type: ignore[arg-type]
    )
    layout = ParallelLayout(
        pp=run.parallel.pipeline,
        vpp=run.parallel.virtual_pipeline,
        tp=run.parallel.tensor,
        ep=run.parallel.expert,
        # Enough replicas for the experts.
        dp=run.parallel.expert,
        sequence_parallel=run.parallel.sequence,
    )
    found = located_problems(
        model_problems(layout, run.policy.engine, ModelSpec.from_config(config)), run.cluster
    )
    return [str(problem).partition(" has ")[2] for problem in found]


def test_heads_and_layers_must_divide() -> None:
    three_heads = {**DENSE, "num_key_value_heads": 3}
    assert problems(three_heads, tensor=2, pipeline=16) == [
        (
            "3 key-value heads, and 3 / parallel.tensor 2 = 1.5, not a whole number: set"
            " parallel.tensor to 1"
        ),
        "10 layers, fewer than parallel.pipeline 16 stages: set it to 10 or less",
    ]
    assert problems(DENSE, pipeline=3, virtual_pipeline=3) == []
    (only,) = problems(DENSE, pipeline=3, virtual_pipeline=4)
    assert only.startswith(
        "10 layers, fewer than parallel.pipeline 3 x parallel.virtual_pipeline 4"
    )
    assert only.endswith("= 12 virtual stages: set parallel.virtual_pipeline to 3 or less")
    # Megatron-Core replicates each key-value head on two ranks.
    (only,) = problems(three_heads, tensor=6, pipeline=4)
    assert "feed-forward columns" in only
    assert len(problems(three_heads, engine="dtensor", tensor=6)) == 2


def test_columns_of_shared_experts_must_divide() -> None:
    shared = {**MOE, "n_shared_experts": 1, "moe_intermediate_size": 30}
    assert problems(shared, tensor=2, sequence=True) == []
    (only,) = problems(shared, tensor=4, sequence=True)
    assert "30 columns of shared experts, and 30 / parallel.tensor 4 = 7.5" in only


def test_experts_must_divide() -> None:
    assert problems(MOE, expert=3) == []
    assert problems(MOE, expert=4) == [
        (
            "6 experts, and 6 / parallel.expert 4 = 1.5, not a whole number: set parallel.expert"
            " to 3 or 6"
        )
    ]
    # With FSDP the experts of a tensor-parallel rank are divided.
    assert problems(MOE, engine="dtensor", tensor=2, expert=3) == []
    (problem,) = problems(MOE, engine="dtensor", tensor=2, expert=2)
    assert problem.startswith("3 experts of a tensor-parallel rank, and 3 / parallel.expert 2 =")
    assert problem.endswith("set parallel.expert to 1 or 3")
    assert problems(DENSE, expert=2) == ["no experts, and parallel.expert is 2: set it to 1"]


def test_experts_with_tensor_parallelism_need_sequence_parallelism() -> None:
    assert problems(MOE, tensor=2, sequence=True) == []
    (problem,) = problems(MOE, tensor=2)
    assert "would send the same tokens to them; set parallel.sequence to true" in problem
    assert problems(MOE, engine="dtensor", tensor=2) == []


def vllm_texts(
    config: dict,
    *,
    tensor_parallel_size: int = 1,
    max_total_length: int = 16,
    is_on_cpu: bool = False,
) -> list[str]:
    found = vllm_problems(
        ModelSpec.from_config(config),
        VLLMGenerationConfig(tensor_parallel_size=tensor_parallel_size),
        max_total_length=max_total_length,
        is_on_cpu=is_on_cpu,
    )
    return [str(problem) for problem in found]


def test_heads_that_vllm_cannot_divide() -> None:
    key = "policy.generation.vllm.tensor_parallel_size"
    assert vllm_texts(DENSE, tensor_parallel_size=8) == [
        (
            "llama has 12 attention heads and 4 key-value heads, which vLLM cannot divide evenly"
            f" over {key} 8: set it to 4 or 12"
        )
    ]
    # 4 key-value heads on 6 ranks would be neither divided nor replicated.
    (only,) = vllm_texts(DENSE, tensor_parallel_size=6)
    assert only.endswith("set it to 4 or 12")
    assert vllm_texts(DENSE, tensor_parallel_size=12) == []


@given(num_kv_heads=st.integers(1, 8), group=st.integers(1, 6), size=st.integers(1, 48))
def test_each_rank_of_vllm_has_the_same_number_of_heads(
    num_kv_heads: int, group: int, size: int
) -> None:
    num_heads = num_kv_heads * group
    config = {**DENSE, "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    # Ranks in order have consecutive heads; a rank needs the key-value heads of its heads, all of
    # which belong to it, or one that it shares.
    parts = [
        range(rank * num_heads // size, (rank + 1) * num_heads // size) for rank in range(size)
    ]
    is_even = len({len(part) for part in parts}) == 1 and len(parts[0]) > 0
    kv_heads = [[head // group for head in part] for part in parts]
    is_complete = all(
        len(set(part)) == 1 or all(part.count(head) == group for head in part) for part in kv_heads
    )
    assert (vllm_texts(config, tensor_parallel_size=size) == []) == (is_even and is_complete)


def test_positions_above_those_of_the_model_are_refused_by_vllm() -> None:
    config = {**DENSE, "max_position_embeddings": 64}
    assert vllm_texts(config, max_total_length=64) == []
    assert vllm_texts(config, max_total_length=65) == [
        (
            "policy.max_total_sequence_length 65 is above the 64 positions of llama, which vLLM"
            " refuses: set it to 64 or less"
        )
    ]
    # vLLM multiplies the positions by the factor of these rotary embeddings.
    scaled = {**config, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}
    assert vllm_texts(scaled, max_total_length=256) == []
    yarn = {**config, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    assert len(vllm_texts(yarn, max_total_length=256)) == 1
    assert vllm_texts(DENSE, max_total_length=10**6) == [], "config.json has no limit"


def test_head_sizes_of_vllm_on_cpu() -> None:
    (only,) = vllm_texts(DENSE, is_on_cpu=True)
    assert "llama has heads of size 8" in only and "set policy.generation.backend to hf" in only
    assert vllm_texts(DENSE, is_on_cpu=False) == []
    for size in VLLM_CPU_HEAD_SIZES:
        assert vllm_texts({**DENSE, "head_dim": size}, is_on_cpu=True) == []


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_head_sizes_are_those_of_the_installed_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    # Read as text: importing vLLM takes seconds.
    source = Path(spec.origin).parent / "v1/attention/backends/cpu_attn.py"
    functions = [
        node
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes"
    ]
    (function,) = functions
    returned = function.body[-1]
    assert isinstance(returned, ast.Return) and returned.value is not None
    assert tuple(ast.literal_eval(returned.value)) == VLLM_CPU_HEAD_SIZES
