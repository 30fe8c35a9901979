"""The interface of an algorithm to the commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from nemo_like.config.schema import RunConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nemo_like.data.chat import ChatEncoder
    from nemo_like.data.collate import EncodedRow
    from nemo_like.data.datasets import Row, Rows, RowSchema
    from nemo_like.diagnostics.report import Diagnostics
    from nemo_like.prediction.lengths import RowLengths
    from nemo_like.run.progress import Progress
    from nemo_like.training.dataset import RunData
    from nemo_like.training.run import RunResult


class AlgorithmData(Protocol):
    """The rows of an algorithm; implemented by its module `data`, which does not import torch.

    `config` is the algorithm's own run config.
    """

    ROW_SCHEMA: RowSchema
    """Row formats of the training and validation files."""

    def encode_row(self, encoder: ChatEncoder, config: RunConfig, row: Row) -> EncodedRow | None:
        """Encode one row of the training file; see `training.encoding.EncodeRow`.

        Encoding processes call it with a config that has only the keys of
        `training.encoding.encoding_setup`.
        """
        ...

    def rewarded_rows(self, train: Rows | None, validation: Rows | None) -> Rows | None:
        """Return the rows whose completions the reward functions score; None if there are none."""
        ...

    def check_rows(
        self, config: Any, data: RunData, model: PretrainedConfig | None, diagnostics: Diagnostics
    ) -> None:
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
    package: str
    """Its package, with the modules `data` and `loop` (see below)."""

    def import_data(self) -> AlgorithmData:
        """Import the module `data`."""
        return cast("AlgorithmData", import_module(f"{self.package}.data"))

    def import_run(self) -> Callable[[Any], RunResult]:
        """Import `run_<package>` of the module `loop`, which trains as configured.

        It raises ConfigError for wrong input.
        """
        name = self.package.rpartition(".")[2]
        return getattr(import_module(f"{self.package}.loop"), f"run_{name}")
