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
from nemo_like.generation.generator import Generator
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.generation.replicas import Replica, assign_units
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


@settings(max_examples=100)
@given(
    costs=st.lists(st.integers(1, 500), max_size=60),
    outstanding=st.lists(st.integers(0, 2000), min_size=1, max_size=5),
)
def test_units_go_to_the_replica_with_the_lowest_load(
    costs: list[int], outstanding: list[int]
) -> None:
    unit_costs, before = np.array(costs, dtype=np.int64), np.array(outstanding, dtype=np.int64)
    owners = assign_units(unit_costs, before)
    after = before + np.bincount(owners, weights=unit_costs, minlength=len(before)).astype(int)
    for replica in set(owners.tolist()):
        # Without its smallest unit, which came last, it had at most the work of every other.
        smallest = unit_costs[owners == replica].min()
        assert after[replica] - smallest <= after.min()


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
