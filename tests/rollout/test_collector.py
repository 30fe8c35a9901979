"""Which completions the collector submits for rewards together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.config.rollout import RewardConfig
from nemo_like.data.jagged import Jagged
from nemo_like.environments.reward import RewardSample
from nemo_like.environments.reward_worker import ScoredSamples
from nemo_like.generation.requests import Completions, SamplingParams
from nemo_like.rollout.collector import RolloutCollector
from nemo_like.rollout.conversations import Prompt

SAMPLING = SamplingParams(max_new_tokens=4, temperature=1.0)


class Generator:
    """Finishes the requests that the test names; the completion of request i is the token i."""

    def __init__(self) -> None:
        self.num_unfinished = 0
        self.num_requests = 0
        self.finished: list[int] = []
        self.awaited_calls: list[Any] = []
        self.cancelled: list[int] = []
        self.num_discarded = 0

    def start_rollout(self) -> None:
        pass

    def submit(
        self, prompts: Jagged, seeds: np.ndarray, sampling: SamplingParams, **_: Any
    ) -> list[int]:
        first = self.num_requests
        self.num_requests += len(seeds)
        self.num_unfinished += len(seeds)
        return list(range(first, self.num_requests))

    def cancel(self, request_ids: Sequence[int]) -> None:
        self.cancelled += request_ids

    def add_discarded(self, num_tokens: int) -> None:
        self.num_discarded += num_tokens

    def collect(self, timeout_s: float, calls: Sequence[Any] = ()) -> tuple[list[int], Completions]:
        self.awaited_calls = list(calls)
        ids = self.finished
        self.finished = []
        self.num_unfinished -= len(ids)
        tokens = [[each] for each in ids]
        logprobs = [[-1.0] for _ in ids]
        reasons: list[Any] = ["stop"] * len(ids)
        return ids, Completions.from_rows(tokens, logprobs, [[0] for _ in ids], reasons)


class Rewards:
    """Scores at once: the reward of a request is its number."""

    def __init__(self, is_grouped: bool) -> None:
        self.config = RewardConfig()
        self.is_grouped = is_grouped
        self.running_calls: list[Any] = []
        self.submitted: list[list[int]] = []
        self.groups: dict[int, set[int]] = {}
        self._scored: list[ScoredSamples] = []

    def set_tokenizer(self, tokenizer: Any) -> None:
        pass

    def submit(
        self, keys: Sequence[int], samples: Sequence[RewardSample], token_ids: Sequence[np.ndarray]
    ) -> None:
        self.submitted.append(list(keys))
        assert [each.tolist() for each in token_ids] == [[key] for key in keys]
        for key, sample in zip(keys, samples, strict=True):
            self.groups.setdefault(sample.group, set()).add(key)
        self._scored.append(
            ScoredSamples(
                keys=list(keys),
                rewards=np.array(keys, dtype=np.float64),
                components={},
                problems=[None] * len(keys),
            )
        )

    def hold(self, scored: Sequence[ScoredSamples]) -> None:
        """Return results again at the next call of `collect`."""
        self._scored += scored

    def collect(self, timeout_s: float) -> list[ScoredSamples]:
        scored = self._scored
        self._scored = []
        return scored


def _run(
    is_grouped: bool, num_prompts: list[int], sizes: list[int], chunks: list[list[int]]
) -> Rewards:
    """Finish the requests of jobs in `chunks`; check that every row gets its own reward."""
    generator = Generator()
    rewards = Rewards(is_grouped)
    tokenizer: Any = SimpleNamespace()
    collector = RolloutCollector(generator, rewards, tokenizer)  # type: ignore[arg-type]
    prompt = Prompt(token_ids=np.array([1], dtype=np.int32), text="p", answer=None)
    jobs = []
    for count, size in zip(num_prompts, sizes, strict=True):
        jobs.append(
            collector.start(
                [prompt] * count,
                group_size=size,
                sampling=SAMPLING,
                max_total_length=8,
                seeds=np.arange(count * size, dtype=np.uint64),
            )
        )
    for chunk in chunks:
        generator.finished = list(chunk)
        collector.advance()
    assert all(job.is_done for job in jobs)
    found = np.concatenate([job.rewards for job in jobs])
    assert found.tolist() == list(range(generator.num_requests))
    return rewards


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3), st.data())
def test_a_group_is_submitted_when_its_last_completion_has_ended(
    jobs: list[tuple[int, int]], data: st.DataObject
) -> None:
    """With grouped functions; requests end in any order, also of several jobs at a time."""
    members: list[list[int]] = []
    for count, size in jobs:
        for _ in range(count):
            first = sum(map(len, members))
            members.append(list(range(first, first + size)))
    order = data.draw(st.permutations(range(sum(map(len, members)))))
    bounds = sorted(data.draw(st.sets(st.integers(1, len(order)))) | {0, len(order)})
    chunks = [order[start:stop] for start, stop in pairwise(bounds)]
    rewards = _run(True, [count for count, _ in jobs], [size for _, size in jobs], chunks)
    expected = []
    ended: set[int] = set()
    for chunk in chunks:
        complete = [each for each in members if set(chunk) & set(each)]
        ended |= set(chunk)
        complete = [each for each in complete if ended >= set(each)]
        if complete:
            expected.append(complete)
    assert len(rewards.submitted) == len(expected)
    for keys, groups in zip(rewards.submitted, expected, strict=True):
        # Consecutive, in row order; the groups in the order in which they became complete.
        parts = sorted(groups, key=lambda each: keys.index(each[0]))
        assert keys == [key for part in parts for key in part]
    assert sorted(rewards.groups.values(), key=min) == [set(each) for each in members]


@pytest.mark.parametrize("is_grouped", [False, True])
def test_only_grouped_functions_wait_for_the_group(is_grouped: bool) -> None:
    rewards = _run(is_grouped, [2], [2], [[1], [2, 3], [0]])
    assert rewards.submitted == ([[2, 3], [0, 1]] if is_grouped else [[1], [2, 3], [0]])


def test_the_wait_for_completions_ends_with_a_call_of_the_reward_workers() -> None:
    generator, rewards = Generator(), Rewards(is_grouped=False)
    tokenizer: Any = SimpleNamespace()
    collector = RolloutCollector(generator, rewards, tokenizer)  # type: ignore[arg-type]
    prompt = Prompt(token_ids=np.array([1], dtype=np.int32), text="p", answer=None)
    collector.start(
        [prompt],
        group_size=1,
        sampling=SAMPLING,
        max_total_length=8,
        seeds=np.zeros(1, dtype=np.uint64),
    )
    rewards.running_calls = ["a call"]
    collector.advance()
    assert generator.awaited_calls == ["a call"]


@given(
    num_groups=st.integers(2, 6),
    size=st.integers(1, 4),
    is_grouped=st.sampled_from([None, False, True]),
    delays_rewards=st.booleans(),
    data=st.data(),
)
def test_a_job_ends_with_the_groups_that_end_first(
    num_groups: int, size: int, is_grouped: bool | None, delays_rewards: bool, data: st.DataObject
) -> None:
    """Without functions, with functions of completions and of groups, and with late rewards."""
    num_wanted = data.draw(st.integers(1, num_groups - 1))
    order = data.draw(st.permutations(range(num_groups * size)))
    bounds = sorted(data.draw(st.sets(st.integers(1, len(order)))) | {0, len(order)})
    generator = Generator()
    rewards = None if is_grouped is None else Rewards(is_grouped)
    tokenizer: Any = SimpleNamespace()
    collector = RolloutCollector(generator, rewards, tokenizer)  # type: ignore[arg-type]
    prompts = [
        Prompt(token_ids=np.array([1], dtype=np.int32), text=str(each), answer=None)
        for each in range(num_groups)
    ]
    job = collector.start(
        prompts,
        group_size=size,
        sampling=SAMPLING,
        max_total_length=8,
        seeds=np.arange(num_groups * size, dtype=np.uint64),
        num_wanted=num_wanted,
    )
    # By hand: a group ends with its last completion.
    ends = np.argsort(order).reshape(num_groups, size).max(axis=1).tolist()
    kept = sorted(sorted(range(num_groups), key=ends.__getitem__)[:num_wanted])
    last = max(ends[group] for group in kept)
    held: list[ScoredSamples] = []
    num_returned = 0
    for start, stop in pairwise(bounds):
        if rewards is not None and delays_rewards:
            held += rewards.collect(0.0)
        generator.finished = [each for each in order[start:stop] if each not in generator.cancelled]
        num_returned += len(generator.finished)
        if job.kept is not None and not held:
            break
        collector.advance()
        assert job.kept == (kept if stop > last else None)
    if rewards is not None:
        rewards.hold(held)
        collector.advance()
    assert job.is_done and job.kept == kept
    rows = [row for group in kept for row in range(group * size, (group + 1) * size)]
    assert [row.prompt.text for row in job.rows] == [str(row // size) for row in rows]
    assert [row.last_turn.tolist() for row in job.rows] == [[row] for row in rows]
    assert job.rewards.tolist() == (rows if rewards is not None else [0] * len(rows))
    assert sorted(job.scored_rows) == list(range(len(rows)))
    rollout = job.result()
    assert rollout.batch["group"].tolist() == np.repeat(range(num_wanted), size).tolist()
    others = set(range(num_groups * size)) - set(rows)
    ended = set(order[: next(stop for stop in bounds if stop > last)]) & others
    assert generator.num_discarded == len(ended), "one token each"
    assert set(generator.cancelled) >= others - ended
    assert not set(generator.cancelled) & set(rows)
