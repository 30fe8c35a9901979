"""The learning rate by step, and what is decayed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.config.schema import OptimizerConfig, PolicyConfig, SchedulerConfig
from nemo_like.policy.optim import build_optimizer, learning_rate, resolve_decay_steps


def rates(num_steps: int, **scheduler) -> list[float]:
    config = SchedulerConfig(**scheduler)
    return [learning_rate(step, OptimizerConfig(lr=1.0), config) for step in range(num_steps)]


def test_warm_up_then_linear_decay_to_zero():
    assert rates(9, kind="linear", warmup_steps=3, decay_steps=7) == [
        0.25,
        0.5,
        0.75,
        1.0,
        0.75,
        0.5,
        0.25,
        0.0,
        0.0,
    ]


def test_cosine_is_halfway_down_in_the_middle_and_stays_at_its_minimum():
    found = rates(12, kind="cosine", decay_steps=10, min_ratio=0.1)
    assert found[0] == 1.0
    assert found[5] == pytest.approx(0.55)
    assert found[10:] == pytest.approx([0.1, 0.1])


def test_constant_needs_no_decay_steps_and_starts_at_full_rate_without_warm_up():
    assert rates(3, kind="constant") == [1.0, 1.0, 1.0]


def test_a_decaying_schedule_without_its_length_is_an_error():
    with pytest.raises(
        ValueError, match=r"policy\.scheduler\.kind is cosine and decay_steps is null"
    ):
        rates(1, kind="cosine")


def test_null_decay_steps_become_the_length_of_the_run():
    config = PolicyConfig(model_name="m", scheduler=SchedulerConfig(kind="linear"))
    assert resolve_decay_steps(config, 40).scheduler.decay_steps == 40
    fixed = PolicyConfig(model_name="m", scheduler=SchedulerConfig(kind="linear", decay_steps=7))
    assert resolve_decay_steps(fixed, 40) is fixed


@given(
    kind=st.sampled_from(["linear", "cosine"]),
    warmup=st.integers(0, 10),
    decay=st.integers(11, 40),
    min_ratio=st.floats(0, 1),
)
def test_the_rate_rises_to_its_peak_and_then_never_rises(kind, warmup, decay, min_ratio):
    found = rates(45, kind=kind, warmup_steps=warmup, decay_steps=decay, min_ratio=min_ratio)
    assert found[: warmup + 1] == sorted(found[: warmup + 1])
    assert max(found) == found[warmup] == 1.0
    assert all(
        later <= earlier + 1e-12
        for earlier, later in zip(found[warmup:], found[warmup + 1 :], strict=False)
    )
    assert found[-1] == pytest.approx(min_ratio)


def test_norms_and_biases_are_not_decayed_and_frozen_weights_not_trained():
    layer, norm = torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)
    layer.weight.requires_grad_(True)
    frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    stacked = torch.nn.Parameter(torch.ones(3, 2))
    named = [
        *layer.named_parameters(),
        *norm.named_parameters(),
        ("experts.up_proj_bias", stacked),
        ("frozen", frozen),
    ]
    optimizer = build_optimizer(named, OptimizerConfig(weight_decay=0.5))
    decayed, plain = optimizer.param_groups
    assert decayed["weight_decay"] == 0.5
    assert [id(parameter) for parameter in decayed["params"]] == [id(layer.weight)]
    assert plain["weight_decay"] == 0.0
    assert [id(parameter) for parameter in plain["params"]] == [
        id(layer.bias),
        id(norm.weight),
        id(norm.bias),
        id(stacked),
    ]
