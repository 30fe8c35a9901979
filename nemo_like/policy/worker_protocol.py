"""The methods of a policy worker that a driver calls, and what they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import SlicedDataDict
from nemo_like.losses import Loss
from nemo_like.metrics import Metrics
from nemo_like.policy.isolation import IsolationReport
from nemo_like.policy.logprob_store import LogprobHandle, LogprobName
from nemo_like.policy.nonfinite import SkippedStep
from nemo_like.policy.targets import TargetSettings
from nemo_like.run.files import FileRecord
from nemo_like.weight_sync.channel import WeightSource

Columns = Mapping[str, np.ndarray | Jagged]


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """Speed and memory of a worker's device."""

    peak_flops: float
    """Peak FLOP/s, the denominator of MFU."""
    peak_flops_source: str
    memory_bytes: int | None = None
    """Memory of a GPU; None on the CPU."""


class PolicyWorkerProtocol(WeightSource, Protocol):
    """One rank of the policy. Every method is called on all ranks."""

    def device_info(self) -> DeviceInfo:
        """Return the speed and memory of this worker's device."""
        ...

    def compute_logprobs(
        self,
        shard: SlicedDataDict,
        names: Sequence[LogprobName] | None = None,
        *,
        as_sampled: bool = True,
    ) -> LogprobHandle:
        """Compute the log-probs `names` and keep them on this rank; returns their handle.

        None means `prev_logprobs`, and with a reference also `reference_logprobs`. They are at the
        sampling temperature and 0 for tokens that are not trained; `prev_logprobs` are under the
        distribution that is sampled from, `reference_logprobs` under the reference's unfiltered
        distribution. Without `as_sampled` all are those of the models' own distributions, at
        temperature 1 and unfiltered. The log-probs of the previous call are released. Raises
        ValueError for `reference_logprobs` without a reference.
        """
        ...

    def compute_targets(self, shard: SlicedDataDict, settings: TargetSettings) -> LogprobHandle:
        """Run the teachers on the microbatches of the plan and keep their results on this rank.

        The shard of a worker with several teachers has the row column `teacher`, the index of the
        teacher of each row. `train` and `evaluate` with the handle compute the divergence from the
        teachers, for `losses.distillation`. The results are released by the next pass and when the
        model is offloaded. Raises ValueError without teachers.
        """
        ...

    def fetch_logprobs(self, shard: SlicedDataDict, logprobs: LogprobHandle) -> dict[str, Jagged]:
        """Return kept log-probs, float32 [T] over the tokens of the shard in its row order.

        Empty on all pipeline stages but the last. Raises ValueError if `logprobs` is not the handle
        of the latest call of `compute_logprobs`.
        """
        ...

    def compute_scores(self, shard: SlicedDataDict) -> np.ndarray | None:
        """Compute the score of each row of the shard, float32 [B], without gradients.

        The budget is that of log-probs. None on all pipeline stages but the last. Raises ValueError
        for a model without a score head.
        """
        ...

    def train(
        self,
        shard: SlicedDataDict,
        columns: Columns | None,
        loss: Loss,
        logprobs: LogprobHandle | None = None,
        *,
        keep_logprobs: bool = False,
    ) -> list[Metrics]:
        """Take one optimizer step for each step of the plan.

        With `keep_logprobs` the log-probs that the training pass computes stay in host memory for
        `fetch_trained_logprobs`.

        `columns` and the kept log-probs of the handle `logprobs` extend the columns of the shard.
        A step whose loss or gradients are not finite is skipped (`Engine.optimizer_step`);
        `skipped_steps` describes it. Returns the metrics of each step over all dp ranks, equal on
        all of them. Raises ValueError for a handle that `fetch_logprobs` refuses, and
        NonFiniteError when a step leaves weights that are not finite.
        """
        ...

    def fetch_trained_logprobs(self) -> Jagged | None:
        """Return the log-probs of the last `train`, float32 [T] in the row order of its shard.

        0 for tokens that are not trained. None without `keep_logprobs`, and on all pipeline stages
        but the last.
        """
        ...

    def measure_gradient(
        self,
        shard: SlicedDataDict,
        columns: Columns | None,
        loss: Loss,
        logprobs: LogprobHandle | None = None,
    ) -> Metrics:
        """Return the metrics of the first optimizer step of the plan without taking it.

        They are those of the loss, the gradient's norm before clipping, and the counts. Weights
        and optimizer state do not change. The arguments are those of `train`.
        """
        ...

    def skipped_steps(self) -> list[SkippedStep]:
        """Return the skipped steps of the last `train`, with the rows of this dp rank.

        Only the last pipeline stage knows the rows.
        """
        ...

    def evaluate(
        self, shard: SlicedDataDict, loss: Loss, logprobs: LogprobHandle | None = None
    ) -> Metrics:
        """Return the loss's metrics over all rows of all dp ranks, without gradients.

        The weights are the averages with `policy.ema.use_for_validation`. `logprobs` is as in
        `train`.
        """
        ...

    def probe_isolation(self) -> IsolationReport:
        """Check that rows of a microbatch do not see each other; raises IsolationError."""
        ...

    def save(self, directory: str | Path) -> dict[str, FileRecord]:
        """Write this rank's shard of weights and optimizer; returns its files' records.

        Raises NonFiniteError, before anything is written, if a weight or a moment is not finite.
        """
        ...

    def start_save(self, directory: str | Path) -> None:
        """Copy this rank's shard to host memory and write it in a thread; see `save`.

        Training may continue at once. Call `finish_save` before the next save.
        """
        ...

    def is_save_written(self) -> bool:
        """Return True if `finish_save` would not wait for this rank's files."""
        ...

    def finish_save(self) -> dict[str, FileRecord]:
        """Wait until the checkpoint of `start_save` is complete; returns the files' records.

        Raises WriteError if a file could not be written.
        """
        ...

    def load(self, directory: str | Path) -> None:
        """Read what `save` wrote with any number of ranks.

        The reference changes only if it had been updated before the save. Raises NonFiniteError if
        a weight or a moment is not finite.
        """
        ...

    def update_reference(self) -> None:
        """Copy the policy's weights into the reference. Raises ValueError without a reference."""
        ...

    def export_hf(self, directory: str | Path, *, ema: bool = False) -> None:
        """Write a transformers model directory on rank 0, with `ema` of the averaged weights.

        Raises NonFiniteError if a weight is not finite, RuntimeError without averages.
        """
        ...

    def answer_directory_probe(self, folder: str, token: str) -> str:
        """See `run.directory.answer`."""
        ...

    def offload(self) -> None:
        """Move weights and optimizer state to host memory."""
        ...

    def onload(self) -> None:
        """Move weights and optimizer state back to the device."""
        ...
