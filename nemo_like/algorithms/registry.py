"""Every algorithm by the name of its command, and the configs of all of them.

A new algorithm is a package beside `sft` and one entry of `ALGORITHMS`; see docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, overload

from nemo_like.algorithms.distillation.config import DistillRunConfig
from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.preferences.config import DpoRunConfig, RewardModelRunConfig
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.config.keys import JobSchema
from nemo_like.config.schema import RunConfig

if TYPE_CHECKING:
    from nemo_like.data.formats import RowSchema
    from nemo_like.prediction.lengths import RowLengths
    from nemo_like.run.progress import Progress
    from nemo_like.training.row_checks import RowChecks
    from nemo_like.training.run import RunResult
    from nemo_like.training.run_data import RunData

ConfigT = TypeVar("ConfigT", bound=RunConfig)


class AlgorithmData(Protocol):
    """The rows of an algorithm; implemented by its module `data`, which does not import torch.

    `config` is the algorithm's own run config.
    """

    def row_schemas(self, config: Any) -> tuple[RowSchema, RowSchema]:
        """Return the row formats of the training and of the validation files."""
        ...


class AlgorithmChecks(Protocol):
    """What commands find out about rows; implemented by the module `checks` of an algorithm.

    `config` is the algorithm's own run config. The module does not import torch.
    """

    def check_rows(self, config: Any, data: RunData, checks: RowChecks) -> None:
        """Check the rows and plan the first step, for `nemo-like validate`."""
        ...

    def first_lengths(
        self, config: Any, data: RunData, num_steps: int, progress: Progress
    ) -> RowLengths:
        """Return the row lengths of the first `num_steps` steps, at least of one.

        For `nemo-like plan`. The rows are in the order of the run.
        """
        ...


@dataclass(frozen=True)
class Algorithm:
    """One job of the command line, e.g. `nemo-like sft`.

    Every command imports the registry, so only the config is there at once; the rest is imported
    by the command that needs it.
    """

    summary: str
    """One line for `nemo-like --help`."""
    run_config: type[RunConfig]
    """The keys and the checks of their relations."""

    def import_data(self) -> AlgorithmData:
        """Import the module `data` of the package that has the config."""
        return cast("AlgorithmData", import_module(f"{self._package}.data"))

    def import_checks(self) -> AlgorithmChecks:
        """Import the module `checks` of the package that has the config."""
        return cast("AlgorithmChecks", import_module(f"{self._package}.checks"))

    def import_run(self) -> Callable[[Any], RunResult]:
        """Import `run_<kind>` of the module `loop`, which trains as configured.

        It raises ConfigError for wrong input.
        """
        return getattr(import_module(f"{self._package}.loop"), f"run_{self.run_config.kind}")

    @property
    def _package(self) -> str:
        return self.run_config.__module__.rpartition(".")[0]


ALGORITHMS: dict[str, Algorithm] = {
    "sft": Algorithm("supervised fine-tuning", SftRunConfig),
    "grpo": Algorithm("reinforcement learning with group-relative advantages", GrpoRunConfig),
    "dpo": Algorithm("direct preference optimization", DpoRunConfig),
    "distill": Algorithm(
        "distillation of teachers, on rows of data or on completions of the student",
        DistillRunConfig,
    ),
    "rm": Algorithm("training of a reward model on preferences", RewardModelRunConfig),
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
    # pydantic and OmegaConf are imported here, because `--help` needs the registry and no config.
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
