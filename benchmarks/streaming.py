r"""Training throughput of the kinds of `data.batching`, against fixed batches and an oracle.

    python benchmarks/streaming.py                       # training steps, about 5 minutes
    python benchmarks/streaming.py --parts planning,exchange
    python benchmarks/streaming.py --lengths azure_conv.csv --columns ContextTokens,GeneratedTokens

Part `training`: every method trains the same rows with the same model (random Llama) and the same
token budget in this process. The methods take turns step by step, so that other load affects all
alike; times are CPU seconds of one thread. `fixed` takes so many rows at a time that the longest
would fit, and `fixed, mean` so many that rows of the mean length would, which exceeds the budget;
both in as many optimizer steps as the others, padded to the longest row of each microbatch. The
oracles know all lengths in advance and use as few microbatches as possible. `planning` is the share
of the planner in the time of a step.

Part `planning`: rows per second of the planner alone, for a stream of many rows.
Part `pool`: CPU time of `LoadBalancedDataset` over a plain loop's with the same rule, which
compares all rows of the pool for each choice.
Part `exchange`: time of one all-gather of the alignment, with gloo processes.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.train_step import open_policy, write_model
from nemo_like.data.jagged import Jagged
from nemo_like.data.packing.packers import Packing, best_fit_decreasing
from nemo_like.data.planning.oversize import FittedRows
from nemo_like.data.planning.plan import BatchPlan, join_steps
from nemo_like.data.planning.plan_step import form_padded, on_ranks
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.data.streaming.alignment import ProcessGroupCoordinator
from nemo_like.data.streaming.planner import StreamingPlanner, stream_steps
from nemo_like.data.streaming.selection import Selection
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.integer_math import ceil_div
from nemo_like.losses import NllLoss
from nemo_like.parallel_layout import RowLayout
from nemo_like.policy.policy import Policy
from nemo_like.torch_data.datasets import LoadBalancedDataset, ShardedIterableDataset

_VOCABULARY = 8192
KINDS: dict[str, Selection] = {
    "pool": "prefer_closest",
    "online": "best_fit",
    "token_budget": "in_order",
    "dyn_bsz": "first_fit",
}


@dataclass
class Method:
    """The steps of one way to form batches, and the measured times."""

    name: str
    layout: RowLayout
    steps: list[tuple[np.ndarray, BatchPlan]]
    """Row ids int64 [n] in the order of the plan's rows, and the plan."""
    planning_s: float = 0.0
    train_s: list[float] = field(default_factory=list)

    @property
    def padding_share(self) -> float:
        """Share of positions that are padding."""
        positions = sum(int(plan.num_tokens.sum()) for _, plan in self.steps)
        tokens = sum(int(plan.lengths.sum()) for _, plan in self.steps)
        return 1.0 - tokens / positions

    @property
    def num_microbatches(self) -> int:
        return sum(plan.num_microbatches for _, plan in self.steps)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    torch.set_num_threads(1)
    parts = arguments.parts.split(",")
    lengths = load_lengths(arguments)
    mean = lengths.mean()
    print(
        f"lengths: mean {mean:.0f}, CV {lengths.std() / mean:.2f}, longest {lengths.max()};"
        f" budget {arguments.budget} tokens"
    )
    if "planning" in parts:
        print_planning(arguments)
    if "pool" in parts:
        print_pool(lognormal_lengths(np.random.default_rng(0), 20_000, 600, 8192).tolist())
    if "exchange" in parts:
        print_exchange(arguments.ranks)
    if "training" in parts:
        print_training(lengths, arguments)


def load_lengths(arguments: argparse.Namespace) -> np.ndarray:
    """Return the lengths of the rows that are trained, int64 [rows]."""
    rng = np.random.default_rng(arguments.seed)
    if arguments.lengths is None:
        return lognormal_lengths(rng, arguments.rows, arguments.mean, arguments.longest)
    with arguments.lengths.open(newline="") as file:
        table = list(csv.DictReader(file))
    columns = arguments.columns.split(",")
    totals = np.array([sum(int(row[name]) for name in columns) for row in table], dtype=float)
    totals *= arguments.longest / totals.max()
    return np.maximum(rng.choice(totals, arguments.rows), 2).astype(np.int64)


def lognormal_lengths(
    rng: np.random.Generator, num_rows: int, mean: float, longest: int
) -> np.ndarray:
    """Return lognormal lengths with a coefficient of variation of about 1, int64 [num_rows]."""
    sigma = np.sqrt(np.log(2.0))
    lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num_rows)
    return np.clip(lengths, 4, longest).astype(np.int64)


def methods(lengths: np.ndarray, budget: int, microbatches: int) -> Iterator[Method]:
    """Yield every method with its steps for rows of `lengths` int64 [n] in this order."""
    packed_oracle = best_fit_decreasing(lengths, budget, len(lengths))
    num_steps = ceil_div(packed_oracle.num_bins, microbatches)
    for name, rows_at_a_time in (
        ("fixed", budget // int(lengths.max())),
        ("fixed, mean", budget // int(lengths.mean())),
    ):
        bounds = np.arange(0, len(lengths), max(1, rows_at_a_time))
        bins = Packing(np.arange(len(lengths)), np.append(bounds, len(lengths)))
        # As many optimizer steps as the others have, so that only the microbatches differ.
        per_step = ceil_div(bins.num_bins, num_steps)
        yield _known_method(name, "padded", bins, lengths, budget, per_step)
    for layout in ("padded", "packed"):
        for kind, selection in KINDS.items():
            yield _streamed_method(kind, selection, layout, lengths, budget, microbatches)
    ones = np.ones_like(lengths)
    oracle = form_padded(lengths, ones, None, budget)
    yield _known_method("oracle", "padded", oracle, lengths, budget, microbatches)
    yield _known_method("oracle", "packed", packed_oracle, lengths, budget, microbatches)


def _streamed_method(
    kind: str,
    selection: Selection,
    layout: RowLayout,
    lengths: np.ndarray,
    budget: int,
    microbatches: int,
) -> Method:
    spec = StreamSpec(
        plan=PlanSpec(layout=layout, max_tokens=budget),
        selection=selection,
        microbatches_per_step=microbatches,
        window_rows=64 if kind == "pool" else 256,
        window_tokens=0 if kind == "pool" else None,
    )
    began = time.process_time()
    planned = list(stream_steps(lengths, StreamingPlanner(spec)))
    planning_s = time.process_time() - began
    steps = [(np.array(step.rows, dtype=np.int64), step.plan) for step in planned]
    return Method(kind, layout, steps, planning_s)


def _known_method(
    name: str, layout: RowLayout, bins: Packing, lengths: np.ndarray, budget: int, microbatches: int
) -> Method:
    """Return steps of given microbatches in random order."""
    spec = PlanSpec(layout=layout, max_tokens=budget)
    order = np.random.default_rng(0).permutation(bins.num_bins)
    steps = []
    for start in range(0, len(order), microbatches):
        taken = bins.take(order[start : start + microbatches])
        rows = taken.perm
        own = Packing(np.arange(len(rows)), taken.offsets)
        fitted = FittedRows.of(TokenCounts(lengths[rows]), spec)
        plan = join_steps(spec, fitted, [on_ranks(own, fitted, spec)])
        steps.append((rows, plan))
    return Method(name, layout, steps)


def print_training(lengths: np.ndarray, arguments: argparse.Namespace) -> None:
    """Train every method and print real tokens per CPU second."""
    all_methods = list(methods(lengths, arguments.budget, arguments.microbatches))
    for method in all_methods:
        rows = np.concatenate([rows for rows, _ in method.steps])
        assert sorted(rows.tolist()) == list(range(len(lengths))), method.name
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), arguments)
        policies = {
            layout: _open(folder, layout, lengths, arguments) for layout in ("padded", "packed")
        }
        tokens = _tokens(lengths, arguments.seed)
        for policy in policies.values():
            # Warm up: allocator, kernels, optimizer state.
            _train(policy, tokens, *all_methods[0].steps[0])
        longest = max(len(method.steps) for method in all_methods)
        for step in range(longest):
            for method in all_methods:
                if step < len(method.steps):
                    seconds = _train(policies[method.layout], tokens, *method.steps[step])
                    method.train_s.append(seconds)
    _print_methods(all_methods, lengths)


def _open(folder: str, layout: str, lengths: np.ndarray, arguments: argparse.Namespace) -> Policy:
    options = SimpleNamespace(
        precision="float32", budget=arguments.budget, activation_checkpointing=False, device="cpu"
    )
    mode = "packed" if layout == "packed" else "dynamic"
    return open_policy(Path(folder), mode, lengths, options)  # pyright: ignore[reportArgumentType]


def _tokens(lengths: np.ndarray, seed: int) -> Jagged:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, _VOCABULARY, int(lengths.sum())).astype(np.int32)
    return Jagged.from_lengths(values, lengths)


def _train(policy: Policy, tokens: Jagged, rows: np.ndarray, plan: BatchPlan) -> float:
    """Train one step; return its CPU seconds."""
    ids = tokens.take(rows)
    mask = Jagged(np.ones(len(ids.values), dtype=np.uint8), ids.offsets)
    batch = BatchedDataDict(input_ids=ids, token_mask=mask, length=ids.lengths)
    began = time.process_time()
    policy.train(policy.shard(batch, plan), None, NllLoss())
    return time.process_time() - began


def _print_methods(all_methods: list[Method], lengths: np.ndarray) -> None:
    num_tokens = int(lengths.sum())
    baseline = sum(all_methods[0].train_s)
    oracles = {each.layout: sum(each.train_s) for each in all_methods if each.name == "oracle"}
    print(
        f"{'method':<14}{'layout':<8}{'tokens/CPU s':>13}{'padding':>9}{'steps':>7}"
        f"{'microbatches':>14}{'of fixed':>10}{'of oracle':>11}{'planning':>10}"
    )
    for method in all_methods:
        seconds = sum(method.train_s)
        share = method.planning_s / (seconds + method.planning_s)
        print(
            f"{method.name:<14}{method.layout:<8}{num_tokens / seconds:>13,.0f}"
            f"{method.padding_share:>9.1%}{len(method.steps):>7}{method.num_microbatches:>14}"
            f"{baseline / seconds:>9.2f}x{oracles[method.layout] / seconds:>10.1%}{share:>10.2%}"
        )


def print_planning(arguments: argparse.Namespace) -> None:
    """Print the rows per CPU second of the planner."""
    num_rows = arguments.planning_rows
    rng = np.random.default_rng(arguments.seed)
    lengths = lognormal_lengths(rng, num_rows, 600, 4096)
    print(f"planner alone, {num_rows:,} rows, 8 ranks x 4 microbatches of 4,096 tokens:")
    for layout in ("packed", "padded"):
        for kind, selection in KINDS.items():
            spec = StreamSpec(
                plan=PlanSpec(layout=layout, max_tokens=4096, num_ranks=8),
                selection=selection,
                microbatches_per_step=4,
                window_rows=32 if kind == "pool" else 256,
                window_tokens=0 if kind == "pool" else None,
            )
            began = time.process_time()
            num_steps = sum(1 for _ in stream_steps(lengths, StreamingPlanner(spec)))
            seconds = time.process_time() - began
            print(
                f"  {kind:<14}{layout:<8}{num_rows / seconds:>10,.0f} rows/s,"
                f" {1e3 * seconds / num_steps:.2f} ms per step"
            )


def print_pool(lengths: list[int], budget: int = 8192) -> None:
    """Print the time of the batches of one epoch of rows of these lengths, the best of three."""
    samples = [{"input_ids": [0] * length} for length in lengths]
    for pool_size in (32, 256):
        for layout in ("padded", "packed"):
            times: dict[str, float] = {}
            num_batches = 0
            for name in ("plain", "unseeded", "seeded") * 3:
                began = time.process_time()
                if name == "plain":
                    num_batches = sum(1 for _ in _plain_pool(samples, pool_size, budget, layout))
                else:
                    batches = LoadBalancedDataset(
                        ShardedIterableDataset(samples, shuffle=False, seed_rows=name == "seeded"),
                        pool_size=pool_size,
                        max_tokens_for_batch=budget,
                        seq_packing_enabled=layout == "packed",
                        infinite_loop=False,
                    )
                    assert sum(1 for _ in batches) == num_batches
                seconds = time.process_time() - began
                times[name] = min(times.get(name, seconds), seconds)
            print(
                f"pool of {pool_size}, {layout}: plain loop {times['plain']:.2f} s for"
                f" {len(samples):,} rows, unseeded {times['unseeded'] / times['plain']:.2f}x,"
                f" seeded {times['seeded'] / times['plain']:.2f}x"
            )


def _plain_pool(
    samples: list[dict[str, list[int]]], pool_size: int, budget: int, layout: RowLayout
) -> Iterator[list[dict[str, list[int]]]]:
    incoming = iter(samples)
    pool: list[dict[str, list[int]]] = []
    while True:
        pool += islice(incoming, pool_size - len(pool))
        if not pool:
            return
        batch = [pool.pop(0)]
        longest = total = len(batch[0]["input_ids"])
        while True:
            best = None
            for index, sample in enumerate(pool):
                length = len(sample["input_ids"])
                if layout == "packed":
                    if total + length <= budget:
                        best = (0, 0, index)
                        break
                    continue
                cost = max(longest, length) * (len(batch) + 1)
                key = (cost, abs(length - longest), index)
                if cost <= budget and (best is None or key < best):
                    best = key
            if best is None:
                break
            batch.append(pool.pop(best[2]))
            length = len(batch[-1]["input_ids"])
            longest = max(longest, length)
            total += length
        yield batch


def print_exchange(num_ranks: int) -> None:
    """Print the median time of one exchange between gloo processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_exchange, args=(num_ranks, f"file://{folder}/store"), nprocs=num_ranks)


def _exchange(rank: int, num_ranks: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    coordinator = ProcessGroupCoordinator()
    seconds = []
    for _ in range(300):
        began = time.perf_counter()
        coordinator.all_gather([1, 2, 3, 4, 0])
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        print(
            f"exchange between {num_ranks} gloo processes: median"
            f" {1e3 * float(np.median(seconds[50:])):.3f} ms"
        )
    dist.destroy_process_group()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="planning,exchange,training")
    parser.add_argument("--rows", type=int, default=768, help="rows that every method trains")
    parser.add_argument("--mean", type=float, default=120.0, help="mean length of built-in rows")
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=1024, help="max tokens of a microbatch")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches per step")
    parser.add_argument("--lengths", type=Path, help="CSV file of token counts instead")
    parser.add_argument("--columns", default="ContextTokens,GeneratedTokens")
    parser.add_argument("--planning-rows", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=2, help="gloo processes of the exchange")
    parser.add_argument("--model", choices=("tiny", "llama-1b"), default="tiny")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
