"""Scores of rows of an engine with a score head, computed forward only."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from nemo_like.data.planning.plan import RankPlan
from nemo_like.distributed import activity
from nemo_like.distributed.batched_data_dict import SlicedDataDict
from nemo_like.policy.engine import Engine
from nemo_like.policy.model_inputs import ModelInputs, TokenLogprobs, build_inputs


def shard_scores(engine: Engine, shard: SlicedDataDict, plan: RankPlan) -> np.ndarray | None:
    """Return the score of each row of `shard`, float32 [B]; None on pipeline stages but the last.

    Of the columns only `input_ids` is read. A row that `plan` does not contain gets 0. Every rank
    calls. Raises ValueError for an engine without a score head.
    """
    cp_rank = engine.parallel_layout.coordinates(engine.rank).cp
    columns = {"input_ids": shard["input_ids"]}

    def inputs() -> Iterable[ModelInputs]:
        for microbatch in plan.microbatches:
            activity.note(f"scores of a microbatch of {len(microbatch.rows)} rows")
            yield build_inputs(
                columns, microbatch, plan.spec, cp_rank=cp_rank, device=engine.device
            )

    parts = compute_row_scores(engine, inputs())
    engine.clock.drop()
    if not parts:
        return None
    scores = np.zeros(len(shard["input_ids"]), dtype=np.float32)
    for microbatch, part in zip(plan.microbatches, parts, strict=True):
        # A dummy has a score and no row.
        rows = list(microbatch.rows)
        scores[rows] = part[: len(rows)]
    return scores


def compute_row_scores(engine: Engine, microbatches: Iterable[ModelInputs]) -> list[np.ndarray]:
    """Return the scores of each microbatch, float32 [R] each; none on stages but the last.

    Every rank calls. Raises ValueError for an engine without a score head.
    """
    if engine.spec.head != "scores":
        raise ValueError(
            "this model has no score head; start the worker with head='scores' and the directory of"
            " a reward model"
        )

    def gathered(inputs: ModelInputs, outputs: TokenLogprobs) -> tuple[None, Tensor]:
        """Return None as loss, and the scores [R]: each is on one context-parallel rank."""
        assert outputs.scores is not None, "an engine with a score head returns scores"
        return None, engine.sum_over_cp(outputs.scores.detach())

    parts = engine.run(microbatches, gathered, backward=False)
    if not parts:
        return []
    # After the last microbatch, so that the device is waited for once.
    values = torch.cat(parts).cpu().numpy()
    ends = np.cumsum([len(part) for part in parts])
    return np.split(values, ends[:-1])
