"""The transports, and both sides of a weight update in the processes that send and load weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nemo_like.distributed import activity
from nemo_like.weight_sync.broadcast import GlooTransport, NcclTransport
from nemo_like.weight_sync.channel import (
    BucketLayout,
    BucketMessage,
    Buckets,
    ChannelBrokenError,
    ChannelReceiver,
    ChannelRequest,
    ChannelSender,
    ChannelSpec,
    Endpoint,
    LoadedBucket,
    Placement,
    SentWeights,
    Transport,
    plan_layouts,
)
from nemo_like.weight_sync.cuda_ipc import CudaIpcTransport
from nemo_like.weight_sync.shared_memory import SharedMemoryTransport

NamedTensors = Iterator[tuple[str, Tensor]]


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


class WeightSender:
    """Implements `WeightSource` for one rank of the policy."""

    def __init__(
        self, owner: WeightOwner, *, adapters_only: bool = False, constant: Collection[str] = ()
    ) -> None:
        """With `adapters_only` an update has the adapters and no other weight.

        `constant` are the names of weights that no training changes.
        """
        self._owner = owner
        self._adapters_only = adapters_only
        self._constant = frozenset(constant)
        self._num_constant = 0
        """Layouts of constant weights, the last ones."""
        self._layouts: tuple[BucketLayout, ...] = ()
        self._transport: Transport = TRANSPORTS["in_process"]
        self._channel: ChannelSender | None = None
        self._is_connected = False
        self._broken = ""

    def endpoint(self) -> Endpoint:
        """See `WeightSource.weight_endpoint`."""
        return Endpoint.of_process(self._owner.device)

    def open(self, request: ChannelRequest) -> ChannelSpec | None:
        """See `WeightSource.open_weight_channel`. Raises ValueError for an unknown dtype."""
        self.close()
        self._is_connected = False
        self._broken = ""
        dtype = getattr(torch, request.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"dtype {request.dtype!r} is not a dtype of torch; use float32 or bfloat16"
            )
        self._transport = TRANSPORTS[request.transport]
        device = self._owner.device
        if self._transport.needs_gpu and device.type != "cuda":
            raise RuntimeError(
                f"the transport {request.transport} needs a GPU; the policy is on {device}"
            )
        shapes = self._owner.weight_shapes()
        if self._adapters_only:
            shapes = self._owner.adapter_shapes()
        changing = {name: shapes[name] for name in shapes if name not in self._constant}
        constant = {name: shapes[name] for name in shapes if name in self._constant}
        self._layouts = plan_layouts(changing, dtype, request.max_bytes)
        last = plan_layouts(constant, dtype, request.max_bytes)
        self._layouts += last
        self._num_constant = len(last)
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
            num_constant=self._num_constant,
        )

    def send(self, is_first: bool) -> SentWeights:
        """See `WeightSource.send_weights`."""
        if not self._layouts:
            return SentWeights(broken="the policy has closed the channel")
        if self._transport.passes_tensors:
            return SentWeights(buckets=self._bucket)
        try:
            num_later = len(self._layouts) - self._num_constant
            return self._send(self._layouts if is_first else self._layouts[:num_later])
        except BaseException:
            # Receivers would wait for the next bucket otherwise.
            self.close()
            raise

    def close(self) -> None:
        """See `WeightSource.close_weight_channel`."""
        channel = self._channel
        self._channel = None
        self._layouts = ()
        if channel is not None:
            channel.close()

    def _send(self, layouts: Sequence[BucketLayout]) -> SentWeights:
        """Implement `send`.

        A broken channel does not end the gathers: the other ranks of the policy take part in all of
        them.
        """
        channel = self._channel
        if channel is not None and not self._is_connected:
            self._try(channel.connect)
            self._is_connected = True
        gather_s = 0.0
        transfer_s = []
        for index, layout in enumerate(layouts):
            activity.note(f"weight bucket {index + 1} of {len(layouts)}")
            targets = None
            if channel is not None:
                buffer = channel.buffer(index)
                if self._owner.rank == 0:
                    targets = [target for _, target in layout.views(buffer)]
            start = time.perf_counter()
            self._owner.gather_weights(layout.names, getattr(torch, layout.dtype), targets)
            gathered = time.perf_counter()
            gather_s += gathered - start
            if channel is not None:
                self._try(channel.publish, index, layout.num_bytes)
            transfer_s.append(time.perf_counter() - gathered)
        return SentWeights(
            gather_s=gather_s,
            transfer_s=tuple(transfer_s),
            buffer_bytes=0 if channel is None else channel.finish(),
            broken=self._broken,
        )

    def _try(self, step: Callable[..., None], *args: int) -> None:
        """Run a step of the channel, unless it is broken."""
        if self._broken:
            return
        try:
            step(*args)
        except ChannelBrokenError as error:
            self._broken = str(error)

    def _bucket(self, index: int) -> NamedTensors:
        """Yield the weights of a bucket, [*shape] each; weights of its dtype are not copied."""
        layout = self._layouts[index]
        for name, weight in self._owner.full_weights(layout.names):
            yield name, weight.detach().to(getattr(torch, layout.dtype))


class WeightReceiver:
    """Receives buckets in the process that loads them.

    A generation worker whose engine has processes of its own, such as vLLM with tensor
    parallelism, constructs one in each of them and forwards the calls; all arguments and results
    can be pickled.
    """

    def __init__(self, device: torch.device) -> None:
        """`device` is the device of the process; with the GPU transports buckets arrive on it."""
        self._device = device
        self.spec: ChannelSpec | None = None
        """Specification of the open channel."""
        self._channel: ChannelReceiver | None = None

    def endpoint(self) -> Endpoint:
        """Return this process, for `WeightTarget.weight_endpoints`."""
        return Endpoint.of_process(self._device)

    def open(self, spec: ChannelSpec, index: int) -> str:
        """Join a channel as receiver `index`; returns why that failed, or an empty string.

        Leaves a channel that is still open.
        """
        self.close()
        self.spec = spec
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
        if self.spec is None:
            raise RuntimeError("a weight bucket was received outside of an open channel")
        if message.tensors is not None:
            yield from message.tensors
            return
        if self._channel is None:
            raise ChannelBrokenError("the channel was not opened")
        buffer = self._channel.receive(message.index)
        yield from self.spec.layouts[message.index].views(buffer)

    def load(
        self, message: BucketMessage, load_weights: Callable[[NamedTensors], object]
    ) -> LoadedBucket:
        """Receive a bucket and pass its tensors to `load_weights`, as in `receive`.

        A broken channel is reported and not raised, because this process is intact.
        """
        activity.note(f"loading weight bucket {message.index + 1}")
        start = time.perf_counter()
        named = self.receive(message)
        buffer_bytes = 0
        try:
            # The generator receives the bucket before it yields the first tensor.
            first = next(named, None)
            received = time.perf_counter()
            load_weights(_chain(first, named))
            first = None  # a view of the buffer
            if self._channel is not None:
                self._channel.loaded()
                if message.is_last:
                    buffer_bytes = self._channel.finish()
        except BaseException as error:
            # No further bucket can come, and a member that leaves releases the others.
            self._leave()
            if not isinstance(error, ChannelBrokenError):
                raise
            return LoadedBucket(broken=str(error))
        return LoadedBucket(
            transfer_s=received - start,
            load_s=time.perf_counter() - received,
            buffer_bytes=buffer_bytes,
        )

    def close(self) -> None:
        """Leave the channel and release its buffers."""
        self.spec = None
        self._leave()

    def _leave(self) -> None:
        channel = self._channel
        self._channel = None
        if channel is not None:
            channel.close()


class BucketLoader(Protocol):
    """The steps of an update in a generation worker; see `load_all`."""

    def begin_update(self, names: Sequence[str]) -> None:
        """Start an update with weights of these names; the worker generates nothing until its end.

        Constant weights of the channel may be left out, and stay as they are. Raises ValueError for
        unknown, duplicate or missing names, before a weight changes.
        """

    def load_bucket(self, message: BucketMessage) -> LoadedBucket:
        """Receive a bucket and copy its tensors over the model's weights of the same names.

        Raises ValueError for a tensor with another shape than the model's weight.
        """
        ...

    def finish_update(self, version: int) -> None:
        """End the update. Raises ValueError if a weight was not loaded."""

    def close_weight_channel(self) -> None: ...


def load_all(
    worker: BucketLoader,
    spec: ChannelSpec | None,
    version: int,
    buckets: Buckets | None,
    is_first: bool,
) -> list[LoadedBucket]:
    """Implement `WeightTarget.load_weights` with the channel `spec` that `worker` has joined."""
    if spec is None:
        return [LoadedBucket(broken="the channel was closed")]
    if not is_first:
        spec = spec.of_later_updates()
    loaded: list[LoadedBucket] = []
    try:
        worker.begin_update(spec.names)
        for index in range(len(spec.layouts)):
            tensors = None if buckets is None else buckets(index)
            is_last = index + 1 == len(spec.layouts)
            loaded.append(worker.load_bucket(BucketMessage(index, tensors, is_last)))
            if loaded[-1].broken:
                return loaded
        worker.finish_update(version)
    except BaseException:
        # The sender would wait for this receiver.
        worker.close_weight_channel()
        raise
    return loaded


def _chain(first: tuple[str, Tensor] | None, rest: NamedTensors) -> NamedTensors:
    """Yield `first`, unless it is None, and then the rest; tensors are [*shape] each."""
    if first is not None:
        yield first
    yield from rest
