"""Sizes of a model that the parallel sizes do not divide are problems with the arithmetic."""

from __future__ import annotations

from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.config.batching import StreamableDataConfig
from nemo_like.config.parallel import named_by_keys
from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.models.layout_check import model_problems
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
        tp=run.parallel.tensor,
        ep=run.parallel.expert,
        # Enough replicas for the experts.
        dp=run.parallel.expert,
        sequence_parallel=run.parallel.sequence,
    )
    found = named_by_keys(
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
    # Megatron-Core replicates each key-value head on two ranks.
    (only,) = problems(three_heads, tensor=6, pipeline=4)
    assert "feed-forward columns" in only
    assert len(problems(three_heads, engine="dtensor", tensor=6)) == 2


def test_experts_must_divide() -> None:
    assert problems(MOE, expert=3) == []
    assert problems(MOE, expert=4) == [
        (
            "6 experts, and 6 / parallel.expert 4 = 1.5, not a whole number: set parallel.expert"
            " to 3 or 6"
        )
    ]
    assert problems(DENSE, expert=2) == ["no experts, and parallel.expert is 2: set it to 1"]


def test_experts_with_tensor_parallelism_need_sequence_parallelism() -> None:
    assert problems(MOE, tensor=2, sequence=True) == []
    (problem,) = problems(MOE, tensor=2)
    assert "would send the same tokens to them; set parallel.sequence to true" in problem
    assert problems(MOE, engine="dtensor", tensor=2) == []
