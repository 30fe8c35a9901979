"""The driver's side of generation: work dealt evenly, results in the order of the prompts, versions
that must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.config.generation import GenerationConfig
from nemo_like.data.jagged import Jagged
from nemo_like.demo_task import build_model, build_tokenizer
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.generation.generator import Generator, deal_by_length
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.generation.worker_protocol import Completions, SamplingParams
from nemo_like.parallel_layout import ParallelLayout


class _InProcessGroup:
    """Several workers in this process, with the calls `Generator` makes."""

    name = "generation"

    def __init__(self, workers: Sequence[HFGenerationWorker]) -> None:
        self.parallel_layout = ParallelLayout(dp=len(workers))
        self.world_size = len(workers)
        self.workers = list(workers)

    def run_all_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(worker, method)(*args, **kwargs) for worker in self.workers]

    def run_all_workers_sharded_data(
        self, method: str, *sharded: Sequence[Any], **common: Any
    ) -> list[Any]:
        items = zip(*sharded, strict=True)
        return [
            getattr(worker, method)(*item, **common)
            for worker, item in zip(self.workers, items, strict=True)
        ]


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(directory)
    build_model(seed=0).save_pretrained(directory)
    return directory


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 500), max_size=60), num_workers=st.integers(1, 5))
def test_every_row_is_dealt_once_and_evenly(lengths: list[int], num_workers: int) -> None:
    dealt = deal_by_length(np.array(lengths, dtype=np.int64), num_workers)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(len(lengths)))
    counts = [len(rows) for rows in dealt]
    assert max(counts) - min(counts) <= 1
    tokens = [sum(lengths[row] for row in rows) for rows in dealt]
    assert max(tokens) - min(tokens) <= 2 * max(lengths, default=0)


def test_results_are_in_the_order_of_the_prompts_for_any_number_of_workers(
    model_directory: Path,
) -> None:
    rng = np.random.default_rng(0)
    prompts = Jagged.from_rows(
        [rng.integers(4, 20, rng.integers(1, 9)) for _ in range(11)], np.int32
    )
    seeds = np.arange(11, dtype=np.uint64)
    sampling = SamplingParams(max_new_tokens=12)
    kwargs = {"model_name": str(model_directory), "batch_size": 4}
    alone = Generator(
        LocalGroup(HFGenerationWorker, kwargs, local_context(num_threads=1), name="generation")
    )
    workers = [HFGenerationWorker(local_context(num_threads=1), **kwargs) for _ in range(3)]  # type: ignore[arg-type]
    spread = Generator(_InProcessGroup(workers))  # type: ignore[arg-type]
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
    )  # fewer rows than workers
    assert np.array_equal(few.token_ids.values, left.token_ids.slice(0, 2).values)


def test_a_prompt_without_room_names_the_key(model_directory: Path) -> None:
    worker = HFGenerationWorker(local_context(num_threads=1), model_name=str(model_directory))
    generator = Generator(_InProcessGroup([worker]))  # type: ignore[arg-type]
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


def test_completions_of_two_versions_are_not_mixed() -> None:
    row = Jagged.from_rows([[1]], np.int32)
    parts = [
        Completions(row, Jagged.from_rows([[0.0]], np.float32), ["stop"], version)
        for version in (3, 4)
    ]
    with pytest.raises(ValueError, match=r"weight versions \[3, 4\]"):
        Completions.concat(parts)


def test_sampling_follows_the_config() -> None:
    config = GenerationConfig(
        max_new_tokens=7, temperature=0.8, top_p=0.9, top_k=5, min_p=0.02, stop_strings=("\n\n",)
    )
    sampling = SamplingParams.from_config(config)
    assert sampling == SamplingParams(
        max_new_tokens=7, temperature=0.8, top_p=0.9, top_k=5, min_p=0.02, stop_strings=("\n\n",)
    )
    assert SamplingParams.from_config(config, temperature=0.0).temperature == 0.0
