"""Context parallelism per microbatch against one context-parallel size: simulated step times.

    python -m benchmarks.context_parallel [--lengths FILE] [--gpus 64 128 256 512]

Rows of natural lengths are planned with `dynamic_context` and with each fixed size that the longest
row fits in, under the same limit of tokens per GPU. The time of a step is the sum over microbatches
of the slowest rank: its work by the cost of the model, the exchange of keys and values, and a fixed
cost of each microbatch. Nothing is run, and times are in units of the ideal, in which the work is
divided equally over all GPUs and nothing is exchanged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from nemo_like.data.planning.context_step import EXCHANGE_SHARE
from nemo_like.data.planning.plan import BatchPlan, plan_batch
from nemo_like.data.planning.plan_step import OVERHEAD_TOKENS
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.integer_math import ceil_div

ROWS_PER_GPU = 16
MAX_CONTEXT = 16


def lower_bound(work: np.ndarray, tokens: np.ndarray, num_gpus: int, cp: int, limit: int) -> float:
    """Return a lower bound of the sum of maxima of any division of rows over GPUs.

    `work` float64 [n] and `tokens` int64 [n] are of rows that up to `cp` GPUs may share, with
    `limit` tokens on each at a time. By decreasing length, rows up to row i have more tokens than s
    microbatches hold, so at least s + 1 microbatches take as long as row i on `cp` GPUs; and the
    first s of them do at most the work of their densest tokens.
    """
    order = np.argsort(-tokens, kind="stable")
    work, tokens = work[order], tokens[order]
    capacity = num_gpus * limit
    ends = np.cumsum(tokens)
    done = np.cumsum(work)
    bound = float(work.sum()) / num_gpus
    maxima = 0.0
    for filled in range(ceil_div(int(ends[-1]), capacity)):
        # The first row that does not fit in `filled` microbatches.
        row = int(np.searchsorted(ends, filled * capacity, side="right"))
        maxima += float(work[row]) / cp
        last = int(np.searchsorted(ends, (filled + 1) * capacity))
        rest = float(done[-1] - done[min(last, len(done) - 1)]) / num_gpus
        bound = max(bound, maxima + rest)
    return bound


def step_time(plan: BatchPlan, exchange_share: float = EXCHANGE_SHARE) -> float:
    """Return the time of the plan's steps in the work of one GPU."""
    spec = plan.spec
    cp = spec.cp_size
    sizes = np.full(len(plan.rows), cp) if plan.context_size is None else plan.context_size
    # A rank of a group receives the keys and values of the tokens of the others.
    exchange = exchange_share * spec.cost.linear * plan.lengths * (sizes - 1)
    loads = plan.of_context_ranks(plan.work + exchange)
    if plan.context_size is None:
        loads = loads / cp
    overhead = OVERHEAD_TOKENS * spec.cost.linear
    return float(loads.max(axis=0).sum()) + plan.num_microbatches * overhead


def compare(
    lengths: np.ndarray, num_gpus: int, limit: int, exchange_share: float
) -> dict[str, float]:
    """Return the times relative to the ideal: of each fixed size, of groups, and the bound."""
    longest = int(lengths.max())
    smallest = 1 << (ceil_div(longest, limit) - 1).bit_length()
    times: dict[str, float] = {}
    ideal = 0.0
    for cp in [size for size in (1, 2, 4, 8, 16) if smallest <= size <= MAX_CONTEXT]:
        spec = PlanSpec(max_tokens=cp * limit, num_ranks=num_gpus // cp, cp_size=cp)
        plan = plan_batch(lengths, spec)
        ideal = float(plan.spec.cost.of(lengths).sum()) / num_gpus
        times[f"fixed {cp}"] = step_time(plan, exchange_share) / ideal
        if cp > 1:
            plan = plan_batch(lengths, replace(spec, dynamic_context=True))
            times[f"groups of up to {cp}"] = step_time(plan, exchange_share) / ideal
            times[f"mean size, up to {cp}"] = plan.metrics()["packing/mean_context_size"]
            work = spec.cost.of(lengths)
            times[f"bound, up to {cp}"] = lower_bound(work, lengths, num_gpus, cp, limit) / ideal
    return times


def long_tail(rng: np.random.Generator, num_rows: int, longest: int) -> np.ndarray:
    """Return lengths of a log-normal distribution with a median of 2,000 tokens, int64 [n]."""
    return np.clip(rng.lognormal(np.log(2000), 1.3, num_rows), 64, longest).astype(np.int64)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each number of GPUs and each source of lengths."""
    parser = argparse.ArgumentParser(description="Simulated gain of context groups")
    parser.add_argument("--lengths", type=Path, help="file with one length per line")
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--limit", type=int, default=16384, help="tokens of a GPU")
    parser.add_argument("--longest", type=int, default=131072)
    parser.add_argument("--exchange", type=float, nargs="+", default=[EXCHANGE_SHARE, 0.08])
    options = parser.parse_args(arguments)
    for num_gpus in options.gpus:
        rng = np.random.default_rng(0)
        num_rows = num_gpus * ROWS_PER_GPU
        lengths = long_tail(rng, num_rows, options.longest)
        if options.lengths is not None:
            source = np.loadtxt(options.lengths)
            source = source * (options.longest / source.max())
            lengths = rng.choice(source, num_rows).astype(np.int64).clip(16)
        for share in options.exchange:
            times = compare(lengths, num_gpus, options.limit, share)
            best_fixed = min(value for name, value in times.items() if name.startswith("fixed"))
            best = min(value for name, value in times.items() if name.startswith("groups"))
            rounded = {name: round(value, 3) for name, value in times.items()}
            print(json.dumps({"gpus": num_gpus, "exchange": share, **rounded}))
            print(f"  gain over the best fixed size: {best_fixed / best:.3f}")


if __name__ == "__main__":
    main()
