"""LoRA with Megatron-Core: what the processes of a layout run, in one process group."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_like.config.schema import OutputHead, ParallelConfig, PolicyConfig
from nemo_like.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.policy.megatron.engine import MegatronEngine
from nemo_like.policy.megatron.optimizer import fill_weights
from nemo_like.policy.megatron.param_map import Shape
from nemo_like.policy.worker import PolicyWorker
from tests.policy.adapters import (
    PACKED,
    adapter_values,
    is_trained,
    look,
    of_architecture,
    use,
    use_scores,
)
from tests.policy.megatron.ranks import Rank, joined


class MegatronSide:
    """See `Side`."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def worker(
        self, config: PolicyConfig, head: OutputHead = "vocabulary", *, initial: bool = False
    ) -> PolicyWorker:
        rank = self._rank
        engine = MegatronEngine(config, rank.groups, trainable=True, head=head)
        shapes = engine.saved_shapes()

        def read(name: str, offset: Shape, shape: Shape) -> Tensor:
            full = adapter_values(name, shapes[name])
            return full.narrow(0, offset[0], shape[0]).narrow(1, offset[1], shape[1])

        if not initial:
            fill_weights(engine.trained, engine.trained_map, read, engine.optimizer)
        return PolicyWorker(config, engine, engine)

    def shard(self, config: PolicyConfig, batch: BatchedDataDict) -> SlicedDataDict:
        return self._rank.shard(config, None, batch)  # type: ignore[arg-type]

    def gradients(self, engine: Any) -> dict[str, np.ndarray]:
        optimizer = engine.optimizer

        def gradient(name: str) -> Tensor:
            optimizer.reduce_gradients()
            shard = optimizer.shard(name)
            values = None if shard is None else shard.main.grad
            return optimizer.gather_full(name, values, writer=0)

        shapes = engine.saved_shapes()
        gathered = engine.gatherer.gather(list(shapes), shapes, torch.float32, gradient)
        return {name: tensor.numpy() for name, tensor in gathered}

    def frozen(self, engine: Any) -> Iterable[Tensor]:
        # A prefix is the number of a model chunk.
        return [
            each
            for name, each in engine.parameters.items()
            if not is_trained(name.lstrip("0123456789."))
        ]

    def masters(self, engine: Any) -> Iterable[Tensor]:
        return [shard.main.detach() for _, shard in engine.optimizer.shards()]


def program(
    worker_context: WorkerContext,
    parallel: ParallelConfig,
    models: dict[str, str],
    straight: Path | None,
    out: Path,
    scores: bool,
) -> dict[str, Any]:
    """Gradients of all models in one process group; of the first model also `use` if there is a
    checkpoint `straight`, and `use_scores` with `scores`.
    """
    used, *_ = models
    uses = straight is not None
    with joined(worker_context, parallel) as rank:
        side = MegatronSide(rank)
        found: dict[str, Any] = {}
        for name, model in models.items():
            found[name] = look(side, name, model, recomputes=uses and name == used)
        if straight is not None:
            found["use"] = use(side, used, models[used], straight, out)
        if scores:
            found["scores"] = use_scores(side, used, models[used], out)
    return found


def build_worker(worker_context: WorkerContext, parallel: ParallelConfig, model: str) -> None:
    with joined(worker_context, parallel) as rank:
        config = of_architecture(PACKED, "qwen2_tied", model)
        MegatronSide(rank).worker(dataclasses.replace(config, model_name=model))
