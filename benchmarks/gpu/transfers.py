"""Host and device copies, weight buckets, and transfers to a second process."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.gpu.cells import SkipCell
from benchmarks.gpu.peer import checksum, receive, started_peer
from benchmarks.gpu.training_steps import synchronize, time_calls
from nemo_like.weight_sync.channel import (
    MAX_BUCKET_BYTES,
    ChannelRequest,
    ChannelSender,
    ChannelSpec,
    plan_layouts,
)
from nemo_like.weight_sync.transfer import TRANSPORTS

_NUM_COPIES = 5
_SLOT_BYTES = 256 * 2**20


def time_copy(
    device: str, direction: Literal["H2D", "D2H", "D2D"], num_bytes: int, *, is_pinned: bool
) -> Mapping[str, Any]:
    """Time copies between host memory and the device, or within the device."""
    if is_pinned and not device.startswith("cuda"):
        raise SkipCell("pinned memory needs a CUDA device")
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    host.fill_(1)
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target, source = {
        "H2D": (on_device, host),
        "D2H": (host, on_device),
        "D2D": (torch.empty_like(on_device), on_device),
    }[direction]
    copy = partial(target.copy_, source, non_blocking=is_pinned)
    seconds = time_calls(copy, device, _NUM_COPIES, 1)["median_s"]
    return {"gb_per_s": num_bytes / 1e9 / seconds, "num_bytes": num_bytes}


def time_buckets(
    device: str, shapes: Mapping[str, tuple[int, ...]], place: Literal["device", "host"]
) -> Mapping[str, Any]:
    """Time copies of bfloat16 weights into buckets and back; the buckets are at `place`."""
    layouts = plan_layouts(shapes, torch.bfloat16, MAX_BUCKET_BYTES)
    weights = {
        name: torch.randn(shape, dtype=torch.bfloat16, device=device)
        for name, shape in shapes.items()
    }
    largest = max(layout.num_bytes for layout in layouts)
    where = device if place == "device" else "cpu"
    buffer = torch.empty(largest, dtype=torch.uint8, device=where)

    def encode() -> None:
        for layout in layouts:
            for name, view in layout.views(buffer):
                view.copy_(weights[name])

    def decode() -> None:
        for layout in layouts:
            for name, view in layout.views(buffer):
                weights[name].copy_(view)

    num_bytes = sum(layout.num_bytes for layout in layouts)
    encode_s = time_calls(encode, device, 3, 1)["median_s"]
    decode_s = time_calls(decode, device, 3, 1)["median_s"]
    return {
        "num_bytes": num_bytes,
        "num_buckets": len(layouts),
        "num_tensors": len(shapes),
        "encode_gb_per_s": num_bytes / 1e9 / encode_s,
        "decode_gb_per_s": num_bytes / 1e9 / decode_s,
    }


def time_raw_ipc(device: str, num_bytes: int) -> Mapping[str, Any]:
    """Time copies out of a tensor of this process by another process, over torch's CUDA IPC."""
    if not device.startswith("cuda"):
        raise SkipCell("CUDA IPC needs a CUDA device")
    from torch.multiprocessing.reductions import reduce_tensor

    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    expected = checksum(source)
    synchronize(device)
    with started_peer(device) as peer:
        _call(peer, "open_raw", reduce_tensor(source)[1])
        answers = [_call(peer, "copy_raw") for _ in range(_NUM_COPIES + 1)]
        _call(peer, "close_raw")
    return _copied(answers, expected, num_bytes)


def time_transport(
    device: str, transport: Literal["cuda_ipc", "shared_memory"], num_bytes: int
) -> Mapping[str, Any]:
    """Time weight buckets through our transport: written here, copied out by another process."""
    if transport == "cuda_ipc" and not device.startswith("cuda"):
        raise SkipCell("CUDA IPC needs a CUDA device")
    slot_bytes = min(num_bytes, _SLOT_BYTES)
    num_buckets = max(num_bytes // slot_bytes, 2)
    weights = torch.randint(0, 255, (slot_bytes,), dtype=torch.uint8, device=device)
    expected = checksum(weights)
    request = ChannelRequest(
        transport=transport,
        dtype="float32",
        max_bytes=slot_bytes,
        num_receivers=1,
        host="127.0.0.1",
        timeout_s=60.0,
    )
    # With an index: the handle of the memory names the device.
    sender = TRANSPORTS[transport].sender(request, slot_bytes, torch.device(device))
    spec = ChannelSpec(
        transport=transport,
        layouts=(),
        slot_bytes=slot_bytes,
        timeout_s=60.0,
        address=sender.address,
    )
    with started_peer(device) as peer:
        _call(peer, "open", spec)
        sender.connect()
        answers = []

        def update() -> None:
            for index in range(num_buckets):
                answers.append(_send(sender, peer, index, weights))
            # Each side waits for the other at the end of an update.
            peer.send(("finish", ()))
            sender.finish()
            receive(peer)

        seconds = time_calls(update, device, 3, 1)["median_s"]
        _call(peer, "close")
    sender.close()
    copied = _copied(answers, expected, slot_bytes)
    return copied | {
        "num_buckets": num_buckets,
        "slot_bytes": slot_bytes,
        "update_gb_per_s": num_buckets * slot_bytes / 1e9 / seconds,
    }


def _send(
    sender: ChannelSender, peer: Connection, index: int, weights: Tensor
) -> tuple[float, float]:
    """Write `weights` uint8 [n] into a slot and have the peer copy them out."""
    sender.buffer(index)[: len(weights)].copy_(weights)
    sender.publish(index, len(weights))
    return _call(peer, "load", index, len(weights))


def _call(peer: Connection, method: str, *arguments: Any) -> Any:
    peer.send((method, arguments))
    return receive(peer)


def _copied(answers: list[tuple[float, float]], expected: float, num_bytes: int) -> dict[str, Any]:
    """Return the speed of the copies but the first, and whether all bytes arrived."""
    seconds = statistics.median(each for each, _ in answers[1:])
    return {
        "copy_gb_per_s": num_bytes / 1e9 / seconds,
        "copy_s": seconds,
        "num_bytes": num_bytes,
        "passed": all(found == expected for _, found in answers),
    }
