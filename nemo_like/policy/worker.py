"""One rank of the policy: it computes log-probs, trains and evaluates its shard. It knows plans, losses and
metrics, and no engine.

The division that makes a step independent of how its rows were split happens here and nowhere else:
the counts of the whole optimizer step are summed over the dp ranks before the first backward, each
microbatch contributes loss_sum / count, and the engine sums gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_like import shared_directory
from nemo_like.config.schema import PolicyConfig
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.cost import CostModel
from nemo_like.data.planning.plan import Microbatch, PlanSpec, RankPlan
from nemo_like.distributed import activity
from nemo_like.distributed.batched_data_dict import SlicedDataDict
from nemo_like.files import FileRecord
from nemo_like.losses import GlobalCounts, Loss, LossInputs, NllLoss
from nemo_like.metrics import Max, Mean, Metrics, Sum, merge_metrics
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.device_flops import peak_flops, peak_memory_bytes, reset_peak_memory
from nemo_like.policy.engine import Engine, Sync, TokenLogprobs
from nemo_like.policy.isolation import IsolationReport, probe_isolation
from nemo_like.policy.model_inputs import ModelInputs, build_inputs, num_predicted_tokens
from nemo_like.policy.nonfinite import SkippedStep, row_loss_sums
from nemo_like.policy.optim import LARGEST, NonFiniteError, learning_rate
from nemo_like.policy.row_logprobs import compute_row_logprobs
from nemo_like.sampling_filter import SamplingFilter
from nemo_like.weight_sync.stream import Bucket, plan_buckets

Columns = Mapping[str, np.ndarray | Jagged]
_NUM_TRAINED = "num_trained_tokens"


@dataclass(frozen=True, kw_only=True)
class PolicyInfo:
    """What a driver needs to know of the policy to plan batches and to report throughput."""

    num_params: int
    num_workers: int
    cost: CostModel
    """Forward FLOPs of a row, from the model's configuration."""
    sync: Sync
    """Where the ranks wait for each other."""
    peak_flops: float
    """FLOPs per second one worker's device could do at best."""
    peak_flops_source: str


class PolicyWorker:
    """Drives one engine, and a frozen second one as reference. `DTensorPolicyWorker` says which
    engines those are.
    """

    def __init__(self, config: PolicyConfig, policy: Engine, reference: Engine | None) -> None:
        self.config = config
        self._policy = policy
        self._reference = reference
        self._buckets: list[list[str]] = []
        self._skipped: list[SkippedStep] = []

    def compute_logprobs(self, shard: SlicedDataDict) -> dict[str, Jagged]:
        """`prev_logprobs` (and `reference_logprobs`, with a reference) of the shard's rows, in its
        order.

        Float32 per token at the sampling temperature; 0 for tokens that are not trained.
        `prev_logprobs` are those of the distribution that is sampled from, `reference_logprobs`
        those of the reference's whole distribution.
        """
        plan = _score_plan(shard)
        rows = self._rows(shard, plan.spec)
        engines = {"prev_logprobs": (self._policy, self._sampling_filter)}
        if self._reference is not None:
            engines["reference_logprobs"] = (self._reference, None)
        outputs = {}
        for name, (engine, token_filter) in engines.items():
            inputs = map(rows.inputs, plan.microbatches)
            parts = compute_row_logprobs(
                engine, inputs, temperature=self._sampling_temperature, token_filter=token_filter
            )
            if parts:  # only the last pipeline stage has them, and only its results are fetched
                outputs[name] = rows.in_shard_order(plan.microbatches, parts)
        return outputs

    def train(self, shard: SlicedDataDict, columns: Columns | None, loss: Loss) -> list[Metrics]:
        """One optimizer step for each step of the plan; `columns` join the shard's, row by row.

        A step whose loss or gradients are not finite is skipped (`Engine.optimizer_step`);
        `skipped_steps` describes it. Returns the metrics of each step, over all dp ranks and so
        equal on all of them. Raises NonFiniteError when a step leaves weights that are not finite.
        """
        assert shard.plan is not None, "a shard of BatchedDataDict.shard has a plan"
        rows = self._rows({**shard, **(columns or {})}, shard.plan.spec)
        num_steps = len(shard.plan.step_offsets) - 1
        self._skipped = []
        return [
            self._train_step(rows, shard.plan.step(step), loss, step) for step in range(num_steps)
        ]

    def skipped_steps(self) -> list[SkippedStep]:
        """The steps of the last call of `train` that were skipped, with the rows of this dp rank.

        Only the last pipeline stage knows the rows.
        """
        return self._skipped

    def evaluate(self, shard: SlicedDataDict, loss: Loss) -> Metrics:
        """The loss's metrics over all rows of all dp ranks, without gradients."""
        plan = _score_plan(shard)
        rows = self._rows(shard, plan.spec)
        options = self._score_options(loss)
        inputs = map(rows.inputs, plan.microbatches)
        results = self._policy.run(
            inputs, _LossStep(loss, denominator=1.0), backward=False, **options
        )
        parts = merge_metrics(metrics for metrics, _ in results)
        return merge_metrics(self._policy.gather_over_dp_cp(parts))

    def probe_isolation(self) -> IsolationReport:
        """Check on the model itself that rows of a microbatch do not see each other; IsolationError
        if they do.
        """
        return probe_isolation(
            self._policy,
            layout="packed" if self.config.sequence_packing.enabled else "padded",
            vocab_size=self._policy.model_config.vocab_size,
            precision=self.config.precision,
        )

    def info(self) -> PolicyInfo:
        """The model's size and cost, and the device's speed."""
        peak, source = peak_flops(self._policy.device)
        return PolicyInfo(
            num_params=sum(prod(shape) for shape in self._policy.weight_shapes().values()),
            num_workers=self._policy.topology.world_size,
            cost=CostModel.from_spec(ModelSpec.from_config(self._policy.model_config)),
            sync=self._policy.sync,
            peak_flops=peak,
            peak_flops_source=source,
        )

    def num_weight_buckets(self, max_bytes: int) -> int:
        """Cut the weights into buckets of at most `max_bytes` for the calls of `weight_bucket` that
        follow.
        """
        itemsize = 2 if self.config.precision == "bfloat16" else 4
        shapes = self._policy.weight_shapes()
        names = list(shapes)
        buckets = plan_buckets([prod(shape) * itemsize for shape in shapes.values()], max_bytes)
        self._buckets = [names[bucket.start : bucket.stop] for bucket in buckets]
        return len(self._buckets)

    def weight_bucket(self, index: int) -> Bucket | None:
        """Bucket `index` of the weights as they are now, on rank 0; the others help to gather it
        and return None.
        """
        activity.note(f"weight bucket {index + 1} of {len(self._buckets)}")
        weights = self._policy.full_weights(self._buckets[index])
        if self._policy.rank == 0:
            return Bucket.encode(weights)
        for _ in weights:
            pass
        return None

    def save(self, directory: str | Path) -> dict[str, FileRecord]:
        """Every rank writes its part of weights, optimizer and schedule into `directory` and
        returns its files' records.

        Raises NonFiniteError, before anything is written, if a weight or a moment is not finite.
        """
        self._check_finite(with_moments=True)
        return self._policy.save(Path(directory))

    def load(self, directory: str | Path) -> None:
        """Read what `save` wrote, with any number of ranks. The reference stays as it was.

        Raises NonFiniteError if a weight or a moment is not finite.
        """
        self._policy.load(Path(directory))
        if not self._policy.is_finite(with_moments=True):
            raise NonFiniteError(
                f"{directory} has weights or optimizer moments that are not finite, or weights"
                f" larger than {LARGEST:.2g};"
                " remove this checkpoint, so that an earlier one is loaded"
            )

    def export_hf(self, directory: str | Path) -> None:
        """Rank 0 writes a model that transformers loads; raises NonFiniteError if a weight is not
        finite.
        """
        self._check_finite()
        self._policy.export_hf(Path(directory))

    def answer_directory_probe(self, folder: str, token: str) -> str:
        """See `shared_directory.answer`."""
        return shared_directory.answer(folder, token, self._policy.rank)

    def offload(self) -> None:
        """Move everything out of the accelerator's memory."""
        for engine in filter(None, (self._policy, self._reference)):
            engine.offload()

    def onload(self) -> None:
        """Undo `offload`."""
        for engine in filter(None, (self._policy, self._reference)):
            engine.onload()

    def _rows(self, columns: Mapping[str, Any], spec: PlanSpec) -> _Rows:
        cp_rank = self._policy.topology.coordinates(self._policy.rank).cp
        return _Rows(columns, spec, cp_rank, self._policy.device)

    @property
    def _sampling_temperature(self) -> float:
        # Temperature 0 is greedy decoding; the distribution it was taken from is the model's own.
        return self.config.generation.temperature or 1.0

    @property
    def _sampling_filter(self) -> SamplingFilter | None:
        return SamplingFilter.from_config(self.config.generation)

    def _score_options(self, loss: Loss) -> dict[str, Any]:
        """Likelihood is of the model's own distribution, a policy gradient of the one that was
        sampled from.
        """
        if isinstance(loss, NllLoss):
            return {"temperature": 1.0, "with_entropy": loss.needs_entropy}
        return {
            "temperature": self._sampling_temperature,
            "with_entropy": loss.needs_entropy,
            "token_filter": self._sampling_filter,
        }

    def _train_step(
        self, rows: _Rows, microbatches: Sequence[Microbatch], loss: Loss, index: int
    ) -> Metrics:
        counts = GlobalCounts(*self._policy.sum_over_dp(rows.count(microbatches)))
        lr = learning_rate(
            self._policy.num_optimizer_steps, self.config.optimizer, self.config.scheduler
        )
        step_fn = _LossStep(loss, counts.denominator(loss.normalization))
        reset_peak_memory(self._policy.device)
        self._policy.clock.pop_seconds()
        inputs = map(rows.inputs, microbatches)
        results = self._policy.run(inputs, step_fn, backward=True, **self._score_options(loss))
        seconds = self._policy.clock.pop_seconds()
        num_applied = self._policy.num_optimizer_steps
        grad_norm = self._policy.optimizer_step(lr, is_loss_finite=step_fn.is_finite())
        is_skipped = self._policy.num_optimizer_steps == num_applied
        self._check_finite()
        if is_skipped:
            self._record_skipped(
                index, grad_norm, loss, microbatches, [seen for _, seen in results]
            )
        parts = merge_metrics(metrics for metrics, _ in results)
        gathered = self._policy.gather_over_dp_cp((parts, seconds))
        metrics = merge_metrics(rank_metrics for rank_metrics, _ in gathered)
        rank_seconds = [rank_seconds for _, rank_seconds in gathered]
        metrics["policy/grad_norm"] = Mean(grad_norm)
        metrics["policy/skipped_steps"] = Sum(float(is_skipped))
        metrics["policy/lr"] = Mean(lr)
        metrics["policy/num_tokens"] = Sum(counts.num_tokens)
        metrics["policy/num_rows"] = Sum(counts.num_rows)
        mean_seconds = sum(rank_seconds) / len(rank_seconds)
        metrics["policy/rank_time_worst_over_mean"] = Mean(
            max(rank_seconds) / mean_seconds if mean_seconds else 1.0
        )
        return metrics | self._memory_metrics()

    def _memory_metrics(self) -> Metrics:
        """The peak memory of the step: the largest of all ranks and their mean. None on a device
        that does not count it.
        """
        peak = peak_memory_bytes(self._policy.device)
        if peak is None:
            return {}
        peaks = self._policy.gather_over_world(peak)
        return {
            "policy/peak_memory_gb": Max(max(peaks) / 1e9),
            "policy/peak_memory_mean_gb": Mean(sum(peaks) / 1e9, len(peaks)),
        }

    def _record_skipped(
        self,
        index: int,
        grad_norm: float,
        loss: Loss,
        microbatches: Sequence[Microbatch],
        seen: Sequence[LossInputs],
    ) -> None:
        """Keep what `skipped_steps` returns. Context-parallel ranks each hold a part of every row,
        which are added up.
        """
        losses: dict[int, float] = {}
        for microbatch, inputs in zip(microbatches, seen, strict=bool(seen)):
            losses |= dict(zip(microbatch.rows, row_loss_sums(loss, inputs), strict=False))
        dp_rank = self._policy.topology.dp_rank(self._policy.rank)
        gathered = self._policy.gather_over_dp_cp((dp_rank, losses))
        shares = [share for rank, share in gathered if rank == dp_rank]
        sums = {row: sum((share[row] for share in shares), 0.0) for row in losses}
        self._skipped.append(SkippedStep(index=index, grad_norm=grad_norm, row_losses=sums))

    def _check_finite(self, *, with_moments: bool = False) -> None:
        if not self._policy.is_finite(with_moments=with_moments):
            what = "weights or optimizer moments" if with_moments else "weights"
            raise NonFiniteError(
                f"the policy's {what} are not finite, or larger than {LARGEST:.2g}, after optimizer"
                f" step"
                f" {self._policy.num_optimizer_steps}. They are neither saved nor exported, and no"
                f" completion is sampled"
                f" from them. Lower policy.optimizer.lr (now {self.config.optimizer.lr:g}), then"
                f" run again"
            )


@dataclass(frozen=True)
class _Rows:
    """A shard's rows as microbatches of tensors.

    `token_mask` says which tokens are trained, `row_mask` (absent means all) which rows.
    """

    columns: Mapping[str, Any]
    spec: PlanSpec
    cp_rank: int
    device: torch.device

    def count(self, microbatches: Iterable[Microbatch]) -> tuple[float, float]:
        """(trained tokens, rows that have any): what the summed loss is divided by, once summed
        over dp ranks.
        """
        counts = [self.num_trained_tokens(microbatch) for microbatch in microbatches]
        return float(sum(count.sum() for count in counts)), float(
            sum((count > 0).sum() for count in counts)
        )

    def num_trained_tokens(self, microbatch: Microbatch) -> np.ndarray:
        """int64 [R] of each row; [1] of 0 for a dummy."""
        counts = num_predicted_tokens(self.columns["token_mask"], microbatch)
        if "row_mask" in self.columns and microbatch.rows:
            counts = (
                counts * np.asarray(self.columns["row_mask"], dtype=bool)[list(microbatch.rows)]
            )
        return counts

    def inputs(self, microbatch: Microbatch) -> ModelInputs:
        """Model inputs whose `label_mask` is narrowed to trained tokens, so that only those meet
        the vocabulary.
        """
        activity.note(f"inputs of a microbatch of {len(microbatch.rows)} rows")
        inputs = build_inputs(
            self.columns, microbatch, self.spec, cp_rank=self.cp_rank, device=self.device
        )
        counts = torch.from_numpy(self.num_trained_tokens(microbatch)).to(
            self.device, torch.float32
        )
        is_trained_row = counts > 0
        mask = inputs.label_mask & inputs.columns["token_mask"] & is_trained_row[inputs.row_ids]
        row_columns = {**inputs.row_columns, _NUM_TRAINED: counts}
        return dataclasses.replace(inputs, label_mask=mask, row_columns=row_columns)

    def in_shard_order(self, microbatches: Sequence[Microbatch], parts: Sequence[Jagged]) -> Jagged:
        """The rows of `parts` (one Jagged per microbatch) where the shard has them; 0 for tokens
        that were cut off.
        """
        offsets = self.columns["input_ids"].offsets
        values = np.zeros(offsets[-1], dtype=np.float32)
        for microbatch, part in zip(microbatches, parts, strict=True):
            for row, outputs in zip(microbatch.rows, part, strict=True):
                values[offsets[row] : offsets[row] + len(outputs)] = outputs
        return Jagged(values, offsets)


@dataclass
class _LossStep:
    """What the engine does with the outputs of a microbatch: its share of the loss, its metrics, and
    what it was computed from.
    """

    loss: Loss
    denominator: float
    finite: Tensor | None = None
    """bool []: whether the loss of every microbatch so far was finite."""

    def __call__(
        self, inputs: ModelInputs, outputs: TokenLogprobs
    ) -> tuple[Tensor, tuple[Metrics, LossInputs]]:
        activity.note(f"loss of a microbatch of {inputs.num_tokens} tokens")
        entropy = outputs.entropy
        if entropy is not None and not self.loss.entropy_gradient:
            entropy = entropy.detach()
        loss_inputs = LossInputs(
            policy_logprobs=outputs.logprobs,
            unfiltered_logprobs=outputs.unfiltered_logprobs,
            token_mask=inputs.label_mask,
            row_ids=inputs.row_ids,
            row_num_tokens=inputs.row_columns[_NUM_TRAINED],
            columns=_loss_columns(inputs),
            entropy=entropy,
        )
        terms = self.loss(loss_inputs)
        finite = terms.loss_sum.detach().isfinite()
        self.finite = finite if self.finite is None else self.finite & finite
        seen = dataclasses.replace(
            loss_inputs,
            policy_logprobs=outputs.logprobs.detach(),
            unfiltered_logprobs=None
            if outputs.unfiltered_logprobs is None
            else outputs.unfiltered_logprobs.detach(),
            entropy=None if entropy is None else entropy.detach(),
        )
        return terms.loss_sum / self.denominator, (terms.metrics, seen)

    def is_finite(self) -> bool:
        """Of all microbatches on this rank; True where no loss is computed."""
        return self.finite is None or bool(self.finite)


def _score_plan(shard: SlicedDataDict) -> RankPlan:
    plan = shard.plan if shard.logprob_plan is None else shard.logprob_plan
    assert plan is not None, "a shard of BatchedDataDict.shard has a plan"
    return plan


def _loss_columns(inputs: ModelInputs) -> dict[str, Tensor]:
    """Every column of real numbers, one value per position; what is given per row holds for all its
    positions.
    """
    columns = {
        name: column.float()
        for name, column in inputs.columns.items()
        if column.is_floating_point()
    }
    for name, column in inputs.row_columns.items():
        if column.is_floating_point() and name != _NUM_TRAINED:
            columns[name] = column.float()[inputs.row_ids]
    return columns
