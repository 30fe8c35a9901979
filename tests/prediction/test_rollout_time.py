"""The simulation of a rollout against its definition, token by token, and its invariants."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.planning.cost import CostModel
from nemo_like.models.presets import load_spec
from nemo_like.prediction.rollout_time import Batching, DecodeModel, rollout_times, simulate_rollout

MODEL = DecodeModel(
    weight_bytes=1000.0,
    kv_bytes_per_token=3.0,
    flops_per_token=50.0,
    prefill=CostModel(linear=10.0, quadratic=0.5),
    flops_per_s=400.0,
    memory_bytes_per_s=2000.0,
    step_overhead_s=0.01,
)
UNIFORM = DecodeModel(
    weight_bytes=0.0,
    kv_bytes_per_token=0.0,
    flops_per_token=0.0,
    prefill=CostModel(linear=0.0, quadratic=1e-12),
    flops_per_s=1.0,
    memory_bytes_per_s=1.0,
    step_overhead_s=1.0,
)
"""A decode step takes one second, whatever the batch is."""

lengths = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=24)
batchings = st.builds(
    Batching, max_running=st.integers(1, 10), is_static=st.booleans(), shares_prefix=st.booleans()
)


def arrays(rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    prompts, completions = np.array(rows, dtype=np.int64).T
    return prompts, completions


@given(num_rows=st.integers(1, 40), context=st.integers(0, 1000), num_steps=st.integers(0, 60))
def test_decode_seconds_are_the_sum_over_single_steps(num_rows, context, num_steps):
    expected = 0.0
    for step in range(num_steps):
        read_s = (1000.0 + 3.0 * (context + step * num_rows)) / 2000.0
        expected += max(read_s, num_rows * 50.0 / 400.0) + 0.01
    assert MODEL.decode_seconds(num_rows, context, num_steps) == pytest.approx(expected)


def token_by_token(
    prompts: np.ndarray, completions: np.ndarray, batching: Batching, groups: np.ndarray
) -> float:
    """One replica, one decode step at a time."""
    waiting = list(zip(prompts.tolist(), completions.tolist(), groups.tolist(), strict=True))
    running: list[list[int]] = []
    seen: set[int] = set()
    seconds = 0.0
    while waiting or running:
        if not (batching.is_static and running):
            while waiting and len(running) < batching.max_running:
                prompt, completion, group = waiting.pop(0)
                if not (batching.shares_prefix and group in seen):
                    seconds += (10.0 * prompt + 0.5 * prompt**2) / 400.0
                seen.add(group)
                running.append([prompt, completion])
        read_s = (1000.0 + 3.0 * sum(context for context, _ in running)) / 2000.0
        seconds += max(read_s, len(running) * 50.0 / 400.0) + 0.01
        running = [[context + 1, left - 1] for context, left in running if left > 1]
    return seconds


@settings(max_examples=100, deadline=None)
@given(rows=lengths, batching=batchings, group_size=st.integers(1, 4))
def test_one_replica_is_the_simulation_token_by_token(rows, batching, group_size):
    prompts, completions = arrays(rows)
    groups = np.arange(len(rows)) // group_size
    result = simulate_rollout(prompts, completions, 1, MODEL, batching, groups)
    assert result.seconds == pytest.approx(token_by_token(prompts, completions, batching, groups))


@given(rows=lengths)
def test_one_replica_without_limit_takes_as_many_steps_as_the_longest_row(rows):
    prompts, completions = arrays(rows)
    batching = Batching(max_running=len(rows))
    result = simulate_rollout(prompts, completions, 1, UNIFORM, batching)
    assert result.seconds == pytest.approx(completions.max())
    assert result.num_steps.tolist() == [completions.max()]


@settings(max_examples=100, deadline=None)
@given(rows=lengths, batching=batchings, num_replicas=st.integers(1, 8))
def test_every_token_is_decoded_once_and_no_replica_ends_after_the_rollout(
    rows, batching, num_replicas
):
    prompts, completions = arrays(rows)
    counts = range(1, num_replicas + 1)
    for result in (
        simulate_rollout(prompts, completions, num_replicas, MODEL, batching),
        rollout_times(prompts, completions, counts, MODEL, batching)[-1],
    ):
        assert len(result.busy_s) == num_replicas
        assert result.num_tokens.sum() == completions.sum()
        assert result.seconds == result.busy_s.max()
        assert result.num_steps.max() >= completions.max()
        assert 0.0 <= result.idle_share < 1.0
        # A replica decodes at most `max_running` tokens per step.
        assert bool((result.num_tokens <= result.num_steps * batching.max_running).all())


@settings(max_examples=60, deadline=None)
@given(rows=lengths, batching=batchings)
def test_more_replicas_are_never_slower(rows, batching):
    prompts, completions = arrays(rows)
    found = rollout_times(prompts, completions, range(1, 9), MODEL, batching)
    seconds = [result.seconds for result in found]
    assert seconds == sorted(seconds, reverse=True)


def test_static_batches_wait_for_their_longest_row() -> None:
    prompts, completions = arrays([(1, 9), (1, 1), (1, 1), (1, 9)])
    continuous = Batching(max_running=2)
    static = dataclasses.replace(continuous, is_static=True)
    assert simulate_rollout(prompts, completions, 1, UNIFORM, continuous).seconds == pytest.approx(
        11.0
    )
    assert simulate_rollout(prompts, completions, 1, UNIFORM, static).seconds == pytest.approx(18.0)


def test_the_sizes_of_a_model() -> None:
    """Qwen2.5-7B in bfloat16: 28 layers with 4 key-value heads of 128."""
    spec = load_spec("7b")
    model = DecodeModel.from_spec(
        spec, bytes_per_value=2, flops_per_s=1.0, memory_bytes_per_s=1.0, step_overhead_s=0.0
    )
    assert model.weight_bytes == 2 * spec.num_params
    assert model.kv_bytes_per_token == 28 * 2 * 4 * 128 * 2
    assert model.flops_per_token == 2 * spec.num_active_params


def test_wrong_arguments_are_errors() -> None:
    one = np.array([1])
    with pytest.raises(ValueError, match="max_running is 0"):
        Batching(max_running=0)
    with pytest.raises(ValueError, match="num_replicas is 0"):
        simulate_rollout(one, one, 0, MODEL, Batching(max_running=1))
    with pytest.raises(ValueError, match="at least one row"):
        simulate_rollout(one[:0], one[:0], 1, MODEL, Batching(max_running=1))
    with pytest.raises(ValueError, match="at least one token"):
        simulate_rollout(one, np.array([0]), 1, MODEL, Batching(max_running=1))
