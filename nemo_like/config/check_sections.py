"""Relations between the keys of one section: data, LoRA adapters, optimizer, reward models."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from nemo_like.config.errors import Problem
from nemo_like.config.needs import RunNeeds
from nemo_like.config.rollout import RewardConfig
from nemo_like.config.schema import (
    MAIN_SET,
    VALIDATION_SET,
    ClusterConfig,
    DataConfig,
    PolicyConfig,
    SchedulerConfig,
)
from nemo_like.training_engines import ENGINES


def data_problems(data: DataConfig, needs: RunNeeds) -> Iterator[Problem]:
    """Yield the problems of the training sets and their weights."""
    for name in data.train_sets:
        if re.fullmatch(r"[a-z0-9][a-z0-9_]*", name) is None or name == MAIN_SET:
            yield Problem(
                ("data.train_sets",),
                f"data.train_sets has the name {name!r}; use lower-case letters, digits and '_',"
                f" and not {MAIN_SET!r}, which is data.train_path",
            )
    names = [MAIN_SET, *data.train_sets, VALIDATION_SET, *data.validation_sets]
    for name in data.set_columns:
        if name not in names:
            yield Problem(
                (f"data.set_columns.{name}",),
                f"data.set_columns has the name {name!r}; the sets are {_listed(names)}",
            )
    yield from _weights(data)
    yield from _filters(data, needs)


def _filters(data: DataConfig, needs: RunNeeds) -> Iterator[Problem]:
    """The filters of rows have an effect."""
    if data.max_prompt_tokens is not None and needs.rollouts is None:
        yield Problem(
            ("data.max_prompt_tokens",),
            f"data.max_prompt_tokens is {data.max_prompt_tokens}, but this run has no"
            " rollouts; set it to null, and policy.max_total_sequence_length with"
            " policy.oversize_rows=drop to leave out long rows",
        )


def _weights(data: DataConfig) -> Iterator[Problem]:
    """Every set has a weight if one has."""
    weights = data.train_weights
    if not weights:
        return
    names = [MAIN_SET, *data.train_sets]
    if sorted(weights) != sorted(names):
        yield Problem(
            ("data.train_weights",),
            f"data.train_weights has {_listed(weights)}, the training sets are {_listed(names)};"
            " give each of them a weight, or none",
        )
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight > 0):
            yield Problem(
                ("data.train_weights",),
                f"data.train_weights.{name} is {weight}; it must be a finite number above 0",
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def adapter_problems(policy: PolicyConfig, needs: RunNeeds) -> Iterator[Problem]:
    """Yield the problems of `policy.lora` that do not depend on the model."""
    lora = policy.lora
    if lora.enabled and not lora.target_modules:
        yield Problem(
            ("policy.lora.target_modules",),
            "policy.lora.target_modules is empty, so nothing would be trained: name linear layers,"
            " e.g. [q_proj, v_proj], or set policy.lora.enabled to false",
        )
    if lora.quantization != "none" and not lora.enabled:
        yield Problem(
            ("policy.lora.quantization", "policy.lora.enabled"),
            f"policy.lora.quantization is {lora.quantization}, but policy.lora.enabled is false,"
            " and quantized weights cannot be trained themselves: set policy.lora.enabled to true,"
            " or policy.lora.quantization to none",
        )
    engine = policy.engine
    if lora.is_quantized and not ENGINES[engine].has_4bit_weights:
        yield Problem(
            ("policy.lora.quantization", "policy.engine"),
            f"policy.lora.quantization is {lora.quantization}, but policy.engine is {engine}, and"
            " the linear layers of Megatron-Core have no 4-bit weights: set policy.engine to"
            " dtensor, or policy.lora.quantization to none",
        )
    if lora.adapter_path is not None and not lora.enabled:
        yield Problem(
            ("policy.lora.adapter_path", "policy.lora.enabled"),
            f"policy.lora.adapter_path is {lora.adapter_path!r}, but policy.lora.enabled is false,"
            " so the adapter would not be used: set policy.lora.enabled to true, or"
            " policy.lora.adapter_path to null",
        )
    if lora.reference == "adapter" and (lora.adapter_path is None or not needs.reference):
        reason = "this run has no reference policy: set policy.lora.reference to base"
        if needs.reference:
            reason = (
                "there is no initial adapter: set policy.lora.adapter_path to the directory of one,"
                " or policy.lora.reference to base"
            )
        yield Problem(
            ("policy.lora.reference", "policy.lora.adapter_path"),
            f"policy.lora.reference is adapter, but {reason}",
        )
    yield from _weight_sync(policy)


def _weight_sync(policy: PolicyConfig) -> Iterator[Problem]:
    lora = policy.lora
    sends_adapters = policy.sends_adapters
    if lora.weight_sync == "adapter" and not lora.enabled:
        yield Problem(
            ("policy.lora.weight_sync", "policy.lora.enabled"),
            "policy.lora.weight_sync is adapter, but policy.lora.enabled is false, so there are no"
            " adapters to send: set policy.lora.enabled to true, or policy.lora.weight_sync to"
            " auto",
        )
    if sends_adapters and lora.is_quantized:
        yield Problem(
            ("policy.lora.weight_sync", "policy.lora.quantization"),
            "policy.lora.weight_sync is adapter, but policy.lora.quantization is"
            f" {lora.quantization}: the generator has the weights of the model files, and the"
            " policy the weights in 4 bits. Set policy.lora.weight_sync to merged, or"
            " policy.lora.quantization to none",
        )
    max_rank = policy.generation.engine.max_adapter_rank
    if sends_adapters and max_rank is not None and lora.rank > max_rank:
        yield Problem(
            ("policy.lora.rank", "policy.lora.weight_sync"),
            f"policy.lora.rank is {lora.rank}, but policy.lora.weight_sync is adapter, and vLLM has"
            f" adapters up to rank {max_rank}: lower policy.lora.rank, or set"
            " policy.lora.weight_sync to merged",
        )


def compilation_problems(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield a problem if the engine does not compile layers."""
    engine = policy.engine
    if policy.compile == "layers" and not ENGINES[engine].compiles_layers:
        yield Problem(
            ("policy.compile", "policy.engine"),
            f"policy.compile is {policy.compile}, but policy.engine {engine} has its own"
            " fused functions: set policy.compile to none, or policy.engine to dtensor",
        )


def memory_problems(policy: PolicyConfig, *, is_fixed: bool) -> Iterator[Problem]:
    """Yield a problem unless microbatches may shrink: `is_fixed` is a fixed number of rows."""
    if policy.oom == "shrink" and not is_fixed:
        yield Problem(
            ("policy.oom", "data.batching.kind"),
            "policy.oom is shrink, but with this data.batching.kind the tokens of a microbatch"
            " determine the rows of an optimizer step: set policy.oom=stop or"
            " data.batching.kind=fixed",
        )


def optimization_problems(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield the problems of `policy.optimizer`, `policy.scheduler` and `policy.freeze`."""
    scheduler = policy.scheduler
    yield from _lengths(scheduler)
    yield from _optimizer(policy)
    if policy.freeze and policy.lora.enabled:
        yield Problem(
            ("policy.freeze", "policy.lora.enabled"),
            "policy.freeze is set, but policy.lora.enabled is true, which freezes all weights of"
            " the model: remove policy.freeze; policy.lora.target_modules selects what is trained",
        )
    has_base = scheduler.base_batch_size is not None
    if has_base != (scheduler.batch_size_scaling != "none"):
        yield Problem(
            ("policy.scheduler.batch_size_scaling", "policy.scheduler.base_batch_size"),
            f"policy.scheduler.batch_size_scaling is {scheduler.batch_size_scaling} and"
            f" policy.scheduler.base_batch_size is {scheduler.base_batch_size or 'null'}: scaling"
            " needs the batch size for which policy.optimizer.lr was chosen; set both or none",
        )


def _optimizer(policy: PolicyConfig) -> Iterator[Problem]:
    optimizer = policy.optimizer
    if optimizer.name != "adamw" and ENGINES[policy.engine].has_adamw_only:
        yield Problem(
            ("policy.optimizer.name", "policy.engine"),
            f"policy.optimizer.name is {optimizer.name}, but policy.engine {policy.engine} divides"
            " the state of a float32 AdamW into flat parts: set policy.engine to dtensor, or"
            " policy.optimizer.name to adamw",
        )
    if optimizer.name == "muon" and policy.lora.enabled:
        yield Problem(
            ("policy.optimizer.name", "policy.lora.enabled"),
            "policy.optimizer.name is muon, but policy.lora.enabled is true: Muon updates the"
            " matrices of the model, which are frozen. Set policy.optimizer.name to adamw",
        )


def _lengths(scheduler: SchedulerConfig) -> Iterator[Problem]:
    end = scheduler.decay_steps
    warmup = scheduler.warmup_steps
    if end is None:
        return
    if end <= warmup:
        yield Problem(
            ("policy.scheduler.decay_steps", "policy.scheduler.warmup_steps"),
            f"policy.scheduler.decay_steps is {end}, which includes the"
            f" {warmup} warm-up steps; it must be above {warmup},"
            " or null for the length of the run",
        )
        return
    if scheduler.kind == "wsd" and (scheduler.wsd_decay_steps or 0) > end - warmup:
        yield Problem(
            ("policy.scheduler.wsd_decay_steps", "policy.scheduler.decay_steps"),
            f"policy.scheduler.wsd_decay_steps is {scheduler.wsd_decay_steps}, but only"
            f" {end - warmup} steps are between policy.scheduler.warmup_steps {warmup} and"
            f" policy.scheduler.decay_steps {end}: set it to {end - warmup} or less",
        )


MAX_SHARED_MODELS = 2
"""Reward models on the resources of the policy's workers, each of which four groups can share:
policy, generator and two more (`distributed.ray.virtual_cluster.COLOCATED_GROUPS`)."""


def reward_model_problems(reward: RewardConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    """Yield names that are used twice, and workers that the cluster cannot have."""
    models = reward.models
    for name in models:
        if name in reward.functions:
            yield Problem(
                (f"reward.models.{name}", f"reward.functions.{name}"),
                f"reward.models and reward.functions both have the name {name}, which is a part of"
                " metric names: rename one of them",
            )
    if cluster.backend == "local":
        for name, model in models.items():
            if model.num_workers > 0:
                yield Problem(
                    (f"reward.models.{name}.num_workers", "cluster.backend"),
                    f"reward.models.{name}.num_workers is {model.num_workers}, but cluster.backend"
                    " local runs every model in this process: set it to 0, or use ray",
                )
        return
    shared = [name for name, model in models.items() if model.num_workers == 0]
    if len(shared) > MAX_SHARED_MODELS:
        key = f"reward.models.{shared[-1]}.num_workers"
        yield Problem(
            (key,),
            f"{len(shared)} reward models ({', '.join(shared)}) have num_workers 0 and share the"
            f" resources of the policy's workers, where {MAX_SHARED_MODELS} have room: set {key},"
            " for example, to the number of workers that it gets for itself",
        )
