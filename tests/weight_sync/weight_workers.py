"""A policy and a generator reduced to what a weight update calls, around real parameters."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_like.distributed.process_groups import init_process_group
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.weight_sync.channel import (
    BucketMessage,
    Buckets,
    ChannelRequest,
    ChannelSpec,
    Endpoint,
    LoadedBucket,
    SentWeights,
    UpdateCoverage,
    num_bytes_of,
)
from nemo_like.weight_sync.slots import NAME
from nemo_like.weight_sync.transfer import NamedTensors, WeightReceiver, WeightSender, load_all


class TiedModel(nn.Module):
    """Parameters of several shapes: one above the bucket limit of the tests, a scalar, a tie."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(70, 16, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(16, 16, dtype=dtype) for _ in range(5))
        self.scale = nn.Parameter(torch.tensor(0.5 + seed, dtype=dtype))
        self.head = nn.Linear(16, 70, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight

    def digest(self, dtype: str) -> str:
        """Hash of all weights in `dtype`, bit by bit."""
        result = hashlib.sha256()
        for name, parameter in self.named_parameters():
            values = parameter.detach().to(getattr(torch, dtype)).contiguous().reshape(-1)
            result.update(name.encode())
            result.update(values.view(torch.uint8).numpy().tobytes())
        return result.hexdigest()


class Owner:
    """`WeightOwner` of one rank; only rank 0 has full tensors."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.model = model
        self.rank = rank
        self.device = torch.device("cpu")
        self.fail_at = ""
        self.die_at = -1
        """Number of the gather before which the process ends."""
        self.num_gathers = 0

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(each.shape) for name, each in self.model.named_parameters()}

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        weights = dict(self.model.named_parameters())
        for name in names:
            if name == self.fail_at:
                raise ValueError("a shard is missing")
            yield name, weights[name] if self.rank == 0 else torch.empty(0)

    def gather_weights(
        self, names: Sequence[str], dtype: torch.dtype, targets: Sequence[Tensor] | None
    ) -> None:
        if self.num_gathers == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.num_gathers += 1
        weights = list(self.full_weights(names))
        if dist.is_initialized():
            # A rank that fails before the gather stops the others in it.
            dist.barrier()
        if targets is not None:
            for target, (_, weight) in zip(targets, weights, strict=True):
                assert target.dtype == dtype
                target.copy_(weight)


class PolicySide:
    def __init__(self, context: WorkerContext, *, dtype: str = "float32") -> None:
        self.context = context
        if context.world_size > 1:
            init_process_group(context)
        self.model = TiedModel(1, getattr(torch, dtype))
        self.owner = Owner(self.model, context.rank)
        self.sender = WeightSender(self.owner)
        self.num_opened = 0

    def set_constant(self, names: Sequence[str]) -> None:
        self.sender = WeightSender(self.owner, constant=names)

    def weight_endpoint(self) -> Endpoint:
        return self.sender.endpoint()

    def open_weight_channel(self, request: ChannelRequest) -> ChannelSpec | None:
        self.num_opened += 1
        return self.sender.open(request)

    def send_weights(self, is_first: bool) -> SentWeights:
        return self.sender.send(is_first)

    def close_weight_channel(self) -> None:
        self.sender.close()

    def num_channels(self) -> int:
        return self.num_opened

    def change_weights(self, seed: int, part: str = "") -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if part in name:
                    parameter.copy_(torch.randn_like(parameter))

    def fail_in_last_rank(self, name: str) -> None:
        """Fail in the gather of a weight."""
        if self.context.rank == self.context.world_size - 1:
            self.owner.fail_at = name

    def die_in_bucket(self, index: int) -> None:
        self.owner.die_at = self.owner.num_gathers + index

    def largest_weight_bytes(self) -> int:
        shapes = self.owner.weight_shapes().values()
        return max(num_bytes_of(shape, torch.float32) for shape in shapes)

    def digest(self, dtype: str) -> str:
        return self.model.digest(dtype)

    def mapped_slots(self) -> int:
        return mapped_slots()


class GeneratorSide:
    def __init__(self, context: WorkerContext, *, dtype: str = "float32") -> None:
        self.context = context
        self.model = TiedModel(2, getattr(torch, dtype))
        self.receiver = WeightReceiver(torch.device("cpu"))
        self.coverage: UpdateCoverage | None = None
        self.version = 0
        self.num_buckets = 0
        self.die_at = -1
        self.fatal_signal = signal.SIGKILL

    def weight_endpoints(self) -> tuple[Endpoint, ...]:
        return (self.receiver.endpoint(),)

    def open_weight_channel(self, spec: ChannelSpec, first_index: tuple[int, ...]) -> str:
        return self.receiver.open(spec, first_index[self.context.rank])

    def load_weights(
        self, version: int, buckets: Buckets | None, is_first: bool
    ) -> list[LoadedBucket]:
        return load_all(self, self.receiver.spec, version, buckets, is_first)

    def begin_update(self, names: Sequence[str]) -> None:
        spec = self.receiver.spec
        assert spec is not None
        weights = dict(self.model.named_parameters())
        for name in set(spec.names) - set(names):
            del weights[name]
        shapes = {name: tuple(each.shape) for name, each in weights.items()}
        self.coverage = UpdateCoverage(shapes, names)
        self.num_buckets = 0

    def load_bucket(self, message: BucketMessage) -> LoadedBucket:
        if message.index == self.die_at:
            os.kill(os.getpid(), self.fatal_signal)
        self.num_buckets += 1
        return self.receiver.load(message, self._load)

    def _load(self, named: NamedTensors) -> None:
        assert self.coverage is not None
        targets = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in named:
                self.coverage.add(name, tuple(tensor.shape))
                targets[name].copy_(tensor)

    def finish_update(self, version: int) -> None:
        assert self.coverage is not None
        self.coverage.check_complete()
        self.version = version

    def close_weight_channel(self) -> None:
        self.receiver.close()

    def die_in_bucket(self, index: int) -> None:
        self.die_at = index

    def stop_in_bucket(self, index: int) -> None:
        """Stop this process (SIGSTOP) when it should load a bucket."""
        self.die_at = index
        self.fatal_signal = signal.SIGSTOP

    def state(self, dtype: str) -> tuple[int, str, int]:
        """Version, digest of the weights, buckets of the last update."""
        return self.version, self.model.digest(dtype), self.num_buckets

    def is_tied(self) -> bool:
        return self.model.head.weight is self.model.embedding.weight

    def mapped_slots(self) -> int:
        return mapped_slots()


def mapped_slots() -> int:
    """Return the number of slots that this process maps or has open."""
    mapped = Path("/proc/self/maps").read_text().count(NAME)
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            mapped += NAME in os.readlink(descriptor)
        except FileNotFoundError:  # the descriptor of this listing
            continue
    return mapped
