"""A plan report as plain values for JSON. README.md describes the keys.

Within one value of `FORMAT` no key is renamed or removed.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from nemo_like.prediction.comparison import Outcome
from nemo_like.prediction.memory import usable_bytes
from nemo_like.prediction.plan_report import PlanReport
from nemo_like.reports.grpo_step import step_record

FORMAT = 2


def to_record(report: PlanReport) -> dict[str, Any]:
    """Return everything that the table and the page show."""
    request = report.request
    comparison = report.comparison
    lengths = report.lengths
    model = None
    if request.model is not None:
        model = {"name": request.model.name, "num_params": request.model.num_params}
    percentiles = {}
    for share in (50, 90, 99):
        # JSON has no numbers of NumPy.
        percentiles[f"p{share}"] = float(np.percentile(lengths, share))
    outcomes = {}
    for outcome in comparison.outcomes:
        outcomes[outcome.strategy.key] = _outcome(outcome, report)
    logged = {}
    for name, (logged_value, planned_value) in request.logged.items():
        logged[name] = {"logged": logged_value, "planned": planned_value}
    return {
        "format": FORMAT,
        "rows": {
            "source": request.rows.source,
            "num_rows": len(lengths),
            "num_tokens": int(lengths.sum()),
            "mean": float(lengths.mean()),
            **percentiles,
            "max": int(lengths.max()),
        },
        "setting": {
            "max_tokens": report.max_tokens,
            "batch_size": comparison.batch_size,
            "num_steps": comparison.num_steps,
            "sync": report.spec.sync,
            "seed": report.spec.seed,
            "parallel": {
                **request.placement.parallel_layout.shape._asdict(),
                "ep": request.placement.parallel_layout.ep,
            },
            "sequence_parallel": request.placement.parallel_layout.sequence_parallel,
            "engine": request.placement.engine,
            "precision": request.placement.precision,
            "activation_checkpointing": request.placement.activation_checkpointing,
            "cost": asdict(report.spec.cost),
            "model": model,
        },
        # The key keeps the name it had in the first version of the format.
        "least_microbatches": comparison.min_microbatches,
        "chosen": comparison.chosen_key,
        "baseline": comparison.baseline.strategy.key,
        "strategies": outcomes,
        "memory": _memory(report),
        "logged": logged,
        "grpo_step": step_record(report.grpo),
        "notes": list(report.notes),
        "assumptions": report.assumptions(),
    }


def _outcome(outcome: Outcome, report: PlanReport) -> dict[str, Any]:
    return {
        "title": outcome.strategy.title,
        "padding_share": outcome.padding_share,
        "microbatches_per_step": outcome.num_microbatches,
        "utilization": outcome.utilization,
        "rank_tokens": outcome.rank_tokens,
        "rank_flops": outcome.rank_flops,
        "over_bound": outcome.over_bound,
        "step_time": outcome.step_time,
        "speedup": report.comparison.speedup(outcome),
        "largest_microbatch": outcome.largest_microbatch,
        "peak_gib": report.peak_gib(outcome),
        "metrics": outcome.metrics,
    }


def _memory(report: PlanReport) -> dict[str, Any] | None:
    memory = report.memory
    recommendation = report.recommendation
    # Without a model there is nothing to predict memory from.
    if memory is None:
        return None
    largest = report.comparison.chosen.largest_microbatch
    record: dict[str, Any] = {
        "tokens": largest,
        "bytes": memory.parts(largest),
        "peak_bytes": memory.peak(largest),
    }
    if recommendation is None or report.request.memory_gib is None:
        return record
    # A budget of 0 means that nothing fits; then there are no bytes to show.
    recommended_bytes = None
    if recommendation.max_tokens:
        recommended_bytes = memory.parts(recommendation.max_tokens)
    step_time = None
    num_microbatches = None
    outcome = recommendation.outcome
    if outcome is not None:
        step_time = outcome.step_time
        num_microbatches = outcome.num_microbatches
    return {
        **record,
        "device_gib": report.request.memory_gib,
        "usable_bytes": usable_bytes(report.request.memory_gib),
        "recommended_max_tokens": recommendation.max_tokens,
        "enough_max_tokens": recommendation.max_useful_tokens,
        "recommended_bytes": recommended_bytes,
        "recommended_step_time": step_time,
        "recommended_microbatches_per_step": num_microbatches,
        "other_checkpointing_max_tokens": recommendation.other_max_tokens,
    }
