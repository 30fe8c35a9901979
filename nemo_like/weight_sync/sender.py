"""The sending side of a weight update, in a policy worker's process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nemo_like.distributed import activity
from nemo_like.weight_sync.broadcast import BroadcastSender
from nemo_like.weight_sync.channel import (
    BucketLayout,
    BucketMessage,
    ChannelBrokenError,
    ChannelRequest,
    ChannelSpec,
    Endpoint,
    SentBucket,
    WeightPlan,
    num_bytes_of,
    plan_layouts,
)
from nemo_like.weight_sync.cuda_ipc import CudaIpcSender
from nemo_like.weight_sync.shared_memory import SharedMemorySender

_Channel = SharedMemorySender | BroadcastSender | CudaIpcSender


class WeightOwner(Protocol):
    """What the sender needs of an engine; see `nemo_like.policy.engine.Engine`."""

    rank: int
    device: torch.device

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def adapter_shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each name with its tensor, [*shape] on rank 0.

        The names are all of `weight_shapes` or all of `adapter_shapes`. On other ranks a tensor may
        be smaller or empty; every rank iterates to the end.
        """
        ...

    def gather_weights(
        self, names: Sequence[str], dtype: torch.dtype, targets: Sequence[Tensor] | None
    ) -> None:
        """Gather the named weights into `targets`, [*shape] of `dtype`, of rank 0.

        None on all other ranks. Every rank calls.
        """
        ...


class WeightSender:
    """Implements `WeightSource` for one rank of the policy."""

    def __init__(self, owner: WeightOwner, *, adapters_only: bool = False) -> None:
        """With `adapters_only` an update has the LoRA adapters and no other weight."""
        self._owner = owner
        self._adapters_only = adapters_only
        self._layouts: tuple[BucketLayout, ...] = ()
        self._transport = ""
        self._channel: _Channel | None = None
        self._broken = ""

    def plan(self, dtype: str, max_bytes: int) -> WeightPlan:
        """See `WeightSource.plan_weights`. Raises ValueError for an unknown dtype."""
        wire_dtype = getattr(torch, dtype, None)
        if not isinstance(wire_dtype, torch.dtype):
            raise ValueError(f"dtype {dtype!r} is not a dtype of torch; use float32 or bfloat16")
        shapes = self._owner.weight_shapes()
        if self._adapters_only:
            shapes = self._owner.adapter_shapes()
        self._layouts = plan_layouts(shapes, wire_dtype, max_bytes)
        return WeightPlan(
            names=tuple(shapes),
            num_buckets=len(self._layouts),
            num_bytes=sum(num_bytes_of(shape, wire_dtype) for shape in shapes.values()),
            endpoint=Endpoint.of_process(self._owner.device),
        )

    def open(self, request: ChannelRequest) -> ChannelSpec | None:
        """See `WeightSource.open_weight_channel`."""
        self.close()
        self._broken = ""
        self._transport = request.transport
        slot_bytes = max(layout.num_bytes for layout in self._layouts)
        device = self._owner.device
        address = None
        if request.transport == "cuda_ipc":
            # Every rank has slots on its own GPU.
            self._channel = CudaIpcSender(slot_bytes, device)
        elif self._owner.rank > 0:
            return None
        elif request.transport == "shared_memory":
            self._channel = SharedMemorySender(slot_bytes)
        elif request.transport in ("gloo", "nccl"):
            self._channel = BroadcastSender(
                request.transport,
                request.host,
                request.num_receivers,
                slot_bytes,
                device,
                request.timeout_s,
            )
        if self._channel is not None:
            address = self._channel.address
        return ChannelSpec(
            transport=request.transport,
            layouts=self._layouts,
            slot_bytes=slot_bytes,
            timeout_s=request.timeout_s,
            address=address,
        )

    def connect(self) -> str:
        """See `WeightSource.connect_weight_channel`."""
        if self._channel is not None:
            try:
                self._channel.connect()
            except ChannelBrokenError as error:
                self._broken = str(error)
        return self._broken

    def send(self, index: int) -> SentBucket:
        """See `WeightSource.send_weight_bucket`."""
        try:
            return self._send(index)
        except BaseException:
            # Receivers of a broadcast would wait for this bucket otherwise.
            self.close()
            raise

    def _send(self, index: int) -> SentBucket:
        """Implement `send`."""
        activity.note(f"weight bucket {index + 1} of {len(self._layouts)}")
        layout = self._layouts[index]
        dtype: torch.dtype = getattr(torch, layout.dtype)
        if self._transport == "in_process":
            return self._send_in_process(index, layout, dtype)
        targets = None
        if self._owner.rank == 0:
            assert self._channel is not None, "rank 0 has the channel"
            targets = [target for _, target in layout.views(self._channel.buffer(index))]
        start = time.perf_counter()
        self._owner.gather_weights(layout.names, dtype, targets)
        gathered = time.perf_counter()
        self._publish(index, layout.num_bytes)
        return SentBucket(
            message=BucketMessage(index),
            gather_s=gathered - start,
            transfer_s=time.perf_counter() - gathered,
            broken=self._broken,
        )

    def close(self) -> int:
        """See `WeightSource.close_weight_channel`."""
        channel = self._channel
        self._channel = None
        return 0 if channel is None else channel.close()

    def _publish(self, index: int, num_bytes: int) -> None:
        """Send `num_bytes` of the filled buffer, unless the channel is broken.

        A broken channel does not end the gathers: the other ranks of the policy take part in all of
        them.
        """
        if self._channel is None or self._broken:
            return
        try:
            self._channel.publish(index, num_bytes)
        except ChannelBrokenError as error:
            self._broken = str(error)

    def _send_in_process(self, index: int, layout: BucketLayout, dtype: torch.dtype) -> SentBucket:
        """Return the bucket's weights, [*shape] each; weights of `dtype` are not copied."""
        start = time.perf_counter()
        weights = self._owner.full_weights(layout.names)
        tensors = tuple((name, weight.detach().to(dtype)) for name, weight in weights)
        return SentBucket(
            message=BucketMessage(index, tensors), gather_s=time.perf_counter() - start
        )
