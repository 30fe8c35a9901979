"""What a weight update costs the driver, by number of ranks and replicas, in one run.

    python benchmarks/weight_update_calls.py
    python benchmarks/weight_update_calls.py --sizes 512:64,512:512 --repeats 5

Two processes answer for all ranks of the policy and two for all replicas; they compute nothing, so
all that is measured is the driver: the calls of an update, the bytes of their arguments and results
(pickled), and the CPU seconds of all threads of the driver's process. The weights have the shapes
of Llama-3.1-8B in bfloat16 and are sent over NCCL: sender and receivers find no channel in the
first update, and use that of the first in all later ones. Ray's other processes are not counted.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from nemo_like.config.schema import ClusterConfig
from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
from nemo_like.distributed.ray.worker_group import RayWorkerGroup
from nemo_like.distributed.worker_group import Handle, WorkerContext
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.weight_sync.channel import (
    Buckets,
    ChannelRequest,
    ChannelSpec,
    Endpoint,
    LoadedBucket,
    SentWeights,
    plan_layouts,
)
from nemo_like.weight_sync.sync import WeightSync

SIZES = "8:8,64:64,512:64,512:512,4096:512"
NUM_PROCESSES = 2


def shapes_of_8b() -> dict[str, tuple[int, ...]]:
    """Return the shapes of Llama-3.1-8B by name."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (128256, 4096)}
    for layer in range(32):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", 4096), ("k", 1024), ("v", 1024), ("o", 4096)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, 4096)
        for name in ("gate", "up"):
            shapes[f"{prefix}.mlp.{name}_proj.weight"] = (14336, 4096)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (4096, 14336)
        for name in ("input", "post_attention"):
            shapes[f"{prefix}.{name}_layernorm.weight"] = (4096,)
    return shapes | {"model.norm.weight": (4096,), "lm_head.weight": (128256, 4096)}


class Worker:
    """Both sides of an update, without weights."""

    def __init__(self, context: WorkerContext, *, gpu: str) -> None:
        self._endpoint = Endpoint(pid=1, machine="a", gpu=gpu, free_bytes=80 * 10**9)
        self._num_buckets = 0
        self._is_open = False

    def weight_endpoint(self) -> Endpoint:
        return self._endpoint

    def weight_endpoints(self) -> tuple[Endpoint, ...]:
        return (self._endpoint,)

    def open_weight_channel(
        self, opened: ChannelRequest | ChannelSpec, first_index: tuple[int, ...] = ()
    ) -> ChannelSpec | str | None:
        if isinstance(opened, ChannelSpec):
            self._num_buckets = len(opened.layouts)
            return ""
        if self._is_open:
            # Only rank 0 returns the channel.
            return None
        self._is_open = True
        layouts = plan_layouts(shapes_of_8b(), torch.bfloat16, opened.max_bytes)
        self._num_buckets = len(layouts)
        return ChannelSpec(
            transport=opened.transport,
            layouts=layouts,
            slot_bytes=max(layout.num_bytes for layout in layouts),
            timeout_s=opened.timeout_s,
        )

    def send_weights(self) -> SentWeights:
        self._is_open = False
        return SentWeights(transfer_s=(0.1,) * self._num_buckets)

    def load_weights(self, version: int, buckets: Buckets | None) -> list[LoadedBucket]:
        return [LoadedBucket(transfer_s=0.1, load_s=0.1)] * self._num_buckets

    def close_weight_channel(self) -> None: ...


class Counts:
    """Calls of workers and the bytes of their arguments and results."""

    def __init__(self) -> None:
        self.is_counting = False
        self.num_calls = 0
        self.num_bytes = 0


class SharedGroup(RayWorkerGroup):
    """A group of many ranks that the processes of another group answer for."""

    def __init__(self, processes: RayWorkerGroup, num_ranks: int, counts: Counts) -> None:
        # All the rest, such as the monitor of progress, is CPU time of the processes.
        self.__dict__.update(processes.__dict__)
        self.parallel_layout = ParallelLayout(dp=num_ranks)
        self._watched = set()
        self._counts = counts
        repeats = -(-num_ranks // len(processes._actors))
        self._actors = (processes._actors * repeats)[:num_ranks]
        self._locations = (processes._locations * repeats)[:num_ranks]

    def get(self, handles: Sequence[Handle]) -> list[Any]:
        values = super().get(handles)
        if self._counts.is_counting:
            self._counts.num_bytes += sum(len(pickle.dumps(value)) for value in values)
        return values

    def put(self, value: Any) -> Handle:
        if self._counts.is_counting:
            self._counts.num_bytes += len(pickle.dumps(value))
        return super().put(value)

    def _share(self, value: Any) -> Any:
        if self._counts.is_counting and not isinstance(value, Handle):
            self._counts.num_bytes += len(pickle.dumps(value))
        return super()._share(value)

    def _submit(
        self,
        rank: int,
        method: str,
        actor_method: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Handle:
        self._counts.num_calls += self._counts.is_counting
        return super()._submit(rank, method, actor_method, args, kwargs)


def measure(
    policy: RayWorkerGroup, generation: RayWorkerGroup, size: tuple[int, int], repeats: int
) -> None:
    """Print one line for the first update over a channel and one for those that follow it."""
    num_ranks, num_replicas = size
    counts = Counts()
    sender = SharedGroup(policy, num_ranks, counts)
    replicas = [SharedGroup(generation, 1, counts) for _ in range(num_replicas)]
    counted: dict[str, tuple[int, int]] = {}
    seconds: dict[str, list[float]] = {"first": [], "later": []}
    for repeat in range(repeats + 1):
        sync = WeightSync(sender, dtype="bfloat16", timeout_s=60.0)
        for update, measured in seconds.items():
            # Counting takes CPU time of its own.
            counts.is_counting = repeat == 0
            counts.num_calls = 0
            counts.num_bytes = 0
            start = time.process_time()
            report = sync.push(replicas, 1)
            cpu_s = time.process_time() - start
            assert not report.failed, report.failed
            if counts.is_counting:
                counted[update] = (counts.num_calls, counts.num_bytes)
            else:
                measured.append(cpu_s)
    for update, measured in seconds.items():
        num_calls, num_bytes = counted[update]
        print(
            f"| {num_ranks} | {num_replicas} | {update} | {num_calls} | {num_bytes / 1e6:.2f} |"
            f" {median(measured):.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default=SIZES, help="ranks:replicas, ...")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    config = ClusterConfig(workers_per_node=NUM_PROCESSES, cpus_per_worker=0.5)
    with RayVirtualCluster(config) as cluster:
        groups = [
            RayWorkerGroup(
                cluster,
                Worker,
                {"gpu": name},
                name=name,
                parallel_layout=ParallelLayout(dp=NUM_PROCESSES),
                bundles="anywhere",
            )
            for name in ("policy", "generation")
        ]
        print("| ranks | replicas | update | calls | MB | driver CPU s |")
        print("|---|---|---|---|---|---|")
        for size in args.sizes.split(","):
            ranks, replicas = map(int, size.split(":"))
            measure(groups[0], groups[1], (ranks, replicas), args.repeats)
        for group in groups:
            group.shutdown()


if __name__ == "__main__":
    main()
