"""The packers and the planner as a library: row lengths in, bins and balanced ranks out.

    python examples/library/pack_lengths.py [--rows 512] [--capacity 8192] [--ranks 8] [--seed 0]

It compares the packers by number of bins, and then two plans of one step: the bins of first fit
decreasing assigned to ranks round-robin, and the schedule that packs and balances together. Needs
NumPy only; nothing is trained.
"""

from __future__ import annotations

import argparse

import numpy as np

from nemo_like.data.packing.algorithms import PackingAlgorithm, get_packer
from nemo_like.data.packing.bounds import l2_bound
from nemo_like.data.planning.plan import BatchPlan, PlanSpec, plan_batch


def sample_lengths(num_rows: int, max_length: int, seed: int) -> np.ndarray:
    """Return row lengths with a long tail, like RL completions: int64 [num_rows]."""
    generator = np.random.default_rng(seed)
    lengths = generator.lognormal(np.log(1200), 0.95, num_rows)
    return np.clip(lengths, 1, max_length).astype(np.int64)


def compare_packers(lengths: np.ndarray, capacity: int) -> None:
    """Print bins and utilization of every packer, beside the proven minimum number of bins."""
    print(f"{len(lengths)} rows, {lengths.sum()} tokens, bins of {capacity}:")
    print(f"  {'lower bound (L2)':<32} {l2_bound(lengths, capacity):>4} bins")
    for algorithm in PackingAlgorithm:
        packer = get_packer(algorithm, capacity, collect_metrics=True)
        bins = packer.pack(lengths)
        # Every packer returns a partition: each row is in exactly one bin.
        packed_rows = np.concatenate(bins)
        assert np.array_equal(np.sort(packed_rows), np.arange(len(lengths)))
        # None only without `collect_metrics`.
        assert packer.metrics is not None
        stats = packer.metrics.get_aggregated_stats()
        utilization = stats["average_utilization"]
        print(f"  {algorithm:<32} {len(bins):>4} bins, {utilization:.1%} filled")


def compare_plans(lengths: np.ndarray, capacity: int, num_ranks: int) -> list[BatchPlan]:
    """Plan one optimizer step in two ways; print what the slowest rank costs in each."""
    round_robin = PlanSpec(
        max_tokens=capacity, num_ranks=num_ranks, algorithm="first_fit_decreasing", balance="none"
    )
    balanced = PlanSpec(max_tokens=capacity, num_ranks=num_ranks, balance="flops")
    plans = []
    print(f"one step on {num_ranks} data-parallel ranks:")
    specs = {"bins assigned round-robin": round_robin, "packed and balanced": balanced}
    for name, spec in specs.items():
        plan = plan_batch(lengths, spec)
        # The default cost model is a dense 7B model; see `CostModel.from_spec`.
        imbalance = plan.metrics()["packing/rank_imbalance_flops"]
        count = plan.num_microbatches
        balance = f"slowest rank {imbalance:.4f} x the mean"
        print(f"  {name:<32} {count:>4} microbatches per rank, {balance}")
        plans.append(plan)
    return plans


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare packers and plans on random row lengths.")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    lengths = sample_lengths(arguments.rows, arguments.capacity, arguments.seed)
    compare_packers(lengths, arguments.capacity)
    *_, plan = compare_plans(lengths, arguments.capacity, arguments.ranks)

    # A plan is a value: it can be stored, and one rank's microbatches can be read from it.
    assert BatchPlan.from_json(plan.to_json()) == plan
    first = plan.ranks[0][0]
    print(f"rank 0, microbatch 0: rows {list(first.rows)}, {first.num_tokens} tokens")


if __name__ == "__main__":
    main()
