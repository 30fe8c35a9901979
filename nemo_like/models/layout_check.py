"""Checks that the sizes of a model are divisible by the parallel sizes of a config."""

from __future__ import annotations

from nemo_like.config.errors import Problem
from nemo_like.config.parallel import legal_divisors
from nemo_like.config.schema import RunConfig
from nemo_like.models.spec import ModelSpec


def layout_problems(config: RunConfig, spec: ModelSpec) -> list[Problem]:
    """Return one problem, with the arithmetic, for each size of the model that does not divide."""
    parallel = config.parallel
    model = config.policy.model_name
    num_experts = 0 if spec.moe is None else spec.moe.num_experts
    num_kv_heads = spec.num_kv_heads
    if config.policy.engine == "megatron" and parallel.tensor % num_kv_heads == 0:
        # Megatron-Core replicates key-value heads over tensor-parallel ranks.
        num_kv_heads = 0
    counts = (
        ("tensor", parallel.tensor, "attention heads", spec.num_heads),
        ("tensor", parallel.tensor, "key-value heads", num_kv_heads),
        ("tensor", parallel.tensor, "feed-forward columns", spec.intermediate_size),
        ("expert", parallel.expert, "experts", num_experts),
    )
    problems = []
    for key, size, what, count in counts:
        if count % size == 0:
            continue
        text = (
            f"{model} has {count} {what}, and {count} / parallel.{key} {size} = {count / size:.4g},"
            f" not a whole number: set parallel.{key} to {legal_divisors(count, size)}"
        )
        problems.append(Problem((f"parallel.{key}",), text))
    if spec.num_layers < parallel.pipeline:
        text = (
            f"{model} has {spec.num_layers} layers, fewer than parallel.pipeline"
            f" {parallel.pipeline} stages: set it to {spec.num_layers} or less"
        )
        problems.append(Problem(("parallel.pipeline",), text))
    if parallel.expert > 1 and not num_experts:
        text = f"{model} has no experts, and parallel.expert is {parallel.expert}: set it to 1"
        problems.append(Problem(("parallel.expert",), text))
    needs_sequence = num_experts and parallel.tensor > 1 and config.policy.engine == "megatron"
    if needs_sequence and not parallel.sequence:
        text = (
            f"{model} has {num_experts} experts and parallel.sequence is false: all"
            f" {parallel.tensor} tensor-parallel ranks would send the same tokens to them; set"
            " parallel.sequence to true"
        )
        problems.append(Problem(("parallel.sequence", "parallel.tensor"), text))
    return problems
