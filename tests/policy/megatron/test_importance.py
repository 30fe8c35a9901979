"""Importance correction, and steps without a log-prob pass, on Megatron-Core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_like.config.loss import CorrectionKind
from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.metrics import metric_values
from tests.policy.megatron.ranks import RecordingEngine, as_tensors, joined, of_model
from tests.policy.test_gradient_equality import TOLERANCE, assert_same_metrics, packed
from tests.policy.test_importance_layouts import make_loss, rollout, without_logprobs
from tests.policy.tiny import relative_error

KINDS: tuple[CorrectionKind, ...] = ("none", "sequence_truncate", "sequence_mask")
LAYOUTS: dict[str, tuple[CorrectionKind, ...]] = {
    "cp2": KINDS,
    "tp2": ("none", "sequence_mask"),
    "pp2": ("none", "sequence_truncate"),
}
"""Layout -> kinds of correction; ranks of cp share the sums of a row."""


def train(
    context: WorkerContext,
    parallel: ParallelConfig,
    config: PolicyConfig,
    kinds: Sequence[CorrectionKind],
) -> dict[str, Any]:
    """One optimizer step of a fresh model for each kind, with and without a log-prob pass."""
    found: dict[str, Any] = {}
    with joined(context, parallel) as rank:
        for kind in kinds:
            for is_single_step in (False, True):
                worker = rank.worker(config)
                shard = rollout(worker, rank.shard(config, worker, without_logprobs()))
                loss = make_loss(kind)
                handle = None
                if is_single_step:
                    loss = loss.for_num_steps(1)
                else:
                    handle = worker.compute_logprobs(shard, loss.logprob_names)
                (metrics,) = worker.train(shard, None, loss, handle)
                engine = worker.engine
                assert isinstance(engine, RecordingEngine)
                found[f"{kind}, {is_single_step}"] = (engine.gradients, metric_values(metrics))
    return found


def test_a_layout_and_a_log_prob_pass_change_nothing(model_dir, on_ranks):
    config = of_model(packed(48), model_dir("qwen3"))
    (alone,) = on_ranks(train, "one rank", config, KINDS)
    for parallel, kinds in LAYOUTS.items():
        check(parallel, kinds, on_ranks(train, parallel, config, kinds), alone)


def check(
    parallel: str,
    kinds: Sequence[CorrectionKind],
    ranks: list[dict[str, Any]],
    alone: dict[str, Any],
) -> None:
    """Compare gradients and metrics of a layout with those of one rank."""
    for kind in kinds:
        with_pass, without = f"{kind}, False", f"{kind}, True"
        for found, expected, tolerance in [
            (alone[without], alone[with_pass], 1e-6),
            (ranks[0][without], ranks[0][with_pass], 1e-6),
            (ranks[0][without], alone[without], TOLERANCE),
        ]:
            error = relative_error(as_tensors(found[0]), as_tensors(expected[0]))
            assert error < tolerance, (parallel, kind)
        for name in (without, with_pass):
            # Only the last pipeline stage has the metrics of the loss.
            assert_same_metrics(ranks[-1][name][1], alone[with_pass][1])
