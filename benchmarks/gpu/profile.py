"""Profile of one training step: share of time in which the GPU is busy, kernels, host waits."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the work of the GPU in a Chrome trace of the profiler."""
_HOST = ("cuda_runtime", "cuda_driver")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_MEASURED = "measured call"
"""Event of the profiled function, without the waits of the profiler itself."""
_NUM_KERNELS = 20
_NUM_GAPS = 10
_GAP_BOUNDS = (10.0, 100.0, 1000.0, math.inf)
"""Upper bounds of the classes of idle gaps, microseconds."""
_MAX_NAME = 120


def profile_call(
    function: Callable[[], Any], num_microbatches: float, *, is_cuda: bool
) -> dict[str, Any]:
    """Profile one call and return what `summarize` computes of its trace."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function(_MEASURED):
            function()
        if is_cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return summarize(events, num_microbatches)


def summarize(events: Sequence[Mapping[str, Any]], num_microbatches: float) -> dict[str, Any]:
    """Return busy share, top kernels and waits from the events of a Chrome trace.

    Times of events are microseconds. Without GPU work only the number of events is returned.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    gpu = [event for event in complete if event.get("cat") in _GPU]
    host = _within_call([event for event in complete if event.get("cat") in _HOST], complete)
    if not gpu:
        return {"num_events": len(complete), "note": "no GPU work in the trace"}
    spans = [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in gpu]
    first = min(start for start, _ in spans)
    last = max(stop for _, stop in spans)
    waits = {name: _total(event for event in host if event["name"] == name) for name in _WAITS}
    num_waits = sum(count for count, _ in waits.values())
    copies: dict[str, int] = {}
    for event in gpu:
        if event["cat"] == "gpu_memcpy":
            copies[event["name"]] = copies.get(event["name"], 0) + 1
    return {
        "span_ms": (last - first) / 1e3,
        "busy_ms": union_length(spans) / 1e3,
        "busy_share": union_length(spans) / (last - first) if last > first else 1.0,
        "num_kernels": sum(event["cat"] == "kernel" for event in gpu),
        "kernels_per_microbatch": sum(event["cat"] == "kernel" for event in gpu) / num_microbatches,
        "num_waits": num_waits,
        "waits_per_microbatch": num_waits / num_microbatches,
        "waits": {name: {"count": count, "ms": us / 1e3} for name, (count, us) in waits.items()},
        "copies": copies,
        "top_kernels": top_kernels(gpu),
        "gaps": idle_gaps(gpu),
    }


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (start, stop), which may overlap."""
    total = 0.0
    end = float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _within_call(
    host: list[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the events of the host that start within the profiled function."""
    for call in events:
        if call["name"] == _MEASURED and call.get("cat") not in _GPU:
            start = float(call["ts"])
            stop = start + float(call["dur"])
            return [event for event in host if start <= float(event["ts"]) <= stop]
    return host


def idle_gaps(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return count and milliseconds of the GPU's idle gaps by length, and the longest of them."""
    gaps: list[tuple[float, str, str]] = []
    end = -math.inf
    last = ""
    for event in sorted(events, key=lambda event: float(event["ts"])):
        start = float(event["ts"])
        stop = start + float(event["dur"])
        if last and start > end:
            gaps.append((start - end, last, event["name"]))
        if stop > end:
            end = stop
            last = event["name"]
    by_length = {}
    lower = 0.0
    for upper in _GAP_BOUNDS:
        lengths = [gap for gap, _, _ in gaps if lower <= gap < upper]
        by_length[f"{lower:g} to {upper:g} us"] = {"count": len(lengths), "ms": sum(lengths) / 1e3}
        lower = upper
    longest = [
        {"us": gap, "after": after[:_MAX_NAME], "before": before[:_MAX_NAME]}
        for gap, after, before in sorted(gaps, reverse=True)[:_NUM_GAPS]
    ]
    return {"by_length": by_length, "longest": longest}


def top_kernels(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return name, count, time and share of the kernels with the most time, the longest first."""
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(event["name"], []).append(float(event["dur"]))
    total = sum(sum(each) for each in times.values())
    ordered = sorted(times.items(), key=lambda item: sum(item[1]), reverse=True)
    return [
        {
            "name": name[:_MAX_NAME],
            "count": len(each),
            "ms": sum(each) / 1e3,
            "share": sum(each) / total,
        }
        for name, each in ordered[:_NUM_KERNELS]
    ]


def _total(events: Iterable[Mapping[str, Any]]) -> tuple[int, float]:
    """Return number and total microseconds of events."""
    durations = [float(event["dur"]) for event in events]
    return len(durations), sum(durations)
