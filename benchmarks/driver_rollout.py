"""What a rollout costs the driver: replicas that compute nothing, and completions without a model.

    python benchmarks/driver_rollout.py replicas                 # 8 to 512 replicas
    python benchmarks/driver_rollout.py tokens --tokenizer models/SmolLM2-135M-Instruct

`replicas` drives N replicas of 16 requests each, whose completions of 20 tokens end evenly over
`--seconds`. A poll sleeps as long as it would decode. `cores` are the CPU seconds of the driver's
process per second, `busy` the share of the time in which the replicas had a poll to run.

`tokens` takes `--prompts` x `--group-size` completions of `--mean-tokens` on average (lognormal, at
most four times the mean) through the driver: collection, rewards, the rows of the batch, metrics,
plan, shards of 8 ranks and records. The tokens come from a text, repeated. `peak` is the highest
memory of the process, with the shared memory of Ray's object store that it has mapped.

The replicas, and the ranks that get shards, are coroutines of one actor; reward workers are
processes of their own. Only the driver is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import ray

from nemo_like.config.rollout import RewardConfig, RewardFunctionConfig
from nemo_like.config.schema import ClusterConfig, LoggerConfig, PolicyConfig, SequencePackingConfig
from nemo_like.data.jagged import Jagged
from nemo_like.demo.task import build_model, build_tokenizer
from nemo_like.distributed.ray.failures import Location, ProgressMonitor
from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
from nemo_like.distributed.ray.worker_group import RayWorkerGroup
from nemo_like.distributed.worker_group import Handle
from nemo_like.environments.reward import RewardSample
from nemo_like.environments.reward_worker import RewardEnvironment, RewardWorker
from nemo_like.generation.generator import Generator
from nemo_like.generation.requests import (
    Completions,
    GenerationProgress,
    GenerationRequests,
    SamplingParams,
)
from nemo_like.metrics import metric_values
from nemo_like.models.pretrained import load_tokenizer
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.policy import Policy
from nemo_like.rollout.collector import RolloutCollector
from nemo_like.rollout.conversations import Prompt
from nemo_like.rollout.rows import rollout_metrics
from nemo_like.run.files import write_json_lines

_REQUESTS = 16
"""Per replica."""
_SHORT_TOKENS = 20
_MAX_TOTAL_LENGTH = 1 << 20


class _Replica:
    """A replica without a model: `interval_s` after one completion the next one ends."""

    def __init__(self, text_ids: np.ndarray, interval_s: float) -> None:
        self.lock = asyncio.Lock()
        self._text_ids = text_ids
        self._interval_s = interval_s
        self._waiting: deque[tuple[int, int]] = deque()
        self._next_s = 0.0

    async def start_rollout(self) -> None:
        pass

    async def submit(self, requests: GenerationRequests) -> None:
        ids = requests.request_ids.tolist()
        # The seed is the length of the completion.
        self._waiting += zip(ids, requests.seeds.astype(int).tolist(), strict=True)
        self._next_s = time.monotonic() + self._interval_s

    async def poll(
        self, max_seconds: float, min_seconds: float | None = None
    ) -> GenerationProgress:
        start = time.monotonic()
        ended = []
        while self._waiting:
            until = min(self._next_s, start + max_seconds)
            await asyncio.sleep(until - time.monotonic())
            if time.monotonic() >= self._next_s:
                ended.append(self._waiting.popleft())
                self._next_s += self._interval_s
            if time.monotonic() - start >= max_seconds:
                break
        tokens = [np.resize(self._text_ids, length) for _, length in ended]
        completions = Completions.from_rows(
            tokens,
            [np.full(len(each), -1.0, np.float32) for each in tokens],
            [np.zeros(len(each), np.int32) for each in tokens],
            ["stop" for _ in tokens],
        )
        return GenerationProgress(
            np.array([request_id for request_id, _ in ended], np.int64),
            completions,
            num_unfinished=len(self._waiting),
            num_tokens=sum(map(len, tokens)),
            busy_s=time.monotonic() - start,
        )


class _Host:
    """The actor of all replicas; calls of one replica run in their order."""

    def __init__(self, num_replicas: int, text_ids: np.ndarray, interval_s: float) -> None:
        self._replicas = [_Replica(text_ids, interval_s) for _ in range(num_replicas)]

    @ray.method(num_returns=2)
    async def call(self, index: int, method: str, *args: Any) -> tuple[None, Any]:
        replica = self._replicas[index]
        async with replica.lock:
            return None, await getattr(replica, method)(*args)


class _HostedGroup(RayWorkerGroup):
    """The group of one replica of a host, or of ranks that are never called."""

    def __init__(self, host: Any, index: int, layout: ParallelLayout | None = None) -> None:
        self.name = f"generation-{index}"
        self.parallel_layout = layout or ParallelLayout()
        self._failure = None
        self._watched = set()
        self._monitor = ProgressMonitor(self.name, 0.0)
        self._actors = [host]
        location = Location(pid=0, node_id="", ip="", log_path="", num_oom_kills=0, machine="")
        self._locations = (location,) * self.parallel_layout.world_size
        self._index = index

    def _call(
        self,
        rank: int,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        returns: bool = True,
    ) -> Handle:
        # The first of the arguments selects parts of values, which no call here has.
        sent = (self._index, method, *args[1:])
        return self._submit(rank, method, self._actors[rank].call, sent, kwargs)


def _start_host(num_replicas: int, text_ids: np.ndarray, interval_s: float) -> Any:
    host = ray.remote(_Host).options(num_cpus=0, max_concurrency=4 * num_replicas)
    return host.remote(num_replicas, text_ids, interval_s)


def measure_replicas(num_replicas: int, seconds: float) -> None:
    text_ids = np.arange(_SHORT_TOKENS, dtype=np.int32)
    host = _start_host(num_replicas, text_ids, seconds / _REQUESTS)
    generator = Generator(lambda index: _HostedGroup(host, index), num_replicas)
    num_rows = num_replicas * _REQUESTS
    prompts = Jagged.from_rows([[row // _REQUESTS] * 8 for row in range(num_rows)], np.int32)
    lengths = np.full(num_rows, _SHORT_TOKENS, np.uint64)
    sampling = SamplingParams(max_new_tokens=_SHORT_TOKENS)
    generator.start_rollout()
    start = time.monotonic()
    start_cpu = time.process_time()
    generator.submit(prompts, lengths, sampling, max_total_length=_MAX_TOTAL_LENGTH)
    submit_cpu = time.process_time() - start_cpu
    num_passes = 0
    while generator.num_unfinished:
        generator.collect(0.05)
        num_passes += 1
    wall = time.monotonic() - start
    cpu = time.process_time() - start_cpu
    busy = metric_values(generator.pop_metrics(wall))["timing/generator_busy_s"]
    assert busy is not None
    print(
        f"{num_replicas:9d} {wall:8.1f} {cpu:8.2f} {submit_cpu:8.2f} {cpu / wall:8.2f}"
        f" {num_passes / wall:9.1f} {busy / wall:7.2f}",
        flush=True,
    )
    ray.kill(host)


def _memory(name: str) -> float:
    """Return `VmRSS` (now) or `VmHWM` (the peak) of this process in GB, shared memory included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return int(sizes[name]) * 1024 / 1e9


class _Phases:
    """CPU seconds of this process by phase."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.cpu_s[name] = self.cpu_s.get(name, 0.0) + time.process_time() - start


def has_digit(sample: RewardSample) -> float:
    """Reward: a plain function of the text."""
    return float(any(character.isdigit() for character in sample.completion))


def measure_tokens(arguments: argparse.Namespace, closing: ExitStack) -> None:
    tokenizer = build_tokenizer()
    if arguments.tokenizer is not None:
        tokenizer = load_tokenizer(arguments.tokenizer)
    text = "What is 12 + 7? Add the ones first, then the tens, and write #### 19."
    text_ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    num_rows = arguments.prompts * arguments.group_size
    drawn = np.random.default_rng(0).lognormal(0.0, 0.6, num_rows)
    mean = arguments.mean_tokens
    lengths = np.clip(drawn / drawn.mean() * mean, 1, 4 * mean).astype(np.uint64)
    num_replicas = arguments.replicas
    interval_s = arguments.seconds * num_replicas / num_rows
    host = _start_host(num_replicas, text_ids, interval_s)
    generator = Generator(lambda index: _HostedGroup(host, index), num_replicas)
    rewards = _start_rewards(closing)
    collector = RolloutCollector(generator, rewards, tokenizer)
    prompts = [
        Prompt(token_ids=np.full(100, index, np.int32), text=f"{index}?", answer=None)
        for index in range(arguments.prompts)
    ]
    policy = _policy(host, 8 * mean)
    # Compiled before, as in the second step of a run.
    policy.plan(np.full(num_rows, 100))
    phases = _Phases()
    first = _memory("VmRSS")
    # The peak is counted from here.
    Path("/proc/self/clear_refs").write_text("5")
    wall = time.monotonic()
    with phases("collect"):
        job = collector.start(
            prompts,
            group_size=arguments.group_size,
            sampling=SamplingParams(max_new_tokens=4 * mean),
            max_total_length=_MAX_TOTAL_LENGTH,
            seeds=lengths,
        )
        while not job.is_done:
            collector.advance()
    with phases("rows"):
        rollout = job.result()
        del job
    with phases("metrics"):
        rollout.check_versions(0, 0)
        metric_values(rollout_metrics(rollout))
    with phases("plan"):
        plan = policy.plan(rollout.batch["length"])
    with phases("shard"):
        sharded = policy.shard(rollout.batch, plan)
        del sharded
    with phases("records"), TemporaryDirectory() as directory:
        advantages = np.zeros(num_rows, np.float32)
        rows = rollout.recorded_rows(LoggerConfig().max_rollout_rows)
        records = rollout.records(advantages, rows)
        write_json_lines(Path(directory) / "step_1.jsonl", records, "the rollouts")
    wall = time.monotonic() - wall
    num_tokens = int(lengths.sum())
    total = sum(phases.cpu_s.values())
    print(f"{num_rows} completions, {num_tokens / 1e6:.1f} M tokens, {wall:.0f} s of wall time")
    for name, seconds in {**phases.cpu_s, "total": total}.items():
        print(f"{name:>9} {seconds:7.2f} CPU s {seconds / num_tokens * 1e9:7.1f} ns per token")
    print(f"     peak {_memory('VmHWM') - first:7.2f} GB above the {first:.2f} GB before")


def _start_rewards(closing: ExitStack) -> RewardEnvironment:
    functions = {"digit": RewardFunctionConfig(path="benchmarks.driver_rollout.has_digit")}
    cluster = closing.enter_context(RayVirtualCluster(ClusterConfig(workers_per_node=1)))
    group = RayWorkerGroup(
        cluster,
        RewardWorker,
        {"functions": functions},
        name="reward",
        parallel_layout=ParallelLayout(dp=2),
        bundles="anywhere",
    )
    closing.callback(group.shutdown)
    return RewardEnvironment(group, RewardConfig(functions=functions))


def _policy(host: Any, max_tokens: int) -> Policy:
    packing = SequencePackingConfig(
        enabled=True, train_mb_tokens=max_tokens, logprob_mb_tokens=max_tokens
    )
    config = PolicyConfig(model_name="none", precision="float32", sequence_packing=packing)
    group = _HostedGroup(host, 0, ParallelLayout(dp=8))
    return Policy(group, config, ModelSpec.from_config(build_model(seed=0).config))


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=arguments.store_gb << 30,
    )
    with ExitStack() as closing:
        closing.callback(ray.shutdown)
        if arguments.part == "tokens":
            measure_tokens(arguments, closing)
            return
        print(
            f"{'replicas':>9} {'wall s':>8} {'CPU s':>8} {'submit':>8} {'cores':>8}"
            f" {'passes/s':>9} {'busy':>7}"
        )
        for num_replicas in arguments.sizes:
            measure_replicas(num_replicas, arguments.seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("replicas", "tokens"))
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="in which the completions of a replica end"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64, 128, 256, 512])
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--mean-tokens", type=int, default=4096)
    parser.add_argument("--replicas", type=int, default=8, help="of `tokens`")
    parser.add_argument("--tokenizer", help="a directory; default: the tokenizer of the demo")
    parser.add_argument("--store-gb", type=int, default=3)
    return parser


if __name__ == "__main__":
    main()
