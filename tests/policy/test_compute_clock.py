"""The clock of a rank's own work: waiting for other ranks does not count, in either engine."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from nemo_like import parallel_layout as parallel_layout_module
from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import NllLoss
from nemo_like.policy.device import ComputeClock
from tests.policy.dtensor.test_layouts import Rank
from tests.policy.tiny import random_batch, run_ranks

LENGTHS = [9, 14, 6, 23]


def test_intervals_add_up_and_excluded_calls_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "process_time", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = ComputeClock(torch.device("cpu"))
    nap = clock.excluded(sleep)
    nap(0.01)
    assert clock.pop_seconds() == 0.0, "an excluded call does not start a clock that does not run"
    with clock.running():
        clock.start()
        sleep(0.05)
        nap(0.4)
        sleep(0.05)
    assert clock.pop_seconds() == pytest.approx(0.1)
    assert clock.pop_seconds() == 0.0


def test_cpu_time_does_not_pass_while_a_rank_sleeps() -> None:
    clock = ComputeClock(torch.device("cpu"))
    with clock.running():
        time.sleep(0.3)
    assert clock.pop_seconds() < 0.2


def train_beside_a_slow_rank(
    worker_context: WorkerContext, config: PolicyConfig, delay_s: float
) -> float:
    """The step's imbalance where rank 0 needs `delay_s` longer for each microbatch, and rank 1
    waits for it.
    """
    with pytest.MonkeyPatch.context() as patch:
        # Wall-clock time passes while a rank waits, as the time of events on CUDA.
        patch.setattr(time, "process_time", time.perf_counter)
        patch.setattr(
            parallel_layout_module, "MAX_UNSHARDED_BYTES", 0
        )  # collectives in every microbatch
        process_groups.init_process_group(worker_context)
        try:
            rank = Rank(worker_context, ParallelConfig())
            worker = rank.worker(config)
            engine: Any = worker.engine
            if worker_context.rank == 0:
                engine.model.causal_lm.base_model.register_forward_hook(
                    lambda *_: time.sleep(delay_s)
                )
            (metrics,) = worker.train(rank.shard(config, random_batch(LENGTHS)), None, NllLoss())
            assert worker.engine.ranks.gather_over_world(worker_context.rank) == [0, 1]
        finally:
            process_groups.destroy()
    times = [metrics[f"policy/rank_time_{name}_s"].value for name in ("min", "mean", "max")]
    assert times == sorted(times) and times[1] == pytest.approx((times[0] + times[2]) / 2)
    assert metrics["policy/rank_time_slowest"].value == 0
    imbalance = metrics["policy/rank_time_worst_over_mean"].value
    assert imbalance == pytest.approx(times[2] / times[1])
    return imbalance


def test_a_rank_that_waits_in_collectives_is_not_busy(model_dir, rank_pool, meeting) -> None:
    """By the wall clock both ranks take equally long; rank 0 alone works."""
    config = PolicyConfig(
        model_name=model_dir("llama"),
        train_global_batch_size=4,
        logprob_chunk_size=16,
        train_micro_batch_size=1,
    )
    for imbalance in run_ranks(rank_pool, train_beside_a_slow_rank, 2, meeting, config, 1.0):
        assert imbalance > 1.2
