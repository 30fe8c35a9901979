"""Checks that a parallel layout suits a model: divisibility of heads, layers, experts and so on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_like.integer_math import nearest_divisors
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import EngineName, Field, LayoutProblem, ParallelLayout


def model_problems(
    layout: ParallelLayout,
    engine: EngineName,
    spec: ModelSpec,
) -> list[LayoutProblem]:
    """Return a problem, with the arithmetic, for each size of the model that does not divide."""
    # The name may be any path, and its braces are not fields of the template.
    model = spec.name.replace("{", "{{").replace("}", "}}") or "the model"
    return [
        *_size_problems(layout, engine, spec, model),
        *_vocabulary_problems(layout, engine, spec, model),
        *_pipeline_problems(layout, spec, model),
        *_expert_problems(layout, engine, spec, model),
    ]


def _size_problems(
    layout: ParallelLayout,
    engine: EngineName,
    spec: ModelSpec,
    model: str,
) -> Iterator[LayoutProblem]:
    """Sizes that are divided evenly over the ranks of an axis."""
    over_tp = {
        "attention heads": spec.num_heads,
        "key-value heads": spec.num_kv_heads,
        "feed-forward columns": spec.intermediate_size,
    }
    over_ep = {"experts": 0 if spec.moe is None else spec.moe.num_experts}
    axes: tuple[tuple[Field, int, dict[str, int]], ...] = (
        ("tp", layout.tp, over_tp),
        ("ep", layout.ep, over_ep),
    )
    for field, size, counts in axes:
        # The suggested sizes must divide all counts, not only the one that is wrong.
        common = math.gcd(*counts.values())
        for what, count in counts.items():
            # Megatron-Core replicates key-value heads over tensor-parallel ranks.
            is_replicated = what == "key-value heads" and engine == "megatron" and size % count == 0
            if count % size and not is_replicated:
                yield LayoutProblem(
                    (field,),
                    f"{model} has {count} {what}, and {count} / {{{field}}} {size} ="
                    f" {count / size:.4g}, not a whole number: set {{{field}}} to"
                    f" {nearest_divisors(common, size)}",
                )


def _vocabulary_problems(
    layout: ParallelLayout,
    engine: EngineName,
    spec: ModelSpec,
    model: str,
) -> Iterator[LayoutProblem]:
    # Megatron-Core pads the vocabulary; FSDP2 cannot shard a table without rows.
    if engine == "dtensor" and spec.vocab_size < layout.tp:
        yield LayoutProblem(
            ("tp",),
            f"{model} has a vocabulary of {spec.vocab_size}, smaller than {{tp}} {layout.tp}: set"
            f" it to {spec.vocab_size} or less",
        )


def _pipeline_problems(
    layout: ParallelLayout,
    spec: ModelSpec,
    model: str,
) -> Iterator[LayoutProblem]:
    # Stages may differ by one layer, but none is without layers.
    if spec.num_layers < layout.pp:
        yield LayoutProblem(
            ("pp",),
            f"{model} has {spec.num_layers} layers, fewer than {{pp}} {layout.pp} stages: set it"
            f" to {spec.num_layers} or less",
        )


def _expert_problems(
    layout: ParallelLayout,
    engine: EngineName,
    spec: ModelSpec,
    model: str,
) -> Iterator[LayoutProblem]:
    if spec.moe is None:
        if layout.ep > 1:
            yield LayoutProblem(
                ("ep",), f"{model} has no experts, and {{ep}} is {layout.ep}: set it to 1"
            )
        return
    if engine == "megatron" and layout.tp > 1 and not layout.sequence_parallel:
        yield LayoutProblem(
            ("sequence_parallel", "tp"),
            f"{model} has {spec.moe.num_experts} experts and {{sequence_parallel}} is false: all"
            f" {layout.tp} tensor-parallel ranks would send the same tokens to them; set"
            " {sequence_parallel} to true",
        )
