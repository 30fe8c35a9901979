"""Episodes of programs with slow tools on two vLLM replicas, against lockstep turns.

    python -m benchmarks.agent_episodes --folder DIR --episodes 256

Each episode has calls of one conversation and, after each, a tool that takes an exponentially
distributed time, the same in every mode. The modes take turns in one process:

* `lockstep`: the calls of a turn are submitted when those of all running episodes have arrived;
* `episodes`: as in a run, each call is submitted when it arrives;
* `no affinity`: the same, and a call goes to the replica with the fewest outstanding tokens.

Columns: number of episodes; mode; sampled tokens per second; share of the prompt tokens that came
from the prefix cache, and the largest that is possible; calls per second; CPU milliseconds per call
of the worker with the endpoint and of the driver; seconds; load of the machine. The model has the
size of the demo's: the times are those of tools and calls rather than of decoding.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rollout_order import cpu_s
from nemo_like.agents.worker import AgentWorker
from nemo_like.agents.workers import AgentWorkers
from nemo_like.config.rollout import EnvironmentConfig, RewardConfig, VLLMGenerationConfig
from nemo_like.config.schema import ClusterConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.jagged import Jagged
from nemo_like.demo.task import build_model, build_tokenizer
from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
from nemo_like.distributed.ray.worker_group import RayWorkerGroup
from nemo_like.generation.generator import Generator
from nemo_like.generation.requests import GenerationStart, SamplingParams
from nemo_like.generation.vllm_worker import VLLMGenerationWorker
from nemo_like.metrics import metric_values
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.rollout.collector import RolloutCollector
from nemo_like.rollout.conversations import Prompt
from nemo_like.rollout.episodes import EpisodeDriver
from nemo_like.rollout.rows import Rollout

_MODES = ("lockstep", "episodes", "no affinity")
_MAX_LENGTH = 640


class ModeGenerator(Generator):
    """Ignores the affinity of episodes in one mode."""

    mode = ""

    def submit(self, prompt_ids: Jagged, *args: Any, **kwargs: Any) -> list[int]:
        if self.mode == "no affinity":
            kwargs["affinity"] = None
        return super().submit(prompt_ids, *args, **kwargs)


class ModeDriver(EpisodeDriver):
    """Holds the calls of a turn in one mode until all running episodes have one."""

    mode = ""

    def _submit(self) -> None:
        if self.mode != "lockstep" or len(self._held) == len(self._attempts):
            super()._submit()


def largest_cached_share(rollout: Rollout) -> float:
    """Return the share of prompt tokens that are the prompt and answer of an earlier call."""
    num_known = num_tokens = 0
    for row in rollout.conversations:
        lengths = np.cumsum([len(segment) for segment in row.segments])
        num_tokens += int(lengths[0::2].sum())
        num_known += int(lengths[1:-1:2].sum())
    return num_known / num_tokens


def prompts_of(encoder: ChatEncoder, num: int, seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    prompts = []
    for _ in range(num):
        text = "".join(rng.choice("0123456789+") for _ in range(128))
        token_ids = encoder.encode_prompt([{"role": "user", "content": text}])
        prompts.append(Prompt(token_ids=token_ids, text=text, answer="", row={"prompt": text}))
    return prompts


def measure(
    collector: RolloutCollector, driver: ModeDriver, pid: int, prompts: Sequence[Prompt], turns: int
) -> list[float]:
    """Return the columns of a rollout in the mode of `driver`, its seconds, and the load."""
    generator = collector.generator
    generator.pop_metrics(1.0)
    start, own_s, worker_s = time.perf_counter(), time.process_time(), cpu_s(pid)
    job = collector.start(
        prompts,
        group_size=1,
        sampling=SamplingParams(max_new_tokens=32),
        max_total_length=_MAX_LENGTH,
        seeds=np.arange(len(prompts), dtype=np.uint64),
    )
    while not job.is_done:
        collector.advance()
    seconds = time.perf_counter() - start
    num_calls = len(prompts) * turns
    rollout = job.result()
    return [
        rollout.episode_lengths.sum() / seconds,
        metric_values(generator.pop_metrics(seconds)).get("generation/cached_prompt_share", 0.0),
        largest_cached_share(rollout),
        num_calls / seconds,
        (cpu_s(pid) - worker_s) / num_calls * 1e3,
        (time.process_time() - own_s) / num_calls * 1e3,
        seconds,
        os.getloadavg()[0],
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--episodes", type=int, nargs="+", default=[256])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tool-s", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args(argv)
    model = build_model(0)
    model.config.max_position_embeddings = 1024
    model.save_pretrained(args.folder)
    encoder = ChatEncoder(build_tokenizer())
    encoder.tokenizer.save_pretrained(args.folder)
    environment = EnvironmentConfig(
        kind="program",
        path="tests.agents.programs.uses_tools",
        options={"num_turns": args.turns, "mean_s": args.tool_s},
        timeout_s=None,
    )
    vllm = {
        "start": GenerationStart(model_name=str(args.folder)),
        "max_total_length": _MAX_LENGTH,
        "config": VLLMGenerationConfig(kv_cache_gib=1.0, max_num_seqs=max(args.episodes)),
    }
    with ExitStack() as closing:
        config = ClusterConfig(workers_per_node=1, cpus_per_worker=0.5)
        cluster = closing.enter_context(RayVirtualCluster(config))

        def started(name: str, worker: type, given: dict[str, Any]) -> RayWorkerGroup:
            layout = ParallelLayout()
            group = RayWorkerGroup(
                cluster, worker, given, name=name, parallel_layout=layout, bundles="anywhere"
            )
            closing.callback(group.shutdown)
            return group

        agents = started("environment-0", AgentWorker, {"config": environment})
        workers = AgentWorkers(lambda _: agents, 1)
        workers.set_encoder(encoder)
        generator = ModeGenerator(
            lambda index: started(f"generation-{index}", VLLMGenerationWorker, vllm), 2
        )
        driver = ModeDriver(workers, generator, environment, RewardConfig())
        collector = RolloutCollector(generator, None, encoder.tokenizer, driver)
        pid = agents.locations[0].pid
        measure(collector, driver, pid, prompts_of(encoder, 8, -1), args.turns)
        print("| episodes | mode | tokens/s | cached | possible | calls/s", end="")
        print(" | worker ms | driver ms | s | load |")
        for num, number in itertools.product(args.episodes, range(args.rounds)):
            rates = {}
            for mode in _MODES:
                generator.mode = driver.mode = mode
                prompts = prompts_of(encoder, num, number)
                found = measure(collector, driver, pid, prompts, args.turns)
                rates[mode] = found[0]
                line = " | ".join(f"{each:.3g}" for each in found)
                print(f"| {num} | {mode} | {line} |", flush=True)
            print(f"episodes / lockstep: {rates['episodes'] / rates['lockstep']:.2f}", flush=True)


if __name__ == "__main__":
    main()
