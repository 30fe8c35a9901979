"""The driver's side of generation: requests distributed by outstanding work, every request answered
once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.config.rollout import GenerationConfig
from nemo_like.data.jagged import Jagged
from nemo_like.demo.task import build_model, build_tokenizer
from nemo_like.distributed.errors import WorkerDied
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.distributed.worker_group import Handle
from nemo_like.generation import replicas as replica_module
from nemo_like.generation.generator import Generator
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.generation.replicas import Replica
from nemo_like.generation.requests import (
    Completions,
    GenerationProgress,
    GenerationStart,
    SamplingParams,
)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(directory)
    build_model(seed=0).save_pretrained(directory)
    return directory


def _generator(model_directory: Path, num_replicas: int, batch_size: int = 4) -> Generator:
    lock = threading.Lock()

    def start(index: int) -> LocalGroup:
        kwargs = {
            "start": GenerationStart(model_name=str(model_directory)),
            "batch_size": batch_size,
        }
        context = local_context(num_threads=1)
        # Replicas start in threads, but transformers loads one model at a time per process.
        with lock:
            return LocalGroup(HFGenerationWorker, kwargs, context, name=f"generation-{index}")

    return Generator(start, num_replicas)


@pytest.fixture(scope="module")
def generators(model_directory: Path) -> list[Generator]:
    """One of two replicas, and one of a single replica."""
    return [_generator(model_directory, 2, batch_size=2), _generator(model_directory, 1)]


def test_predicted_lengths_decide_about_replica_and_order(model_directory: Path) -> None:
    """Four prompts of one length with two completions each."""
    prompts = Jagged.from_rows([[4 + row // 2] * 3 for row in range(8)], np.int32)
    seeds = np.arange(8, dtype=np.uint64)
    sampling = SamplingParams(max_new_tokens=4)
    generator = _generator(model_directory, 2)
    with generator.onloaded():
        generator.start_rollout()
        lengths = np.repeat([50.0, 10, 30, 15], 2)
        generator.submit(prompts, seeds, sampling, max_total_length=16, lengths=lengths)
        assert [list(each.costs) for each in generator.replicas] == [[0, 1], [4, 5, 6, 7, 2, 3]]
        finished: list[int] = []
        while generator.num_unfinished:
            finished += generator.collect(1.0)[0]
        assert sorted(finished) == list(range(8))
        # The next rollout has no predictions, and so the order of its prompts.
        generator.start_rollout()
        generator.submit(prompts, seeds, sampling, max_total_length=16)
        assert [list(each.costs) for each in generator.replicas] == [
            [8, 9, 12, 13],
            [10, 11, 14, 15],
        ]
        generator.cancel(list(range(8, 16)))


def test_calls_that_wait_together_are_planned_in_their_order(model_directory: Path) -> None:
    """The requests of an earlier step are needed first, whatever their lengths."""
    generator = _generator(model_directory, 1)
    (replica,) = generator.replicas
    prompts = Jagged.from_rows([[5], [6, 6]], np.int32)
    sampling = SamplingParams(max_new_tokens=4)
    for lengths in ([5.0, 9.0], [20.0, 7.0], [8.0, 30.0]):
        replica.has_weights = lengths[0] == 8
        generator.submit(
            prompts,
            np.arange(2, dtype=np.uint64),
            sampling,
            max_total_length=16,
            lengths=np.array(lengths),
        )
    # The tokens of prompt and completion.
    assert list(replica.costs.items()) == [(1, 11), (0, 6), (2, 21), (3, 9), (5, 32), (4, 9)]
    generator.cancel(list(range(6)))


def test_results_are_in_the_order_of_the_prompts_for_any_number_of_replicas(
    model_directory: Path,
) -> None:
    rng = np.random.default_rng(0)
    prompts = Jagged.from_rows(
        [rng.integers(4, 20, rng.integers(1, 9)) for _ in range(11)], np.int32
    )
    seeds = np.arange(11, dtype=np.uint64)
    sampling = SamplingParams(max_new_tokens=12)
    alone, spread = _generator(model_directory, 1), _generator(model_directory, 3)
    results = []
    for generator in (alone, spread):
        with generator.onloaded():
            results.append(generator.generate(prompts, seeds, sampling, max_total_length=16))
    left, right = results
    assert left.finish_reasons == right.finish_reasons
    assert np.array_equal(left.token_ids.values, right.token_ids.values)
    assert np.array_equal(left.token_ids.lengths, right.token_ids.lengths)
    np.testing.assert_allclose(left.logprobs.values, right.logprobs.values, atol=1e-5)
    few = spread.generate(
        prompts.slice(0, 2), seeds[:2], sampling, max_total_length=16
    )  # fewer rows than replicas
    assert np.array_equal(few.token_ids.values, left.token_ids.slice(0, 2).values)
    metrics = spread.pop_metrics(wall_s=1.0)
    assert metrics["timing/generator_busy_s"].value > 0
    assert metrics["generation/num_discarded_tokens"].value == 0


def test_the_completions_of_a_prompt_are_sampled_by_one_replica(model_directory: Path) -> None:
    generator = _generator(model_directory, 2)
    prompts = Jagged.from_rows([[5, 6]] * 3 + [[7]] * 3 + [[8, 9, 10]] * 3, np.int32)
    ids = generator.submit(
        prompts, np.arange(9, dtype=np.uint64), SamplingParams(max_new_tokens=4), max_total_length=9
    )
    owners = [set(replica.costs) for replica in generator.replicas]
    assert set.union(*owners) == set(ids)
    for start in (0, 3, 6):
        group = set(ids[start : start + 3])
        assert any(group <= owned for owned in owners)


def test_restarted_requests_are_answered_once(model_directory: Path) -> None:
    generator = _generator(model_directory, 2, batch_size=2)
    prompts = Jagged.from_rows([[5 + row] for row in range(6)], np.int32)
    ids = generator.submit(
        prompts, np.arange(6, dtype=np.uint64), SamplingParams(max_new_tokens=9), max_total_length=9
    )
    finished: list[int] = []
    generator.restart_unfinished()
    for _ in range(20):
        done, completions = generator.collect(0.1)
        assert len(done) == len(completions)
        finished += done
    assert sorted(finished) == ids
    assert generator.num_unfinished == 0


def _cancel_all(generator: Generator) -> None:
    generator.cancel([each for replica in generator.replicas for each in replica.costs])
    assert generator.num_unfinished == generator.num_running == 0


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 40), st.integers(1, 60)),
        min_size=1,
        max_size=12,
    )
)
def test_an_episode_stays_on_its_replica_unless_that_has_too_much_work(
    generators: list[Generator], requests: list[tuple[int, int, int]]
) -> None:
    """Each request is an episode, the length of its prompt and the limit of its completion."""
    generator = generators[0]
    _cancel_all(generator)
    generator.start_rollout()
    loads = [0, 0]
    last: dict[int, int] = {}
    for episode, length, limit in requests:
        expected = loads.index(min(loads))
        if episode in last and loads[last[episode]] <= 1.5 * min(loads) + length:
            expected = last[episode]
        last[episode] = expected
        loads[expected] += length + limit
        (request_id,) = generator.submit(
            Jagged.from_rows([[5] * length], np.int32),
            np.zeros(1, np.uint64),
            SamplingParams(max_new_tokens=limit),
            max_total_length=100,
            affinity=[episode],
        )
        assert request_id in generator.replicas[expected].costs
        assert [replica.cost for replica in generator.replicas] == loads


def _owner(generator: Generator, length: int, episode: int | None) -> int:
    """The replica that gets a request of `length` tokens."""
    (request_id,) = generator.submit(
        Jagged.from_rows([[5] * length], np.int32),
        np.zeros(1, np.uint64),
        SamplingParams(max_new_tokens=5),
        max_total_length=64,
        affinity=None if episode is None else [episode],
    )
    return [request_id in replica.costs for replica in generator.replicas].index(True)


def test_turns_that_start_together_stay_on_their_replicas(model_directory: Path) -> None:
    """The order of the rows must not matter: the first ones may all be of one replica."""
    generator = _generator(model_directory, 2)
    prompts = Jagged.from_rows([[5 + row] * 4 for row in range(8)], np.int32)
    rng = np.random.default_rng(0)
    owners: dict[int, int] = {}
    for _ in range(3):
        episodes = sorted(range(8), key=lambda each: (owners.get(each, 0), rng.random()))
        ids = generator.submit(
            prompts,
            np.arange(8, dtype=np.uint64),
            SamplingParams(max_new_tokens=20),
            max_total_length=30,
            affinity=episodes,
        )
        for request_id, episode in zip(ids, episodes, strict=True):
            index = [request_id in replica.costs for replica in generator.replicas].index(True)
            assert owners.setdefault(episode, index) == index
        assert sorted(owners.values()) == [0] * 4 + [1] * 4
        while generator.num_unfinished:
            generator.collect(0.1)


def test_an_update_ends_the_affinity_of_episodes_without_a_request(model_directory: Path) -> None:
    """Their prefixes are not in a cache any more; a request that runs computes its own again."""
    generator = _generator(model_directory, 2)
    assert [_owner(generator, 9, episode) for episode in (0, 1)] == [0, 1]
    while generator.num_unfinished:
        generator.collect(0.1)
    assert _owner(generator, 1, None) == 0
    assert _owner(generator, 8, 0) == 0, "6 tokens wait there, and none at the other"
    generator.set_version(generator.replicas, 1)
    assert _owner(generator, 1, 1) == 1
    _cancel_all(generator)
    assert _owner(generator, 1, None) == 0
    assert _owner(generator, 9, 0) == 0, "it had a request"
    _cancel_all(generator)
    generator.set_version(generator.replicas, 2)
    assert _owner(generator, 1, None) == 0
    assert _owner(generator, 9, 0) == 1


@settings(max_examples=10, deadline=None)
@given(num_rows=st.integers(1, 10), seed=st.integers(0, 1000))
def test_requests_are_returned_once_or_cancelled(
    generators: list[Generator], num_rows: int, seed: int
) -> None:
    """Requests are cancelled while they wait, run, and after they have finished."""
    generator, alone = generators
    rng = np.random.default_rng(seed)
    _cancel_all(generator)
    generator.pop_metrics(wall_s=1.0)
    prompts = Jagged.from_rows([[5 + row] for row in range(num_rows)], np.int32)
    seeds = np.arange(num_rows, dtype=np.uint64)
    sampling = SamplingParams(max_new_tokens=6)
    expected = alone.generate(prompts, seeds, sampling, max_total_length=16).token_ids
    ids = generator.submit(prompts, seeds, sampling, max_total_length=16)
    returned: dict[int, list[int]] = {}
    cancelled: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        # One decoding step per poll.
        patch.setattr(replica_module, "POLL_S", 0.0)
        while generator.num_unfinished:
            action = rng.integers(4)
            if action == 0:
                chosen = rng.choice(ids, rng.integers(0, 4)).tolist()
                cancelled |= set(chosen) - returned.keys()
                generator.cancel(chosen)
            elif action == 1:
                generator.restart_unfinished()
            done, completions = generator.collect(0.1)
            for request_id, token_ids in zip(done, completions.token_ids, strict=True):
                assert request_id not in returned
                returned[request_id] = token_ids.tolist()
    assert cancelled.isdisjoint(returned) and cancelled | returned.keys() == set(ids)
    for request_id, token_ids in returned.items():
        assert token_ids == expected[request_id - ids[0]].tolist()
    assert generator.num_running == 0
    metrics = generator.pop_metrics(wall_s=1.0)
    assert metrics["generation/num_cancelled"].value == len(cancelled)


def test_calls_with_different_options_are_sampled_with_their_own(model_directory: Path) -> None:
    generator, alone = _generator(model_directory, 2), _generator(model_directory, 1)
    prompts = Jagged.from_rows([[5], [5], [6, 7]], np.int32)
    options = [
        (SamplingParams(max_new_tokens=9), 5, 12),
        (SamplingParams(max_new_tokens=3, temperature=0.0), 5, 12),
        (SamplingParams(max_new_tokens=9, temperature=1.7, top_p=0.8), 5, 12),
        (SamplingParams(max_new_tokens=9, stop_strings=("1", "2", "3")), 5, 12),
        (SamplingParams(max_new_tokens=9), 6, 12),
        (SamplingParams(max_new_tokens=9), 5, 4),
    ]
    found: dict[int, list[int]] = {}
    calls = []
    for sampling, seed, limit in options:
        seeds = np.full(3, seed, dtype=np.uint64)
        calls.append(generator.submit(prompts, seeds, sampling, max_total_length=limit))
    while generator.num_unfinished:
        done, completions = generator.collect(0.1)
        found |= dict(zip(done, map(np.ndarray.tolist, completions.token_ids), strict=True))
    distinct = set()
    for ids, (sampling, seed, limit) in zip(calls, options, strict=True):
        seeds = np.full(3, seed, dtype=np.uint64)
        expected = alone.generate(prompts, seeds, sampling, max_total_length=limit).token_ids
        rows = [found[each] for each in ids]
        assert rows == [row.tolist() for row in expected]
        distinct.add(str(rows))
    assert len(distinct) == len(options), "the options matter"


def test_polls_of_turns_are_short_and_at_most_500_per_second() -> None:
    assert replica_module.poll_seconds(1, has_turns=False) == (0.1, None)
    assert replica_module.poll_seconds(100, has_turns=False) == (pytest.approx(0.2), None)
    assert replica_module.poll_seconds(1, has_turns=True) == pytest.approx((0.02, 0.002))
    for num_replicas in (1, 9, 10, 11, 100, 500):
        max_s, min_s = replica_module.poll_seconds(num_replicas, has_turns=True)
        assert min_s is not None and max_s >= min_s
        assert num_replicas / min_s == pytest.approx(500.0)


def test_a_prompt_without_room_names_the_key(model_directory: Path) -> None:
    generator = _generator(model_directory, 1)
    sampling = SamplingParams(max_new_tokens=4)
    prompts = Jagged.from_rows([[5], [5] * 8], np.int32)
    with pytest.raises(
        ValueError,
        match=r"prompt 1 has 8 tokens and policy\.max_total_sequence_length is 8.*at least 9",
    ):
        generator.generate(prompts, np.zeros(2, np.uint64), sampling, max_total_length=8)
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        generator.generate(
            Jagged.from_rows([[5], []], np.int32),
            np.zeros(2, np.uint64),
            sampling,
            max_total_length=8,
        )
    with pytest.raises(ValueError, match="2 prompts need as many seeds, got 1"):
        generator.generate(prompts, np.zeros(1, np.uint64), sampling, max_total_length=9)


def test_sampling_follows_the_config() -> None:
    config = GenerationConfig(
        max_new_tokens=7, temperature=0.8, top_p=0.9, top_k=5, min_p=0.02, stop_strings=("\n\n",)
    )
    sampling = SamplingParams.from_config(config)
    assert sampling == SamplingParams(
        max_new_tokens=7, temperature=0.8, top_p=0.9, top_k=5, min_p=0.02, stop_strings=("\n\n",)
    )


class _DyingGroup:
    """A group whose worker ends between two polls."""

    def __init__(self, progress: GenerationProgress) -> None:
        self.progress = progress

    def get(self, handles: Sequence[Handle]) -> list[GenerationProgress]:
        if handles[0].method == "second":
            raise WorkerDied("it died", group="generation-0", rank=0, method="poll")
        return [self.progress]


def test_the_rows_of_a_poll_are_kept_if_the_next_poll_fails() -> None:
    completions = Completions.from_rows([[5]], [[-1.0]], [[0]], ["length"])
    ids = np.array([7], dtype=np.int64)
    progress = GenerationProgress(ids, completions, num_unfinished=1, num_tokens=2, busy_s=0.1)
    group: Any = _DyingGroup(progress)
    replica = Replica(0, group, has_weights=True, costs={7: 10, 8: 10})
    replica.polls.extend([[Handle(None, None, 0, "first")], [Handle(None, None, 0, "second")]])
    results: list[GenerationProgress] = []
    with pytest.raises(WorkerDied):
        replica.wait(results)
    assert [result.request_ids.tolist() for result in results] == [[7]]
    assert list(replica.costs) == [8], "only the unfinished request is sampled again"
