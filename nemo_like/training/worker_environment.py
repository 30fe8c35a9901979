"""Environment variables of a run's workers: `cluster.env`, and those passed on from the driver."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from nemo_like.config.errors import ConfigError
from nemo_like.config.parallel import is_colocated
from nemo_like.config.schema import RunConfig
from nemo_like.distributed.processes import set_variables

WorkerKind = Literal["policy", "generation", "reward", "environment", "reward_model"]

_PREFIXES = ("NCCL_", "GLOO_", "HF_")
"""Variables of the driver that every worker needs as well: networks, caches and access tokens."""
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Two names of the settings of torch's CUDA memory allocator."""
_EXPANDABLE_SEGMENTS = "expandable_segments:True"


def worker_environment(
    config: RunConfig, kind: WorkerKind, driver: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the variables that are set in workers of `kind`; `driver` is the driver's environment.

    None removes a variable that a worker inherits: a Ray that the run starts inherits the
    driver's environment, and torch reads only one of two names of the allocator's settings.

    Variables of `cluster.env` replace those of the driver, and these replace what a worker inherits
    from its node. Raises ConfigError for a variable that is null in `cluster.env` and not set in
    the driver's environment.
    """
    environment: dict[str, str | None] = {
        name: value for name, value in driver.items() if name.startswith(_PREFIXES)
    }
    own = _own_variables(config, driver)
    environment |= own
    # Not one name of each: torch reads only one of them where both are set.
    allocator = {name: own[name] for name in _ALLOCATOR if name in own}
    allocator = allocator or {name: driver[name] for name in _ALLOCATOR if name in driver}
    if kind != "policy":
        # The generator's memory pool for sleeping and the IPC handles of its all-reduce do not
        # support expandable segments.
        return environment | dict.fromkeys(_ALLOCATOR)
    if not allocator and _benefits_from_expandable_segments(config):
        allocator[_ALLOCATOR[0]] = _EXPANDABLE_SEGMENTS
    if allocator:
        environment |= dict.fromkeys(_ALLOCATOR)
    return environment | allocator


@contextmanager
def environment_variables(environment: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of this process inside the block, and restore the previous ones after it.

    None removes a variable.
    """
    before = {name: os.environ.get(name) for name in environment}
    set_variables(environment)
    try:
        yield
    finally:
        set_variables(before)


def _own_variables(config: RunConfig, driver: Mapping[str, str]) -> dict[str, str]:
    """Return `cluster.env` with the driver's values in place of nulls."""
    variables = {}
    for name, value in config.cluster.env.items():
        if value is not None:
            variables[name] = value
        elif name in driver:
            variables[name] = driver[name]
        else:
            raise ConfigError(
                f"cluster.env.{name} is null, which takes the value of the driver's"
                f" environment, where {name} is not set; export it, or write its value"
            )
    return variables


def _benefits_from_expandable_segments(config: RunConfig) -> bool:
    """Return True if the policy runs on GPUs and exports no memory to another process.

    Microbatches differ in length, so a fixed segment size leaves memory unused. A colocated
    generator reads new weights through CUDA IPC, which for expandable segments needs the system
    call pidfd_getfd; most containers do not permit it.
    """
    return config.cluster.gpus_per_node > 0 and not is_colocated(config)
