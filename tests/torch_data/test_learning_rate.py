"""Learning rates: the base schedule times the scale of the batch size, for every scheduler."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from nemo_like.torch_data.learning_rate import (
    Method,
    VariableBatchSizeLR,
    batch_size_scale,
    scale_lr,
)
from nemo_like.torch_data.token_batches import batch_by_tokens

LRS = (1e-3, 0.02)

SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step + 0.1),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.8),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.25, total_iters=5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 7, eta_min=1e-5),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "multistep": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.3),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 6, 2.0),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.7),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 1e-4, 1e-2, 3),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3),
            lr_scheduler.ExponentialLR(optimizer, 0.8),
        ],
        milestones=[3],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=3),
            lr_scheduler.ExponentialLR(optimizer, 0.8),
        ]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1),
}


def new_optimizer(lrs: tuple[float, ...] = LRS, *, as_tensors: bool = False) -> Optimizer:
    groups: list[dict[str, Any]] = []
    for lr in lrs:
        parameter = torch.nn.Parameter(torch.zeros(2))
        value = torch.tensor(lr, dtype=torch.float64) if as_tensors else lr
        groups.append({"params": [parameter], "lr": value})
    return torch.optim.SGD(groups, momentum=0.9)


def current(scheduler: LRScheduler) -> list[float]:
    return [float(group["lr"]) for group in scheduler.optimizer.param_groups]


def advance(scheduler: LRScheduler, step: int) -> None:
    scheduler.optimizer.step()
    base = getattr(scheduler, "base_scheduler", scheduler)
    if isinstance(base, lr_scheduler.ReduceLROnPlateau):
        # A loss that stops falling after step 4.
        scheduler.step(1.0 / min(step + 1, 5))  # pyright: ignore[reportArgumentType]
    else:
        scheduler.step()


def base_lrs(name: str, num_steps: int) -> list[list[float]]:
    """Learning rates of the scheduler alone."""
    scheduler = SCHEDULERS[name](new_optimizer())
    result = []
    for step in range(num_steps):
        result.append(current(scheduler))
        advance(scheduler, step)
    return result


def wrapped(name: str, batch_sizes: list[int] | None, method: Method = "linear") -> Any:
    base = SCHEDULERS[name](new_optimizer())
    return VariableBatchSizeLR(
        base, base_batch_size=4, batch_sizes=batch_sizes, lr_scaling_method=method
    )


@pytest.mark.parametrize(
    ("base", "method", "expected"),
    [
        (lr_scheduler.ConstantLR, "linear", [5e-3, 2e-3, 5e-3, 2e-3]),
        (lr_scheduler.ConstantLR, "sqrt", [2.236e-3, 1.414e-3, 2.236e-3]),
        (lr_scheduler.ConstantLR, "none", [1e-3, 1e-3, 1e-3]),
        (lr_scheduler.ExponentialLR, "linear", [5e-3, 1e-3, 1.25e-3, 0.25e-3]),
        (lr_scheduler.LinearLR, "linear", [2.5e-3, 1.25e-3, 3.75e-3, 1.75e-3, 5e-3]),
    ],
)
def test_examples_of_the_reference(base: Any, method: Method, expected: list[float]) -> None:
    """Example 27: base batch size 2, learning rate 1e-3, batch sizes 10 and 4 in turn."""
    arguments = {
        lr_scheduler.ConstantLR: {"factor": 1.0},
        lr_scheduler.ExponentialLR: {"gamma": 0.5},
        lr_scheduler.LinearLR: {"start_factor": 0.5, "total_iters": 4},
    }
    optimizer = new_optimizer((1e-3,))
    scheduler = VariableBatchSizeLR(
        base(optimizer, **arguments[base]),
        base_batch_size=2,
        batch_sizes=[10, 4],
        lr_scaling_method=method,
    )
    lrs = []
    for step in range(len(expected)):
        lrs += current(scheduler)
        assert scheduler.get_last_lr() == lrs[-1:]
        advance(scheduler, step)
    assert lrs == pytest.approx(expected, rel=1e-3)


def test_batches_of_short_then_long_rows() -> None:
    """Example of the description: 30 tokens per batch, reference batch size 2, rate 1e-3."""
    batches = batch_by_tokens(np.array([3] * 10 + [7] * 4), 30)
    scheduler = VariableBatchSizeLR(
        lr_scheduler.ConstantLR(new_optimizer((1e-3,)), factor=1.0),
        base_batch_size=2,
        batch_sizes=batches.step_num_rows.tolist(),
    )
    lrs = current(scheduler)
    advance(scheduler, 0)
    assert lrs + current(scheduler) == pytest.approx([5e-3, 2e-3])


def test_scales() -> None:
    assert batch_size_scale(10, 2, "linear") == 5
    assert batch_size_scale(18, 2, "sqrt") == 3
    assert batch_size_scale(18, 2, "none") == 1
    for arguments in ((0, 2, "linear"), (2, 0, "none"), (2, 2, "cubic"), (math.nan, 1, "linear")):
        with pytest.raises(ValueError, match="give"):
            batch_size_scale(*arguments)  # pyright: ignore[reportArgumentType]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=3),
    st.lists(st.integers(1, 1000), min_size=1, max_size=5),
    st.integers(1, 100),
    st.sampled_from(["linear", "sqrt", "none"]),
    st.booleans(),
)
def test_it_equals_the_closed_form(
    lrs: list[float], batch_sizes: list[int], base: int, method: Method, as_tensors: bool
) -> None:
    optimizer = new_optimizer(tuple(lrs), as_tensors=as_tensors)
    factors = [1 / (1 + step) for step in range(12)]
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: factors[step])
    scheduler = VariableBatchSizeLR(
        schedule,
        base_batch_size=base,
        batch_sizes=batch_sizes,
        lr_scaling_method=method,
        unit="tokens",
    )
    for step in range(10):
        ratio = batch_sizes[step % len(batch_sizes)] / base
        scale = {"linear": ratio, "sqrt": ratio**0.5, "none": 1.0}[method]
        assert current(scheduler) == pytest.approx([lr * factors[step] * scale for lr in lrs])
        advance(scheduler, step)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_continues_as_it_would_alone(name: str) -> None:
    expected = base_lrs(name, 12)
    batch_sizes = [3, 11, 7]
    scheduler = wrapped(name, batch_sizes)
    stream = wrapped(name, None)
    for step, lrs in enumerate(expected):
        stream.set_next_batch_size(1)
        stream.set_next_batch_size(batch_sizes[step % 3])
        scaled = [lr * batch_sizes[step % 3] / 4 for lr in lrs]
        assert current(scheduler) == current(stream) == pytest.approx(scaled, rel=1e-12)
        assert scheduler.unscaled_lrs == lrs
        advance(scheduler, step)
        advance(stream, step)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_state_restores_it_exactly(name: str) -> None:
    for stopped in range(8):
        first = wrapped(name, [3, 11, 7], "sqrt")
        for step in range(stopped):
            advance(first, step)
        state = first.state_dict()
        optimizer_state = first.optimizer.state_dict()
        second = wrapped(name, [1], "sqrt")
        if stopped % 2:
            second.optimizer.load_state_dict(optimizer_state)
            second.load_state_dict(state)
        else:
            second.load_state_dict(state)
            second.optimizer.load_state_dict(optimizer_state)
        assert current(second) == current(first)
        for step in range(stopped, 10):
            advance(first, step)
            advance(second, step)
            assert current(second) == current(first)
        assert second.state_dict() == first.state_dict()


def test_a_state_is_a_copy_and_json() -> None:
    scheduler = wrapped("exponential", [3, 11])
    state = scheduler.state_dict()
    text = json.dumps(state)
    advance(scheduler, 0)
    assert json.dumps(state) == text
    scheduler.load_state_dict(json.loads(text))
    assert scheduler.state_dict() == state


def test_a_new_epoch_restarts_the_batch_sizes_only() -> None:
    expected = base_lrs("exponential", 7)
    scheduler = wrapped("exponential", [3, 11])
    sizes = []
    for step, lrs in enumerate(expected):
        if step == 3:
            scheduler.start_epoch([8, 6, 5])
        sizes.append(scheduler.batch_size)
        assert current(scheduler) == pytest.approx([lr * sizes[-1] / 4 for lr in lrs])
        advance(scheduler, step)
        scheduler.load_state_dict(scheduler.state_dict())
    assert sizes == [3, 11, 3, 8, 6, 5, 8]


def test_errors() -> None:
    stream = wrapped("exponential", None)
    listed = wrapped("exponential", [3, 11])
    with pytest.raises(RuntimeError, match="batch size of step 0 is unknown: call set_next"):
        advance(stream, 0)
    with pytest.raises(ValueError, match="next batch size is 0; it must be at least 1"):
        stream.set_next_batch_size(0)
    with pytest.raises(ValueError, match="batch_sizes were given"):
        listed.set_next_batch_size(2)
    with pytest.raises(ValueError, match="streams call set_next_batch_size instead"):
        stream.start_epoch([2])
    with pytest.raises(ValueError, match=r"ExponentialLR was called with metrics=0\.5"):
        listed.step(0.5)
    with pytest.raises(ValueError, match="for step 2 after step 0: give 1, or restore"):
        listed.step(2)
    with pytest.raises(ValueError, match="ReduceLROnPlateau was called without metrics"):
        wrapped("plateau", [3]).step()
    with pytest.raises(ValueError, match="batch_sizes is empty"):
        wrapped("linear", [])
    with pytest.raises(ValueError, match="lr_scheduler is a VariableBatchSizeLR"):
        VariableBatchSizeLR(listed, base_batch_size=1)
    with pytest.raises(ValueError, match="unit is 'samples': give rows or tokens"):
        VariableBatchSizeLR(
            listed.base_scheduler,
            base_batch_size=1,
            unit="samples",  # pyright: ignore[reportArgumentType]
        )
    for key, value in (("unit", "tokens"), ("method", "sqrt"), ("base_batch_size", 5)):
        with pytest.raises(ValueError, match=f"the state has {key}={value!r}, this scheduler"):
            listed.load_state_dict({**listed.state_dict(), key: value})
    with pytest.raises(ValueError, match="the state has 1 parameter groups, the optimizer 2"):
        listed.load_state_dict({**listed.state_dict(), "unscaled_lrs": [1.0]})
    with pytest.raises(ValueError, match="in only one of the state and this scheduler"):
        listed.load_state_dict(stream.state_dict())


def test_a_batch_size_is_an_integer_and_the_base_a_scheduler() -> None:
    with pytest.raises(ValueError, match=r"batch size 1 is 1.5; give an integer"):
        wrapped("exponential", [3, 1.5])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="next batch size is nan; give an integer"):
        wrapped("exponential", None).set_next_batch_size(math.nan)  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    with pytest.raises(ValueError, match="lr_scheduler is a SGD: give a scheduler"):
        VariableBatchSizeLR(optimizer, base_batch_size=2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="the state has no unit"):
        wrapped("exponential", None).load_state_dict({})


def test_steps_may_be_numbered_as_in_deepspeed() -> None:
    """`step(0)` after the construction, and then `step(i)` after optimizer step i - 1."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    base = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    scheduler = VariableBatchSizeLR(base, 10, [10, 4], None, "linear")
    scheduler.step(0)
    rates = []
    for step in range(1, 5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(epoch=step) if step % 2 else scheduler.step(step)
    assert rates == pytest.approx([1.0, 0.5 * 0.4, 0.25, 0.125 * 0.4])


def test_scale_lr_has_the_arguments_of_deepspeed() -> None:
    assert scale_lr(10, 4, 5e-3, "linear") == pytest.approx(2e-3)
    assert scale_lr(16, 4, 1.0, "sqrt") == pytest.approx(0.5)
    assert scale_lr(16, 4, 3.0, "none") == 3.0
    assert scale_lr(2, 4) == pytest.approx(2.0)
