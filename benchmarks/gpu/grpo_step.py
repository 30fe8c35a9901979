"""One GRPO step by phase, with the workers of a run on the local backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import AutoTokenizer

from benchmarks.gpu.cells import require_modules
from benchmarks.gpu.policies import policy_config
from benchmarks.gpu.sizes import Size
from benchmarks.gpu.training_steps import synchronize
from nemo_like.algorithms.grpo.advantages import group_advantages
from nemo_like.algorithms.grpo.config import GrpoConfig, GrpoRunConfig
from nemo_like.algorithms.run import workers_start
from nemo_like.config.rollout import HFGenerationConfig, RewardConfig, RewardFunctionConfig
from nemo_like.config.schema import ClusterConfig, DataConfig, GenerationConfig
from nemo_like.environments.reward import RewardSample
from nemo_like.generation.requests import SamplingParams
from nemo_like.losses import ClippedPolicyGradientLoss
from nemo_like.metrics import Timers
from nemo_like.rollout.collector import RolloutCollector
from nemo_like.rollout.conversations import Prompt
from nemo_like.rollout.rows import Rollout, row_seeds
from nemo_like.run.progress import Progress
from nemo_like.training.weights import GeneratorWeights
from nemo_like.training.workers import RunWorkers, start_workers


def completion_reward(sample: RewardSample) -> float:
    """Return a reward that differs between completions: the parity of the text's length."""
    return float(len(sample.completion) % 2)


@dataclass
class _Phases:
    """Seconds of each phase of a step."""

    device: str
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to the phase."""
        synchronize(self.device)
        start = time.perf_counter()
        yield
        synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def time_grpo_steps(
    folder: Path, device: str, size: Size, backend: Literal["hf", "vllm"], *, num_steps: int = 2
) -> Mapping[str, Any]:
    """Return the seconds of each phase; the first step warms up, the last one is recorded."""
    if backend == "vllm":
        require_modules("vllm")
    config = grpo_config(folder, device, size, backend)
    start = time.perf_counter()
    with start_workers(workers_start(config), Progress()) as workers:
        start_s = time.perf_counter() - start
        step = _GrpoStep(config, workers, device, size)
        results = [step.run(index) for index in range(num_steps)]
    phases, facts = results[-1]
    return {
        "start_s": round(start_s, 2),
        "phases_s": {name: round(seconds, 4) for name, seconds in phases.items()},
        "step_s": round(sum(phases.values()), 4),
        "first_step_s": round(sum(results[0][0].values()), 4),
        **facts,
    }


def grpo_config(
    folder: Path, device: str, size: Size, backend: Literal["hf", "vllm"]
) -> GrpoRunConfig:
    """Return the configuration of a run with one optimizer step per rollout."""
    num_rows = size.grpo_prompts * size.grpo_group
    longest = size.prompt_tokens + size.grpo_new_tokens
    generation = GenerationConfig(
        backend=backend,
        max_new_tokens=size.grpo_new_tokens,
        hf=HFGenerationConfig(batch_size=num_rows),
    )
    policy = policy_config(
        folder,
        budget=max(size.main_budget, longest),
        num_rows=num_rows,
        longest=longest,
        options={"policy.generation": generation},
    )
    reward = RewardFunctionConfig(path=f"{__name__}.{completion_reward.__name__}")
    return GrpoRunConfig(
        run_name="gpu-report",
        policy=policy,
        data=DataConfig(train_path="none"),
        cluster=ClusterConfig(backend="local", gpus_per_node=1 if device.startswith("cuda") else 0),
        reward=RewardConfig(functions={"parity": reward}),
        grpo=GrpoConfig(
            num_prompts_per_step=size.grpo_prompts, num_generations_per_prompt=size.grpo_group
        ),
    )


class _GrpoStep:
    """The phases of `nemo_like.algorithms.grpo.loop`, without files and logs."""

    def __init__(self, config: GrpoRunConfig, workers: RunWorkers, device: str, size: Size) -> None:
        self._config = config
        self._workers = workers
        self._device = device
        self._size = size
        rollout = workers.rollout
        tokenizer = AutoTokenizer.from_pretrained(config.policy.model_name, local_files_only=True)
        self._collector = RolloutCollector(rollout.generator, rollout.rewards, tokenizer)
        self._weights = GeneratorWeights(
            config.policy,
            config.cluster,
            workers.policy,
            rollout.generator,
            Timers(),
            lambda line: None,
        )
        self._transport = ""

    def run(self, index: int) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the seconds by phase of step `index`, and facts of the step."""
        phases = _Phases(self._device)
        policy = self._workers.policy
        rollout = self._rollout(index, phases)
        advantages = group_advantages(
            rollout.batch["reward"], rollout.batch["group"], self._config.grpo.advantage
        )
        with phases.measure("policy onload"):
            context = self._workers.policy_onloaded()
            context.__enter__()
        try:
            with phases.measure("plan and shard"):
                plan = policy.plan(rollout.batch["length"])
                sharded = policy.shard(rollout.batch, plan)
            loss = ClippedPolicyGradientLoss(config=self._config.loss_fn)
            loss = loss.for_num_steps(plan.num_steps)
            with phases.measure("train"):
                metrics = policy.train(sharded, {"advantages": advantages}, loss)[0]
            # Of runs with several optimizer steps per rollout; not part of this step.
            probe = _Phases(self._device)
            with probe.measure("log-prob pass"):
                policy.compute_logprobs(sharded)
            with phases.measure("weight sync"):
                update = self._weights.update(index + 1)
        finally:
            with phases.measure("policy offload"):
                context.__exit__(None, None, None)
        facts = {
            "num_rows": len(rollout.batch["length"]),
            "num_tokens": int(rollout.batch["length"].sum()),
            "num_generated_tokens": int(rollout.completion_lengths.sum()),
            "num_microbatches": plan.metrics()["packing/num_microbatches"],
            "loss": float(metrics["policy/loss"].value),
            "weight_bytes": float(update["weight_sync/bytes"].value),
            "weight_sync_s": float(update["weight_sync/seconds"].value),
            "logprob_pass_s": round(probe.seconds["log-prob pass"], 4),
        }
        return phases.seconds, facts

    def _rollout(self, index: int, phases: _Phases) -> Rollout:
        size = self._size
        rng = np.random.default_rng(index)
        prompts = []
        for _ in range(size.grpo_prompts):
            token_ids = rng.integers(2, 64, size.prompt_tokens).astype(np.int32)
            prompts.append(Prompt(token_ids=token_ids, text="", answer=None))
        with phases.measure("generator onload"):
            context = self._workers.generator_onloaded()
            context.__enter__()
        try:
            with phases.measure("weight check"):
                self._weights.verify()
            with phases.measure("rollout"):
                job = self._collector.start(
                    prompts,
                    group_size=size.grpo_group,
                    sampling=SamplingParams.from_config(self._config.policy.generation),
                    max_total_length=self._config.policy.max_total_sequence_length,
                    seeds=row_seeds(0, index, size.grpo_prompts * size.grpo_group),
                )
                _wait(lambda: job.is_done, self._collector)
        finally:
            with phases.measure("generator offload"):
                context.__exit__(None, None, None)
        return job.result()


def _wait(is_done: Callable[[], bool], collector: RolloutCollector) -> None:
    while not is_done():
        collector.advance()
