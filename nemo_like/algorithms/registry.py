"""Every algorithm by the name of its command, and the configs of all of them.

A new algorithm is a package beside `sft` and one entry of `ALGORITHMS`; see docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from nemo_like.algorithms.algorithm import Algorithm, AlgorithmData
from nemo_like.algorithms.distillation.config import DistillRunConfig
from nemo_like.algorithms.dpo.config import DpoRunConfig
from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.reward_model.config import RewardModelRunConfig
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.config.keys import JobSchema
from nemo_like.config.schema import RunConfig

if TYPE_CHECKING:
    from nemo_like.training.run import RunResult

ConfigT = TypeVar("ConfigT", bound=RunConfig)


def _sft_data() -> AlgorithmData:
    from nemo_like.algorithms.sft import data

    return data


def _sft_run() -> Callable[[Any], RunResult]:
    from nemo_like.algorithms.sft.loop import run_sft

    return run_sft


def _grpo_data() -> AlgorithmData:
    from nemo_like.algorithms.grpo import data

    return data


def _grpo_run() -> Callable[[Any], RunResult]:
    from nemo_like.algorithms.grpo.loop import run_grpo

    return run_grpo


def _dpo_data() -> AlgorithmData:
    from nemo_like.algorithms.dpo import data

    return data


def _dpo_run() -> Callable[[Any], RunResult]:
    from nemo_like.algorithms.dpo.loop import run_dpo

    return run_dpo


def _distill_data() -> AlgorithmData:
    from nemo_like.algorithms.distillation import data

    return data


def _distill_run() -> Callable[[Any], RunResult]:
    from nemo_like.algorithms.distillation.loop import run_distill

    return run_distill


def _reward_model_data() -> AlgorithmData:
    from nemo_like.algorithms.reward_model import data

    return data


def _reward_model_run() -> Callable[[Any], RunResult]:
    from nemo_like.algorithms.reward_model.loop import run_reward_model

    return run_reward_model


ALGORITHMS: dict[str, Algorithm] = {
    "sft": Algorithm("supervised fine-tuning", SftRunConfig, _sft_data, _sft_run),
    "grpo": Algorithm(
        "reinforcement learning with group-relative advantages",
        GrpoRunConfig,
        _grpo_data,
        _grpo_run,
    ),
    "dpo": Algorithm("direct preference optimization", DpoRunConfig, _dpo_data, _dpo_run),
    "distill": Algorithm(
        "distillation of teachers, on rows of data or on completions of the student",
        DistillRunConfig,
        _distill_data,
        _distill_run,
    ),
    "rm": Algorithm(
        "training of a reward model on preferences",
        RewardModelRunConfig,
        _reward_model_data,
        _reward_model_run,
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
def load_config(
    kind: type[ConfigT],
    path: Path,
    overrides: Sequence[str] = (),
) -> ConfigT: ...
@overload
def load_config(
    kind: str,
    path: Path,
    overrides: Sequence[str] = (),
) -> RunConfig: ...


def load_config(
    kind: str | type[RunConfig],
    path: Path,
    overrides: Sequence[str] = (),
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
    path: Path,
    overrides: Sequence[str] = (),
    kind: str | None = None,
) -> RunConfig:
    """Load a config of the job `kind`, which is detected by default. Raises ConfigError."""
    return load_config(kind or detect_kind(path, overrides), path, overrides)
