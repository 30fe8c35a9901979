"""The time of an epoch of rollouts by the order of its groups and by oversampling.

    python -m benchmarks.rollout_order                  # simulated, 8 to 512 replicas
    python -m benchmarks.rollout_order --folder DIR     # measured, two vLLM replicas

Each prompt has a typical length, from a log-normal distribution or from the last column of a file,
and a completion has a log-normal factor of it. The prediction is the mean of another group of the
prompt, as of an earlier visit, times noise for the policy's change since then. Every mode has the
same lengths, and trains each prompt of the epoch once in the same number of steps. The modes:

* `first come`: the order of the prompts;
* `longest first`: the order of `plan_rollout` with the predicted lengths;
* `oversampled`: `first come` with 1.25 times the prompts of a step, as with
  `grpo.oversampling_factor`;
* `both`.

Simulated: a replica decodes `--slots` completions at a time, one token each per step of constant
time, and begins the next completion as soon as one ends. No speed of an engine is in these figures.

Measured: a random model samples each completion up to its own limit, without an end token, with at
most `--slots` completions of a replica at a time. It has the size of the demo's unless `--layers`
and `--hidden-size` are set. The modes take turns in one
process. The time is that of rollouts alone, without rewards, training and weight updates.
"""

from __future__ import annotations

import argparse
import heapq
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlamaForCausalLM

from nemo_like.config.rollout import VLLMGenerationConfig
from nemo_like.config.schema import ClusterConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.oversampling import OversamplingLoader
from nemo_like.data.row_order import RowOrder
from nemo_like.demo.task import build_model, build_tokenizer
from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
from nemo_like.distributed.ray.worker_group import RayWorkerGroup
from nemo_like.generation.engine_thread import between_steps
from nemo_like.generation.generator import Generator
from nemo_like.generation.requests import GenerationRequests, GenerationStart, SamplingParams
from nemo_like.generation.rollout_plan import RolloutPlan, plan_rollout
from nemo_like.generation.vllm_engine import sampling_request, vllm_prompt
from nemo_like.generation.vllm_worker import VLLMGenerationWorker
from nemo_like.metrics import metric_values
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.rollout.collector import RolloutCollector
from nemo_like.rollout.conversations import Prompt

FACTOR = 1.25
MODES = {
    "first come": (False, 1.0),
    "longest first": (True, 1.0),
    "oversampled": (False, FACTOR),
    "both": (True, FACTOR),
}
"""Whether groups are ordered by predicted length, and how many times the prompts are sampled."""
NUM_STEPS = 10
"""Steps of an epoch: with 1.25 every fifth one has the prompts that were cancelled before."""
SEED_UNIT = 2**16
"""The limit of a measured completion is its seed modulo this number."""


@dataclass(frozen=True, eq=False)
class Epoch:
    """P prompts with G completions each."""

    lengths: np.ndarray
    """int64 [P, G]: tokens of each completion."""
    predicted: np.ndarray
    """float64 [P]: predicted mean of each prompt."""


class Indices:
    """The rows 0 to n - 1, encoded as themselves."""

    num_skipped = 0

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.digests = (f"{num_rows} indices",)

    def __len__(self) -> int:
        return self._num_rows

    def fetch(self, rows: Sequence[int]) -> list[int]:
        return list(rows)

    def location(self, row: int) -> str:
        return str(row)


Sample = Callable[[list[int], np.ndarray | None, int], tuple[list[int], float]]
"""Samples prompts, with predicted lengths or None, until so many groups are complete; returns the
indices of these groups, increasing, and the time."""


def draw_epoch(args: argparse.Namespace, num_prompts: int, entropy: Sequence[int]) -> Epoch:
    """Draw the lengths of an epoch."""
    rng = np.random.default_rng(entropy)
    if args.lengths is None:
        typical = rng.lognormal(np.log(args.median), 1.0, num_prompts)
    else:
        lines = args.lengths.read_text().splitlines()[1:]
        typical = rng.choice([float(line.rpartition(",")[2]) for line in lines], num_prompts)

    def draw() -> np.ndarray:
        factors = rng.lognormal(0.0, args.spread, (num_prompts, args.group))
        return np.clip(typical[:, None] * factors, 4, args.limit).astype(np.int64)

    noise = rng.lognormal(0.0, args.noise, num_prompts)
    return Epoch(draw(), draw().mean(axis=1) * noise)


def run_epoch(epoch: Epoch, mode: str, prompts_per_step: int, seed: int, sample: Sample) -> float:
    """Return the time of all steps of an epoch."""
    is_planned, factor = MODES[mode]
    rows: Any = Indices(len(epoch.lengths))
    loader: OversamplingLoader[int] = OversamplingLoader(
        rows,
        RowOrder(len(rows), rows.digests, seed=seed),
        batch_size=prompts_per_step,
        num_sampled=round(factor * prompts_per_step),
    )
    total = 0.0
    trained: list[int] = []
    for _ in range(NUM_STEPS):
        batch = next(loader)
        predicted = epoch.predicted[batch] if is_planned else None
        kept, seconds = sample(batch, predicted, loader.num_wanted)
        loader.keep(kept)
        trained += loader.batch_rows
        total += seconds
    assert sorted(trained) == list(range(len(rows))), "each prompt is trained once"
    return total


def group_ends(
    plan: RolloutPlan, lengths: np.ndarray, num_replicas: int, num_slots: int
) -> np.ndarray:
    """Return the step in which the last completion of each group ends, int64 [P].

    `lengths` is int [P, G].
    """
    ends = np.zeros(len(lengths), dtype=np.int64)
    for replica in range(num_replicas):
        slots = [0] * num_slots
        for unit in plan.units_of(replica):
            for length in lengths[unit].tolist():
                end = slots[0] + length
                heapq.heapreplace(slots, end)
                ends[unit] = max(ends[unit], end)
    return ends


def simulated(epoch: Epoch, num_replicas: int, args: argparse.Namespace) -> Sample:
    """Return the simulation of a step."""
    idle = np.zeros(num_replicas, dtype=np.int64)

    def sample(
        rows: list[int], predicted: np.ndarray | None, num_wanted: int
    ) -> tuple[list[int], float]:
        costs = np.full(len(rows), args.limit) if predicted is None else predicted
        plan = plan_rollout((args.group * costs).astype(np.int64), idle, predicted)
        ends = group_ends(plan, epoch.lengths[rows], num_replicas, args.slots)
        kept = np.argsort(ends, kind="stable")[:num_wanted]
        return sorted(kept.tolist()), float(ends[kept].max())

    return sample


def simulate(args: argparse.Namespace) -> None:
    """Print a table of means over seeds."""
    print("simulated; time of an epoch relative to a lower bound of all orders\n")
    print(f"| replicas | {' | '.join(MODES)} | gain of longest first | gain of both |")
    print("|---" * (len(MODES) + 3) + "|")
    for num_replicas in args.replicas:
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        for seed in range(args.rounds):
            num_prompts = args.prompts * num_replicas
            epoch = draw_epoch(args, num_prompts * NUM_STEPS, (seed, num_replicas))
            bound = max(epoch.lengths.max(), epoch.lengths.sum() / (num_replicas * args.slots))
            sample = simulated(epoch, num_replicas, args)
            for mode in MODES:
                times[mode].append(run_epoch(epoch, mode, num_prompts, seed, sample) / bound)
        mean = {mode: float(np.mean(found)) for mode, found in times.items()}
        cells = " | ".join(f"{value:.3f}" for value in mean.values())
        gains = [mean["first come"] / mean[mode] for mode in ("longest first", "both")]
        print(f"| {num_replicas} | {cells} | {gains[0]:.2f} | {gains[1]:.2f} |", flush=True)


class LimitedWorker(VLLMGenerationWorker):
    """Samples each completion up to the limit in its seed, without an end token."""

    @between_steps
    def submit(self, requests: GenerationRequests) -> None:
        for row, request_id in enumerate(requests.request_ids.tolist()):
            seed = int(requests.seeds[row])
            limit = seed % SEED_UNIT
            params = sampling_request(
                requests.sampling, max_tokens=limit, seed=seed, stop_token_ids=()
            )
            params.ignore_eos = True
            self._engine.add_request(str(request_id), vllm_prompt(requests.prompt_ids[row]), params)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Measurement:
    """Samples the steps of an epoch with the replicas."""

    def __init__(
        self,
        epoch: Epoch,
        collector: RolloutCollector,
        encoder: ChatEncoder,
        limit: int,
        pids: Sequence[int],
    ) -> None:
        """`pids` are the processes of the replicas."""
        self._lengths = epoch.lengths
        self._pids = pids
        self._collector = collector
        self._limit = limit
        self.busiest_s = 0.0
        """CPU seconds of the replica that needed most in each step, summed over the steps."""
        self._prompts = []
        for index in range(len(epoch.lengths)):
            token_ids = encoder.encode_prompt([{"role": "user", "content": f"{index}+{index}"}])
            self._prompts.append(Prompt(token_ids=token_ids, text=str(index), answer=None))

    def _cpu_s(self) -> np.ndarray:
        """Return the CPU seconds of each replica until now, float64 [R]."""
        return np.array([cpu_s(pid) for pid in self._pids])

    def sample(
        self, rows: list[int], predicted: np.ndarray | None, num_wanted: int
    ) -> tuple[list[int], float]:
        """See `Sample`; the time is in seconds."""
        lengths = self._lengths[rows].reshape(-1)
        start, before = time.perf_counter(), self._cpu_s()
        job = self._collector.start(
            [self._prompts[row] for row in rows],
            group_size=self._lengths.shape[1],
            sampling=SamplingParams(max_new_tokens=self._limit),
            max_total_length=2 * self._limit,
            seeds=(lengths + SEED_UNIT * np.arange(len(lengths))).astype(np.uint64),
            lengths=predicted,
            num_wanted=num_wanted,
        )
        while not job.is_done:
            self._collector.advance()
        seconds = time.perf_counter() - start
        self.busiest_s += float((self._cpu_s() - before).max())
        kept = list(range(len(rows))) if job.kept is None else job.kept
        found = [row.num_model_tokens for row in job.rows]
        assert found == self._lengths[rows][kept].reshape(-1).tolist(), "the limits were kept"
        return kept, seconds


def measure(args: argparse.Namespace) -> None:
    """Print a line per epoch, and the ratios of the sums of seconds."""
    config = build_model(0).config
    config.max_position_embeddings = 2 * args.limit
    config.num_hidden_layers = args.layers
    config.hidden_size, config.intermediate_size = args.hidden_size, 3 * args.hidden_size
    # Heads of the same size as in the demo.
    config.num_attention_heads = config.num_key_value_heads = args.hidden_size // 64
    LlamaForCausalLM(config).save_pretrained(args.folder)
    encoder = ChatEncoder(build_tokenizer())
    encoder.tokenizer.save_pretrained(args.folder)
    vllm = {
        "start": GenerationStart(model_name=str(args.folder)),
        "max_total_length": 2 * args.limit,
        "config": VLLMGenerationConfig(kv_cache_gib=1.0, max_num_seqs=args.slots),
    }
    with ExitStack() as closing:
        config = ClusterConfig(workers_per_node=1, cpus_per_worker=0.5)
        cluster = closing.enter_context(RayVirtualCluster(config))

        groups: list[RayWorkerGroup] = []

        def started(index: int) -> RayWorkerGroup:
            group = RayWorkerGroup(
                cluster,
                LimitedWorker,
                vllm,
                name=f"generation-{index}",
                parallel_layout=ParallelLayout(),
                bundles="anywhere",
            )
            closing.callback(group.shutdown)
            groups.append(group)
            return group

        generator = Generator(started, 2)
        collector = RolloutCollector(generator, None, encoder.tokenizer)
        warmup = Epoch(np.full((8, args.group), 16), np.full(8, 16.0))
        pids = [group.locations[0].pid for group in groups]
        Measurement(warmup, collector, encoder, args.limit, pids).sample([*range(8)], None, 8)
        generator.pop_metrics(1.0)
        print("| round | mode | s | busiest replica CPU s | busy share | discarded | load |")
        print("|---" * 7 + "|", flush=True)
        seconds = dict.fromkeys(args.modes, 0.0)
        cpu_seconds = dict.fromkeys(args.modes, 0.0)
        for number in range(args.first, args.first + args.rounds):
            epoch = draw_epoch(args, args.prompts * NUM_STEPS, (number, 2))
            # Another mode is first in each round.
            first = number % len(args.modes)
            for mode in args.modes[first:] + args.modes[:first]:
                measurement = Measurement(epoch, collector, encoder, args.limit, pids)
                took = run_epoch(epoch, mode, args.prompts, number, measurement.sample)
                seconds[mode] += took
                cpu_seconds[mode] += measurement.busiest_s
                counts = metric_values(generator.pop_metrics(took))
                busy = counts["timing/generator_busy_s"] / took
                discarded = counts["generation/num_discarded_tokens"] / epoch.lengths.sum()
                cells = f"{took:.1f} | {measurement.busiest_s:.1f} | {busy:.2f}"
                cells += f" | {discarded:.2f} | {os.getloadavg()[0]:.1f}"
                print(f"| {number} | {mode} | {cells} |", flush=True)
        for mode in args.modes:
            ratios = [each[args.modes[0]] / each[mode] for each in (seconds, cpu_seconds)]
            print(f"{args.modes[0]} / {mode}: {ratios[0]:.2f} in s, {ratios[1]:.2f} in CPU s")


def main() -> None:
    """Simulate, or measure with `--folder`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="measure; for the model")
    parser.add_argument("--rounds", type=int, default=3, help="epochs, each with other lengths")
    parser.add_argument("--first", type=int, default=0, help="number of the first measured epoch")
    parser.add_argument("--modes", nargs="+", default=[*MODES], choices=[*MODES], help="measured")
    parser.add_argument("--layers", type=int, default=2, help="of the model that is measured")
    parser.add_argument("--hidden-size", type=int, default=128, help="a multiple of 64")
    parser.add_argument("--noise", type=float, default=0.3, help="of the predicted lengths")
    parser.add_argument("--spread", type=float, default=0.5, help="of the lengths of a group")
    parser.add_argument("--lengths", type=Path, help="CSV file; None: log-normal")
    parser.add_argument("--median", type=float, default=2000)
    parser.add_argument("--limit", type=int, default=32768)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=32, help="per step; simulated: and replica")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 32, 128, 512])
    args = parser.parse_args()
    if args.folder is None:
        simulate(args)
    else:
        measure(args)


if __name__ == "__main__":
    main()
