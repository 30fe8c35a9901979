"""Metrics of an optimizer step that do not come from the loss."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.losses import GlobalCounts
from nemo_like.metrics import Max, Mean, Metrics, Sum
from nemo_like.policy.device_flops import peak_memory_bytes
from nemo_like.policy.engine import Engine


def gradient_metrics(grad_norm: float, counts: GlobalCounts) -> Metrics:
    """Return the norm of the gradient and the counts of the step."""
    return {
        "policy/grad_norm": Mean(grad_norm),
        "policy/num_tokens": Sum(counts.num_tokens),
        "policy/num_rows": Sum(counts.num_rows),
    }


def memory_metrics(engine: Engine) -> Metrics:
    """Return the peak memory of the step, maximum and mean over ranks; empty on the CPU."""
    peak = peak_memory_bytes(engine.device)
    if peak is None:
        return {}
    peaks = engine.gather_over_world(peak)
    return {
        "policy/peak_memory_gb": Max(max(peaks) / 1e9),
        "policy/peak_memory_mean_gb": Mean(sum(peaks) / 1e9, len(peaks)),
    }


def max_over_mean(values: Sequence[float]) -> float:
    """Return the maximum of `values` over their mean; 1 if all are 0."""
    mean = sum(values) / len(values)
    if mean == 0:
        return 1.0
    return max(values) / mean
