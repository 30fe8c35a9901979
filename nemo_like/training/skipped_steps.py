"""Optimizer steps that are skipped because the loss or the gradients are not finite: counting,
recording, stopping.

The rows of a skipped step are consumed: weights, optimizer state and learning-rate schedule stay as
they were and the run continues with the next batch. When more than `policy.max_skipped_steps`
optimizer steps in a row are skipped, the run saves a checkpoint after the current step and stops; a
resumed run continues behind the skipped rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_like.data.jagged import Jagged
from nemo_like.data.loader import RowLoader
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.errors import WorkerError
from nemo_like.files import reporting_write_errors, write_text
from nemo_like.losses import Loss
from nemo_like.metrics import Metrics, merge_metrics
from nemo_like.policy.nonfinite import SkippedStep
from nemo_like.policy.optim import NonFiniteError
from nemo_like.policy.policy import ShardedBatch
from nemo_like.training.run import Job

TOTAL = "num_skipped_steps"
IN_A_ROW = "num_skipped_steps_in_a_row"


class SkippedStepsError(NonFiniteError):
    """More optimizer steps in a row were skipped than `policy.max_skipped_steps` allows."""


@dataclass(frozen=True, kw_only=True)
class TrainedBatch:
    """A batch as the loop has it, for the record of its rows."""

    step: int
    """The step it belongs to, counted from 1."""
    batch: BatchedDataDict
    locations: Sequence[str]
    """Where each row stands in the data, e.g. `data/train.jsonl:17`."""
    columns: Mapping[str, np.ndarray | Jagged]
    """Columns that join the batch for training, such as `advantages`."""


def train(job: Job, sharded: ShardedBatch, trained: TrainedBatch, loss: Loss) -> Metrics:
    """Train on the sharded batch; count skipped optimizer steps and write their rows to
    `<run>/skipped/step_<N>.jsonl`.

    Raises NonFiniteError if an optimizer step left weights that are not finite. `stop_if_too_many`
    has to follow, after the step is logged.
    """
    try:
        steps = job.policy.train(sharded, trained.columns, loss)
    except WorkerError as error:
        if not isinstance(error.cause, NonFiniteError):
            raise
        raise NonFiniteError(f"step {trained.step}: {error.cause}") from error
    skipped = [step["policy/skipped_steps"].value > 0 for step in steps]
    job.num_skipped_in_a_row = _count(job.counters, skipped)
    if any(skipped):
        path = job.run.skipped(trained.step)
        with reporting_write_errors(path):
            path.parent.mkdir(exist_ok=True)
        records = [
            record
            for step in job.policy.skipped_steps(sharded)
            for record in _records(step, trained, job.encoder.tokenizer)
        ]
        lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
        write_text(path, lines, f"the skipped rows of step {trained.step}")
        job.progress.say(
            f"step {trained.step}: {_summary(records, sum(skipped), len(steps))}; see {path}"
        )
    return merge_metrics(steps)


def stop_if_too_many(job: Job, step: int, loader: RowLoader) -> None:
    """Save step `step` and raise SkippedStepsError if more steps in a row were skipped than
    allowed.
    """
    limit, in_a_row = job.config.policy.max_skipped_steps, job.num_skipped_in_a_row
    if in_a_row <= limit:
        return
    job.counters[IN_A_ROW] = 0.0  # a resumed run starts to count anew
    job.save_if_due(step, loader, is_last=True)
    saved = (
        f"Step {step} was saved with the last finite weights, and a resumed run continues with the"
        f" rows after it"
        if job.config.checkpointing.enabled
        else "Nothing was saved, as checkpointing.enabled is false"
    )
    raise SkippedStepsError(
        f"{in_a_row} optimizer steps in a row were skipped up to step {step}, more than"
        f" policy.max_skipped_steps={limit}"
        f" allows: their loss or gradients were not finite. Their rows are in"
        f" {job.run.skipped(step).parent}. {saved}."
        f" Remove such rows, lower policy.optimizer.lr (now {job.config.policy.optimizer.lr:g}), or"
        f" raise"
        " policy.max_skipped_steps"
    )


def _count(counters: dict[str, float], skipped: Sequence[bool]) -> int:
    """Update the totals; returns the largest number of skipped steps in a row that these steps
    reached.
    """
    longest = in_a_row = int(counters.get(IN_A_ROW, 0.0))
    for is_skipped in skipped:
        in_a_row = in_a_row + 1 if is_skipped else 0
        longest = max(longest, in_a_row)
    counters[TOTAL] = counters.get(TOTAL, 0.0) + sum(skipped)
    counters[IN_A_ROW] = float(in_a_row)
    return longest


def _records(step: SkippedStep, trained: TrainedBatch, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """The rows with a loss that is not finite; all rows of the optimizer step if every loss is
    finite.
    """
    losses = dict(sorted(step.row_losses.items()))
    responsible = {row: loss for row, loss in losses.items() if not math.isfinite(loss)}
    for row, loss in (responsible or losses).items():
        token_ids = trained.batch["input_ids"][row].tolist()
        yield {
            "step": trained.step,
            "update": step.index,
            "cause": "loss" if responsible else "gradient",
            "grad_norm": _json_number(step.grad_norm),
            "row": row,
            "source": trained.locations[row],
            "loss": _json_number(loss),
            **{name: _json_number(float(value)) for name, value in _row_values(trained, row)},
            "num_tokens": len(token_ids),
            "token_ids": token_ids,
            "text": tokenizer.decode(token_ids),
        }


def _row_values(trained: TrainedBatch, row: int) -> Iterator[tuple[str, Any]]:
    """Real numbers of a row, such as its reward and advantage."""
    for name, column in {**trained.batch, **trained.columns}.items():
        if isinstance(column, np.ndarray) and column.dtype.kind == "f":
            yield name, column[row]


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _summary(records: Sequence[Mapping[str, Any]], num_skipped: int, num_steps: int) -> str:
    share = "" if num_steps == 1 else f" ({num_skipped} of {num_steps})"
    num_rows = sum(record["cause"] == "loss" for record in records)
    cause = f"the loss of {num_rows} rows is" if num_rows else "the gradients are"
    return f"optimizer step skipped{share}, weights unchanged: {cause} not finite"
