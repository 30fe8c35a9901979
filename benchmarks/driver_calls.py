"""What the calls of one step cost the driver: calls, bytes and CPU seconds by number of ranks.

    python benchmarks/driver_calls.py --ranks 8 64 512 4096

Policy and group are the same as in a run on Ray; the workers compute nothing, and two processes
answer for all ranks. A step of GRPO plans, shards and trains with advantages, and fetches the
log-probs of the training pass for the rollout records; a step of SFT only plans, shards and trains.
CPU seconds are user and system time of all threads of the driver, the median of `--repeats` steps
after one that does not count. Weight updates are in `weight_sync.py`.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nemo_like.config.schema import ClusterConfig, PolicyConfig, SequencePackingConfig
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.ray import worker_group
from nemo_like.distributed.ray.failures import ProgressMonitor
from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
from nemo_like.distributed.worker_group import Handle
from nemo_like.losses.likelihood import NllLoss
from nemo_like.metrics import Mean, Metrics
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.policy import Policy

NUM_PROCESSES = 2
MAX_RANKS = 1 << 14
NUM_METRICS = 40
MAX_TOKENS = 4096
MODEL = ModelSpec.from_config(
    {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
    }
)


class IdleWorker:
    """Returns values of the size of a `PolicyWorker`'s."""

    def __init__(self, context: Any) -> None:
        # One process answers for several ranks, whose calls come in their order.
        self._lengths: deque[np.ndarray] = deque(maxlen=MAX_RANKS)

    def train(self, shard: Any, columns: Any, **settings: Any) -> list[Metrics]:
        """Return the metrics of one step on the ranks whose rows are marked."""
        self._lengths.append(shard["length"])
        if not shard["has_metrics"].any():
            return [{}]
        return [{f"policy/metric_{index}": Mean(1.0) for index in range(NUM_METRICS)}]

    def fetch_trained_logprobs(self) -> Jagged:
        """Return float32 [T] over the tokens of the oldest shard."""
        lengths = self._lengths.popleft()
        return Jagged.from_lengths(np.zeros(int(lengths.sum()), dtype=np.float32), lengths)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--rows-per-rank", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--metrics-of-all-ranks", action="store_true", help="as before one rank returned them"
    )
    arguments = parser.parse_args(argv)
    print(f"{'ranks':>6} {'step':<5} {'calls':>6} {'CPU s':>7} {'wall s':>7}   CPU s of parts")
    with RayVirtualCluster(ClusterConfig(), generates=False) as cluster:
        start_actor = worker_group.start_actor
        monitor = ProgressMonitor("idle", 0.0)
        processes = [
            start_actor("idle", rank, None, 1, monitor, {}) for rank in range(NUM_PROCESSES)
        ]
        worker_group.start_actor = lambda name, rank, *others: processes[rank % NUM_PROCESSES]
        for num_ranks in arguments.ranks:
            group = CountingGroup(
                cluster,
                IdleWorker,
                {},
                name="policy",
                bundles="anywhere",
                parallel_layout=ParallelLayout(dp=num_ranks),
            )
            # As on nodes with 8 devices.
            group._locations = tuple(
                replace(location, node_id=f"node{rank // 8}")
                for rank, location in enumerate(group.locations)
            )
            measure(group, arguments)


class CountingGroup(worker_group.RayWorkerGroup):
    """A group that counts its calls."""

    num_calls = 0

    def _submit(
        self, rank: int, method: str, actor_method: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Handle:
        self.num_calls += 1
        return super()._submit(rank, method, actor_method, args, kwargs)

    def shutdown(self) -> None:
        """Keep the processes, which serve the next number of ranks as well."""


def measure(group: CountingGroup, arguments: argparse.Namespace) -> None:
    """Print the lines of both kinds of steps for one number of ranks."""
    packing = SequencePackingConfig(
        enabled=True, train_mb_tokens=MAX_TOKENS, logprob_mb_tokens=MAX_TOKENS
    )
    num_ranks = group.world_size
    num_rows = num_ranks * arguments.rows_per_rank
    policy_config = PolicyConfig(
        model_name="idle", sequence_packing=packing, train_global_batch_size=num_rows
    )
    policy = Policy(group, policy_config, MODEL)
    lengths = np.random.default_rng(0).integers(64, 1024, num_rows)
    tokens = np.zeros(int(lengths.sum()), dtype=np.int32)
    for kind in ("grpo", "sft"):
        samples = []
        for _ in range(arguments.repeats + 1):
            group.num_calls = 0
            parts: dict[str, float] = {}
            wall = time.perf_counter()
            step(kind, policy, lengths, tokens, parts, all_ranks=arguments.metrics_of_all_ranks)
            samples.append((sum(parts.values()), time.perf_counter() - wall, parts))
        seconds, wall_s, parts = sorted(samples[1:], key=lambda sample: sample[0])[
            arguments.repeats // 2
        ]
        described = ", ".join(f"{name} {value:.3f}" for name, value in parts.items())
        print(
            f"{num_ranks:>6} {kind:<5} {group.num_calls:>6} {seconds:>7.3f} {wall_s:>7.2f}"
            f"   {described}",
            flush=True,
        )


def step(
    kind: str,
    policy: Policy,
    lengths: np.ndarray,
    tokens: np.ndarray,
    parts: dict[str, float],
    *,
    all_ranks: bool,
) -> None:
    """Run one step; `parts` gets the CPU seconds of each part."""

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = call()
        parts[name] = time.process_time() - start
        return result

    plan = timed("plan", lambda: policy.plan(lengths))
    has_metrics = np.full(len(lengths), all_ranks)
    has_metrics[plan.rows_of_rank(0)] = True
    batch = BatchedDataDict(
        {
            "input_ids": Jagged.from_lengths(tokens, lengths),
            "length": lengths,
            "has_metrics": has_metrics,
        }
    )
    sharded = timed("shard", lambda: policy.shard(batch, plan))
    columns = {} if kind == "sft" else {"advantages": np.zeros(len(lengths), dtype=np.float32)}
    timed("train", lambda: policy.train(sharded, columns, NllLoss()))
    if kind == "grpo":
        timed("fetch", lambda: policy.fetch_trained_logprobs(sharded))


if __name__ == "__main__":
    main()
