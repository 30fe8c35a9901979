"""A second process that receives tensors from a part: raw CUDA IPC, or the weight transports.

Started with the method `spawn`. It answers each message with seconds and a checksum.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from nemo_like.weight_sync.channel import ChannelReceiver, ChannelSpec
from nemo_like.weight_sync.transfer import TRANSPORTS

_TIMEOUT_S = 100.0


@contextmanager
def started_peer(device: str) -> Iterator[Connection]:
    """Start the process, wait until it has its device, and end it with the block."""
    # CUDA cannot be used in a forked process.
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe()
    process = context.Process(target=serve, args=(other, device), daemon=True)
    process.start()
    other.close()
    try:
        answer = receive(connection)
        assert answer == "started", answer
        yield connection
    finally:
        connection.close()
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()


def receive(connection: Connection) -> Any:
    """Return the peer's answer. Raises RuntimeError if it failed, TimeoutError without one."""
    if not connection.poll(_TIMEOUT_S):
        raise TimeoutError(f"the peer process did not answer within {_TIMEOUT_S:.0f} s")
    answer = connection.recv()
    if isinstance(answer, Exception):
        raise RuntimeError(f"the peer process failed: {answer!r}")
    return answer


def serve(connection: Connection, device: str) -> None:
    """Answer messages until the connection is closed."""
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))
        torch.zeros(1, device=device)
    connection.send("started")
    server = _Server(torch.device(device))
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(getattr(server, method)(*arguments))
        except Exception as error:  # noqa: BLE001 (raised by the part)
            connection.send(error)


class _Server:
    """What the peer can do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._channel: ChannelReceiver | None = None
        self._tensor: Tensor | None = None
        self._target: Tensor | None = None

    def open_raw(self, handle: tuple[Any, ...]) -> bool:
        """Open a tensor by the arguments of torch's `rebuild_cuda_tensor`."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        self._tensor = rebuild_cuda_tensor(*handle)
        return True

    def copy_raw(self) -> tuple[float, float]:
        """Copy the opened tensor; return the seconds and the checksum of the copy."""
        assert self._tensor is not None
        if self._target is None:
            self._target = torch.empty_like(self._tensor)
        return self._copy(self._target, self._tensor)

    def close_raw(self) -> bool:
        """Release the opened tensor."""
        self._tensor = None
        self._target = None
        torch.cuda.ipc_collect()
        return True

    def open(self, spec: ChannelSpec) -> bool:
        """Join a channel of the weight transports."""
        self._channel = TRANSPORTS[spec.transport].receiver(spec, 0, self._device)
        return True

    def load(self, index: int, num_bytes: int) -> tuple[float, float]:
        """Copy bucket `index` out of its slot; return the seconds and the checksum."""
        assert self._channel is not None
        source = self._channel.receive(index)[:num_bytes]
        if self._target is None or self._target.numel() < num_bytes:
            self._target = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        answer = self._copy(self._target[:num_bytes], source)
        self._channel.loaded()
        return answer

    def finish(self) -> bool:
        """End an update."""
        assert self._channel is not None
        self._channel.finish()
        return True

    def close(self) -> bool:
        """Leave the channel."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self._target = None
        return True

    def _copy(self, target: Tensor, source: Tensor) -> tuple[float, float]:
        start = time.perf_counter()
        target.copy_(source)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - start
        return seconds, checksum(target)


def checksum(tensor: Tensor) -> float:
    """Return the sum of all bytes of a tensor uint8 [n], exact below 2^53."""
    return float(tensor.view(torch.uint8).sum(dtype=torch.int64))
