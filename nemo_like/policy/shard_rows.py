"""A dp rank's rows as microbatches of tensors, and the log-probs and targets that stay beside them.

The driver has handles of the log-probs and targets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nemo_like.config.loss import LogprobName
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import Microbatch, PlanSpec
from nemo_like.distributed import activity
from nemo_like.policy.heads.targets import Targets
from nemo_like.policy.inputs.images import RowImages
from nemo_like.policy.inputs.model_inputs import ModelInputs, build_inputs, num_predicted_tokens
from nemo_like.policy.rank_groups import RankGroups

EPISODE_TRAINED = "num_trained_tokens_of_episode"
"""Row column: float32 [R], trained tokens of the episode of each row; see `with_episodes`."""


@dataclass(frozen=True)
class ShardRows:
    """Columns of a shard with the layout of its plan.

    The column `token_mask` is True for trained tokens, the optional column `row_mask` for trained
    rows. With `EPISODE_TRAINED`, see `with_episodes`, the rows of an episode count as one.
    """

    columns: Mapping[str, Any]
    spec: PlanSpec
    cp_rank: int
    device: torch.device
    targets: Targets | None = None
    """Targets of the teachers, which choose the output head of each microbatch."""
    images: RowImages | None = None
    """Images of the rows, if any row of the batch has one."""

    def count(self, microbatches: Iterable[Microbatch]) -> tuple[float, float]:
        """Count (trained tokens, rows with at least one trained token) of this dp rank.

        Summed over the dp ranks, these are the denominators of the loss. A row that is a part of an
        episode counts as its share of the trained tokens of the episode.
        """
        num_tokens = 0
        num_rows = 0
        for microbatch in microbatches:
            counts = self.num_trained_tokens(microbatch)
            num_tokens += counts.sum()
            shares = counts > 0
            if EPISODE_TRAINED in self.columns and microbatch.rows:
                totals = self.columns[EPISODE_TRAINED][list(microbatch.rows)]
                shares = counts / np.maximum(totals, 1)
            num_rows += shares.sum()
        return float(num_tokens), float(num_rows)

    def with_episodes(self, microbatches: Iterable[Microbatch], ranks: RankGroups) -> ShardRows:
        """Return the rows with `EPISODE_TRAINED`, counted over all dp ranks, which call this.

        `microbatches` has the microbatches of all optimizer steps. Without the column `episode`,
        int [n], which is equal for the rows of an episode, the rows are returned unchanged.
        """
        if "episode" not in self.columns:
            return self
        tokens: Counter[int] = Counter()
        for microbatch in microbatches:
            # A dummy has one count and no row.
            episodes = self.columns["episode"][list(microbatch.rows)].tolist()
            counts = self.num_trained_tokens(microbatch).tolist()
            for episode, count in zip(episodes, counts, strict=False):
                tokens[episode] += count
        # Every context-parallel rank has counted the complete rows of its dp rank.
        by_rank = dict(ranks.gather_over_dp_cp((ranks.dp_rank, tokens)))
        totals = sum(by_rank.values(), Counter())
        column = np.array([totals[each] for each in self.columns["episode"].tolist()], np.float32)
        return replace(self, columns={**self.columns, EPISODE_TRAINED: column})

    def num_trained_tokens(self, microbatch: Microbatch) -> np.ndarray:
        """Count the trained tokens of each row, int64 [R]; [1] of 0 for a dummy microbatch."""
        counts = num_predicted_tokens(self.columns["token_mask"], microbatch)
        if "row_mask" in self.columns and microbatch.rows:
            rows = list(microbatch.rows)
            row_mask = np.asarray(self.columns["row_mask"], dtype=bool)
            counts = counts * row_mask[rows]
        return counts

    def own_part(self, microbatch: Microbatch) -> tuple[Microbatch, PlanSpec, int]:
        """Return what this rank computes of a microbatch; see `Microbatch.on_context_rank`."""
        return microbatch.on_context_rank(self.cp_rank, self.spec)

    def inputs(self, microbatch: Microbatch) -> ModelInputs:
        """Build model inputs whose `label_mask` is True for trained tokens only."""
        activity.note(f"inputs of a microbatch of {len(microbatch.rows)} rows")
        part, spec, cp_rank = self.own_part(microbatch)
        inputs = build_inputs(
            self.columns,
            part,
            spec,
            cp_rank=cp_rank,
            device=self.device,
            num_trained=self.num_trained_tokens(part),
            images=self.images if microbatch.has_images else None,
        )
        if self.targets is None:
            return inputs
        return replace(inputs, head=self.targets.head(microbatch))

    def in_shard_order(
        self, microbatches: Sequence[Microbatch], parts: Sequence[Jagged], ranks: RankGroups
    ) -> Jagged:
        """Reorder `parts`, one Jagged [T] per microbatch, to the rows of the shard: float32 [T].

        Truncated tokens, which are in no microbatch, get 0. Every context-parallel rank calls.
        """
        offsets = self.columns["input_ids"].offsets
        values = np.zeros(offsets[-1], dtype=np.float32)
        for microbatch, part in zip(microbatches, parts, strict=True):
            own, _, group_rank = self.own_part(microbatch)
            # All ranks of a group have its complete rows.
            if self.spec.dynamic_context and group_rank > 0:
                continue
            for row, outputs in zip(own.rows, part, strict=True):
                start = offsets[row]
                values[start : start + len(outputs)] = outputs
        if self.spec.dynamic_context:
            values = ranks.join_over_cp(values)
        return Jagged(values, offsets)


@dataclass(frozen=True, slots=True)
class LogprobHandle:
    """Names the results of one pass of `compute_logprobs` or `compute_targets`, which the workers
    keep.

    Its size does not depend on the number of tokens. It is equal on all ranks, since every rank
    takes part in every pass.
    """

    pass_index: int
    """Passes that the workers had started before this one."""
    names: tuple[LogprobName, ...]
    has_targets: bool = False
    """The pass was one of teachers; it has no log-probs then."""


class LogprobStore:
    """Keeps the log-probs of the latest pass on one rank; earlier passes are released.

    They are jagged float32 arrays in host memory, in the row order of the shard: 4 bytes per token
    and column, as much as `input_ids` of the shard. They are therefore independent of the
    microbatches they were computed in, an offload of the model does not move them, and every
    context-parallel rank has full rows, of which `model_inputs.build_inputs` takes its share.
    Pipeline stages but the last keep nothing: they compute no loss.
    """

    def __init__(self) -> None:
        self._num_passes = 0
        self._columns: dict[str, Jagged] = {}
        self._targets: Targets | None = None

    def start_pass(self) -> None:
        """Release the columns of the previous pass; its handle becomes invalid."""
        # Before the new columns are computed, so that two passes are never in memory together.
        self._columns = {}
        self._targets = None
        self._num_passes += 1

    def keep(self, columns: Mapping[str, Jagged], names: tuple[LogprobName, ...]) -> LogprobHandle:
        """Keep the columns of the pass that `start_pass` began; they replace the previous ones.

        `names` are the names of the pass; `columns`, float32 [T] in shard order, is empty on all
        pipeline stages but the last.
        """
        self._columns = dict(columns)
        return LogprobHandle(self._num_passes - 1, names)

    def keep_targets(self, targets: Targets) -> LogprobHandle:
        """Keep the targets of the pass that `start_pass` began."""
        self._targets = targets
        return LogprobHandle(self._num_passes - 1, (), has_targets=True)

    def release_targets(self) -> None:
        """Release the targets, which have tensors on the device."""
        self._targets = None

    def targets(self, handle: LogprobHandle | None) -> Targets | None:
        """Return the targets of `handle`, of which `columns` checks the pass; None without any.

        Raises ValueError if they were released.
        """
        if handle is None or not handle.has_targets:
            return None
        if self._targets is None:
            raise ValueError(
                f"the targets of pass {handle.pass_index} were released when the model was"
                " offloaded; call compute_targets and train while it stays on the device"
            )
        return self._targets

    def columns(self, handle: LogprobHandle, input_ids: Jagged) -> dict[str, Jagged]:
        """Return the columns of `handle`, float32 [T], for the shard with `input_ids` [T].

        Raises ValueError if the columns were released, or belong to rows of other lengths.
        """
        latest = self._num_passes - 1
        # The values of an older pass are gone, and the latest values belong to other rows.
        if handle.pass_index != latest:
            kept = "none" if latest < 0 else f"pass {latest}"
            raise ValueError(
                f"the log-probs of pass {handle.pass_index} were released: a worker keeps only"
                f" its latest pass, here {kept}; call compute_logprobs for this batch again,"
                " with all names that train needs in one call"
            )
        for name, column in self._columns.items():
            if not np.array_equal(column.offsets, input_ids.offsets):
                raise ValueError(
                    f"{name} of pass {handle.pass_index} belongs to another batch: it has"
                    f" {len(column)} rows of {column.offsets[-1]} tokens, the shard has"
                    f" {len(input_ids)} rows of {input_ids.offsets[-1]}; pass the log-probs that"
                    " compute_logprobs returned for this batch"
                )
        return dict(self._columns)
