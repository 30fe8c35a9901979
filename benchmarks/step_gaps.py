"""Time between two steps of a vLLM replica while the driver polls it, on time and late.

    python -m benchmarks.step_gaps --model DIR

One replica in a process of its own (Ray, one thread) decodes random prompts to the token limit.
The driver sleeps for `late` seconds after each poll that it reads. Columns: tokens per second;
median and sum of the times between two steps while requests are unfinished; polls, and CPU
milliseconds of the driver for each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from nemo_like.config.rollout import VLLMGenerationConfig
from nemo_like.config.schema import ClusterConfig
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
from nemo_like.distributed.ray.worker_group import RayWorkerGroup
from nemo_like.generation.generator import Generator
from nemo_like.generation.requests import GenerationStart, SamplingParams
from nemo_like.generation.vllm_worker import VLLMGenerationWorker
from nemo_like.parallel_layout import ParallelLayout

MAX_LENGTH = 512


class TimedWorker(VLLMGenerationWorker):
    """Keeps the times between two steps."""

    _ended_s = 0.0

    def start_rollout(self) -> None:
        super().start_rollout()
        self._gaps: list[float] = []
        self._ended_s = 0.0

    def gaps(self) -> list[float]:
        return self._gaps

    def _step(self) -> None:
        if self._ended_s > 0:
            self._gaps.append(time.perf_counter() - self._ended_s)
        super()._step()
        self._ended_s = time.perf_counter()


@contextmanager
def started(model: str, num_rows: int) -> Iterator[tuple[RayWorkerGroup, Generator]]:
    config = ClusterConfig(workers_per_node=1, cpus_per_worker=1)
    kwargs: dict[str, Any] = {
        "start": GenerationStart(model_name=model),
        "max_total_length": MAX_LENGTH,
        "config": VLLMGenerationConfig(kv_cache_gib=1.0, max_num_seqs=num_rows),
    }
    with RayVirtualCluster(config) as cluster:
        group = RayWorkerGroup(
            cluster,
            TimedWorker,
            kwargs,
            name="generation-0",
            parallel_layout=ParallelLayout(),
            bundles="anywhere",
        )
        yield group, Generator(lambda index: group)
        group.shutdown()


def measure(group: RayWorkerGroup, generator: Generator, rows: int, new: int, late: float) -> None:
    """Print one line of the table."""
    rng = np.random.default_rng(0)
    prompts = Jagged.from_rows([rng.integers(3, 300, 32) for _ in range(rows)], np.int32)
    sampling = SamplingParams(max_new_tokens=new)
    generator.start_rollout()
    start = time.perf_counter()
    cpu = time.thread_time()
    generator.submit(
        prompts, np.arange(rows, dtype=np.uint64), sampling, max_total_length=MAX_LENGTH
    )
    num_tokens = 0
    num_polls = 0
    while generator.num_unfinished:
        _, completions = generator.collect(timeout_s=5.0)
        num_tokens += len(completions.token_ids.values)
        num_polls += 1
        time.sleep(late)
    cpu_ms = (time.thread_time() - cpu) * 1e3 / num_polls
    seconds = time.perf_counter() - start
    gaps = np.array(group.run_all_workers("gaps")[0]) * 1e3
    print(
        f"| {late:g} | {num_tokens / seconds:.0f} | {np.median(gaps):.2f} | {gaps.sum():.0f}"
        f" | {gaps.max():.1f} | {num_polls} | {cpu_ms:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--late", type=float, nargs="+", default=[0.0, 0.1, 0.5])
    args = parser.parse_args()
    with started(args.model, args.rows) as (group, generator):
        print("| late s | tokens/s | gap, median ms | sum ms | max ms | polls | CPU ms per poll |")
        print("|---|---|---|---|---|---|---|")
        for late in (0.0, *args.late):
            # The first line warms up.
            measure(group, generator, args.rows, args.max_new_tokens, late)


if __name__ == "__main__":
    main()
