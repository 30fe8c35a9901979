"""Simulated: the time of a rollout by the order of its groups, for 8 to 512 replicas.

    python -m benchmarks.rollout_order

A replica decodes `SLOTS` completions at a time, one token each per step of constant time, and
begins the next completion as soon as one ends. Prompts have a log-normal mean length, completions a
log-normal factor of it, up to `LIMIT` tokens. The prediction is the mean of another group of the
same prompt, as of an earlier visit, times noise for the policy's change since then. No measured
speed of an engine is in these figures.
"""

from __future__ import annotations

import argparse
import heapq

import numpy as np

from nemo_like.generation.rollout_plan import RolloutPlan, plan_rollout

SLOTS, GROUP, LIMIT = 64, 8, 32768
GROUPS_PER_REPLICA = 32
"""256 completions per replica, four for each slot."""


def completion_lengths(means: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw the tokens of a group of each prompt, int64 [P, G]; `means` is float [P]."""
    factors = rng.lognormal(0.0, 0.5, (len(means), GROUP))
    return np.clip(means[:, None] * factors, 16, LIMIT).astype(np.int64)


def makespan(plan: RolloutPlan, lengths: np.ndarray, num_replicas: int) -> int:
    """Return the steps until the last replica has ended; `lengths` is int [P, G]."""
    last = 0
    for replica in range(num_replicas):
        ends = [0] * SLOTS
        for unit in plan.units_of(replica):
            for length in lengths[unit].tolist():
                heapq.heapreplace(ends, ends[0] + length)
        last = max(last, *ends)
    return last


def measure(num_replicas: int, seed: int, noise: float) -> dict[str, float]:
    """Return the time of each order relative to a lower bound of all orders."""
    rng = np.random.default_rng((seed, num_replicas))
    num_prompts = GROUPS_PER_REPLICA * num_replicas
    means = rng.lognormal(np.log(2000), 1.0, num_prompts)
    lengths, earlier = completion_lengths(means, rng), completion_lengths(means, rng)
    predicted = earlier.mean(axis=1) * rng.lognormal(0.0, noise, num_prompts)
    idle = np.zeros(num_replicas, dtype=np.int64)
    limits = np.full(num_prompts, GROUP * LIMIT)
    exact = lengths.mean(axis=1)
    plans = {
        "first come": plan_rollout(limits, idle),
        "predicted": plan_rollout((GROUP * predicted).astype(np.int64), idle, predicted),
        "exact means": plan_rollout((GROUP * exact).astype(np.int64), idle, exact),
    }
    bound = max(lengths.max(), lengths.sum() / (num_replicas * SLOTS))
    return {name: makespan(plan, lengths, num_replicas) / bound for name, plan in plans.items()}


def main() -> None:
    """Print a table of means over seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 32, 128, 512])
    arguments = parser.parse_args()
    print("simulated; time relative to the lower bound\n")
    print("| replicas | first come | predicted | exact means | gain of predicted |")
    print("|---|---|---|---|---|")
    for num_replicas in arguments.replicas:
        seeds = range(arguments.seeds)
        results = [measure(num_replicas, seed, arguments.noise) for seed in seeds]
        mean = {name: float(np.mean([each[name] for each in results])) for name in results[0]}
        gain = mean["first come"] / mean["predicted"]
        cells = " | ".join(f"{value:.3f}" for value in mean.values())
        print(f"| {num_replicas} | {cells} | {gain:.2f} |")


if __name__ == "__main__":
    main()
