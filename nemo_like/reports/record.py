"""A plan report as plain values for JSON. docs/planner.md describes the keys.

Within one value of `FORMAT` no key is renamed or removed.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from nemo_like.prediction.assumptions import assumptions
from nemo_like.prediction.comparison import Outcome
from nemo_like.prediction.memory import GIB, usable_bytes
from nemo_like.prediction.plan_report import PlanReport

FORMAT = 3


def to_record(report: PlanReport) -> dict[str, Any]:
    """Return everything that the table and the page show."""
    request = report.request
    comparison = report.comparison
    lengths = report.lengths
    placement = request.placement
    layout = placement.parallel_layout
    median, p90, p99 = np.percentile(lengths, (50, 90, 99)).tolist()
    return {
        "format": FORMAT,
        "rows": {
            "source": request.rows.source,
            "num_rows": len(lengths),
            "num_tokens": int(lengths.sum()),
            "mean": float(lengths.mean()),
            "p50": median,
            "p90": p90,
            "p99": p99,
            "max": int(lengths.max()),
        },
        "setting": {
            "max_tokens": request.max_tokens,
            "batch_size": comparison.batch_size,
            "num_steps": comparison.num_steps,
            "sync": report.spec.sync,
            "seed": report.spec.seed,
            "parallel": {**layout.shape._asdict(), "ep": layout.ep},
            "sequence_parallel": layout.sequence_parallel,
            "engine": placement.engine,
            "precision": placement.precision,
            "activation_checkpointing": placement.activation_checkpointing,
            "cost": asdict(report.spec.cost),
            "model": {"name": request.model.name, "num_params": request.model.num_params},
        },
        # The key keeps the name it had in the first version of the format.
        "least_microbatches": comparison.min_microbatches,
        "chosen": comparison.chosen_key,
        "baseline": comparison.baseline.strategy.key,
        "strategies": {
            outcome.strategy.key: _outcome(outcome, report) for outcome in comparison.outcomes
        },
        "memory": _memory(report),
        "logged": {
            name: {"logged": logged, "planned": planned}
            for name, (logged, planned) in request.logged.items()
        },
        "notes": list(report.notes),
        "assumptions": assumptions(report),
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
        "peak_gib": report.peak_bytes(outcome) / GIB,
        "metrics": outcome.metrics,
    }


def _memory(report: PlanReport) -> dict[str, Any]:
    memory = report.memory
    largest = report.comparison.chosen.largest_microbatch
    record: dict[str, Any] = {
        "tokens": largest,
        "bytes": memory.parts(largest),
        "peak_bytes": memory.peak(largest),
    }
    recommendation = report.recommendation
    if recommendation is None or report.request.memory_gib is None:
        return record
    budget = recommendation.max_tokens
    outcome = recommendation.outcome
    return {
        **record,
        "device_gib": report.request.memory_gib,
        "usable_bytes": usable_bytes(report.request.memory_gib),
        "recommended_max_tokens": budget,
        "enough_max_tokens": recommendation.max_useful_tokens,
        # A budget of 0 means that nothing fits; then there are no bytes to show.
        "recommended_bytes": memory.parts(budget) if budget else None,
        "recommended_step_time": outcome and outcome.step_time,
        "recommended_microbatches_per_step": outcome and outcome.num_microbatches,
        "other_checkpointing_max_tokens": recommendation.other_max_tokens,
    }
