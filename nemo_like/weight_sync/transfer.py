"""The transports, and both sides of a weight update in the processes that send and load weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nemo_like.distributed import activity
from nemo_like.weight_sync.broadcast import GlooTransport, NcclTransport
from nemo_like.weight_sync.channel import (
    BucketLayout,
    BucketMessage,
    ChannelBrokenError,
    ChannelReceiver,
    ChannelRequest,
    ChannelSender,
    ChannelSpec,
    Endpoint,
    LoadedBucket,
    Placement,
    SentBucket,
    Transport,
    WeightPlan,
    num_bytes_of,
    plan_layouts,
)
from nemo_like.weight_sync.cuda_ipc import CudaIpcTransport
from nemo_like.weight_sync.shared_memory import SharedMemoryTransport


class InProcessTransport(Transport):
    """Tensors by reference."""

    name = "in_process"
    passes_tensors = True

    def available(self, placement: Placement) -> bool:
        return placement.is_one_process


_PREFERRED: tuple[Transport, ...] = (
    InProcessTransport(),
    CudaIpcTransport(),
    NcclTransport(),
    SharedMemoryTransport(),
    GlooTransport(),
)

TRANSPORTS = {transport.name: transport for transport in _PREFERRED}
"""All transports by name. An update uses the first that is available."""


def select_transport(policy: Sequence[Endpoint], receivers: Sequence[Endpoint]) -> str:
    """Return the name of the transport from policy rank 0 to all receivers.

    `policy` has the endpoints of the policy's ranks. Weights are passed through host memory unless
    both sides are on GPUs. Raises ValueError for receivers of which only some share a GPU with a
    policy rank: CUDA IPC does not reach all of them and NCCL refuses two ranks on one GPU.
    """
    placement = Placement(policy, receivers)
    for name, transport in TRANSPORTS.items():
        if transport.available(placement):
            return name
    raise ValueError(
        f"{placement.num_on_policy_gpus} of {len(receivers)} generator processes share a GPU with"
        " the policy; set cluster.generation_workers to 0 to place all of them on the policy's"
        " GPUs, or above 0 to place none there"
    )


NamedTensors = Iterator[tuple[str, Tensor]]


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
        """With `adapters_only` an update has the adapters and no other weight."""
        self._owner = owner
        self._adapters_only = adapters_only
        self._layouts: tuple[BucketLayout, ...] = ()
        self._transport: Transport = TRANSPORTS["in_process"]
        self._channel: ChannelSender | None = None
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
        self._transport = TRANSPORTS[request.transport]
        device = self._owner.device
        if self._transport.needs_gpu and device.type != "cuda":
            raise RuntimeError(
                f"the transport {request.transport} needs a GPU; the policy is on {device}"
            )
        slot_bytes = max(layout.num_bytes for layout in self._layouts)
        is_source = self._owner.rank == 0
        if is_source or self._transport.every_rank_sends:
            self._channel = self._transport.sender(request, slot_bytes, device)
        if not is_source or self._channel is None:
            return None
        return ChannelSpec(
            transport=request.transport,
            layouts=self._layouts,
            slot_bytes=slot_bytes,
            timeout_s=request.timeout_s,
            address=self._channel.address,
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
        if self._transport.passes_tensors:
            return self._pass_tensors(index, layout, dtype)
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

    def _pass_tensors(self, index: int, layout: BucketLayout, dtype: torch.dtype) -> SentBucket:
        """Return the bucket's weights, [*shape] each; weights of `dtype` are not copied."""
        start = time.perf_counter()
        weights = self._owner.full_weights(layout.names)
        tensors = tuple((name, weight.detach().to(dtype)) for name, weight in weights)
        return SentBucket(
            message=BucketMessage(index, tensors), gather_s=time.perf_counter() - start
        )


class WeightReceiver:
    """Receives buckets in the process that loads them.

    A generation worker whose engine has processes of its own, such as vLLM with tensor
    parallelism, constructs one in each of them and forwards the calls; all arguments and results
    can be pickled.
    """

    def __init__(self, device: torch.device) -> None:
        """`device` is the device of the process; with the GPU transports buckets arrive on it."""
        self._device = device
        self._spec: ChannelSpec | None = None
        self._channel: ChannelReceiver | None = None

    def endpoint(self) -> Endpoint:
        """Return this process, for `WeightTarget.weight_endpoints`."""
        return Endpoint.of_process(self._device)

    def open(self, spec: ChannelSpec, index: int) -> str:
        """Join a channel as receiver `index`; returns why that failed, or an empty string.

        Leaves a channel that is still open.
        """
        self.close()
        self._spec = spec
        try:
            transport = TRANSPORTS[spec.transport]
            self._channel = transport.receiver(spec, index, self._device)
        except ChannelBrokenError as error:
            return str(error)
        return ""

    def receive(self, message: BucketMessage) -> NamedTensors:
        """Yield each name with its tensor [*shape] in the dtype of the wire.

        The tensors are views of the bucket's memory, which is overwritten after the call that loads
        this bucket has returned. They must not be written to. Raises ChannelBrokenError if the
        sender is gone, and RuntimeError without an open channel.
        """
        if self._spec is None:
            raise RuntimeError("a weight bucket was received outside of an open channel")
        if message.tensors is not None:
            yield from message.tensors
            return
        if self._channel is None:
            raise ChannelBrokenError("the channel was not opened")
        buffer = self._channel.receive(message.index)
        yield from self._spec.layouts[message.index].views(buffer)

    def load(
        self, message: BucketMessage, load_weights: Callable[[NamedTensors], object]
    ) -> LoadedBucket:
        """Receive a bucket and pass its tensors to `load_weights`, as in `receive`.

        A broken channel is reported and not raised, because this process is intact.
        """
        activity.note(f"loading weight bucket {message.index + 1}")
        start = time.perf_counter()
        named = self.receive(message)
        try:
            # The generator receives the bucket before it yields the first tensor.
            first = next(named, None)
        except ChannelBrokenError as error:
            # No further bucket can come, and a member that leaves releases the others.
            if self._channel is not None:
                self._channel.close()
                self._channel = None
            return LoadedBucket(broken=str(error))
        received = time.perf_counter()
        load_weights(_chain(first, named))
        if self._channel is not None:
            self._channel.loaded()
        return LoadedBucket(transfer_s=received - start, load_s=time.perf_counter() - received)

    def close(self) -> int:
        """Leave the channel; returns the bytes of the buffers of its own that it needed."""
        channel = self._channel
        self._channel = None
        self._spec = None
        return 0 if channel is None else channel.close()


def _chain(first: tuple[str, Tensor] | None, rest: NamedTensors) -> NamedTensors:
    """Yield `first`, unless it is None, and then the rest; tensors are [*shape] each."""
    if first is not None:
        yield first
    yield from rest
