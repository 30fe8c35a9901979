"""The predicted GRPO step: a table on the terminal, a section of the page, and plain values."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from nemo_like.prediction.grpo_step import GrpoStepPrediction, SplitTimes

COLUMNS = (
    "rollout",
    "rewards",
    "log-probs",
    "training",
    "weights",
    "idle",
    "synchronous",
    "staleness 1",
)
"""Seconds of each phase; the share of the replicas' time after their last row; seconds per step."""
TITLE = "policy + generation"
# Two lines, so that the table fits into the width of a pipe.
_HEADS = (
    "\nrollout",
    "\nrewards",
    "log-\nprobs",
    "\ntraining",
    "\nweights",
    "\nidle",
    "synchro-\nnous",
    "stale-\nness 1",
)


def cells(times: SplitTimes) -> list[str]:
    """Return the cells of `COLUMNS` for one split."""
    staleness_1 = times.staleness_1
    return [
        _seconds(float(times.rollout.mean())),
        _seconds(times.reward + float(times.reward_model.mean())),
        _seconds(float(times.logprobs.mean())),
        _seconds(float(times.train.mean())),
        _seconds(times.weight_sync),
        f"{times.idle_share:.0%}",
        _seconds(times.synchronous),
        "-" if staleness_1 is None else _seconds(staleness_1),
    ]


def step_table(prediction: GrpoStepPrediction) -> Table:
    """Return the table with one split of the devices per row; that of the config is bold."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column(f"seconds of a step\n{TITLE}", no_wrap=True)
    for head in _HEADS:
        table.add_column(head, justify="right", no_wrap=True)
    for times in prediction.splits:
        style = "bold" if times is prediction.configured else None
        table.add_row(str(times.split), *cells(times), style=style)
    return table


def step_verdict(prediction: GrpoStepPrediction) -> str:
    """Return one sentence about the fastest splits and the configured one."""
    configured = prediction.configured
    synchronous = prediction.fastest_synchronous
    text = (
        f"GRPO step, {configured.split} as configured: {_seconds(configured.synchronous)} s"
        f" synchronous; fastest synchronous: {synchronous.split} with"
        f" {_seconds(synchronous.synchronous)} s"
    )
    overlapped = prediction.fastest_overlapped
    if overlapped is not None and overlapped.staleness_1 is not None:
        ratio = synchronous.synchronous / overlapped.staleness_1
        text += (
            f"; with staleness 1: {overlapped.split} with {_seconds(overlapped.staleness_1)} s"
            f" ({ratio:.2f}x the speed)"
        )
    return text


def step_record(prediction: GrpoStepPrediction | None) -> dict[str, Any] | None:
    """Return the prediction as plain values; None without one."""
    if prediction is None:
        return None
    splits = []
    for times in prediction.splits:
        splits.append(
            {
                "policy_workers": times.split.policy,
                "generation_workers": times.split.generation,
                "is_colocated": times.split.is_colocated,
                "rollout_s": float(times.rollout.mean()),
                "reward_s": times.reward,
                "reward_model_s": float(times.reward_model.mean()),
                "logprobs_s": float(times.logprobs.mean()),
                "train_s": float(times.train.mean()),
                "weight_sync_s": times.weight_sync,
                "generation_idle_share": times.idle_share,
                "synchronous_s": times.synchronous,
                "staleness_1_s": times.staleness_1,
            }
        )
    return {
        "source": prediction.request.source,
        "calibrated_with": prediction.calibration.source or None,
        "factors": dict(prediction.calibration.factors),
        "num_logprob_passes": prediction.request.num_logprob_passes,
        "configured": list(prediction.splits).index(prediction.configured),
        "splits": splits,
    }


def _seconds(seconds: float) -> str:
    """Format seconds with three digits. Examples: `0.0123`, `4.56`, `789`."""
    if seconds >= 100:
        return f"{seconds:,.0f}"
    return f"{seconds:#.3g}"
