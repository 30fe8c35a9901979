"""Tokens per second and model FLOPs utilisation of a step, from the real length of every row."""

from __future__ import annotations

import numpy as np

from nemo_like.data.planning.cost import CostModel
from nemo_like.metrics import Mean, Metrics, Timers

FLOPS_PER_TRAINED_UNIT = 3
"""Forward and backward cost three forwards; recomputation is not counted (that would be hardware
utilisation).
"""


def throughput_metrics(
    lengths: np.ndarray,
    cost: CostModel,
    timers: Timers,
    *,
    peak_flops: float,
    num_workers: int,
    num_logprob_passes: int,
) -> Metrics:
    """Rates of one step over all its rows.

    `lengths` int [B] counts prompt and completion tokens; `cost.of` gives the forward FLOPs of a
    row, causal attention over its own tokens only. MFU = (3 forwards trained + `num_logprob_passes`
    forwards scored) / (seconds x peak).
    """
    forward = float(cost.of(lengths).sum())
    tokens = float(lengths.sum())
    train_s, logprobs_s, step_s = (
        timers.seconds("train"),
        timers.seconds("logprobs"),
        timers.seconds("step"),
    )
    done = forward * (FLOPS_PER_TRAINED_UNIT + num_logprob_passes)
    busy = train_s + logprobs_s
    metrics: Metrics = {
        "performance/tokens_per_s": Mean(tokens / step_s if step_s else 0.0),
        "performance/tokens_per_s_per_worker": Mean(
            tokens / step_s / num_workers if step_s else 0.0
        ),
        "performance/train_tokens_per_s": Mean(tokens / train_s if train_s else 0.0),
        "performance/train_tflops_per_s_per_worker": Mean(
            done / busy / num_workers / 1e12 if busy else 0.0
        ),
        "performance/train_mfu": Mean(done / busy / num_workers / peak_flops if busy else 0.0),
    }
    return metrics
