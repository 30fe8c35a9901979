"""Checks of `reward.models` against the other sections of a config."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.errors import Problem
from nemo_like.config.schema import RunConfig

MAX_SHARED_MODELS = 2
"""Reward models on the resources of the policy's workers, each of which four groups can share:
policy, generator and two more (`distributed.ray.virtual_cluster.COLOCATED_GROUPS`)."""


def reward_model_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield names that are used twice, and workers that the cluster cannot have."""
    models = config.reward.models
    for name in models:
        if name in config.reward.functions:
            yield Problem(
                (f"reward.models.{name}", f"reward.functions.{name}"),
                f"reward.models and reward.functions both have the name {name}, which is a part of"
                " metric names: rename one of them",
            )
    if config.cluster.backend == "local":
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
