"""The receiving side of a weight update, in the process that loads the weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nemo_like.distributed import activity
from nemo_like.weight_sync.broadcast import BroadcastReceiver
from nemo_like.weight_sync.channel import (
    BucketMessage,
    ChannelBrokenError,
    ChannelSpec,
    Endpoint,
    LoadedBucket,
)
from nemo_like.weight_sync.cuda_ipc import CudaIpcReceiver
from nemo_like.weight_sync.shared_memory import SharedMemoryReceiver

_Channel = SharedMemoryReceiver | BroadcastReceiver | CudaIpcReceiver

NamedTensors = Iterator[tuple[str, Tensor]]


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
        self._channel: _Channel | None = None

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
            if spec.transport == "shared_memory":
                self._channel = SharedMemoryReceiver(spec)
            elif spec.transport == "cuda_ipc":
                self._channel = CudaIpcReceiver(spec, self._device)
            elif spec.transport in ("gloo", "nccl"):
                self._channel = BroadcastReceiver(spec, index, self._device)
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
        if isinstance(self._channel, CudaIpcReceiver):
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
