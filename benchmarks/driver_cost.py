"""What forming a step's batch costs the driver: our plan + shard against a padded gather, in one
run.

    python benchmarks/driver_cost.py         # 4096 rows of up to 8192 tokens, 7 columns, 8 ranks
    python benchmarks/driver_cost.py --ray   # and put the shards into Ray's object store

`bytes` are what the driver's heap was given (tracemalloc, which NumPy reports to), over the bytes
of the real tokens of all columns; `peak` is the highest they stood at any time. The padded way is
the field's usual one: columns [B, S], rows brought into the plan's order by one gather over all of
them, shards cut as views. Both carry the same columns and obey the same plan. Ray's store is memory
of its own, shared with the workers, and takes each byte that is put into it once.
"""

from __future__ import annotations

import argparse
import itertools
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from packing_references import KINDS, lengths_of, read_lengths

from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import BatchPlan, PlanSpec, plan_batch
from nemo_like.distributed.batched_data_dict import BatchedDataDict

TOKEN_COLUMNS = {
    "input_ids": np.int32,
    "token_mask": np.uint8,
    "generation_logprobs": np.float32,
    "prev_logprobs": np.float32,
    "reference_logprobs": np.float32,
    "advantages": np.float32,
    "values": np.float32,
}


class Cost(NamedTuple):
    """Of one way to form the shards."""

    seconds: float
    allocated: int
    """Bytes that are there when it is done."""
    peak: int
    """Most bytes at any time."""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    trace = (
        None if arguments.lengths is None else read_lengths(arguments.lengths, arguments.columns)
    )
    print(
        f"{'lengths':<12} {'way':<16} {'ms':>8} {'bytes':>7} {'peak':>7} {'GB':>6}   (bytes and"
        f" peak over the real tokens')"
    )
    for kind in KINDS:
        lengths = np.minimum(
            lengths_of(kind, arguments.rows, arguments.max_tokens, 0, trace), arguments.max_tokens
        )
        _compare(kind, lengths, arguments)


def _compare(kind: str, lengths: np.ndarray, arguments: argparse.Namespace) -> None:
    batch = _batch(lengths)
    real = sum(column.values.nbytes for column in batch.values())
    spec = PlanSpec(max_tokens=arguments.max_tokens, num_ranks=arguments.ranks)
    padded = _pad(batch, int(lengths.max()))
    plan_batch(lengths, spec)  # compiled packers are loaded once per process
    plan = plan_batch(lengths, spec)
    _check(batch, padded, plan)
    ways: dict[str, Callable[[], Any]] = {
        "plan": lambda: plan_batch(lengths, spec),
        "plan + shard": lambda: batch.shard(plan_batch(lengths, spec)),
        "padded gather": lambda: _shard_padded(padded, plan_batch(lengths, spec)),
    }
    if arguments.ray:
        import ray

        ray.init(
            ignore_reinit_error=True,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=6 << 30,
        )
        ways["+ put (Ray)"] = lambda: [ray.put(shard) for shard in batch.shard(plan)]
        ways["padded + put"] = lambda: [ray.put(shard) for shard in _shard_padded(padded, plan)]
    for name, way in ways.items():
        cost = _measured(way, arguments.repeats)
        print(
            f"{kind:<12} {name:<16} {cost.seconds * 1e3:8.1f} {cost.allocated / real:7.2f}"
            f" {cost.peak / real:7.2f}"
            f" {cost.peak / 1e9:6.2f}",
            flush=True,
        )


def _measured(way: Callable[[], Any], repeats: int) -> Cost:
    """Best time of `repeats` runs; bytes of one more run, which is traced and so slower."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        kept = way()
        seconds.append(time.perf_counter() - start)
        del kept
    tracemalloc.start()
    kept = way()
    allocated, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return Cost(min(seconds), allocated, peak)


def _batch(lengths: np.ndarray) -> BatchedDataDict:
    generator, size = np.random.default_rng(0), int(lengths.sum())
    columns = {
        name: generator.integers(0, 99, size).astype(dtype) for name, dtype in TOKEN_COLUMNS.items()
    }
    return BatchedDataDict(
        {name: Jagged.from_lengths(values, lengths) for name, values in columns.items()}
    )


def _pad(batch: BatchedDataDict, width: int) -> dict[str, np.ndarray]:
    padded = {}
    for name, column in batch.items():
        rectangle = np.zeros((len(column), width), dtype=column.values.dtype)
        rectangle[np.arange(width) < column.lengths[:, None]] = column.values
        padded[name] = rectangle
    return padded


def _shard_padded(padded: dict[str, np.ndarray], plan: BatchPlan) -> list[dict[str, np.ndarray]]:
    """One gather of padded rows into the plan's order; shards are views of it."""
    order = np.concatenate([plan.rows_of_rank(rank) for rank in range(plan.spec.num_ranks)])
    ordered = {name: column[order] for name, column in padded.items()}
    bounds = np.cumsum([0, *(len(plan.rows_of_rank(rank)) for rank in range(plan.spec.num_ranks))])
    return [
        {name: column[start:stop] for name, column in ordered.items()}
        for start, stop in itertools.pairwise(bounds)
    ]


def _check(batch: BatchedDataDict, padded: dict[str, np.ndarray], plan: BatchPlan) -> None:
    """Both ways give every rank the same tokens."""
    for mine, theirs in zip(batch.shard(plan), _shard_padded(padded, plan), strict=True):
        for row in range(0, len(theirs["input_ids"]), 97):
            tokens = mine["input_ids"][row]
            assert np.array_equal(tokens, theirs["input_ids"][row, : len(tokens)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument(
        "--max-tokens", type=int, default=8192, help="cap of a row and of a microbatch"
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--ray", action="store_true", help="also put the shards into Ray's object store"
    )
    parser.add_argument(
        "--lengths", type=Path, help="a file of lengths, scaled like the other distributions"
    )
    parser.add_argument(
        "--columns",
        type=lambda text: text.split(","),
        default=[],
        help="columns to add up, by comma",
    )
    return parser


if __name__ == "__main__":
    main()
