"""WSD and cosine with restarts, against transformers and torch, and their bounds."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler
from transformers import get_cosine_with_hard_restarts_schedule_with_warmup, get_wsd_schedule

from nemo_like.config.schema import OptimizerConfig, SchedulerConfig
from nemo_like.policy.optim import learning_rate, wsd_decay_start


def rates(num_steps: int, **scheduler) -> list[float]:
    config = SchedulerConfig(**scheduler)
    return [learning_rate(step, OptimizerConfig(lr=1.0), config) for step in range(num_steps)]


def sgd() -> torch.optim.Optimizer:
    """An optimizer with learning rate 1, for a scheduler of another library."""
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def stepped(scheduler: LRScheduler, num_steps: int) -> list[float]:
    """Learning rates of the first steps of `scheduler`."""
    found = []
    for _ in range(num_steps):
        found.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(("shape", "name"), [("linear",) * 2, ("cosine",) * 2, ("sqrt", "1-sqrt")])
def test_wsd_is_that_of_transformers_after_warm_up(shape, name):
    reference = get_wsd_schedule(
        sgd(),
        num_warmup_steps=4,
        num_decay_steps=6,
        num_training_steps=20,
        decay_type=name,
        min_lr_ratio=0.1,
    )
    found = rates(
        24,
        kind="wsd",
        warmup_steps=4,
        decay_steps=20,
        wsd_decay_steps=6,
        wsd_decay_shape=shape,
        min_ratio=0.1,
    )
    assert found[4:] == pytest.approx(stepped(reference, 24)[4:])
    # The warm-up of this package is never 0, that of transformers begins with a step of 0.
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize(("num_cycles", "num_steps"), [(1, 9), (3, 21), (4, 18)])
def test_restarts_are_those_of_transformers_after_warm_up(num_cycles, num_steps):
    reference = get_cosine_with_hard_restarts_schedule_with_warmup(
        sgd(), num_warmup_steps=3, num_training_steps=3 + num_steps, num_cycles=num_cycles
    )
    found = rates(
        num_steps + 6,
        kind="cosine_restarts",
        warmup_steps=3,
        decay_steps=3 + num_steps,
        num_cycles=num_cycles,
    )
    assert found[3:] == pytest.approx(stepped(reference, num_steps + 6)[3:])


def test_cycles_are_equal_to_torch():
    reference = CosineAnnealingWarmRestarts(sgd(), T_0=7, eta_min=0.2)
    found = rates(21, kind="cosine_restarts", decay_steps=21, num_cycles=3, min_ratio=0.2)
    assert found == pytest.approx(stepped(reference, 21))


@given(
    warmup=st.integers(0, 8),
    span=st.integers(1, 40),
    decay=st.none() | st.integers(1, 60),
    shape=st.sampled_from(["linear", "sqrt", "cosine"]),
    min_ratio=st.floats(0, 1),
)
def test_wsd_is_flat_and_then_falls_to_its_minimum(warmup, span, decay, shape, min_ratio):
    keys = {
        "kind": "wsd",
        "warmup_steps": warmup,
        "decay_steps": warmup + span,
        "wsd_decay_steps": decay,
        "wsd_decay_shape": shape,
        "min_ratio": min_ratio,
    }
    found = rates(warmup + span + 3, **keys)
    start = wsd_decay_start(warmup + span, SchedulerConfig(**keys))
    assert warmup <= start < warmup + span
    assert found[warmup : start + 1] == pytest.approx([1.0] * (start + 1 - warmup))
    falling = found[start:]
    for earlier, later in pairwise(falling):
        assert later <= earlier + 1e-12
    assert found[warmup + span :] == pytest.approx([min_ratio] * 3)


@given(
    warmup=st.integers(0, 5),
    span=st.integers(1, 60),
    num_cycles=st.integers(1, 5),
    min_ratio=st.floats(0, 1),
)
def test_restarts_stay_between_the_bounds(warmup, span, num_cycles, min_ratio):
    found = rates(
        warmup + span + 2,
        kind="cosine_restarts",
        warmup_steps=warmup,
        decay_steps=warmup + span,
        num_cycles=num_cycles,
        min_ratio=min_ratio,
    )
    after = found[warmup : warmup + span]
    assert after[0] == 1.0
    assert all(min_ratio - 1e-12 <= rate <= 1.0 for rate in after)
    num_rises = sum(later > earlier for earlier, later in pairwise(after))
    assert num_rises <= num_cycles - 1
    if min_ratio < 0.99 and span >= 4 * num_cycles:
        assert num_rises == num_cycles - 1
    assert found[warmup + span :] == pytest.approx([min_ratio] * 2)
