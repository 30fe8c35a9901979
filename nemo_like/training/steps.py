"""The steps of a run: training on a batch, validation by reward, and the loop over epochs.

An optimizer step is skipped if its loss or its gradients are not finite.

The rows of a skipped step are consumed: weights, optimizer state and learning-rate schedule stay as
they were and the run continues with the next batch. When more than `policy.max_skipped_steps`
consecutive optimizer steps are skipped, the run saves a checkpoint after the current step and
stops; a resumed run continues behind the skipped rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from nemo_like.config.errors import counted
from nemo_like.config.rollout import GenerationConfig
from nemo_like.data.jagged import Jagged
from nemo_like.data.loader import BatchLoader, Position
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.errors import WorkerError
from nemo_like.generation.requests import SamplingParams
from nemo_like.losses import Loss
from nemo_like.metrics import Metrics, merge_metrics
from nemo_like.policy.loss_step import SkippedStep
from nemo_like.policy.optim import NonFiniteError
from nemo_like.policy.policy import Logprobs, ShardedBatch
from nemo_like.rollout.answers import answer_metrics
from nemo_like.rollout.conversations import Prompt
from nemo_like.rollout.records import record_sample
from nemo_like.rollout.rows import Rollout, row_seeds
from nemo_like.run.files import AppendedFile, reporting_write_errors
from nemo_like.training.reporting import TRAINED, StepWork, check_trained
from nemo_like.training.run import RunResult, TrainingRun, open_training_run
from nemo_like.training.run_data import ExampleSource, ExampleT, PromptSet, named_metrics

TOTAL = "num_skipped_steps"
IN_A_ROW = "num_skipped_steps_in_a_row"


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
    run.counters[TRAINED] = run.counters.get(TRAINED, 0.0) + sum(num_tokens)
    num_untrained = num_tokens.count(0)
    if num_untrained:
        run.progress.print_line(
            f"WARNING: step {trained.step}: {num_untrained} of {len(steps)} optimizer steps have no"
            " trained token and change nothing; check policy.oversize_rows,"
            " policy.max_total_sequence_length and the rows"
        )
    skipped = [step["policy/skipped_steps"].value > 0 for step in steps]
    longest = _count(run.counters, skipped)
    # A step may have several passes; `stop_if_too_many` is called once, after the last.
    earlier = run.num_skipped_in_a_row if trained.epoch > 0 else 0
    run.num_skipped_in_a_row = max(longest, earlier)
    if any(skipped):
        records: list[dict[str, Any]] = []
        for step in run.policy.skipped_steps(sharded):
            records.extend(_records(step, trained, run.encoder.tokenizer))
        path = run.directory.skipped(trained.step)
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
    limit = run.config.policy.max_skipped_steps
    in_a_row = run.num_skipped_in_a_row
    if in_a_row <= limit:
        return
    # A resumed run counts from 0 again; it would stop at once otherwise.
    run.counters[IN_A_ROW] = 0.0
    run.save_if_due(step, position, is_last=True)
    saved = "Nothing was saved, as checkpointing.enabled is false"
    if run.config.checkpointing.enabled:
        saved = (
            f"Step {step} was saved with the last finite weights, and a resumed run continues with"
            " the rows after it"
        )
    raise SkippedStepsError(
        f"{in_a_row} optimizer steps in a row were skipped up to step {step}, more than"
        f" policy.max_skipped_steps={limit} allows: their loss or gradients were not finite. Their"
        f" rows are in {run.directory.skipped(step).parent}. {saved}."
        f" Remove such rows, lower policy.optimizer.lr (now {run.config.policy.optimizer.lr:g}), or"
        " raise policy.max_skipped_steps"
    )


def _count(counters: dict[str, float], skipped: Sequence[bool]) -> int:
    """Update the totals; return the longest sequence of skipped steps that ends in these steps."""
    in_a_row = int(counters.get(IN_A_ROW, 0.0))
    longest = in_a_row
    for is_skipped in skipped:
        in_a_row = in_a_row + 1 if is_skipped else 0
        longest = max(longest, in_a_row)
    counters[TOTAL] = counters.get(TOTAL, 0.0) + sum(skipped)
    counters[IN_A_ROW] = float(in_a_row)
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


_SEED_OFFSET = 2**31
"""Separates the sampling streams of validation and of training steps."""


@dataclass(frozen=True, kw_only=True)
class AnswerSampling:
    """How validation answers are sampled and counted."""

    temperature: float = 0.0
    num_samples: int = 1
    """Answers per prompt."""
    pass_reward: float = 1.0
    """An answer with at least this reward is correct, for avg@n and pass@k."""
    top_p: float | None = None
    """None, here and below: as in training."""
    top_k: int | None = None
    max_new_tokens: int | None = None

    def applied(self, config: GenerationConfig) -> GenerationConfig:
        """Return the config of generation with the values of validation answers."""
        return replace(
            config,
            temperature=self.temperature,
            top_p=config.top_p if self.top_p is None else self.top_p,
            top_k=config.top_k if self.top_k is None else self.top_k,
            max_new_tokens=self.max_new_tokens or config.max_new_tokens,
        )


def is_due(step: int, period: int, *, is_last: bool) -> bool:
    """Return True every `period` steps (0: never) and always at the last step."""
    return is_last or (period > 0 and step % period == 0)


def answer_seeds(seed: int, step: int, num_rows: int) -> np.ndarray:
    """Return the seed of each validation answer, uint64 [num_rows].

    `seed` is the seed of the run. Fewer rows have the seeds of the first ones.
    """
    return row_seeds(seed, _SEED_OFFSET + step, num_rows)


def score_answers(
    run: TrainingRun,
    sets: Sequence[PromptSet],
    step: int,
    sampling: AnswerSampling = AnswerSampling(),
) -> Metrics:
    """Generate answers to the prompts of all sets, score them and return `validation/*`.

    Without prompts there are no metrics. The generator must have the weights of `step`: raises
    RuntimeError if its completions have another version.
    """
    prompts: list[Prompt] = []
    for each in sets:
        prompts += each.prompts
    if not prompts:
        return {}
    config = run.config
    with run.progress.phase("validation", len(prompts)) as phase, run.generating():
        # One job for all sets, so that the generator is idle once, at the end.
        job = run.rollouts.start(
            prompts,
            group_size=sampling.num_samples,
            sampling=SamplingParams.from_config(sampling.applied(config.policy.generation)),
            max_total_length=config.policy.max_total_sequence_length,
            seeds=answer_seeds(config.seed, step, len(prompts) * sampling.num_samples),
        )
        rollout = run.finish_rollout(job)
        rollout.check_versions(step, step)
        phase.advance(len(prompts))
    show_rollout(run, rollout, "validation", f"validation samples at step {step}")
    metrics: Metrics = {}
    first_row = 0
    for each in sets:
        num_rows = len(each.prompts) * sampling.num_samples
        rows = np.arange(first_row, first_row + num_rows)
        metrics |= _set_metrics(rollout, each, rows, sampling)
        first_row += num_rows
    return metrics


def _set_metrics(
    rollout: Rollout, prompts: PromptSet, rows: np.ndarray, sampling: AnswerSampling
) -> Metrics:
    """Return the metrics of one set, whose answers are `rows` int64 [n]."""
    if len(rows) == 0:
        return {}
    metrics = answer_metrics(
        rollout, rows, num_samples=sampling.num_samples, pass_reward=sampling.pass_reward
    )
    return named_metrics(prompts.name, metrics)


def show_rollout(run: TrainingRun, rollout: Rollout, name: str, title: str) -> None:
    """Print and log the first `logger.num_samples_shown` rows of a rollout with their rewards."""
    num_shown = min(run.config.logger.num_samples_shown, rollout.batch.size)
    samples = [record_sample(record) for record in rollout.records(rows=range(num_shown))]
    run.progress.show_table(samples, title)
    run.media.samples[f"samples/{name}"] = samples


class EpochTask(Protocol):
    """What an algorithm does in such a run."""

    def show_rows(self, run: TrainingRun) -> None:
        """Print the first rows of the file, decoded."""
        ...

    def train_step(self, run: TrainingRun, step: int) -> StepWork:
        """Train on the next rows after `step` steps; return them and what was computed."""
        ...

    def validate(self, run: TrainingRun, step: int) -> Metrics:
        """Return the metrics of all validation sets after `step` steps."""
        ...


def run_epochs(
    source: ExampleSource[ExampleT],
    loader: BatchLoader[ExampleT],
    open_task: Callable[[], EpochTask],
) -> RunResult:
    """Train until the limits of the config end the run; return paths and last metrics.

    `open_task` is called before the run starts: it encodes the validation rows, so that a bad row
    is an error before the first step. Raises ConfigError for wrong input.
    """
    source.encode_ahead(loader.rows_of_batches(source.last_step(loader, 0)))
    total = source.last_step(loader, 0)
    task = open_task()
    with open_training_run(
        source.config, source.data, num_steps=total, num_optimizer_steps=total
    ) as run:
        step = run.resume(loader)
        if step == 0:
            task.show_rows(run)
            if source.config.epoch_loop.val_at_start:
                run.add_metrics(task.validate(run, step))
                run.log_metrics(step)
        return run.finalize(_train(run, source, loader, task, step))


def _train(
    run: TrainingRun,
    source: ExampleSource[ExampleT],
    loader: BatchLoader[ExampleT],
    task: EpochTask,
    step: int,
) -> int:
    """Train from `step` to the end of the run; return the last step."""
    # The files can have changed since the checkpoint, and the number of steps with them.
    total = source.last_step(loader, step)

    def is_end() -> bool:
        return (total is not None and step >= total) or loader.is_finished(source.rows.is_kept)

    # A run without any row left ends with the error of the loader, not after 0 steps.
    is_last = step > 0 and is_end()
    with run.progress.phase(run.config.kind, total, unit="steps", done=step) as phase:
        while not is_last and not run.stops_early:
            run.stop_if_requested(step, loader)
            with run.timers("step"):
                work = task.train_step(run, step)
            step += 1
            phase.advance()
            is_last = is_end()
            if is_due(step, run.config.epoch_loop.val_period, is_last=is_last):
                run.add_metrics(task.validate(run, step))
            run.log_step(step, work)
            # With a mixture an epoch need not have every row.
            if loader.epoch > 0 and loader.mixture is None:
                check_trained(run.config, run.counters)
            # After the log, because it can end the run.
            stop_if_too_many(run, step, loader)
            run.save_if_due(step, loader, is_last=is_last)
    check_trained(run.config, run.counters)
    num_left_out = loader.num_left_out(source.rows.is_kept)
    if num_left_out:
        run.progress.print_line(
            f"data.batching.tail=drop leaves out {counted(num_left_out, 'row')} of the last epoch"
        )
    return step
