"""A dp rank's rows as microbatches of tensors, and their order in the shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import Microbatch, PlanSpec
from nemo_like.distributed import activity
from nemo_like.policy.heads.targets import Targets
from nemo_like.policy.inputs.model_inputs import ModelInputs, build_inputs, num_predicted_tokens


@dataclass(frozen=True)
class ShardRows:
    """Columns of a shard with the layout of its plan.

    The column `token_mask` is True for trained tokens, the optional column `row_mask` for trained
    rows.
    """

    columns: Mapping[str, Any]
    spec: PlanSpec
    cp_rank: int
    device: torch.device
    targets: Targets | None = None
    """Of the teachers, which choose the output head of each microbatch."""

    def count(self, microbatches: Iterable[Microbatch]) -> tuple[float, float]:
        """Count (trained tokens, rows with at least one trained token) of this dp rank.

        Summed over the dp ranks, these are the denominators of the loss.
        """
        num_tokens = 0
        num_rows = 0
        for microbatch in microbatches:
            counts = self.num_trained_tokens(microbatch)
            num_tokens += counts.sum()
            num_rows += (counts > 0).sum()
        return float(num_tokens), float(num_rows)

    def num_trained_tokens(self, microbatch: Microbatch) -> np.ndarray:
        """Count the trained tokens of each row, int64 [R]; [1] of 0 for a dummy microbatch."""
        counts = num_predicted_tokens(self.columns["token_mask"], microbatch)
        if "row_mask" in self.columns and microbatch.rows:
            rows = list(microbatch.rows)
            row_mask = np.asarray(self.columns["row_mask"], dtype=bool)
            counts = counts * row_mask[rows]
        return counts

    def inputs(self, microbatch: Microbatch) -> ModelInputs:
        """Build model inputs whose `label_mask` is True for trained tokens only."""
        activity.note(f"inputs of a microbatch of {len(microbatch.rows)} rows")
        inputs = build_inputs(
            self.columns,
            microbatch,
            self.spec,
            cp_rank=self.cp_rank,
            device=self.device,
            num_trained=self.num_trained_tokens(microbatch),
        )
        if self.targets is None:
            return inputs
        return replace(inputs, head=self.targets.head(microbatch))

    def in_shard_order(self, microbatches: Sequence[Microbatch], parts: Sequence[Jagged]) -> Jagged:
        """Reorder `parts`, one Jagged [T] per microbatch, to the rows of the shard: float32 [T].

        Truncated tokens, which are in no microbatch, get 0.
        """
        offsets = self.columns["input_ids"].offsets
        values = np.zeros(offsets[-1], dtype=np.float32)
        for microbatch, part in zip(microbatches, parts, strict=True):
            for row, outputs in zip(microbatch.rows, part, strict=True):
                start = offsets[row]
                values[start : start + len(outputs)] = outputs
        return Jagged(values, offsets)
