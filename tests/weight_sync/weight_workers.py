"""A policy and a generator reduced to what the weight transport calls, around real
parameters.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.weight_sync.stream import Bucket, plan_buckets


class NotForTheDriver(Bucket):
    """A bucket that fails when a process other than the two sides loads it."""

    def __setstate__(self, state: list[object]) -> None:
        if "NEMO_LIKE_TEST_DRIVER" in os.environ:
            raise AssertionError("the driver fetched a bucket that it should only have passed on")
        for name, value in zip(self.__slots__ or Bucket.__slots__, state, strict=True):
            object.__setattr__(self, name, value)


def build_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(50, 8), nn.Linear(8, 16), nn.Linear(16, 3).to(torch.bfloat16)
    )
    model.register_parameter("scale", nn.Parameter(torch.tensor(0.5 + seed)))
    return model


class PolicySide:
    def __init__(self, context: WorkerContext, *, fail_at: int | None = None) -> None:
        self.context = context
        self.model = build_model(seed=1)
        self.fail_at = fail_at
        self.max_bytes = 0

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, parameter.detach()) for name, parameter in self.model.named_parameters()]

    def num_weight_buckets(self, max_bytes: int) -> int:
        self.max_bytes = max_bytes
        return len(self._plan())

    def weight_bucket(self, index: int) -> Bucket | None:
        if index == self.fail_at and self.context.rank == self.context.world_size - 1:
            raise ValueError("a shard is missing")
        if self.context.rank != 0:
            return None
        tensors = self.named_tensors()
        bucket = Bucket.encode([tensors[position] for position in self._plan()[index]])
        return NotForTheDriver(bucket.names, bucket.shapes, bucket.dtypes, bucket.data)

    def checksum(self) -> float:
        return checksum(self.model)

    def _plan(self) -> tuple[range, ...]:
        return plan_buckets([tensor.nbytes for _, tensor in self.named_tensors()], self.max_bytes)


class GeneratorSide:
    def __init__(self, context: WorkerContext) -> None:
        self.model = build_model(seed=2)
        self.version = 0
        self.loaded: list[tuple[str, ...]] = []

    def begin_update(self) -> None:
        self.version = -1
        self.loaded = []

    def load_bucket(self, bucket: Bucket) -> None:
        targets = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in bucket.decode():
                targets[name].copy_(tensor)
        self.loaded.append(bucket.names)

    def finish_update(self, version: int) -> None:
        self.version = version

    def state(self) -> tuple[int, float, list[tuple[str, ...]]]:
        return self.version, checksum(self.model), self.loaded


def checksum(model: nn.Module) -> float:
    return sum(parameter.detach().double().sum().item() for parameter in model.parameters())
