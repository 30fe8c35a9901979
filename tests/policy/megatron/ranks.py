"""Processes for Megatron's ranks, and what they run: several checks in one process group, as
importing costs seconds.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.data.planning.plan import plan_batch
from nemo_like.distributed import process_groups
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.parallel_layout import Topology
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import Loss, NllLoss
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.megatron.engine import MegatronEngine
from nemo_like.policy.megatron.groups import Groups
from nemo_like.policy.worker import PolicyWorker

MAX_RANKS = 8


@contextmanager
def open_pool() -> Iterator[ProcessPoolExecutor]:
    """Up to MAX_RANKS processes, started when they are needed from one that has imported
    everything.
    """
    method = multiprocessing.get_context("forkserver")
    method.set_forkserver_preload([__name__])
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
        return optimizer._gather_full(name, None if shard is None else shard.main.grad, writer=0)

    shapes = engine.weight_shapes()
    return engine._gatherer.gather(list(shapes), shapes, torch.float32, gradient)


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
    topology: Topology
    device: torch.device
    groups: Groups

    def engine(self, config: PolicyConfig, *, trainable: bool = True) -> RecordingEngine:
        return RecordingEngine(
            config,
            self.device,
            self.topology,
            self.context.rank,
            groups=self.groups,
            sequence_parallel=self.parallel.sequence,
            trainable=trainable,
        )

    def worker(self, config: PolicyConfig) -> PolicyWorker:
        return PolicyWorker(config, self.engine(config), None)

    def shard(self, config: PolicyConfig, worker: PolicyWorker, batch: BatchedDataDict) -> Any:
        """Rows of `batch` on this rank, with their plan."""
        spec = plan_spec(
            config,
            purpose="train",
            topology=self.topology,
            cost=worker.info().cost,
            sequence_parallel=self.parallel.sequence,
            sync=worker.info().sync,
        )
        return batch.shard(plan_batch(batch["length"], spec))[
            self.topology.dp_rank(self.context.rank)
        ]


@contextmanager
def joined(context: WorkerContext, parallel: ParallelConfig) -> Iterator[Rank]:
    """In a process group of Megatron's axes."""
    topology = Topology.from_world_size(
        context.world_size, pp=parallel.pipeline, cp=parallel.context, tp=parallel.tensor
    )
    device = process_groups.init_process_group(context)
    try:
        groups = Groups.join(
            topology, device, seed=0, timeout_s=context.collective_timeout_s, expert=parallel.expert
        )
        yield Rank(context, parallel, topology, device, groups)
    finally:
        process_groups.destroy()


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
            engine = worker._policy
            assert isinstance(engine, RecordingEngine)
            results.append(
                StepResult(
                    engine.gradients, {name: metric.value for name, metric in metrics.items()}
                )
            )
    return results


def as_tensors(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def of_model(config: PolicyConfig, model: str) -> PolicyConfig:
    return dataclasses.replace(config, model_name=model)


def meeting_in(directory: Path) -> Path:
    """A rendezvous file that never existed."""
    return directory / f"rendezvous_{uuid.uuid4().hex}"
