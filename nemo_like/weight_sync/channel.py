"""Layouts of weight buckets, the interface of transports, and the check that an update is complete.

Sender and receiver compute nothing themselves: the layouts are planned once per weight update and
sent to the receivers, and both sides make the same views of a buffer. The bytes are equal to the
tensors in memory, so every dtype, bfloat16 too, is transferred bit by bit.

All of it is small and picklable; only `BucketMessage.tensors` and `SentWeights.buckets` refer to
weights, and exist only where both sides are one process.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_like.distributed.activity import machine_id

ALIGNMENT = 64
"""Bytes: every tensor starts at a multiple of it, a cache line and more than any element size."""

MAX_BUCKET_BYTES = 2**30
"""Default limit of a bucket. At most two buckets exist at a time on each side."""

_FREE_SHARE = 0.02
"""Share of the free memory of a process that one bucket may take."""
_MIN_BUCKETS = 8
_MIN_BUCKET_BYTES = 8 * 2**20

Buckets = Callable[[int], Iterable[tuple[str, Tensor]]]
"""Index of a bucket -> its weights, [*shape] each, where both sides are one process."""

_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Names, shapes and positions of the tensors of one bucket.

    Example: bfloat16 [2, 3] "w" and [] "b" start at bytes 0 and 64, and the bucket has 66 bytes.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    """The first byte of each tensor."""
    num_bytes: int
    """Bytes of the bucket, alignment included."""
    dtype: str
    """dtype of all tensors, as in `torch.bfloat16` without the module."""

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> BucketLayout:
        """Return the layout of tensors with these names and shapes, in this order."""
        starts: list[int] = []
        end = 0
        for shape in shapes.values():
            start = aligned(end)
            starts.append(start)
            end = start + num_bytes_of(shape, dtype)
        return cls(tuple(shapes), tuple(shapes.values()), tuple(starts), end, dtype_name(dtype))

    def views(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each name with the view [*shape] of its bytes in `buffer`, uint8 [n].

        The buffer may be larger than the bucket. Raises ValueError if it is smaller.
        """
        if buffer.numel() < self.num_bytes:
            raise ValueError(
                f"a bucket of {len(self.names)} tensors needs {self.num_bytes} bytes; the buffer"
                f" has {buffer.numel()}"
            )
        dtype: torch.dtype = getattr(torch, self.dtype)
        for name, shape, start in zip(self.names, self.shapes, self.starts, strict=True):
            raw = buffer[start : start + num_bytes_of(shape, dtype)]
            yield name, raw.view(dtype).view(shape)


def plan_layouts(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_bytes: int
) -> tuple[BucketLayout, ...]:
    """Return the layouts of the buckets that transfer tensors of these names and shapes.

    The limit of a bucket is lowered from `max_bytes` to an eighth of all bytes, but not below
    8 MiB: nothing overlaps with the gather of the first bucket and with the load of the last.
    """
    names = list(shapes)
    sizes = [num_bytes_of(shape, dtype) for shape in shapes.values()]
    total = sum(map(aligned, sizes))
    overlapping = max(_MIN_BUCKET_BYTES, -(-total // _MIN_BUCKETS))
    layouts = []
    for bucket in plan_buckets(sizes, min(max_bytes, overlapping)):
        members = {name: shapes[name] for name in names[bucket.start : bucket.stop]}
        layouts.append(BucketLayout.of(members, dtype))
    return tuple(layouts)


def plan_buckets(num_bytes: Sequence[int], max_bytes: int) -> tuple[range, ...]:
    """Split consecutive tensors, given by size in bytes, into buckets of at most `max_bytes`.

    A tensor above the limit gets a bucket of its own. Each size is rounded up to the alignment of
    64. Example: sizes [3, 4, 9, 2] with a limit of 128 give ranges 0-2 and 2-4. Raises ValueError
    for a limit below 1.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes is {max_bytes}; a bucket needs at least one byte")
    buckets: list[range] = []
    start = 0
    total = 0
    for index, weight_bytes in enumerate(num_bytes):
        # Rounded up, so that the alignment inside the bucket does not exceed the limit.
        size = aligned(weight_bytes)
        if index > start and total + size > max_bytes:
            buckets.append(range(start, index))
            start = index
            total = 0
        total += size
    if start < len(num_bytes):
        buckets.append(range(start, len(num_bytes)))
    return tuple(buckets)


def aligned(num_bytes: int) -> int:
    """Round up to the alignment."""
    return num_bytes + -num_bytes % ALIGNMENT


def num_bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor of this shape and dtype."""
    return math.prod(shape) * dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in `torch`. Example: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class WeightSyncError(RuntimeError):
    """Weights did not reach a generator, or the generator computes with other weights."""


class ChannelBrokenError(RuntimeError):
    """The other side of a channel ended or does not answer. Raised in senders and receivers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Process and device that send or load weights."""

    pid: int
    machine: str
    """`machine_id` of the process: equal where process ids and shared memory are common."""
    gpu: str = ""
    """UUID of the process's GPU; empty on the CPU."""
    free_bytes: int = field(default=2**62, compare=False)
    """Memory of the device, or of the machine, that is free."""

    @classmethod
    def of_process(cls, device: torch.device) -> Endpoint:
        """Return the endpoint of this process with `device`."""
        gpu = ""
        if device.type == "cuda":
            gpu = gpu_uuid(device)
            free_bytes = torch.cuda.mem_get_info(device)[0]
        else:
            memory = Path("/proc/meminfo").read_text(encoding="ascii")
            available = re.search(r"MemAvailable: +(\d+) kB", memory)
            free_bytes = int(available[1]) * 1024 if available else _MIN_BUCKET_BYTES
        return cls(pid=os.getpid(), machine=machine_id(), gpu=gpu, free_bytes=free_bytes)


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in every process that sees it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def bucket_limit(endpoints: Sequence[Endpoint], max_bytes: int) -> int:
    """Return the limit of a bucket: 2 % of the least free memory, from 8 MiB up to `max_bytes`."""
    free_bytes = min(each.free_bytes for each in endpoints)
    return min(max_bytes, max(_MIN_BUCKET_BYTES, int(_FREE_SHARE * free_bytes)))


@dataclass(frozen=True)
class Placement:
    """The processes of both sides of an update, by which a transport is chosen."""

    policy: Sequence[Endpoint]
    """The ranks of the policy. Rank 0 sends."""
    receivers: Sequence[Endpoint]

    @property
    def is_one_process(self) -> bool:
        """Whether policy rank 0 and all receivers are one process."""
        source = self.policy[0]
        return all(
            (each.pid, each.machine) == (source.pid, source.machine) for each in self.receivers
        )

    @property
    def is_one_machine(self) -> bool:
        """Whether policy rank 0 and all receivers are on one machine."""
        return all(each.machine == self.policy[0].machine for each in self.receivers)

    @property
    def is_on_gpus(self) -> bool:
        """Whether policy rank 0 and all receivers have GPUs."""
        return all(each.gpu for each in [self.policy[0], *self.receivers])

    @property
    def num_on_policy_gpus(self) -> int:
        """Receivers whose GPU is the GPU of a policy rank."""
        policy_gpus = {each.gpu for each in self.policy} - {""}
        return sum(each.gpu in policy_gpus for each in self.receivers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSpec:
    """All that a receiver needs to receive the buckets of the updates over one channel."""

    transport: str
    """A name in `nemo_like.weight_sync.transfer.TRANSPORTS`."""
    layouts: tuple[BucketLayout, ...]
    slot_bytes: int
    """Bytes of the largest bucket."""
    timeout_s: float
    address: Any = None
    """`ChannelSender.address`."""
    num_constant: int = 0
    """The last layouts, of weights that only the first update over the channel sends."""

    def of_later_updates(self) -> ChannelSpec:
        """Return the channel as it is after the first update: without the constant weights."""
        num_layouts = len(self.layouts) - self.num_constant
        return replace(self, layouts=self.layouts[:num_layouts], num_constant=0)

    @property
    def names(self) -> tuple[str, ...]:
        """Hugging Face names of the weights that are sent."""
        return tuple(name for layout in self.layouts for name in layout.names)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without alignment."""
        dtype: torch.dtype = getattr(torch, self.layouts[0].dtype)
        shapes = [shape for layout in self.layouts for shape in layout.shapes]
        return sum(num_bytes_of(shape, dtype) for shape in shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelRequest:
    """The channel that the policy opens. Updates use it until a member fails or changes."""

    transport: str
    dtype: str
    """dtype in which weights are sent, a name in `torch`."""
    max_bytes: int
    """Limit of a bucket."""
    num_receivers: int
    host: str
    """Address of policy rank 0's node, for a rendezvous."""
    timeout_s: float
    """Max wait of a member for the others, per bucket."""


class ChannelSender:
    """The sending side of an open channel, in the process of a policy rank.

    An update calls `buffer` and `publish` for each bucket, and `finish`.
    """

    address: Any = None
    """What the receivers need to join; it can be pickled."""

    def connect(self) -> None:
        """Join the receivers, before the first update.

        Raises ChannelBrokenError if one does not come in time.
        """

    def buffer(self, index: int) -> Tensor:
        """Return the memory of bucket `index`, uint8 [slot_bytes], into which it is gathered.

        Waits until no receiver reads what it had before.
        """
        raise NotImplementedError

    def publish(self, index: int, num_bytes: int) -> None:
        """Make the first `num_bytes` of the buffer of bucket `index` available to the receivers.

        Raises ChannelBrokenError if one of them is gone.
        """

    def finish(self) -> int:
        """Release the buffers at the end of an update; returns the bytes that they occupied."""
        return 0

    def close(self) -> None:
        """Leave the channel and release what is left of an update."""


class ChannelReceiver:
    """The receiving side of an open channel, in a process that loads weights.

    An update calls `receive` and `loaded` for each bucket, and `finish`.
    """

    def receive(self, index: int) -> Tensor:
        """Return memory uint8 [slot_bytes] that has bucket `index`.

        Raises ChannelBrokenError if the sender is gone.
        """
        raise NotImplementedError

    def loaded(self) -> None:
        """Note that nothing will read the received bucket again.

        Raises ChannelBrokenError if the sender is gone.
        """

    def finish(self) -> int:
        """Release the buffers at the end of an update; returns the bytes of its own buffers.

        Raises ChannelBrokenError if the sender is gone.
        """
        return 0

    def close(self) -> None:
        """Leave the channel and release what is left of an update."""


class Transport:
    """A way from policy rank 0 to the receivers.

    The subclasses are listed in `nemo_like.weight_sync.transfer.TRANSPORTS`, and no other place
    distinguishes them.
    """

    name: str
    needs_gpu = False
    """The policy must be on GPUs."""
    passes_tensors = False
    """Receivers get the policy's tensors themselves, without a buffer."""
    is_collective = False
    """All members join and transfer a bucket together; one that is lost breaks the channel for
    all. Otherwise the others continue."""
    every_rank_sends = False
    """Every policy rank has a sender, and not only rank 0."""

    def available(self, placement: Placement) -> bool:
        """Return whether this transport reaches all receivers."""
        raise NotImplementedError

    def sender(
        self, request: ChannelRequest, slot_bytes: int, device: torch.device
    ) -> ChannelSender:
        """Open the sending side; the largest bucket has `slot_bytes`."""
        return ChannelSender()

    def receiver(self, spec: ChannelSpec, index: int, device: torch.device) -> ChannelReceiver:
        """Join as receiver `index`. Raises ChannelBrokenError if the sender is gone."""
        return ChannelReceiver()


@dataclass(frozen=True, slots=True)
class BucketMessage:
    """The notice that bucket `index` can be received."""

    index: int
    tensors: Iterable[tuple[str, Tensor]] | None = None
    """The weights themselves, [*shape] each, where sender and receiver are one process."""
    is_last: bool = False
    """No bucket of the update follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """The result of sending all buckets, on one policy rank."""

    gather_s: float = 0.0
    """Casting the weights and gathering them from the policy's ranks into the buffers."""
    transfer_s: tuple[float, ...] = ()
    """Seconds of the broadcast of each bucket; about 0 where receivers read the slot itself."""
    buffer_bytes: int = 0
    """Memory of the sender's buffers."""
    broken: str = ""
    """Why the receivers could not be reached; empty if they were."""
    buckets: Buckets | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBucket:
    """The result of receiving and loading one bucket."""

    transfer_s: float = 0.0
    """Receiving, the wait for the sender included."""
    load_s: float = 0.0
    """Copying into the model."""
    buffer_bytes: int = 0
    """Memory of the receiver's own buffers; with the last bucket, else 0."""
    broken: str = ""
    """Why the bucket could not be received; empty if it was loaded."""

    @staticmethod
    def merge(parts: Sequence[LoadedBucket]) -> LoadedBucket:
        """Return the result of several processes that load the same bucket together."""
        return LoadedBucket(
            transfer_s=min(part.transfer_s for part in parts),
            load_s=max(part.load_s for part in parts),
            buffer_bytes=sum(part.buffer_bytes for part in parts),
            broken=next((part.broken for part in parts if part.broken), ""),
        )


class WeightSource(Protocol):
    """The methods of a policy worker that `WeightSync` calls, always on all ranks."""

    def weight_endpoint(self) -> Endpoint:
        """Return this process."""
        ...

    def open_weight_channel(self, request: ChannelRequest) -> ChannelSpec | None:
        """Plan the buckets and open a channel; rank 0 returns what receivers need to join it.

        Closes a channel that is still open.
        """
        ...

    def send_weights(self, is_first: bool) -> SentWeights:
        """Gather the current weights bucket by bucket and send them.

        Constant weights are sent in the first update over the channel. A channel whose receivers
        cannot be reached is reported and not raised, because the policy's workers are intact.
        """
        ...

    def close_weight_channel(self) -> None:
        """Leave the channel and release its buffers."""


class WeightTarget(Protocol):
    """The methods of a generation worker that `WeightSync` calls, always on all ranks.

    `WeightReceiver` implements the receiving side, `load_all` the order of an update. An update
    that broke off may be begun again, after another receiver failed.
    """

    def weight_endpoints(self) -> tuple[Endpoint, ...]:
        """Return the processes that load weights: this one, or its tensor-parallel children."""
        ...

    def open_weight_channel(self, spec: ChannelSpec, first_index: tuple[int, ...]) -> str:
        """Join a channel; returns why that failed, or an empty string.

        `first_index[r]` is the index, among all receivers, of the first process of rank r; the
        others follow in the order of `weight_endpoints`. Leaves a channel that is still open.
        """
        ...

    def load_weights(
        self, version: int, buckets: Buckets | None, is_first: bool
    ) -> list[LoadedBucket]:
        """Receive all buckets and copy their tensors over the model's weights of the same names.

        `is_first` is that of `WeightSource.send_weights`.

        Completions have weight version `version` from then on. A broken channel is the `broken` of
        the last bucket; the worker generates nothing until a later update is complete. `buckets` is
        `SentWeights.buckets`. Raises ValueError, before a weight changes, for unknown, duplicate or
        missing names, and for a tensor with another shape than the model's weight.
        """
        ...

    def close_weight_channel(self) -> None:
        """Leave the channel and release its buffers."""


class UpdateCoverage:
    """The weights that an update in progress has set, by Hugging Face name."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        names: Sequence[str],
        *,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        """Check the `names` that the policy will send against the model's weights.

        `shapes` has the shape of every weight of the model. `tied` maps the second name of a tied
        weight to its name in `shapes`, for example `lm_head.weight` to
        `model.embed_tokens.weight`. Raises ValueError for a name that the model does not have, for
        a weight that is sent twice, and for weights that are not sent.
        """
        self._shapes = shapes
        self._tied = tied or {}
        unknown = [name for name in names if self._canonical(name) not in shapes]
        if unknown:
            raise ValueError(
                f"the policy sends {len(unknown)} weights that the generator's model does not"
                f" have: {_shown(unknown)}; load policy and generator from the same model"
            )
        announced = [self._canonical(name) for name in names]
        if len(set(announced)) < len(announced):
            twice = sorted({name for name in announced if announced.count(name) > 1})
            raise ValueError(f"the policy sends {len(twice)} weights twice: {_shown(twice)}")
        self._raise_if_missing(set(announced), "the policy does not send")
        self._loaded: set[str] = set()

    def add(self, name: str, shape: tuple[int, ...]) -> None:
        """Record that `name` is set from a tensor of `shape`; call it before the weight changes.

        Raises ValueError for an unknown name, another shape, or a weight that was set before.
        """
        canonical = self._canonical(name)
        expected = self._shapes.get(canonical)
        if expected is None:
            raise ValueError(f"weight {name!r} is not part of the generator's model")
        if tuple(shape) != tuple(expected):
            raise ValueError(
                f"weight {name!r} has shape {tuple(shape)}, the generator's has {tuple(expected)}"
            )
        if canonical in self._loaded:
            raise ValueError(f"weight {name!r} came twice in one update")
        self._loaded.add(canonical)

    def check_complete(self) -> None:
        """Raise ValueError if a weight was not set."""
        self._raise_if_missing(self._loaded, "the weight update left out")

    def _canonical(self, name: str) -> str:
        return self._tied.get(name, name)

    def _raise_if_missing(self, present: set[str], problem: str) -> None:
        missing = [name for name in self._shapes if name not in present]
        if missing:
            raise ValueError(
                f"{problem} {len(missing)} weights of the generator's model: {_shown(missing)}"
            )


def _shown(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_SHOWN])
    return f"{shown} ..." if len(names) > _MAX_SHOWN else shown
