"""Peaks of one worker's device: its FLOP/s, which model FLOPs utilisation (MFU) is relative to, and
its memory in use.
"""

from __future__ import annotations

import time

import torch

# Dense bf16 tensor-core FLOP/s of the vendors' datasheets, by a word of the device name; longer
# words first.
_DATASHEET_BF16 = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "GH200": 989e12,
    "GB200": 2250e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "4090": 165e12,
}


def peak_flops(device: torch.device, seconds: float = 0.05) -> tuple[float, str]:
    """FLOP/s of `device` and where the number comes from.

    On a known GPU the datasheet's dense bf16 rate; elsewhere the best float32 matrix product seen
    within `seconds`, with the threads this process has, so that MFU on a CPU means something too.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for word in sorted(_DATASHEET_BF16, key=len, reverse=True):
            if word in name:
                return _DATASHEET_BF16[word], f"{word} datasheet, dense bf16"
    size = 512 if device.type == "cpu" else 4096
    left, right = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    best = float("inf")
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or best == float("inf"):
        begin = time.perf_counter()
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best, f"measured, float32 matrix product of {size}"


def reset_peak_memory(device: torch.device) -> None:
    """Start a new maximum for `peak_memory_bytes`, where the device counts memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most bytes of tensors on `device` at once since `reset_peak_memory`; None on CPU, which
    does not count them.
    """
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
