"""The driver's side of the policy: it plans batches, sends each dp rank its rows once, and asks the
workers.

Everything here is small and on the CPU; nothing imports a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from nemo_like.config.schema import PolicyConfig
from nemo_like.data.columns import take_rows
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import BatchPlan, plan_batch
from nemo_like.distributed.batched_data_dict import BatchedDataDict, unshard
from nemo_like.distributed.worker_group import Handle, WorkerGroup, onloaded
from nemo_like.files import FileRecord
from nemo_like.losses import Loss
from nemo_like.metrics import Metrics
from nemo_like.policy.batching import Purpose, microbatch_budget, plan_spec
from nemo_like.policy.isolation import IsolationReport
from nemo_like.policy.nonfinite import SkippedStep
from nemo_like.policy.worker import PolicyInfo
from nemo_like.shared_directory import check_shared


@dataclass(frozen=True)
class ShardedBatch:
    """Rows that already are where they will be used."""

    plan: BatchPlan
    shards: tuple[Handle, ...]
    """One per dp rank."""
    names: frozenset[str]
    """Columns the shards hold."""


class Policy:
    """The model that learns, spread over the workers of `group`."""

    def __init__(
        self,
        group: WorkerGroup,
        config: PolicyConfig,
        *,
        sequence_parallel: bool = False,
        seed: int = 0,
    ) -> None:
        self.group = group
        self.config = config
        self._sequence_parallel = sequence_parallel
        self._seed = seed

    @cached_property
    def info(self) -> PolicyInfo:
        """Size and cost of the model, and the workers' speed."""
        return self.group.run_all_workers("info")[0]

    def plan(self, lengths: Sequence[int] | np.ndarray, purpose: Purpose = "train") -> BatchPlan:
        """Which rows of a batch form which microbatch on which rank, from their lengths alone.

        To `evaluate`, the whole batch is one step under the log-prob budget. Raises ValueError for a
        row above the cap where `policy.oversize_rows` is `error`.
        """
        spec = plan_spec(
            self.config,
            purpose=purpose,
            topology=self.group.topology,
            sequence_parallel=self._sequence_parallel,
            cost=self.info.cost,
            sync=self.info.sync,
            seed=self._seed,
        )
        return plan_batch(np.asarray(lengths, dtype=np.int64), spec)

    def shard(self, batch: BatchedDataDict, plan: BatchPlan) -> ShardedBatch:
        """Give each dp rank its rows of `batch`, unpadded, for any number of calls of score, train
        and evaluate.
        """
        shards = batch.shard(plan, self._score_plan(plan))
        return ShardedBatch(
            plan, tuple(self.group.put(shard) for shard in shards), frozenset(batch)
        )

    def compute_logprobs(self, sharded: ShardedBatch) -> dict[str, Jagged]:
        """`prev_logprobs` (and `reference_logprobs` where there is a reference), rows in the
        batch's order.

        Float32 per token, at the sampling temperature; 0 for tokens that are not trained.
        """
        parts = self.group.run_all_workers_sharded_data("compute_logprobs", sharded.shards)
        outputs = {}
        for name in parts[0]:
            column = unshard([part[name] for part in parts], sharded.plan)
            assert isinstance(column, Jagged)
            outputs[name] = column
        return outputs

    def train(
        self, sharded: ShardedBatch, columns: Mapping[str, np.ndarray | Jagged] | None, loss: Loss
    ) -> list[Metrics]:
        """One optimizer step per global batch of the plan, and the metrics of each.

        Of `columns` (rows in the batch's order) only those travel that the sharded batch does not
        have.
        """
        new = {
            name: column for name, column in (columns or {}).items() if name not in sharded.names
        }
        rows = [sharded.plan.rows_of_rank(dp_rank) for dp_rank in range(self.group.topology.dp)]
        parts = [{name: take_rows(column, mine) for name, column in new.items()} for mine in rows]
        return self.group.run_all_workers_sharded_data("train", sharded.shards, parts, loss=loss)[0]

    def skipped_steps(self, sharded: ShardedBatch) -> list[SkippedStep]:
        """The optimizer steps of the last `train` that were skipped, with the loss of each row of
        the batch in them.
        """
        parts = self.group.run_all_workers_sharded_data("skipped_steps")
        rows = [
            sharded.plan.rows_of_rank(dp_rank).tolist() for dp_rank in range(self.group.topology.dp)
        ]
        return [
            dataclasses.replace(
                of_ranks[0],
                row_losses={
                    mine[row]: loss
                    for mine, step in zip(rows, of_ranks, strict=True)
                    for row, loss in step.row_losses.items()
                },
            )
            for of_ranks in zip(*parts, strict=True)
        ]

    def evaluate(self, sharded: ShardedBatch, loss: Loss) -> Metrics:
        """The loss's metrics over the sharded rows, without training on them."""
        return self.group.run_all_workers_sharded_data("evaluate", sharded.shards, loss=loss)[0]

    def onloaded(self) -> AbstractContextManager[None]:
        """The model is on its device inside, and in host memory outside."""
        return onloaded(self.group)

    def probe_isolation(self) -> IsolationReport:
        """Raises WorkerError, its cause an IsolationError, if rows of one microbatch of this model
        see each other.
        """
        return self.group.run_all_workers("probe_isolation")[self.group.topology.output_rank(0)]

    def check_shared_directory(self, directory: Path) -> None:
        """Raise ConfigError unless the driver and every worker read and write the same
        `directory`.
        """
        locations = getattr(self.group, "locations", ())  # workers in this process have none
        check_shared(
            directory,
            lambda folder, token: self.group.run_all_workers(
                "answer_directory_probe", folder, token
            ),
            [location.ip for location in locations],
        )

    def save(self, directory: Path) -> list[dict[str, FileRecord]]:
        """Weights, optimizer and schedule into `directory`, every rank its part; returns the files
        of each rank.
        """
        return self.group.run_all_workers("save", str(directory.resolve()))

    def load(self, directory: Path) -> None:
        """What `save` wrote, with this or another number of ranks."""
        self.group.run_all_workers("load", str(directory.resolve()))

    def export_hf(self, directory: Path) -> None:
        """A model directory that transformers loads."""
        self.group.run_all_workers("export_hf", str(directory.resolve()))

    def shutdown(self) -> None:
        self.group.shutdown()

    def _score_plan(self, plan: BatchPlan) -> BatchPlan | None:
        """The same rows on the same ranks under the log-prob budget; None where one plan serves
        both.
        """
        max_tokens, max_rows = microbatch_budget(self.config, "evaluate")
        if (max_tokens, max_rows) == (plan.spec.max_tokens, plan.spec.max_rows):
            return None
        return plan.with_budget(max_tokens, max_rows=max_rows)
