"""Driver side of the policy: plans batches, sends each dp rank its rows once, calls the workers.

Everything here is small and on the CPU; nothing imports a model.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nemo_like.config.loss import LogprobName
from nemo_like.config.schema import PolicyConfig
from nemo_like.data.columns import take_rows
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.oversize import OversizeWarning
from nemo_like.data.planning.plan import BatchPlan, PlanSpec, plan_batch
from nemo_like.data.planning.prefixes import SharedPrefixMode
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.distributed.batched_data_dict import BatchedDataDict, unshard
from nemo_like.distributed.worker_group import (
    Handle,
    WorkerGroup,
    call_all,
    call_sharded,
    call_sharded_once,
    onloaded,
)
from nemo_like.losses import Loss
from nemo_like.metrics import Metrics
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.batching import (
    Purpose,
    microbatch_budget,
    plan_spec,
    shared_prefix_mode,
    with_image_work,
)
from nemo_like.policy.device import DeviceInfo
from nemo_like.policy.heads.targets import TargetSettings
from nemo_like.policy.isolation import IsolationReport
from nemo_like.policy.loss_step import SkippedStep
from nemo_like.policy.shard_rows import LogprobHandle
from nemo_like.policy.worker import PolicyWorker
from nemo_like.run.directory import check_shared
from nemo_like.run.files import FileRecord


@dataclass(frozen=True)
class ShardedBatch:
    """A batch whose rows are stored once per dp rank, for any number of calls."""

    plan: BatchPlan
    shards: tuple[Handle, ...]
    """One per dp rank."""
    names: frozenset[str]
    """Columns of the shards."""


@dataclass(frozen=True)
class Logprobs:
    """Log-probs of a sharded batch, which stay on the ranks that computed them.

    Valid until the next `Policy.compute_logprobs`: the workers keep the log-probs of one pass.
    """

    sharded: ShardedBatch
    handle: LogprobHandle

    @property
    def names(self) -> tuple[LogprobName, ...]:
        """Columns that they add to the batch."""
        return self.handle.names


class Policy:
    """The model that is trained, on the workers of `group`."""

    def __init__(
        self, group: WorkerGroup, config: PolicyConfig, model: ModelSpec, *, seed: int = 0
    ) -> None:
        """`model` is the spec of `policy.model_name`, which the workers load."""
        self.group = group
        self.config = config
        self.model = model
        self._seed = seed
        self._has_warned = False

    @cached_property
    def device_info(self) -> DeviceInfo:
        """Speed of one worker's device."""
        return call_all(self.group, PolicyWorker.device_info)[0]

    def plan(
        self,
        counts: TokenCounts | Sequence[int] | np.ndarray,
        purpose: Purpose = "train",
        groups: np.ndarray | None = None,
        *,
        episodes: np.ndarray | None = None,
        warn: bool = True,
    ) -> BatchPlan:
        """Assign rows to microbatches and microbatches to dp ranks, see `plan_batch`.

        Everything else that a plan depends on is known to the driver; no worker is called.
        With purpose `evaluate` the batch is one step under the log-prob budget. Raises ValueError
        for a row above the token limit where `policy.oversize_rows` is `error`. The first plan with
        such rows under another policy is an OversizeWarning if `warn`; later ones count them.
        """
        spec = self._spec(purpose)
        plan = plan_batch(
            counts, spec, groups, episodes=episodes, shared_prefix=self._shared_prefix, warn=False
        )
        if warn and plan.oversize_warning and not self._has_warned:
            self._has_warned = True
            more = "further such rows are counted (packing/num_oversize) without a warning"
            warnings.warn(f"{plan.oversize_warning}; {more}", OversizeWarning, stacklevel=2)
        return plan

    def plan_rows(
        self, batch: Mapping[str, Any], purpose: Purpose = "train", *, warn: bool = True
    ) -> BatchPlan:
        """Plan the rows of a batch by its columns as `plan` does.

        See `TokenCounts.of_batch`. Rows with equal id in `pair` int [B] share a microbatch. Rows
        with equal id in `episode` int [B] are in one optimizer step, on any rank, and
        `policy.train_global_batch_size` counts episodes.
        """
        may_share = self._shared_prefix is not False and self._spec(purpose).layout == "packed"
        counts = self.count_tokens(batch, with_prefixes=may_share)
        return self.plan(
            counts, purpose, batch.get("pair"), episodes=batch.get("episode"), warn=warn
        )

    def count_tokens(self, batch: Mapping[str, Any], *, with_prefixes: bool) -> TokenCounts:
        """Count the tokens of a batch; see `TokenCounts.of_batch`. The work of images is known."""
        counts = TokenCounts.of_batch(batch, with_prefixes=with_prefixes)
        return with_image_work(counts, batch.get("images", ()), self.config, self.model.vision)

    @property
    def _shared_prefix(self) -> SharedPrefixMode:
        return shared_prefix_mode(self.config, self.model)

    def _spec(self, purpose: Purpose) -> PlanSpec:
        return plan_spec(
            self.config,
            purpose=purpose,
            parallel_layout=self.group.parallel_layout,
            model=self.model,
            seed=self._seed,
        )

    def shard(self, batch: BatchedDataDict, plan: BatchPlan) -> ShardedBatch:
        """Store each dp rank's rows of `batch`, unpadded.

        The result serves any number of calls of compute_logprobs, train and evaluate.
        """
        shards = batch.shard(plan, self._logprob_plan(plan))
        return ShardedBatch(plan, self.group.put_shards(shards), frozenset(batch))

    def compute_logprobs(
        self,
        sharded: ShardedBatch,
        names: Sequence[LogprobName] | None = None,
        *,
        as_sampled: bool = True,
    ) -> Logprobs:
        """Compute log-probs, which stay on the workers; see `PolicyWorker`.

        `names` None means `prev_logprobs`, and with a reference also `reference_logprobs`. Those of
        the previous call are released, so one call must name all that `train` needs. Without
        `as_sampled` they are at temperature 1 and unfiltered.
        """
        handle = call_sharded_once(
            self.group,
            PolicyWorker.compute_logprobs,
            sharded.shards,
            names=names,
            as_sampled=as_sampled,
        )
        return Logprobs(sharded, handle)

    def compute_targets(self, sharded: ShardedBatch, settings: TargetSettings) -> Logprobs:
        """Run the teachers on a sharded batch; their results stay on the workers.

        See `PolicyWorker.compute_targets`. `train` and `evaluate` get the result as
        `logprobs`.
        """
        handle = call_sharded_once(
            self.group, PolicyWorker.compute_targets, sharded.shards, settings=settings
        )
        return Logprobs(sharded, handle)

    def fetch_logprobs(self, logprobs: Logprobs) -> dict[str, Jagged]:
        """Fetch log-probs from the workers: float32 [T] over the tokens, in batch order."""
        sharded = logprobs.sharded
        parts = call_sharded(
            self.group, PolicyWorker.fetch_logprobs, sharded.shards, logprobs=logprobs.handle
        )
        columns: dict[str, Jagged] = {}
        for name in logprobs.names:
            column = unshard([part[name] for part in parts], sharded.plan)
            assert isinstance(column, Jagged)
            columns[name] = column
        return columns

    def compute_scores(self, sharded: ShardedBatch) -> np.ndarray:
        """Compute the score of each row: float32 [B] in batch order; of a model with a score head.

        The batch needs the columns `input_ids` and `length` only.
        """
        parts: list[np.ndarray] = []
        for part in call_sharded(self.group, PolicyWorker.compute_scores, sharded.shards):
            assert part is not None, "the last pipeline stage has the scores"
            parts.append(part)
        scores = unshard(parts, sharded.plan)
        assert isinstance(scores, np.ndarray)
        return scores

    def train(
        self,
        sharded: ShardedBatch,
        columns: Mapping[str, np.ndarray | Jagged] | None,
        loss: Loss,
        logprobs: Logprobs | None = None,
        *,
        keep_logprobs: bool = False,
    ) -> list[Metrics]:
        """Take one optimizer step per global batch of the plan; returns the metrics of each.

        `columns`, [B, ...] per row or Jagged [T, ...] per token, are in batch order; those that the
        sharded batch already has are not sent again. `logprobs` of `compute_logprobs` join them on
        the workers. With `keep_logprobs`, `fetch_trained_logprobs` returns the log-probs of the
        training pass. Raises ValueError for `logprobs` of another batch, or if the batch or
        `columns` have a column of their name.
        """
        return call_sharded_once(
            self.group,
            PolicyWorker.train,
            sharded.shards,
            self._shares(sharded, columns),
            loss=loss,
            logprobs=_checked_handle(logprobs, sharded, columns or ()),
            keep_logprobs=keep_logprobs,
        )

    def fetch_trained_logprobs(self, sharded: ShardedBatch) -> Jagged:
        """Fetch the log-probs of the last `train`: float32 [T] over the tokens, in batch order.

        Call after `train(sharded, ..., keep_logprobs=True)`. 0 for tokens that were not trained.
        """
        parts: list[Jagged] = []
        for part in call_sharded(self.group, PolicyWorker.fetch_trained_logprobs):
            if part is None:
                raise RuntimeError(
                    "the last training kept no log-probs; call train with keep_logprobs=True"
                )
            parts.append(part)
        column = unshard(parts, sharded.plan)
        assert isinstance(column, Jagged)
        return column

    def measure_gradient(
        self,
        sharded: ShardedBatch,
        columns: Mapping[str, np.ndarray | Jagged] | None,
        loss: Loss,
        logprobs: Logprobs | None = None,
    ) -> Metrics:
        """Return the metrics of the first optimizer step of the plan without taking it.

        The arguments, `columns` [B, ...] or Jagged [T, ...], and the errors are as in `train`.
        The weights do not change.
        """
        return call_sharded_once(
            self.group,
            PolicyWorker.measure_gradient,
            sharded.shards,
            self._shares(sharded, columns),
            loss=loss,
            logprobs=_checked_handle(logprobs, sharded, columns or ()),
        )

    def _shares(
        self, sharded: ShardedBatch, columns: Mapping[str, np.ndarray | Jagged] | None
    ) -> Sequence[dict[str, Any] | None]:
        """Return the rows of each dp rank of the columns, [B, ...] or [T, ...], that it lacks."""
        if not set(columns or ()) - sharded.names:
            return [None] * self.group.parallel_layout.dp
        shares = []
        for dp_rank in range(self.group.parallel_layout.dp):
            rows = sharded.plan.rows_of_rank(dp_rank)
            share = {}
            for name, column in (columns or {}).items():
                if name not in sharded.names:
                    share[name] = take_rows(column, rows)
            shares.append(share)
        return shares

    def skipped_steps(self, sharded: ShardedBatch) -> list[SkippedStep]:
        """Return the skipped steps of the last `train`, with losses by row of the batch."""
        steps_of_ranks = call_sharded(self.group, PolicyWorker.skipped_steps)
        skipped = []
        for ranks in zip(*steps_of_ranks, strict=True):
            row_losses: dict[int, float] = {}
            for dp_rank, step in enumerate(ranks):
                # A worker knows its rows by their index in the shard.
                batch_rows = sharded.plan.rows_of_rank(dp_rank).tolist()
                for row, loss in step.row_losses.items():
                    row_losses[batch_rows[row]] = loss
            skipped.append(dataclasses.replace(ranks[0], row_losses=row_losses))
        return skipped

    def evaluate(
        self, sharded: ShardedBatch, loss: Loss, logprobs: Logprobs | None = None
    ) -> Metrics:
        """Return the loss's metrics over the sharded rows, without training on them.

        `logprobs` is as in `train`.
        """
        return call_sharded_once(
            self.group,
            PolicyWorker.evaluate,
            sharded.shards,
            loss=loss,
            logprobs=_checked_handle(logprobs, sharded, ()),
        )

    def onloaded(self) -> AbstractContextManager[None]:
        """Keep the model on its device inside the block, and in host memory after it."""
        return onloaded(self.group)

    def probe_isolation(self) -> IsolationReport:
        """Check that rows of one microbatch of this model do not see each other.

        Raises WorkerError with an IsolationError as cause if they do.
        """
        reports = call_all(self.group, PolicyWorker.probe_isolation)
        # Only the last pipeline stage has log-probs to compare.
        return reports[self.group.parallel_layout.output_rank(0)]

    def check_shared_directory(self, directory: Path) -> None:
        """Raise ConfigError unless the driver and every worker see the same `directory`."""

        def probe_workers(folder: str, token: str) -> list[str]:
            return call_all(self.group, PolicyWorker.answer_directory_probe, folder, token)

        # Workers in this process have no locations.
        locations = getattr(self.group, "locations", ())
        check_shared(directory, probe_workers, [location.ip for location in locations])

    def save(self, directory: Path) -> list[dict[str, FileRecord]]:
        """Save weights and optimizer state, each rank its shard; returns the files of each rank."""
        return call_all(self.group, PolicyWorker.save, str(directory.resolve()))

    def start_save(self, directory: Path) -> None:
        """Copy weights and optimizer state to host memory; each rank writes in the background.

        The tensors may change as soon as this returns. Call `finish_save` before the next save.
        """
        call_all(self.group, PolicyWorker.start_save, str(directory.resolve()))

    def is_save_written(self) -> bool:
        """Return True if all ranks have written their files, or one failed."""
        return all(call_all(self.group, PolicyWorker.is_save_written))

    def finish_save(self) -> list[dict[str, FileRecord]]:
        """Wait for the files of `start_save`; returns the files of each rank, as `save` does."""
        return call_all(self.group, PolicyWorker.finish_save)

    def load(self, directory: Path) -> None:
        """Load what `save` wrote with any number of ranks."""
        call_all(self.group, PolicyWorker.load, str(directory.resolve()))

    def update_reference(self) -> None:
        """Copy the weights into the reference of the KL penalty; later saves have it as well."""
        call_all(self.group, PolicyWorker.update_reference)

    def export_hf(self, directory: Path, *, ema: bool = False) -> None:
        """Write a model directory that transformers loads; with `ema` the averaged weights."""
        path = str(directory.resolve())
        call_all(self.group, PolicyWorker.export_hf, path, ema=ema)

    def shutdown(self) -> None:
        """Stop the workers."""
        self.group.shutdown()

    def _logprob_plan(self, plan: BatchPlan) -> BatchPlan | None:
        """Plan the same rows on the same ranks under the log-prob budget.

        None where the budgets are equal, so that one plan serves both passes.
        """
        # A forward without backward needs less memory, so its budget may be larger.
        max_tokens, max_rows = microbatch_budget(self.config, "evaluate")
        if (max_tokens, max_rows) == (plan.spec.max_tokens, plan.spec.max_rows):
            return None
        return plan.with_budget(max_tokens, max_rows=max_rows)


def _checked_handle(
    logprobs: Logprobs | None, sharded: ShardedBatch, new_columns: Iterable[str]
) -> LogprobHandle | None:
    """Return the workers' handle of `logprobs`. Raises ValueError if they do not fit the batch."""
    if logprobs is None:
        return None
    if logprobs.sharded is not sharded:
        raise ValueError(
            "these log-probs were computed for another sharded batch; call compute_logprobs with"
            " the batch that is trained on"
        )
    # One of two columns of the same name would be used silently.
    duplicates = sorted(set(logprobs.names) & (sharded.names | set(new_columns)))
    if duplicates:
        raise ValueError(
            f"the batch already has {', '.join(duplicates)}, which the log-probs add; remove the"
            " column from the batch, or compute log-probs without that name"
        )
    return logprobs.handle
