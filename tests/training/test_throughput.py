"""Model FLOPs of a step, from the work of its rows."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_like.data.planning.plan import PlanSpec, plan_batch
from nemo_like.data.planning.prefixes import SharedPrefixes
from nemo_like.data.planning.spec import CostModel
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.metrics import Timers, metric_values
from nemo_like.training.reporting import StepWork, throughput_metrics


@pytest.mark.parametrize("has_frozen_weights", [False, True])
def test_flops_count_the_gradients_that_are_computed(has_frozen_weights: bool):
    cost = CostModel(linear=100.0, quadratic=2.0, head=40.0)
    lengths = np.array([3, 5])
    num_trained = np.array([1, 4])
    timers = Timers()
    timers.add("train", 3.0)
    timers.add("logprobs", 0.5)
    timers.add("teacher", 1.5)
    metrics = throughput_metrics(
        StepWork(
            lengths=lengths,
            num_trained=num_trained,
            num_logprob_passes=1,
            num_epochs=2,
            teacher_flops=77.0,
        ),
        cost,
        timers,
        peak_flops=10.0,
        num_workers=2,
        has_frozen_weights=has_frozen_weights,
    )
    products = 60.0 * 8 + 40.0 * 5
    attention = 2.0 * (9 + 25)
    # Forward, gradients of inputs, and of weights unless they are frozen; attention has none.
    trained = (2 if has_frozen_weights else 3) * products + 3 * attention
    flops = 2 * trained + products + attention + 77.0
    found = metric_values(metrics)["performance/train_mfu"]
    assert found == pytest.approx(flops / 5.0 / 2 / 10.0)


def test_common_leading_tokens_count_once():
    cost = CostModel(linear=100.0, quadratic=2.0, head=40.0)
    prefixes = SharedPrefixes.of_groups([0, 0, 1], [3, 3, 2])
    counts = TokenCounts(np.array([5, 7, 4]), np.array([2, 4, 1]), prefixes)
    spec = PlanSpec(max_tokens=32, cost=cost)
    plan = plan_batch(counts, spec)
    work = StepWork.of(plan)
    # Row 1 or row 0 computes three tokens for both: 13 of 16 tokens, 7 of them with loss.
    products = 60.0 * 13 + 40.0 * 7
    attention = 2.0 * (25 + 49 + 16 - 9)
    assert work.forward_flops(cost) == pytest.approx(products + attention)
    timers = Timers()
    timers.add("train", 1.0)
    timers.add("step", 1.0)
    found = {}
    for frozen in (False, True):
        metrics = throughput_metrics(
            work, cost, timers, peak_flops=1.0, num_workers=1, has_frozen_weights=frozen
        )
        found[frozen] = metric_values(metrics)
    assert found[False]["performance/tokens_per_s"] == 16
    assert found[False]["performance/train_mfu"] == pytest.approx(3 * (products + attention))
    assert found[True]["performance/train_mfu"] == pytest.approx(2 * products + 3 * attention)
