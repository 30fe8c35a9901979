"""Seconds of a weight update by transport and model size, on CPU, in one run.

    python benchmarks/weight_sync.py                    # 8, 34 and 135 million parameters
    python benchmarks/weight_sync.py --sizes 135 --repeats 5
    python benchmarks/weight_sync.py --vllm models/SmolLM2-135M-Instruct

A policy of two ranks (FSDP2, float32) sends random weights to two replicas of the Hugging Face
generator; all four are processes on this machine with one thread each. The last size has the shape
of SmolLM2-135M. `object_store` is the baseline: rank 0 returns each bucket as one NumPy array
through Ray's object store, and both replicas copy it, since the array is read-only. Transports take
turns, so that other load affects all alike; the first update of each is not counted. Columns:
median seconds of gathering on rank 0 (with shared memory directly into the slots), of the
broadcast, of loading in the slower replica and of the complete update (the phases overlap); GB/s of
the transport alone and of the update; buckets, and the memory of the buffers of the sender and the
two receivers in units of the largest bucket. The transport alone is measured without gathering and
loading: the broadcast of all buckets to two processes with gloo; writing all buckets into the slots
and copying them out, one after the other, with shared memory.

With `--vllm` the receivers are two vLLM replicas, processes with one thread each. As in a run, the
log-probs are checked after each of the first ten updates; later ones are shown, too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.registry import load_config
from nemo_like.config.rollout import VLLMGenerationConfig
from nemo_like.config.schema import ClusterConfig, OptimizerConfig, PolicyConfig
from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
from nemo_like.distributed.ray.worker_group import RayWorkerGroup
from nemo_like.generation.generator import Generator as DriverOfReplicas
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.generation.requests import GenerationStart
from nemo_like.metrics import Timers, metric_values
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.policy import Policy as PolicyDriver
from nemo_like.training.weights import GeneratorWeights
from nemo_like.weight_sync.broadcast import BroadcastReceiver, BroadcastSender
from nemo_like.weight_sync.channel import (
    MAX_BUCKET_BYTES,
    BucketLayout,
    ChannelRequest,
    ChannelSpec,
    plan_layouts,
)
from nemo_like.weight_sync.shared_memory import SharedMemoryReceiver, SharedMemorySender
from nemo_like.weight_sync.sync import SyncReport, WeightSync

_CONFIG = Path(__file__).parents[1] / "examples" / "configs" / "demo_grpo.yaml"

TRANSPORTS = ("shared_memory", "gloo")

SIZES = {
    8: {"vocab_size": 12288, "hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 5},
    34: {
        "vocab_size": 24576,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
    },
    135: {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
    },
}
"""Millions of parameters -> shape."""


class Policy(DTensorPolicyWorker):
    """A policy that can also return a bucket as an array, for the baseline."""

    def bucket_array(self, layout: BucketLayout) -> np.ndarray | None:
        """Return the bucket as uint8 [num_bytes] on rank 0, None elsewhere."""
        weights = self.engine.full_weights(layout.names)
        if self.engine.rank > 0:
            for _ in weights:
                pass
            return None
        buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
        for (_, target), (_, weight) in zip(layout.views(buffer), weights, strict=True):
            target.copy_(weight)
        return buffer.numpy()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.engine.weight_shapes()

    def change_and_sum(self) -> float:
        """Change all weights, alike on all ranks; return the sum over this rank's shards."""
        total = 0.0
        engine: Any = self.engine
        for weight in engine.local_weights():
            weight.mul_(1.01)
            total += float(weight.double().sum())
        return total


class Generator(HFGenerationWorker):
    """A generator that can also load a bucket from an array, for the baseline."""

    def load_array(self, layout: BucketLayout, array: np.ndarray) -> None:
        """Copy the tensors of the bucket uint8 [num_bytes] over the weights of their names."""
        # A copy: torch cannot represent the read-only arrays of the object store.
        buffer = torch.from_numpy(array.copy())
        targets = self.model.state_dict(keep_vars=True)
        for name, tensor in layout.views(buffer):
            targets[name].copy_(tensor)

    def sum(self) -> float:
        return sum(float(weight.double().sum()) for weight in self.model.parameters())


@dataclass(frozen=True)
class Result:
    gather_s: float
    transfer_s: float
    load_s: float
    total_s: float
    buffer_bytes: float

    @classmethod
    def of_report(cls, report: SyncReport) -> Result:
        assert not report.failed, report.failed
        return cls(
            report.gather_s, report.transfer_s, report.load_s, report.total_s, report.buffer_bytes
        )


def push_through_object_store(
    policy: RayWorkerGroup, replicas: Sequence[RayWorkerGroup], layouts: Sequence[BucketLayout]
) -> Result:
    """Gather bucket i + 1 while bucket i is loaded, as the transports do."""
    start = time.perf_counter()
    next_bucket = policy.submit_all("bucket_array", layouts[0])
    loading = []
    for index, layout in enumerate(layouts):
        bucket = next_bucket
        policy.wait(bucket)
        if index + 1 < len(layouts):
            next_bucket = policy.submit_all("bucket_array", layouts[index + 1])
        loading = [replica.submit_all("load_array", layout, bucket[0]) for replica in replicas]
        for replica, handles in zip(replicas, loading, strict=True):
            replica.get(handles)
    return Result(0.0, 0.0, 0.0, time.perf_counter() - start, 0)


def shared_memory_gb_per_s(layouts: Sequence[BucketLayout], repeats: int) -> float:
    """Write all buckets into the slots and copy them out again, in this process, without a model.

    Returns GB/s of both together, of the median repeat.
    """
    source = torch.randn(max(layout.num_bytes for layout in layouts) // 4).view(torch.uint8)
    loaded = torch.empty_like(source)
    seconds = []
    for _ in range(repeats):
        sender = SharedMemorySender(source.numel(), timeout_s=1.0)
        spec = ChannelSpec(
            transport="shared_memory",
            layouts=tuple(layouts),
            slot_bytes=source.numel(),
            timeout_s=1.0,
            address=sender.address,
        )
        start = time.perf_counter()
        receiver = SharedMemoryReceiver(spec)
        sender.connect()
        for index, layout in enumerate(layouts):
            size = layout.num_bytes // 4 * 4
            sender.buffer(index)[:size].copy_(source[:size])
            sender.publish(index, size)
            loaded[:size].copy_(receiver.receive(index)[:size])
            receiver.loaded()
        receiver.finish()
        sender.finish()
        seconds.append(time.perf_counter() - start)
        receiver.close()
        sender.close()
    return sum(layout.num_bytes for layout in layouts) / 1e9 / median(seconds)


def gloo_gb_per_s(layouts: Sequence[BucketLayout], repeats: int) -> float:
    """Broadcast all buckets to two other processes, without a model.

    Returns GB/s of the median repeat; weights are counted once.
    """
    slot_bytes = max(layout.num_bytes for layout in layouts)
    context = multiprocessing.get_context("spawn")
    seconds = []
    specs = [context.Queue() for _ in range(2)]
    for index, queue in enumerate(specs):
        arguments = (queue, index, repeats + 1)
        context.Process(target=receive_buckets, args=arguments, daemon=True).start()
    for repeat in range(repeats + 1):
        request = ChannelRequest(
            transport="gloo",
            dtype="float32",
            max_bytes=slot_bytes,
            num_receivers=2,
            host="127.0.0.1",
            timeout_s=60.0,
        )
        sender = BroadcastSender(request, slot_bytes, torch.device("cpu"))
        spec = ChannelSpec(
            transport="gloo",
            layouts=tuple(layouts),
            slot_bytes=slot_bytes,
            timeout_s=60.0,
            address=sender.address,
        )
        for queue in specs:
            queue.put(spec)
        sender.connect()
        start = time.perf_counter()
        for index, layout in enumerate(layouts):
            sender.buffer(index)
            sender.publish(index, layout.num_bytes)
        if repeat > 0:
            seconds.append(time.perf_counter() - start)
        sender.close()
    return sum(layout.num_bytes for layout in layouts) / 1e9 / median(seconds)


def receive_buckets(specs: Any, index: int, repeats: int) -> None:
    """Receive all buckets of each of `repeats` channels as receiver `index`."""
    torch.set_num_threads(1)
    for _ in range(repeats):
        spec = specs.get()
        receiver = BroadcastReceiver(spec, index, torch.device("cpu"))
        for bucket in range(len(spec.layouts)):
            receiver.receive(bucket)
        receiver.close()


def write_model(folder: Path, size: int) -> None:
    heads = {"num_attention_heads": 6 if size == 34 else 9, "num_key_value_heads": 3}
    shape: dict[str, Any] = {**SIZES[size], **heads}
    config = LlamaConfig(**shape, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)


def measure(cluster: RayVirtualCluster, size: int, folder: Path, repeats: int) -> None:
    """Print one line per transport."""
    write_model(folder, size)
    config = PolicyConfig(model_name=str(folder), optimizer=OptimizerConfig(lr=1e-3))
    policy = RayWorkerGroup(
        cluster, Policy, {"config": config}, name="policy", parallel_layout=ParallelLayout(dp=2)
    )
    replicas = [
        RayWorkerGroup(
            cluster,
            Generator,
            {"start": GenerationStart(model_name=str(folder))},
            name=f"generation-{index}",
            parallel_layout=ParallelLayout(),
            bundles="anywhere",
        )
        for index in range(2)
    ]
    shapes = policy.run_all_workers("shapes")[0]
    layouts = plan_layouts(shapes, torch.float32, MAX_BUCKET_BYTES)
    largest = max(layout.num_bytes for layout in layouts)
    syncs = {name: WeightSync(policy, dtype="float32", transport=name) for name in TRANSPORTS}
    results: dict[str, list[Result]] = {name: [] for name in (*TRANSPORTS, "object_store")}
    num_bytes = 0
    for repeat in range(repeats + 1):
        for name, measured in results.items():
            expected = sum(policy.run_all_workers("change_and_sum"))
            if name == "object_store":
                result = push_through_object_store(policy, replicas, layouts)
            else:
                report = syncs[name].push(replicas, repeat)
                num_bytes = report.num_bytes
                result = Result.of_report(report)
            for replica in replicas:
                np.testing.assert_allclose(replica.run_all_workers("sum"), expected, rtol=1e-6)
            if repeat > 0:
                measured.append(result)
    alone = {"shared_memory": shared_memory_gb_per_s, "gloo": gloo_gb_per_s}
    for name, each in results.items():
        row = Result(*(median(values) for values in zip(*map(vars_of, each), strict=True)))
        megabytes = f"{num_bytes / 1e6:.0f}"
        transport = alone[name](layouts, repeats) if name in alone else 0.0
        print(
            f"| {name} | {megabytes} | {row.gather_s:.2f} | {row.transfer_s:.2f} |"
            f" {row.load_s:.2f} | {row.total_s:.2f} |"
            f" {transport:.1f} |"
            f" {num_bytes / 1e9 / row.total_s:.2f} | {len(layouts)} |"
            f" {row.buffer_bytes / largest:.2f} |",
            flush=True,
        )
    for group in (policy, *replicas):
        group.shutdown()


def measure_vllm(cluster: RayVirtualCluster, model: str, repeats: int) -> None:
    """Print one line per update of two vLLM replicas, and the median."""
    from nemo_like.generation.vllm_worker import VLLMGenerationWorker

    config = load_config(
        GrpoRunConfig, _CONFIG, [f"policy.model_name={model}", "policy.generation.backend=vllm"]
    )
    group = RayWorkerGroup(
        cluster,
        Policy,
        {"config": config.policy},
        name="policy",
        parallel_layout=ParallelLayout(dp=2),
    )
    policy_driver = PolicyDriver(group, config.policy, load_spec(model))

    def start_replica(index: int) -> RayWorkerGroup:
        kwargs = {
            "start": GenerationStart(model_name=model),
            "max_total_length": config.policy.max_total_sequence_length,
            "config": VLLMGenerationConfig(kv_cache_gib=0.25),
        }
        return RayWorkerGroup(
            cluster,
            VLLMGenerationWorker,
            kwargs,
            name=f"generation-{index}",
            parallel_layout=ParallelLayout(),
            bundles="anywhere",
        )

    generator = DriverOfReplicas(start_replica, 2)
    weights = GeneratorWeights(
        config.policy, config.cluster, policy_driver, generator, Timers(), print
    )
    weights.start_check()
    print("| update | gather s | load s | update s | check s | total s | largest difference |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for version in range(1, repeats + 2):
        group.run_all_workers("change_and_sum")
        start = time.perf_counter()
        values = metric_values(weights.update(version))
        total_s = time.perf_counter() - start
        update_s = values["weight_sync/seconds"]
        row = (
            values["weight_sync/gather_s"],
            values["weight_sync/load_s"],
            update_s,
            total_s - update_s,
            total_s,
            values.get("weight_sync/check_max_error", float("nan")),
        )
        rows.append(row)
        print_row(str(version), row)
    # The first update is not counted.
    print_row("median", tuple(median(column) for column in zip(*rows[1:], strict=True)))
    generator.shutdown()
    group.shutdown()


def print_row(name: str, row: tuple[float, ...]) -> None:
    seconds = " | ".join(f"{value:.2f}" for value in row[:-1])
    print(f"| {name} | {seconds} | {row[-1]:.1e} |", flush=True)


def vars_of(result: Result) -> tuple[float, ...]:
    return (result.gather_s, result.transfer_s, result.load_s, result.total_s, result.buffer_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vllm", metavar="MODEL", help="update two vLLM replicas of this model")
    args = parser.parse_args()
    config = ClusterConfig(workers_per_node=2, cpus_per_worker=1)
    if args.vllm:
        with RayVirtualCluster(config) as cluster:
            measure_vllm(cluster, args.vllm, args.repeats)
        return
    print(
        "| transport | MB | gather s | transfer s | load s | total s | transport GB/s | total GB/s"
        " | buckets | buffers |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    with RayVirtualCluster(config) as cluster, tempfile.TemporaryDirectory() as folder:
        for size in map(int, args.sizes.split(",")):
            measure(cluster, size, Path(folder) / str(size), args.repeats)


if __name__ == "__main__":
    main()
