"""Processes for Megatron's ranks, and what they run: several checks in one process group, as
importing costs seconds.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from nemo_like.config.parallel import build_layout
from nemo_like.config.schema import OutputHead, ParallelConfig, PolicyConfig
from nemo_like.data.planning.plan import plan_batch
from nemo_like.distributed import process_groups
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import Loss, NllLoss
from nemo_like.metrics import metric_values
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.megatron.engine import MegatronEngine
from nemo_like.policy.megatron.groups import Groups
from nemo_like.policy.worker import PolicyWorker
from tests.policy.planned import planned
from tests.policy.test_gradient_equality import LENGTHS, POLICY_GRADIENT
from tests.policy.tiny import grouped_batch, random_batch

MAX_RANKS = 8
NUM_STEPS = 4
"""Optimizer steps of `reference.train_transformers`."""
Gradients = dict[str, Tensor]
"""By Hugging Face name."""

PARALLEL: dict[str, tuple[int, ParallelConfig]] = {
    "one rank": (1, ParallelConfig()),
    "dp2": (2, ParallelConfig()),
    "tp2": (2, ParallelConfig(tensor=2)),
    "tp2 + sp": (2, ParallelConfig(tensor=2, sequence=True)),
    "pp2": (2, ParallelConfig(pipeline=2)),
    "pp2 x v2": (2, ParallelConfig(pipeline=2, virtual_pipeline=2)),
    "cp2": (2, ParallelConfig(context=2)),
    "dp2 x cp2, dynamic": (4, ParallelConfig(context=2, dynamic_context=True)),
    "ep2": (2, ParallelConfig(expert=2)),
    "tp2 x ep2 + sp": (2, ParallelConfig(tensor=2, expert=2, sequence=True)),
    "tp2 x dp2": (4, ParallelConfig(tensor=2)),
    "tp2 x pp2": (4, ParallelConfig(tensor=2, pipeline=2)),
    "tp2 x pp2 + sp": (4, ParallelConfig(tensor=2, pipeline=2, sequence=True)),
    "tp2 x cp2 + sp": (4, ParallelConfig(tensor=2, context=2, sequence=True)),
    "pp2 x dp2": (4, ParallelConfig(pipeline=2)),
    "pp2 x cp2": (4, ParallelConfig(pipeline=2, context=2)),
    "pp2 x ep2": (4, ParallelConfig(pipeline=2, expert=2)),
    "pp2 x v2 x cp2": (4, ParallelConfig(pipeline=2, virtual_pipeline=2, context=2)),
    "pp2 x v2 x ep2": (4, ParallelConfig(pipeline=2, virtual_pipeline=2, expert=2)),
    "tp2 x pp2 x v2 + sp": (
        4,
        ParallelConfig(tensor=2, pipeline=2, virtual_pipeline=2, sequence=True),
    ),
    # Each expert is on two ranks.
    "tp2 x dp2 x ep2 + sp": (4, ParallelConfig(tensor=2, expert=2, sequence=True)),
    "tp2 x cp2 x ep4 + sp": (4, ParallelConfig(tensor=2, context=2, expert=4, sequence=True)),
    "tp2 x pp2 x dp2": (8, ParallelConfig(tensor=2, pipeline=2)),
    "tp2 x pp2 x cp2 + sp": (8, ParallelConfig(tensor=2, pipeline=2, context=2, sequence=True)),
}
"""Layout -> (number of ranks, parallel sizes); dp follows from them."""


class OnRanks(Protocol):
    """Calls `function(context, parallel, *args)` on every rank of a layout of `PARALLEL`."""

    def __call__(self, function: Callable[..., Any], layout: str, *args: Any) -> list[Any]:
        """Return the results in rank order."""
        ...


@contextmanager
def open_pool() -> Iterator[ProcessPoolExecutor]:
    """Up to MAX_RANKS processes, started when they are needed from one that has imported
    everything, see tests/conftest.py.
    """
    method = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(MAX_RANKS, mp_context=method) as pool:
        yield pool


def full_gradients(engine: MegatronEngine) -> Iterator[tuple[str, Tensor]]:
    """Each weight's gradient, float32: full on rank 0, elsewhere empty.

    This reduces the gradients over the ranks, so the optimizer step must follow.
    """
    optimizer = engine.optimizer

    def gradient(name: str) -> Tensor:
        optimizer.reduce_gradients()
        shard = optimizer.shard(name)
        return optimizer.gather_full(name, None if shard is None else shard.main.grad, writer=0)

    shapes = engine.weight_shapes()
    return engine.gatherer.gather(list(shapes), shapes, torch.float32, gradient)


class RecordingEngine(MegatronEngine):
    """Keeps the gradients of the last optimizer step, as they were before it."""

    gradients: dict[str, np.ndarray]

    def optimizer_step(self, lr: float, *, is_loss_finite: bool = True) -> float:
        self.gradients = {name: tensor.numpy() for name, tensor in full_gradients(self)}
        return super().optimizer_step(lr, is_loss_finite=is_loss_finite)


@dataclass(frozen=True)
class Rank:
    """One rank of a process group whose axes are `parallel`'s."""

    context: WorkerContext
    parallel: ParallelConfig
    parallel_layout: ParallelLayout
    device: torch.device
    groups: Groups

    def engine(
        self, config: PolicyConfig, *, trainable: bool = True, head: OutputHead = "vocabulary"
    ) -> RecordingEngine:
        return RecordingEngine(config, self.groups, trainable=trainable, head=head)

    def worker(self, config: PolicyConfig, **options: Any) -> PolicyWorker:
        return PolicyWorker(config, self.engine(config, **options), None)

    def shard(self, config: PolicyConfig, worker: PolicyWorker, batch: BatchedDataDict) -> Any:
        """Rows of `batch` on this rank, with their plan."""
        spec = plan_spec(
            config,
            purpose="train",
            parallel_layout=self.parallel_layout,
            model=load_spec(config.model_name),
        )
        plan = planned(batch, spec, config.shared_prefix)
        logprob_plan = None
        if config.shared_prefix is True:
            # Passes of log-probs have a limit of their own.
            logprob_plan = plan.with_budget(40)
        return batch.shard(plan, logprob_plan)[self.parallel_layout.dp_rank(self.context.rank)]


@contextmanager
def joined(context: WorkerContext, parallel: ParallelConfig) -> Iterator[Rank]:
    """In a process group of Megatron's axes."""
    parallel_layout = build_layout(parallel, context.world_size)
    device = process_groups.init_process_group(context)
    try:
        groups = Groups.join(
            parallel_layout, context.rank, device, seed=0, timeout_s=context.collective_timeout_s
        )
        _check_groups(groups, parallel_layout, context.rank)
        yield Rank(context, parallel, parallel_layout, device, groups)
    finally:
        # Megatron-Core would hold the groups, and with them their threads.
        parallel_state.destroy_model_parallel()
        process_groups.destroy()


def _check_groups(groups: Groups, parallel_layout: ParallelLayout, rank: int) -> None:
    """Megatron-Core has formed the groups that the layout describes."""
    for group, groups_of_layout in (
        (groups.tp, parallel_layout.groups("tp")),
        (groups.cp, parallel_layout.groups("cp")),
        (groups.dp, parallel_layout.groups("dp")),
        (groups.dp_cp, parallel_layout.groups("dp", "cp")),
    ):
        ranks = dist.get_process_group_ranks(group)
        assert ranks == list(next(ranks for ranks in groups_of_layout if rank in ranks))
    # Consecutive ranks of a pipeline stage have different experts.
    ep_rank = parallel_layout.ep_rank(rank)
    assert ep_rank == groups.ep.rank()
    first = rank - ep_rank
    assert dist.get_process_group_ranks(groups.ep) == list(range(first, first + parallel_layout.ep))
    stage_size = parallel_layout.world_size // parallel_layout.pp
    first = rank // stage_size * stage_size
    same_experts = range(first + ep_rank, first + stage_size, parallel_layout.ep)
    assert dist.get_process_group_ranks(groups.expert_dp) == list(same_experts)


@dataclass(frozen=True)
class Step:
    """One optimizer step of a fresh model."""

    config: PolicyConfig
    batch: BatchedDataDict
    loss: Loss = NllLoss()  # noqa: RUF009  (immutable)


@dataclass(frozen=True)
class StepResult:
    gradients: dict[str, np.ndarray]
    """On rank 0, in Hugging Face names."""
    metrics: dict[str, float]


def take_steps(
    context: WorkerContext, parallel: ParallelConfig, steps: Sequence[Step]
) -> list[StepResult]:
    """Each step on a model of its own, all in one process group."""
    results = []
    with joined(context, parallel) as rank:
        for step in steps:
            worker = rank.worker(step.config)
            (metrics,) = worker.train(rank.shard(step.config, worker, step.batch), None, step.loss)
            engine = worker.engine
            assert isinstance(engine, RecordingEngine)
            results.append(
                StepResult(
                    engine.gradients, {name: metric.value for name, metric in metrics.items()}
                )
            )
    return results


@dataclass(frozen=True)
class Trained:
    """What a rank reports of several optimizer steps."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, np.ndarray]
    """On rank 0."""
    counts: set[float]
    """Step counters of the optimizer shards."""


@dataclass(frozen=True)
class Run:
    """`num_steps` steps from the checkpoint `start`, or from the model's files, saved to `out`."""

    config: PolicyConfig
    num_steps: int
    start: Path | None = None
    out: Path | None = None


def train_runs(
    context: WorkerContext, parallel: ParallelConfig, runs: Sequence[Run]
) -> list[Trained]:
    """Take the steps of each run with a model of its own, all in one process group."""
    with joined(context, parallel) as rank:
        return [_train(rank, run) for run in runs]


def train(
    context: WorkerContext,
    parallel: ParallelConfig,
    config: PolicyConfig,
    num_steps: int,
    start: Path | None = None,
    out: Path | None = None,
) -> Trained:
    """Take the steps of one run."""
    (trained,) = train_runs(context, parallel, [Run(config, num_steps, start, out)])
    return trained


def _train(rank: Rank, run: Run) -> Trained:
    worker = rank.worker(run.config)
    if run.start is not None:
        worker.load(run.start)
    shard = rank.shard(run.config, worker, random_batch(LENGTHS))
    metrics = [worker.train(shard, None, NllLoss())[0] for _ in range(run.num_steps)]
    if run.out is not None:
        worker.save(run.out)
        worker.export_hf(run.out / "hf")
    engine = worker.engine
    assert isinstance(engine, MegatronEngine)
    return Trained(
        losses=[each["policy/loss"].value for each in metrics if "policy/loss" in each],
        norms=[each["policy/grad_norm"].value for each in metrics],
        weights={
            name: tensor.float().numpy()
            for name, tensor in engine.full_weights(list(engine.weight_shapes()))
        },
        counts={
            float(state["step"])
            for part in engine.optimizer.sub_optimizers
            for state in part.adamw.state.values()
        },
    )


def train_dtensor(
    context: WorkerContext,
    parallel: ParallelConfig,
    config: PolicyConfig,
    start: Path | None,
    out: Path | None,
) -> list[float]:
    """Return the losses of two steps of the DTensor engine."""
    worker = DTensorPolicyWorker(context, config=config, start=PolicyStart(parallel=parallel))
    try:
        if start is not None:
            worker.load(start)
        parallel_layout = build_layout(parallel, context.world_size)
        batch = random_batch(LENGTHS)
        spec = plan_spec(
            config,
            purpose="train",
            parallel_layout=parallel_layout,
            model=load_spec(config.model_name),
        )
        dp_rank = parallel_layout.dp_rank(context.rank)
        shard = batch.shard(plan_batch(batch["length"], spec))[dp_rank]
        losses = [worker.train(shard, None, NllLoss())[0]["policy/loss"].value for _ in range(2)]
        if out is not None:
            worker.save(out)
    finally:
        process_groups.destroy()
    return losses


def look_around(
    context: WorkerContext, parallel: ParallelConfig, config: PolicyConfig
) -> dict[str, Any]:
    """Return a rank's log-probs and full weights, and the results of other calls of the engine."""
    seen: dict[str, Any] = {}
    with joined(context, parallel) as rank:
        worker = rank.worker(config)
        engine = rank.engine(config, trainable=False)
        shard = rank.shard(config, worker, grouped_batch())
        handle = worker.compute_logprobs(shard)
        outputs = worker.fetch_logprobs(shard, handle)
        seen["rows"] = {name: list(shard[name]) for name in ("input_ids", "token_mask", "row_mask")}
        seen["outputs"] = {name: list(column) for name, column in outputs.items()}
        seen["weights"] = {
            name: tensor.numpy()
            for name, tensor in engine.full_weights(list(engine.weight_shapes()))
        }
        place = rank.parallel_layout.coordinates(context.rank)
        seen["sum"] = engine.ranks.sum_over_dp([1.0, float(place.dp)])
        seen["gathered"] = engine.ranks.gather_over_dp_cp(context.rank)
        own = torch.tensor([float(place.cp), -1.0])
        seen["cp"] = engine.ranks.gather_over_cp(own, rank.parallel_layout.cp).tolist()
        worker.probe_isolation()
        seen["kept"] = metric_values(worker.evaluate(shard, POLICY_GRADIENT, handle))
        with_columns = rank.shard(config, worker, grouped_batch())
        with_columns.update(outputs)
        seen["sent"] = metric_values(worker.evaluate(with_columns, POLICY_GRADIENT))
        (trained,) = worker.train(shard, None, POLICY_GRADIENT, handle)
        seen["trained"] = metric_values(trained)
    return seen


def as_tensors(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def of_model(config: PolicyConfig, model: str) -> PolicyConfig:
    return dataclasses.replace(config, model_name=model)


def meeting_in(directory: Path) -> Path:
    """A rendezvous file that never existed."""
    return directory / f"rendezvous_{uuid.uuid4().hex}"
