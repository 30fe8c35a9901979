"""Training on a batch, and the optimizer steps that are skipped.

An optimizer step is skipped if its loss or its gradients are not finite.

The rows of a skipped step are consumed: weights, optimizer state and learning-rate schedule stay as
they were and the run continues with the next batch. When more than `policy.max_skipped_steps`
consecutive optimizer steps are skipped, the run saves a checkpoint after the current step and
stops; a resumed run continues behind the skipped rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_like.config.errors import counted
from nemo_like.data.jagged import Jagged
from nemo_like.data.loader import Position
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.errors import WorkerError
from nemo_like.losses import Loss
from nemo_like.metrics import Metrics, merge_metrics
from nemo_like.policy.loss_step import SkippedStep
from nemo_like.policy.optim import NonFiniteError
from nemo_like.policy.policy import Logprobs, ShardedBatch
from nemo_like.run.files import AppendedFile, reporting_write_errors
from nemo_like.training.reporting import TRAINED
from nemo_like.training.run import TrainingRun

NUM_SKIPPED = "num_skipped_steps"
NUM_SKIPPED_IN_A_ROW = "num_skipped_steps_in_a_row"


class SkippedStepsError(NonFiniteError):
    """More consecutive optimizer steps were skipped than `policy.max_skipped_steps` allows."""


@dataclass(frozen=True, kw_only=True)
class TrainedBatch:
    """The batch of one step with the values that a record of skipped rows needs."""

    step: int
    """The step it belongs to, counted from 1."""
    batch: BatchedDataDict
    locations: Sequence[str]
    """File and line of each row, e.g. `data/train.jsonl:17`."""
    columns: Mapping[str, np.ndarray | Jagged]
    """Columns that join the batch for training, such as `advantages`."""
    epoch: int = 0
    """Passes over the rows of the step before this one."""


def train(
    run: TrainingRun,
    sharded: ShardedBatch,
    trained: TrainedBatch,
    loss: Loss,
    logprobs: Logprobs | None = None,
) -> Metrics:
    """Train on the sharded batch as `train_steps` does; return the metrics of all steps merged."""
    return merge_metrics(train_steps(run, sharded, trained, loss, logprobs))


def train_steps(
    run: TrainingRun,
    sharded: ShardedBatch,
    trained: TrainedBatch,
    loss: Loss,
    logprobs: Logprobs | None = None,
    *,
    keep_logprobs: bool = False,
) -> list[Metrics]:
    """Train on the sharded batch; count skipped optimizer steps and write their rows to a file.

    `logprobs` are on the workers, for the loss; `keep_logprobs` is as in
    `Policy.train`. The file is `<run>/skipped/step_<N>.jsonl`. Call `stop_if_too_many` after the
    step is logged. Returns the metrics of each optimizer step.
    Raises NonFiniteError if an optimizer step left weights that are not finite.
    """
    try:
        steps = run.policy.train(
            sharded, trained.columns, loss, logprobs, keep_logprobs=keep_logprobs
        )
    except WorkerError as error:
        # Raised in the worker; the step number is known here only.
        if not isinstance(error.cause, NonFiniteError):
            raise
        raise NonFiniteError(f"step {trained.step}: {error.cause}") from error
    num_tokens = [step["policy/num_tokens"].value for step in steps]
    run.log.counters[TRAINED] = run.log.counters.get(TRAINED, 0.0) + sum(num_tokens)
    num_untrained = num_tokens.count(0)
    if num_untrained:
        run.progress.print_line(
            f"WARNING: step {trained.step}: {num_untrained} of {len(steps)} optimizer steps have no"
            " trained token and change nothing; check policy.oversize_rows,"
            " policy.max_total_sequence_length and the rows"
        )
    skipped = [step["policy/skipped_steps"].value > 0 for step in steps]
    longest = _count(run.log.counters, skipped)
    # A step may have several passes; `stop_if_too_many` is called once, after the last.
    earlier = run.num_skipped_in_a_row if trained.epoch > 0 else 0
    run.num_skipped_in_a_row = max(longest, earlier)
    if any(skipped):
        records: list[dict[str, Any]] = []
        for step in run.policy.skipped_steps(sharded):
            records.extend(_records(step, trained, run.encoder.tokenizer))
        path = run.files.directory.skipped(trained.step)
        with reporting_write_errors(path):
            path.parent.mkdir(exist_ok=True)
        # A step may have several passes, whose records follow one another.
        with closing(AppendedFile(path)) as file:
            for record in records:
                file.append_json(record, f"the skipped rows of step {trained.step}")
        summary = _summary(records, sum(skipped), len(steps))
        run.progress.print_line(f"step {trained.step}: {summary}; see {path}")
    return steps


def stop_if_too_many(run: TrainingRun, step: int, position: Position) -> None:
    """Save `step` and raise SkippedStepsError if too many consecutive steps were skipped."""
    policy = run.settings.policy
    limit = policy.max_skipped_steps
    in_a_row = run.num_skipped_in_a_row
    if in_a_row <= limit:
        return
    # A resumed run counts from 0 again; it would stop at once otherwise.
    run.log.counters[NUM_SKIPPED_IN_A_ROW] = 0.0
    run.save_if_due(step, position, is_last=True)
    saved = "Nothing was saved, as checkpointing.enabled is false"
    if run.files.checkpointing.enabled:
        saved = (
            f"Step {step} was saved with the last finite weights, and a resumed run continues with"
            " the rows after it"
        )
    raise SkippedStepsError(
        f"{in_a_row} optimizer steps in a row were skipped up to step {step}, more than"
        f" policy.max_skipped_steps={limit} allows: their loss or gradients were not finite. Their"
        f" rows are in {run.files.directory.skipped(step).parent}. {saved}."
        f" Remove such rows, lower policy.optimizer.lr (now {policy.optimizer.lr:g}), or"
        " raise policy.max_skipped_steps"
    )


def _count(counters: dict[str, float], skipped: Sequence[bool]) -> int:
    """Update the totals; return the longest sequence of skipped steps that ends in these steps."""
    in_a_row = int(counters.get(NUM_SKIPPED_IN_A_ROW, 0.0))
    longest = in_a_row
    for is_skipped in skipped:
        in_a_row = in_a_row + 1 if is_skipped else 0
        longest = max(longest, in_a_row)
    counters[NUM_SKIPPED] = counters.get(NUM_SKIPPED, 0.0) + sum(skipped)
    counters[NUM_SKIPPED_IN_A_ROW] = float(in_a_row)
    return longest


def _records(step: SkippedStep, trained: TrainedBatch, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows whose loss is not finite; all rows of the step if every loss is finite."""
    losses = dict(sorted(step.row_losses.items()))
    # Without a bad loss the gradients overflowed, for which no single row is responsible.
    responsible = {row: loss for row, loss in losses.items() if not math.isfinite(loss)}
    recorded = responsible or losses
    for row, loss in recorded.items():
        token_ids = trained.batch["input_ids"][row].tolist()
        record = {
            "step": trained.step,
            "epoch": trained.epoch,
            "update": step.index,
            "cause": "loss" if responsible else "gradient",
            "grad_norm": _json_number(step.grad_norm),
            "row": row,
            "source": trained.locations[row],
            "loss": _json_number(loss),
        }
        for name, value in _row_values(trained, row):
            record[name] = _json_number(float(value))
        record["num_tokens"] = len(token_ids)
        record["token_ids"] = token_ids
        record["text"] = tokenizer.decode(token_ids)
        yield record


def _row_values(trained: TrainedBatch, row: int) -> Iterator[tuple[str, Any]]:
    """Yield the floating-point columns of a row, such as its reward and advantage."""
    columns = {**trained.batch, **trained.columns}
    for name, column in columns.items():
        # Values per row only; columns per token (Jagged) would be as long as the text.
        if isinstance(column, np.ndarray) and column.dtype.kind == "f":
            yield name, column[row]


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _summary(records: Sequence[Mapping[str, Any]], num_skipped: int, num_steps: int) -> str:
    share = "" if num_steps == 1 else f" ({num_skipped} of {num_steps})"
    num_rows = sum(record["cause"] == "loss" for record in records)
    cause = f"the loss of {counted(num_rows, 'row')} is" if num_rows else "the gradients are"
    return f"optimizer step skipped{share}, weights unchanged: {cause} not finite"
