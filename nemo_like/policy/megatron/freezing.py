"""Freezing of Megatron-Core parameters, which may consist of several Hugging Face weights."""

from __future__ import annotations

from collections.abc import Collection

from nemo_like.config.errors import ConfigError
from nemo_like.policy.megatron.families.family import Family
from nemo_like.policy.megatron.param_map import ModelSharding, ParamMap


def frozen_parameters(
    frozen: Collection[str],
    family: Family,
    sharding: ModelSharding,
    stage: int,
    param_map: ParamMap,
) -> frozenset[str]:
    """Return the parameters of a rank, by Megatron-Core name, that consist of `frozen` weights.

    `frozen` are Hugging Face names, and `param_map` is the map of the rank. Raises ConfigError if a
    part of a fused parameter is frozen, and if a pipeline stage has no other parameters.
    """
    # The same for all ranks, so that all of them raise.
    for each in range(sharding.pp):
        names = _frozen_of_stage(frozen, family, sharding, each)
        if len(names) == len(_unsharded(family, sharding, each)):
            raise ConfigError(
                f"policy.freeze freezes all weights of pipeline stage {each} of {sharding.pp},"
                " which then has nothing to update: use fewer stages (parallel.pipeline), or"
                " policy.engine=dtensor"
            )
    of_stage = _frozen_of_stage(frozen, family, sharding, stage)
    result = set()
    for name, spec in param_map.items():
        # Experts have local numbers, and all experts of a layer are one Hugging Face weight. Others
        # are not compared by their slices, because a rank may have only padding of the vocabulary.
        is_frozen = name in of_stage
        if spec.is_expert:
            is_frozen = spec.slices[0].name in frozen
        if is_frozen:
            result.add(name)
    return frozenset(result)


def _frozen_of_stage(
    frozen: Collection[str], family: Family, sharding: ModelSharding, stage: int
) -> set[str]:
    """Return the unsharded parameters of a stage that consist of `frozen` weights."""
    result = set()
    for name, spec in _unsharded(family, sharding, stage).items():
        weights = {part.name for part in spec.slices}
        chosen = sorted(weights.intersection(frozen))
        if not chosen:
            continue
        others = sorted(weights.difference(frozen))
        if others:
            raise ConfigError(
                f"policy.freeze matches {', '.join(chosen)}, which policy.engine megatron stores in"
                f" one parameter with {', '.join(others)}: match all of them or none, or use"
                " policy.engine=dtensor"
            )
        result.add(name)
    _check_biases(result, _unsharded(family, sharding, stage))
    return result


def _check_biases(frozen: Collection[str], param_map: ParamMap) -> None:
    """Raise ConfigError for a trained bias of a layer with a frozen weight."""
    for name in frozen:
        module, _, kind = name.rpartition(".")
        bias = f"{module}.bias"
        if kind == "weight" and bias in param_map and bias not in frozen:
            # Megatron-Core computes no gradient for it.
            weights = sorted({part.name for part in param_map[name].slices})
            biases = sorted({part.name for part in param_map[bias].slices})
            raise ConfigError(
                f"policy.freeze matches {', '.join(weights)} and not {', '.join(biases)}, which"
                " policy.engine megatron cannot train alone: match the biases too, or use"
                " policy.engine=dtensor"
            )


def _unsharded(family: Family, sharding: ModelSharding, stage: int) -> ParamMap:
    """Return the parameters of a stage without tensor and expert parallelism."""
    return family.param_map(ModelSharding(sharding.spec, pp=sharding.pp), stage, 0, 0)
