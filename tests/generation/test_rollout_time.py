"""Decoding steps and tokens of a rollout against a simulation token by token."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.config.rollout import GenerationConfig, VLLMGenerationConfig
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.generation.rollout_time import decoding_steps, rollout_work


def steps_token_by_token(lengths: list[int], num_slots: int, *, is_static: bool) -> int:
    waiting = deque(lengths)
    running: list[int] = []
    num_steps = 0
    while waiting or running:
        if not (is_static and running):
            while waiting and len(running) < num_slots:
                running.append(waiting.popleft())
        num_steps += 1
        running = [left - 1 for left in running if left > 1]
    return num_steps


@given(st.lists(st.integers(1, 12), max_size=20), st.integers(1, 6), st.booleans())
def test_each_step_adds_a_token_to_every_running_completion(
    lengths: list[int], num_slots: int, is_static: bool
) -> None:
    expected = steps_token_by_token(lengths, num_slots, is_static=is_static)
    found = decoding_steps(np.array(lengths, dtype=np.int64), num_slots, is_static=is_static)
    assert found == expected


def work(completions: list[int], num_replicas: int, num_slots: int = 4) -> tuple[int, int]:
    trained = np.array(completions)
    generation = GenerationConfig(
        backend="vllm", max_new_tokens=20, vllm=VLLMGenerationConfig(max_num_seqs=num_slots)
    )
    return rollout_work(TokenCounts(trained + 3, trained), 2, num_replicas, generation)


def test_the_slowest_replica_counts() -> None:
    # Groups of two with equal limits go to the replicas in turn: 3 + 5 + 20 + 1 and 4 + 4.
    completions = [3, 5, 4, 4, 20, 1]
    assert work(completions, 2) == (20, 29)
    assert work(completions, 1) == (23, 37)


@given(st.lists(st.tuples(*[st.integers(1, 20)] * 2), min_size=1, max_size=12), st.integers(1, 4))
def test_tokens_do_not_get_lost(groups: list[tuple[int, int]], num_slots: int) -> None:
    completions = [length for group in groups for length in group]
    num_steps, num_tokens = work(completions, 1, num_slots)
    assert num_tokens == sum(completions)
    assert max(completions) <= num_steps <= num_tokens
    # A second replica takes at most everything.
    assert work(completions, 2, num_slots)[1] <= num_tokens
