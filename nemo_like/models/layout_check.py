"""Checks that a parallel layout, frozen weights, or vLLM suit a model: heads, layers, experts,
positions.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec

from nemo_like.config.errors import ConfigError, Problem, either
from nemo_like.config.rollout import VLLMGenerationConfig
from nemo_like.integer_math import nearest_divisors
from nemo_like.models.spec import ModelSpec
from nemo_like.models.torchvision import torchvision_problem
from nemo_like.parallel_layout import LayoutProblem, ParallelLayout
from nemo_like.training_engines import ENGINES, EngineName

VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's attention on CPU, release 0.32."""
_SCALED_ROPE = ("linear", "dynamic")
"""Types of rotary embeddings for which vLLM multiplies the positions of config.json by a factor."""

_KEY = "policy.freeze"


def model_problems(
    layout: ParallelLayout, engine: EngineName, spec: ModelSpec
) -> list[LayoutProblem]:
    """Return a problem, with the arithmetic, for each size of the model that does not divide."""
    model = spec.name or "the model"
    return [
        *_size_problems(layout, engine, spec, model),
        *_vocabulary_problems(layout, engine, spec, model),
        *_pipeline_problems(layout, spec, model),
        *_expert_problems(layout, engine, spec, model),
    ]


def _size_problems(
    layout: ParallelLayout, engine: EngineName, spec: ModelSpec, model: str
) -> Iterator[LayoutProblem]:
    """Sizes that are divided evenly over the ranks of an axis."""
    over_tp = {
        "attention heads": spec.num_heads,
        "key-value heads": spec.num_kv_heads,
        "feed-forward columns": spec.intermediate_size,
        "columns of shared experts": 0 if spec.moe is None else spec.moe.shared_size,
    }
    over_ep = {"experts": 0 if spec.moe is None else spec.moe.num_experts}
    spans_tensor = ENGINES[engine].experts_span_tensor
    if not spans_tensor and layout.tp > 1 and layout.ep > 1 and spec.moe is not None:
        over_tp["experts"] = spec.moe.num_experts
        over_ep = {"experts of a tensor-parallel rank": spec.moe.num_experts // layout.tp}
    axes = (("parallel.tensor", layout.tp, over_tp), ("parallel.expert", layout.ep, over_ep))
    for key, size, counts in axes:
        # The suggested sizes must divide all counts, not only the one that is wrong.
        common = math.gcd(*counts.values())
        for what, count in counts.items():
            may_replicate = what == "key-value heads" and ENGINES[engine].replicates_kv_heads
            is_replicated = may_replicate and size % count == 0
            if count % size and not is_replicated:
                yield LayoutProblem(
                    (key,),
                    f"{model} has {count} {what}, and {count} / {key} {size} = {count / size:.4g},"
                    f" not a whole number: set {key} to {nearest_divisors(common, size)}",
                )


def _vocabulary_problems(
    layout: ParallelLayout, engine: EngineName, spec: ModelSpec, model: str
) -> Iterator[LayoutProblem]:
    # FSDP2 cannot shard a table without rows.
    if not ENGINES[engine].pads_vocabulary and spec.vocab_size < layout.tp:
        yield LayoutProblem(
            ("parallel.tensor",),
            f"{model} has a vocabulary of {spec.vocab_size}, smaller than parallel.tensor"
            f" {layout.tp}: set it to {spec.vocab_size} or less",
        )


def _pipeline_problems(
    layout: ParallelLayout, spec: ModelSpec, model: str
) -> Iterator[LayoutProblem]:
    # Stages may differ by one layer, but none is without layers.
    if spec.num_layers < layout.pp:
        yield LayoutProblem(
            ("parallel.pipeline",),
            f"{model} has {spec.num_layers} layers, fewer than parallel.pipeline {layout.pp}"
            f" stages: set it to {spec.num_layers} or less",
        )
    elif spec.num_layers < layout.pp * layout.vpp:
        yield LayoutProblem(
            ("parallel.virtual_pipeline",),
            f"{model} has {spec.num_layers} layers, fewer than parallel.pipeline {layout.pp} x"
            f" parallel.virtual_pipeline {layout.vpp} = {layout.pp * layout.vpp} virtual stages:"
            f" set parallel.virtual_pipeline to {spec.num_layers // layout.pp} or less",
        )


def _expert_problems(
    layout: ParallelLayout, engine: EngineName, spec: ModelSpec, model: str
) -> Iterator[LayoutProblem]:
    if spec.moe is None:
        if layout.ep > 1:
            yield LayoutProblem(
                ("parallel.expert",),
                f"{model} has no experts, and parallel.expert is {layout.ep}: set it to 1",
            )
        return
    spans_tensor = ENGINES[engine].experts_span_tensor
    if spans_tensor and layout.tp > 1 and not layout.sequence_parallel:
        yield LayoutProblem(
            ("parallel.sequence", "parallel.tensor"),
            f"{model} has {spec.moe.num_experts} experts and parallel.sequence is false: all"
            f" {layout.tp} tensor-parallel ranks would send the same tokens to them; set"
            " parallel.sequence to true",
        )


def vllm_problems(
    spec: ModelSpec, vllm: VLLMGenerationConfig, *, max_total_length: int, is_on_cpu: bool
) -> list[Problem]:
    """Return a problem for each property of the model that vLLM refuses when it starts.

    `max_total_length` is the max tokens of a prompt with its completion.
    """
    model = spec.name or "the model"
    return [
        *_vllm_head_problems(spec, vllm.tensor_parallel_size, model),
        *_vllm_position_problems(spec, max_total_length, model),
        *_vllm_cpu_problems(spec, model, is_on_cpu=is_on_cpu),
        *_vllm_image_problems(spec),
    ]


def _vllm_head_problems(spec: ModelSpec, size: int, model: str) -> Iterator[Problem]:
    """Attention heads are divided; key-value heads are divided or replicated."""
    # Latent attention has one key-value head, which every rank replicates.
    num_kv_heads = spec.num_kv_heads if spec.latent is None else 1
    possible = []
    for candidate in range(1, spec.num_heads + 1):
        is_kv_even = num_kv_heads % candidate == 0 or candidate % num_kv_heads == 0
        if spec.num_heads % candidate == 0 and is_kv_even:
            possible.append(candidate)
    if size in possible:
        return
    below = [candidate for candidate in possible if candidate < size]
    above = [candidate for candidate in possible if candidate > size]
    key = "policy.generation.vllm.tensor_parallel_size"
    yield Problem(
        (key,),
        f"{model} has {spec.num_heads} attention heads and {num_kv_heads} key-value heads,"
        f" which vLLM cannot divide evenly over {key} {size}: set it to"
        f" {either(below[-1:] + above[:1])}",
    )


def _vllm_position_problems(
    spec: ModelSpec, max_total_length: int, model: str
) -> Iterator[Problem]:
    if spec.max_positions is None or spec.rope_type in _SCALED_ROPE:
        return
    if max_total_length > spec.max_positions:
        key = "policy.max_total_sequence_length"
        yield Problem(
            (key,),
            f"{key} {max_total_length} is above the {spec.max_positions} positions of {model},"
            f" which vLLM refuses: set it to {spec.max_positions} or less",
        )


def _vllm_cpu_problems(spec: ModelSpec, model: str, *, is_on_cpu: bool) -> Iterator[Problem]:
    # Latent attention has head sizes of its own.
    if not is_on_cpu or spec.latent is not None or spec.head_dim in VLLM_CPU_HEAD_SIZES:
        return
    sizes = ", ".join(map(str, VLLM_CPU_HEAD_SIZES))
    key = "policy.generation.backend"
    yield Problem(
        (key, "cluster.gpus_per_node"),
        f"{key} is vllm without GPUs, and {model} has heads of size {spec.head_dim}; vLLM has"
        f" attention on CPU for sizes {sizes}: set {key} to hf",
    )


def _vllm_image_problems(spec: ModelSpec) -> Iterator[Problem]:
    # Without vLLM the workers run in another environment.
    if spec.vision is None or find_spec("vllm") is None:
        return
    text = torchvision_problem()
    if text:
        yield Problem(("policy.generation.backend",), text)


def frozen_weights(patterns: Sequence[str], names: Mapping[str, str]) -> frozenset[str]:
    """Return the weights that match one of `patterns`, by the name of the distinct weight.

    `names` has every name of a weight and the name of the distinct weight: for a tied output
    embedding `{"lm_head.weight": "model.embed_tokens.weight", ...}`, so that either name freezes
    both. In a pattern `*` stands for any text, `?` for one character and `[0-7]` for one of
    several.

    Raises ConfigError for a pattern that matches nothing, and if nothing is left to be trained.
    """
    frozen = set()
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(
                f"{_KEY}: {pattern!r} matches no weight of the model; {_nearest(pattern, names)}"
            )
        frozen |= {names[name] for name in matching}
    if frozen == set(names.values()):
        raise ConfigError(
            f"{_KEY} matches all {len(frozen)} weights of the model, so nothing would be trained;"
            " remove a pattern, or train adapters"
        )
    return frozenset(frozen)


def _nearest(pattern: str, names: Mapping[str, str]) -> str:
    """Return names that are similar to `pattern`, or a pattern that matches, in words."""
    # A pattern often lacks the first or the last part of the names.
    for other in (f"model.{pattern}", f"{pattern}.*", f"{pattern}*", f"*.{pattern}*"):
        if any(fnmatchcase(name, other) for name in names):
            return (
                f"a pattern is a complete name, in which * matches any text: {other!r} is possible"
            )
    nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
    return f"names of weights are e.g. {', '.join(nearest or list(names)[:3])}"
