"""Every algorithm by the name of its command, and the configs of all of them.

A new algorithm is a package beside `sft` and one entry of `ALGORITHMS`; see docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, overload

from nemo_like.algorithms.algorithm import Algorithm
from nemo_like.algorithms.distillation.config import DistillRunConfig
from nemo_like.algorithms.dpo.config import DpoRunConfig
from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.reward_model.config import RewardModelRunConfig
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.config.keys import JobSchema
from nemo_like.config.schema import RunConfig

ConfigT = TypeVar("ConfigT", bound=RunConfig)


_PACKAGE = "nemo_like.algorithms"
ALGORITHMS: dict[str, Algorithm] = {
    "sft": Algorithm("supervised fine-tuning", SftRunConfig, f"{_PACKAGE}.sft"),
    "grpo": Algorithm(
        "reinforcement learning with group-relative advantages", GrpoRunConfig, f"{_PACKAGE}.grpo"
    ),
    "dpo": Algorithm("direct preference optimization", DpoRunConfig, f"{_PACKAGE}.dpo"),
    "distill": Algorithm(
        "distillation of teachers, on rows of data or on completions of the student",
        DistillRunConfig,
        f"{_PACKAGE}.distillation",
    ),
    "rm": Algorithm(
        "training of a reward model on preferences",
        RewardModelRunConfig,
        f"{_PACKAGE}.reward_model",
    ),
}
"""Algorithms by the name of their command, which is the `kind` of their config."""

RUN_CONFIGS: dict[str, type[RunConfig]] = {
    kind: algorithm.run_config for kind, algorithm in ALGORITHMS.items()
}


def job_schema(kind: str) -> JobSchema:
    """Return the keys of a job."""
    return JobSchema(kind, RUN_CONFIGS)


@overload
def load_config(kind: type[ConfigT], path: Path, overrides: Sequence[str] = ()) -> ConfigT: ...
@overload
def load_config(kind: str, path: Path, overrides: Sequence[str] = ()) -> RunConfig: ...


def load_config(
    kind: str | type[RunConfig], path: Path, overrides: Sequence[str] = ()
) -> RunConfig:
    """Load and check the config of a job; see `config.load.load_config`.

    `kind` is the name of the job or the class of its config. Raises ConfigError.
    """
    # Hydra is imported here, because `--help` needs the registry and no config.
    from nemo_like.config import load

    # A class gives the caller the precise type, a name is what the command line has.
    name = kind if isinstance(kind, str) else kind.kind
    return load.load_config(job_schema(name), path, overrides)


def detect_kind(path: Path, overrides: Sequence[str] = ()) -> str:
    """Return the job that a config is for; see `config.load.detect_kind`. Raises ConfigError."""
    from nemo_like.config import load

    return load.detect_kind(RUN_CONFIGS, path, overrides)


def load_any_config(
    path: Path, overrides: Sequence[str] = (), kind: str | None = None
) -> RunConfig:
    """Load a config of the job `kind`, which is detected by default. Raises ConfigError."""
    return load_config(kind or detect_kind(path, overrides), path, overrides)
