"""Runs of programs on Ray with vLLM, whose rows are compared with the log of the generator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.generation.generator import Generator
from nemo_like.generation.requests import Completions
from nemo_like.rollout import collector
from nemo_like.rollout.rows import Rollout
from tests.agents.scripted import assert_exact_rows
from tests.agents.test_hf_generator import logprobs_of
from tests.algorithms.test_runs import read_metrics
from tests.recipe import Recipe

COLUMNS = ("input_ids", "token_mask", "generation_logprobs")
NUM_COMPUTED = 8
"""The shortest rows, whose log-probs are computed in float64 as well."""


class GeneratorLog:
    """Prompts and samples of a generator, and the rollouts of the run."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.prompts: dict[int, np.ndarray] = {}
        self.samples: dict[int, np.ndarray] = {}
        self.rollouts: list[Rollout] = []
        submit, collect, build = Generator.submit, Generator.collect, collector.build_rollout

        def logged_submit(generator: Generator, prompts: Any, *args: Any, **options: Any) -> Any:
            request_ids = submit(generator, prompts, *args, **options)
            for request, ids in zip(request_ids, prompts, strict=True):
                self.prompts[request] = np.array(ids)
            return request_ids

        def logged_collect(generator: Generator, *args: Any) -> tuple[list[int], Completions]:
            request_ids, found = collect(generator, *args)
            for request, ids in zip(request_ids, found.token_ids, strict=True):
                self.samples[request] = np.array(ids)
            return request_ids, found

        def logged_build(*args: Any) -> Rollout:
            self.rollouts.append(build(*args))
            return self.rollouts[-1]

        patch.setattr(Generator, "submit", logged_submit)
        patch.setattr(Generator, "collect", logged_collect)
        patch.setattr(collector, "build_rollout", logged_build)


def run_on_vllm(
    recipe: Recipe,
    patch: pytest.MonkeyPatch,
    model_dir: Path,
    rows: Sequence[dict[str, Any]],
    max_tokens: int,
    num_steps: int,
    *overrides: str,
) -> tuple[GeneratorLog, list[list[dict[str, Any]]]]:
    """Train, in each step with two episodes of every row, and compare ids and log-probs.

    Log-probs are those of the first step, whose weights are the model's. Returns the log, and the
    records of each step.
    """
    path = recipe.folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = GeneratorLog(patch)
    config = recipe.grpo(
        f"policy.model_name={model_dir}",
        f"policy.max_total_sequence_length={max_tokens}",
        f"policy.sequence_packing.train_mb_tokens={max_tokens}",
        f"policy.sequence_packing.logprob_mb_tokens={max_tokens}",
        f"policy.train_global_batch_size={2 * len(rows)}",
        "policy.generation.backend=vllm",
        "policy.generation.vllm.kv_cache_gib=0.125",
        "cluster.backend=ray",
        "cluster.workers_per_node=1",
        "cluster.cpus_per_worker=0.5",
        "cluster.generation_workers=1",
        "environment.kind=program",
        f"grpo.max_num_steps={num_steps}",
        f"grpo.num_prompts_per_step={len(rows)}",
        "grpo.num_generations_per_prompt=2",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        f"data.train_path={path}",
        "data.validation_path=null",
        "loss_fn.reference_policy_kl_penalty=0",
        *overrides,
    )
    run = run_grpo(config).directory.path
    lines = read_metrics(run)
    assert len(lines) == len(log.rollouts) == num_steps
    for line in lines:
        assert line["episodes/trained"] == line["episodes/started"] == 2 * len(rows)
        # The policy recomputes what the generator has recorded.
        assert line["mismatch/logprob_diff_max"] < 1e-4
    batches = [rollout.batch for rollout in log.rollouts]
    assert_exact_rows(
        [
            pair
            for each in batches
            for pair in zip(each["input_ids"], each["token_mask"], strict=True)
        ],
        [(log.prompts[request], ids) for request, ids in log.samples.items()],
    )
    assert log.prompts.keys() == log.samples.keys()
    assert log.rollouts[0].versions == (0, 0)
    first = batches[0]
    rows_of_first = zip(*(first[name] for name in COLUMNS), strict=True)
    for ids, mask, recorded in sorted(rows_of_first, key=lambda row: len(row[0]))[:NUM_COMPUTED]:
        difference = recorded - logprobs_of(model_dir, ids, 1.0)
        assert np.abs(difference[mask.astype(bool)]).max() < 1e-4
    paths = [run / "rollouts" / f"step_{step}.jsonl" for step in range(1, num_steps + 1)]
    return log, [[json.loads(line) for line in each.read_text().splitlines()] for each in paths]
