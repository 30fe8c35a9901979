"""One rank of the policy: computes log-probs, trains and evaluates its shard.

It knows plans, losses and metrics, and no engine. The division that makes a step independent of how
its rows were split happens only here: the counts of the complete optimizer step are summed
over the dp ranks before the first backward, each microbatch contributes loss_sum / count, and the
engine sums gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_like.config.loss import LogprobName
from nemo_like.config.schema import PolicyConfig
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import Microbatch, PlanSpec, RankPlan
from nemo_like.distributed.batched_data_dict import SlicedDataDict
from nemo_like.losses import GlobalCounts, Loss, LossInputs, fetch_metrics
from nemo_like.metrics import Max, Mean, Metrics, Sum, merge_metrics
from nemo_like.policy.batching import shared_prefix_mode
from nemo_like.policy.decoder_layers import CompilationCounter
from nemo_like.policy.device import DeviceInfo, peak_flops, reset_peak_memory, total_memory_bytes
from nemo_like.policy.engine import Engine
from nemo_like.policy.frozen_models import ReferenceModel, SharedReference, Teachers, WorkerSave
from nemo_like.policy.heads.row_outputs import (
    compute_row_logprobs,
    keeping_logprobs,
    shard_scores,
    unpack_outputs,
)
from nemo_like.policy.heads.targets import TargetSettings
from nemo_like.policy.inputs.images import ImageFiles
from nemo_like.policy.isolation import IsolationReport, probe_isolation
from nemo_like.policy.loss_step import (
    LossStep,
    SkippedStep,
    gradient_metrics,
    max_over_mean,
    memory_metrics,
    row_loss_sums,
)
from nemo_like.policy.optim import LARGEST, NonFiniteError, learning_rate, learning_rate_scale
from nemo_like.policy.outputs import PLAIN, TokenDistribution
from nemo_like.policy.shard_rows import LogprobHandle, LogprobStore, ShardRows
from nemo_like.run import directory as run_directory
from nemo_like.run.files import FileRecord
from nemo_like.sampling_filter import SamplingFilter

if TYPE_CHECKING:
    from nemo_like.weight_sync.channel import ChannelRequest, ChannelSpec, Endpoint, SentWeights
    from nemo_like.weight_sync.transfer import WeightSender

Columns = Mapping[str, np.ndarray | Jagged]


class PolicyWorker:
    """One rank of the policy, with one engine, and for the reference a frozen one.

    Every method is called on all ranks.

    `EngineWorker` loads the models.
    """

    def __init__(
        self,
        config: PolicyConfig,
        policy: Engine,
        reference: Engine | None,
        teachers: Sequence[Engine] = (),
    ) -> None:
        """`reference` is `policy` itself if the reference shares its frozen weights."""
        self.config = config
        self.engine = policy
        self._reference: ReferenceModel | SharedReference | None = None
        self.engines = [policy]
        if reference is policy:
            self._reference = SharedReference(policy, config.lora)
        elif reference is not None:
            self._reference = ReferenceModel(reference)
            self.engines.append(reference)
        self._logprobs = LogprobStore()
        self.teachers = Teachers(teachers, policy)
        self._skipped: list[SkippedStep] = []
        self._trained_logprobs: Jagged | None = None
        self._pending_save: WorkerSave | None = None
        is_compiled = config.compiles_layers(policy.device.type, is_dense=True)
        self._compilations = CompilationCounter() if is_compiled else None

    @cached_property
    def _weights(self) -> WeightSender:
        """Sends weights to the generator."""
        # Imported on demand: only a run with a generator sends weights.
        from nemo_like.weight_sync.transfer import WeightSender

        return WeightSender(
            self.engine,
            adapters_only=self.config.sends_adapters,
            constant=self.engine.constant_weights(),
        )

    def device_info(self) -> DeviceInfo:
        """Return the speed and memory of this worker's device."""
        peak, source = peak_flops(self.engine.device)
        memory_bytes = total_memory_bytes(self.engine.device)
        return DeviceInfo(peak_flops=peak, peak_flops_source=source, memory_bytes=memory_bytes)

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
        distribution. Without `as_sampled` all refer to the models' own distributions, at
        temperature 1 and unfiltered. The log-probs of the previous call are released. Raises
        ValueError for `reference_logprobs` without a reference.
        """
        sampled = self._sampling_distribution if as_sampled else PLAIN
        sources: dict[LogprobName, tuple[Engine, TokenDistribution]] = {
            "prev_logprobs": (self.engine, sampled)
        }
        if self._reference is not None:
            unfiltered = replace(sampled, token_filter=None)
            sources["reference_logprobs"] = (self._reference.engine, unfiltered)
        names = tuple(sources if names is None else names)
        missing = [name for name in names if name not in sources]
        if missing:
            raise ValueError(
                f"this worker cannot compute {', '.join(missing)}, but {', '.join(sources)};"
                " reference_logprobs need a worker that was started with needs_reference=True"
            )
        self._logprobs.start_pass()
        plan = _logprob_plan(shard)
        rows = self.rows(shard, plan.spec)
        columns: dict[str, Jagged] = {}
        for name in names:
            engine, distribution = sources[name]
            inputs = map(rows.inputs, plan.microbatches)
            with self._computing(name):
                parts = compute_row_logprobs(engine, inputs, distribution)
            # Only the training pass reports compute time; intervals would accumulate.
            engine.clock.drop()
            # Pipeline stages but the last have no parts.
            if parts:
                columns[name] = rows.in_shard_order(plan.microbatches, parts, self.engine.ranks)
        return self._logprobs.keep(columns, names)

    def compute_targets(self, shard: SlicedDataDict, settings: TargetSettings) -> LogprobHandle:
        """Run the teachers on the microbatches of the plan and keep their results on this rank.

        The shard of a worker with several teachers has the row column `teacher`, the index of the
        teacher of each row. `train` and `evaluate` with the handle compute the divergence from the
        teachers, for `losses.likelihood`. The results are released by the next pass and when the
        model is offloaded. Raises ValueError without teachers.
        """
        assert shard.plan is not None, "a shard of BatchedDataDict.shard has a plan"
        self._logprobs.start_pass()
        rows = self.rows(shard, shard.plan.spec)
        targets = self.teachers.compute(rows, shard.plan.microbatches, settings)
        return self._logprobs.keep_targets(targets)

    def fetch_logprobs(self, shard: SlicedDataDict, logprobs: LogprobHandle) -> dict[str, Jagged]:
        """Return kept log-probs, float32 [T] over the tokens of the shard in its row order.

        Empty on all pipeline stages but the last. Raises ValueError if `logprobs` is not the handle
        of the latest call of `compute_logprobs`.
        """
        return self._logprobs.columns(logprobs, shard["input_ids"])

    def compute_scores(self, shard: SlicedDataDict) -> np.ndarray | None:
        """Compute the score of each row of the shard, float32 [B], without gradients.

        The budget is `logprob_mb_tokens`. None on all pipeline stages but the last. Raises
        ValueError for a model without a score head.
        """
        return shard_scores(self.engine, shard, _logprob_plan(shard))

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
        `skipped_steps` describes it. A step without a trained token changes nothing. Returns the
        metrics of each step over all dp ranks, equal on all of them. Raises ValueError for a handle
        that `fetch_logprobs` refuses, and NonFiniteError when a step leaves weights that are not
        finite.
        """
        plan = shard.plan
        assert plan is not None, "a shard of BatchedDataDict.shard has a plan"
        rows = self._training_rows(shard, plan, columns, logprobs)
        self._skipped = []
        self._trained_logprobs = None
        parts: list[Jagged] | None = [] if keep_logprobs else None
        steps = []
        for step in range(plan.num_steps):
            steps.append(self._train_step(rows, plan.step(step), loss, step, parts))
        # Pipeline stages but the last have no parts.
        if parts:
            self._trained_logprobs = rows.in_shard_order(
                plan.microbatches, parts, self.engine.ranks
            )
        return steps

    def fetch_trained_logprobs(self) -> Jagged | None:
        """Return the log-probs of the last `train`, float32 [T] in the row order of its shard.

        0 for tokens that are not trained. None without `keep_logprobs`, and on all pipeline stages
        but the last.
        """
        return self._trained_logprobs

    def measure_gradient(
        self,
        shard: SlicedDataDict,
        columns: Columns | None,
        loss: Loss,
        logprobs: LogprobHandle | None = None,
    ) -> Metrics:
        """Return the metrics of the first optimizer step of the plan without taking it.

        They are the metrics of the loss, the gradient's norm before clipping, and the counts.
        Weights and optimizer state do not change. The arguments are as in `train`.
        """
        plan = shard.plan
        assert plan is not None, "a shard of BatchedDataDict.shard has a plan"
        rows = self._training_rows(shard, plan, columns, logprobs)
        counts, step_fn = self._loss_step(rows, plan.step(0), loss)
        inputs = map(rows.inputs, plan.step(0))
        results = self.engine.run(inputs, step_fn, self._distribution(loss), backward=True)
        grad_norm = self.engine.gradient_norm(is_loss_finite=step_fn.is_finite())
        local_metrics = merge_metrics(fetch_metrics([metrics for metrics, _ in results]))
        metrics = self.engine.ranks.reduce_over_dp_cp(local_metrics, merge_metrics)
        return metrics | gradient_metrics(grad_norm, counts)

    def skipped_steps(self) -> list[SkippedStep]:
        """Return the skipped steps of the last `train`, with the rows of this dp rank.

        Only the last pipeline stage knows the rows.
        """
        return self._skipped

    def evaluate(
        self, shard: SlicedDataDict, loss: Loss, logprobs: LogprobHandle | None = None
    ) -> Metrics:
        """Return the loss's metrics over all rows of all dp ranks, without gradients.

        `logprobs` is as in `train`.
        """
        plan = _logprob_plan(shard)
        rows = self.rows({**shard, **self._kept_logprobs(shard, logprobs)}, plan.spec, logprobs)
        rows = rows.with_episodes(plan.microbatches, self.engine.ranks)
        # Only the metrics are used, so the loss is not normalized.
        step_fn = LossStep(loss, 1.0, self.engine.ranks)
        inputs = map(rows.inputs, plan.microbatches)
        results = self.engine.run(inputs, step_fn, self._distribution(loss), backward=False)
        local_metrics = merge_metrics(fetch_metrics([metrics for metrics, _ in results]))
        return self.engine.ranks.reduce_over_dp_cp(local_metrics, merge_metrics)

    def probe_isolation(self) -> IsolationReport:
        """Check that rows of a microbatch do not see each other; raises IsolationError."""
        is_packed = self.config.sequence_packing.enabled
        shares = shared_prefix_mode(self.config, self.engine.spec) is not False
        return probe_isolation(
            self.engine,
            layout="packed" if is_packed else "padded",
            max_length=self.config.max_total_sequence_length,
            with_shared_prefixes=is_packed and shares,
            vocab_size=self.engine.spec.vocab_size,
            precision=self.config.precision,
        )

    def weight_endpoint(self) -> Endpoint:
        """See `WeightSource.weight_endpoint`."""
        return self._weights.endpoint()

    def open_weight_channel(self, request: ChannelRequest) -> ChannelSpec | None:
        """See `WeightSource.open_weight_channel`."""
        return self._weights.open(request)

    def send_weights(self, is_first: bool) -> SentWeights:
        """See `WeightSource.send_weights`."""
        return self._weights.send(is_first)

    def close_weight_channel(self) -> None:
        """See `WeightSource.close_weight_channel`."""
        self._weights.close()

    def save(self, directory: str | Path) -> dict[str, FileRecord]:
        """Write this rank's shard of weights and optimizer; returns its files' records.

        Raises NonFiniteError, before anything is written, if a weight or a moment is not finite.
        """
        self._start_save(directory, in_background=False)
        return self.finish_save()

    def start_save(self, directory: str | Path) -> None:
        """Copy this rank's shard to host memory and write it in a thread; see `save`.

        Training may continue at once. Call `finish_save` before the next save.
        """
        self._start_save(directory, in_background=True)

    def is_save_written(self) -> bool:
        """Return True if `finish_save` would not wait for this rank's files."""
        return self._pending_save is None or self._pending_save.is_written()

    def finish_save(self) -> dict[str, FileRecord]:
        """Wait until the checkpoint of `start_save` is complete; returns the files' records.

        Raises WriteError if a file could not be written.
        """
        pending = self._pending_save
        if pending is None:
            raise RuntimeError("no save has been started; call start_save first")
        # Also after an error: the next save starts from the beginning.
        self._pending_save = None
        return pending.finish()

    def _start_save(self, directory: str | Path, *, in_background: bool) -> None:
        if self._pending_save is not None:
            raise RuntimeError("the previous save is not finished; call finish_save first")
        self._check_finite(with_moments=True)
        path = Path(directory)
        policy = self.engine.save(path, in_background=in_background)
        reference = None
        if self._reference is not None:
            reference = self._reference.save(path, in_background=in_background)
        self._pending_save = WorkerSave(policy, reference)

    def load(self, directory: str | Path) -> None:
        """Read what `save` wrote with any number of ranks.

        The reference changes only if it had been updated before the save. Raises NonFiniteError if
        a weight or a moment is not finite.
        """
        self.engine.load(Path(directory))
        if not self.engine.is_finite(with_moments=True):
            raise NonFiniteError(
                f"{directory} has weights or optimizer moments that are not finite, or weights"
                f" larger than {LARGEST:.2g};"
                " remove this checkpoint, so that an earlier one is loaded"
            )
        if self._reference is not None:
            self._reference.load(Path(directory))

    def update_reference(self) -> None:
        """Copy the policy's weights into the reference. Raises ValueError without a reference."""
        if self._reference is None:
            raise ValueError(
                "this worker has no reference to update; start it with needs_reference=True"
            )
        self._reference.update(self.engine)

    def export_hf(self, directory: str | Path, *, ema: bool = False) -> None:
        """Write a transformers model directory on rank 0, with `ema` of the averaged weights.

        Raises NonFiniteError if a weight is not finite, RuntimeError without averages.
        """
        self._check_finite()
        with self.engine.ema_weights() if ema else nullcontext():
            self.engine.export_hf(Path(directory))

    def answer_directory_probe(self, folder: str, token: str) -> str:
        """See `run_directory.answer`."""
        return run_directory.answer(folder, token, self.engine.rank)

    def offload(self) -> None:
        """Move weights and optimizer state to host memory."""
        self._logprobs.release_targets()
        for engine in self.engines:
            engine.offload()

    def onload(self) -> None:
        """Move weights and optimizer state back to the device."""
        for engine in self.engines:
            engine.onload()

    def _computing(self, name: LogprobName) -> AbstractContextManager[None]:
        """Return the context in which the engine of `name` computes these log-probs."""
        if name != "reference_logprobs" or self._reference is None:
            return nullcontext()
        return self._reference.computing()

    def _kept_logprobs(
        self, shard: SlicedDataDict, logprobs: LogprobHandle | None
    ) -> Mapping[str, Jagged]:
        """Return the kept log-probs of a handle, float32 [T] each; none without a handle."""
        return {} if logprobs is None else self._logprobs.columns(logprobs, shard["input_ids"])

    def _training_rows(
        self,
        shard: SlicedDataDict,
        plan: RankPlan,
        columns: Columns | None,
        logprobs: LogprobHandle | None,
    ) -> ShardRows:
        """Return the rows of the shard with `columns`, [B, ...] or [T] each, and log-probs."""
        kept = self._kept_logprobs(shard, logprobs)
        rows = self.rows({**shard, **(columns or {}), **kept}, plan.spec, logprobs)
        return rows.with_episodes(plan.microbatches, self.engine.ranks)

    def rows(
        self, columns: Mapping[str, Any], spec: PlanSpec, handle: LogprobHandle | None = None
    ) -> ShardRows:
        cp_rank = self.engine.ranks.cp_rank
        targets = self._logprobs.targets(handle)
        images = None
        if "images" in columns:
            images = self._image_files.rows(columns["input_ids"], columns["images"])
        return ShardRows(columns, spec, cp_rank, self.engine.device, targets, images)

    @cached_property
    def _image_files(self) -> ImageFiles:
        """Reads images of rows; its cache lasts for the run."""
        vision = self.config.vision
        return ImageFiles.open(
            self.engine.model_config,
            Path(self.config.model_name),
            vision.min_pixels,
            vision.max_pixels,
        )

    @property
    def _sampling_distribution(self) -> TokenDistribution:
        """The distribution that completions are sampled from."""
        generation = self.config.generation
        return TokenDistribution(
            # Temperature 0 is greedy decoding. Its log-probs refer to the unscaled distribution.
            temperature=generation.temperature or 1.0,
            token_filter=SamplingFilter.from_config(generation),
        )

    def _distribution(self, loss: Loss) -> TokenDistribution:
        """Return the distribution of the log-probs that `loss` is computed from."""
        base = self._sampling_distribution if loss.uses_sampling_distribution else PLAIN
        return replace(base, with_entropy=loss.needs_entropy)

    def _train_step(
        self,
        rows: ShardRows,
        microbatches: Sequence[Microbatch],
        loss: Loss,
        index: int,
        kept: list[Jagged] | None,
    ) -> Metrics:
        """Take optimizer step `index` of a call of `train`; returns its metrics over all ranks.

        The log-probs of each microbatch, float32 [T], are appended to `kept`.
        """
        engine = self.engine
        counts, step_fn = self._loss_step(rows, microbatches, loss)
        lr = learning_rate(engine.num_optimizer_steps, self.config.optimizer, self.config.scheduler)
        lr *= learning_rate_scale(self.config.scheduler, counts)
        reset_peak_memory(engine.device)
        # Drops intervals that were measured outside of training, for example in evaluation.
        engine.clock.drop()
        inputs = map(rows.inputs, microbatches)
        distribution = self._distribution(loss)
        if kept is None:
            results = engine.run(inputs, step_fn, distribution, backward=True)
        else:
            keeping = keeping_logprobs(engine, step_fn)
            with_outputs = engine.run(inputs, keeping, distribution, backward=True)
            results = [result for result, _ in with_outputs]
            kept += unpack_outputs([outputs for _, outputs in with_outputs])
        seconds = engine.clock.pop_seconds()
        num_steps_before = engine.num_optimizer_steps
        if counts.num_tokens > 0:
            grad_norm = engine.optimizer_step(lr, is_loss_finite=step_fn.is_finite())
        else:
            # An update would decay the weights and the moments of the optimizer.
            grad_norm = engine.gradient_norm()
        is_skipped = counts.num_tokens > 0 and engine.num_optimizer_steps == num_steps_before
        # A finite gradient can still push a weight beyond the limit.
        self._check_finite()
        if is_skipped:
            loss_inputs = [each for _, each in results]
            self._record_skipped(index, grad_norm, loss, rows, microbatches, loss_inputs)
        local_metrics = merge_metrics(fetch_metrics([metrics for metrics, _ in results]))
        if self._compilations is not None:
            local_metrics["policy/recompilations"] = Max(self._compilations.pop())
        own = (local_metrics, seconds, engine.ranks.rank)
        metrics = engine.ranks.reduce_over_dp_cp(own, _merge_ranks)
        metrics |= gradient_metrics(grad_norm, counts)
        metrics["policy/skipped_steps"] = Sum(float(is_skipped))
        metrics["policy/lr"] = Mean(lr)
        return metrics | engine.expert_metrics() | memory_metrics(engine)

    def _loss_step(
        self, rows: ShardRows, microbatches: Sequence[Microbatch], loss: Loss
    ) -> tuple[GlobalCounts, LossStep]:
        """Count the optimizer step over the dp ranks; return the counts and the step function."""
        sums = self.engine.ranks.sum_over_dp(rows.count(microbatches))
        # The shares of the rows of an episode add up to 1 but for rounding errors.
        counts = GlobalCounts(*(round(total, 6) for total in sums))
        return counts, LossStep(loss, loss.denominator(counts), self.engine.ranks)

    def _record_skipped(
        self,
        index: int,
        grad_norm: float,
        loss: Loss,
        rows: ShardRows,
        microbatches: Sequence[Microbatch],
        loss_inputs: Sequence[LossInputs],
    ) -> None:
        """Append to `skipped_steps`, with the loss of each row of this dp rank."""
        losses: dict[int, float] = {}
        # `loss_inputs` is empty on all pipeline stages but the last.
        for microbatch, inputs in zip(microbatches, loss_inputs, strict=bool(loss_inputs)):
            part, _, group_rank = rows.own_part(microbatch)
            part_losses = dict(zip(part.rows, row_loss_sums(loss, inputs), strict=False))
            # Each context-parallel rank has the loss of its share of every row, or the loss of
            # coupled rows in full.
            if group_rank == 0 or loss.coupled_rows(inputs) is None:
                losses |= part_losses
        dp_rank = self.engine.ranks.dp_rank
        sums: dict[int, float] = {}
        for rank, shares in self.engine.ranks.gather_over_dp_cp((dp_rank, losses)):
            if rank == dp_rank:
                sums |= {row: sums.get(row, 0.0) + share for row, share in shares.items()}
        self._skipped.append(SkippedStep(index=index, grad_norm=grad_norm, row_losses=sums))

    def _check_finite(self, *, with_moments: bool = False) -> None:
        """Raise NonFiniteError if the policy's weights, or its moments, are not finite."""
        if self.engine.is_finite(with_moments=with_moments):
            return
        checked = "weights or optimizer moments" if with_moments else "weights"
        raise NonFiniteError(
            f"the policy's {checked} are not finite, or larger than {LARGEST:.2g}, after optimizer"
            f" step {self.engine.num_optimizer_steps}. They are neither saved nor exported, and no"
            f" completion is sampled from them. Lower policy.optimizer.lr (now"
            f" {self.config.optimizer.lr:g}), then run again"
        )


def _merge_ranks(ranks: Sequence[tuple[Metrics, float, int]]) -> Metrics:
    """Merge (metrics, compute seconds, rank) of all ranks of an optimizer step.

    Adds the times of the ranks. The times of several optimizer steps of a step add up.
    """
    metrics = merge_metrics(rank_metrics for rank_metrics, _, _ in ranks)
    times = [seconds for _, seconds, _ in ranks]
    metrics["policy/rank_time_worst_over_mean"] = Mean(max_over_mean(times))
    metrics["policy/rank_time_min_s"] = Sum(min(times))
    metrics["policy/rank_time_mean_s"] = Sum(sum(times) / len(times))
    metrics["policy/rank_time_max_s"] = Sum(max(times))
    # A mean of ranks is the rank that was the slowest in every optimizer step, or not one at all.
    metrics["policy/rank_time_slowest"] = Mean(float(max(ranks, key=lambda each: each[1])[2]))
    return metrics


def _logprob_plan(shard: SlicedDataDict) -> RankPlan:
    """Plan of forward-only passes; the training plan where one plan serves both."""
    plan = shard.plan if shard.logprob_plan is None else shard.logprob_plan
    assert plan is not None, "a shard of BatchedDataDict.shard has a plan"
    return plan
