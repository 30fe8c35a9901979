"""Decoding steps and tokens of a rollout, simulated from the lengths of its completions.

Every running completion gets one token per decoding step.
"""

from __future__ import annotations

import heapq

import numpy as np

from nemo_like.generation.rollout_plan import plan_rollout


def decoding_steps(lengths: np.ndarray, num_slots: int, *, is_static: bool) -> int:
    """Return the decoding steps of a replica for completions of `lengths` int [B], in their order.

    Up to `num_slots` run at a time. With `is_static` so many start together and the next ones start
    when all have ended, otherwise each starts as soon as another one ends.
    """
    if is_static:
        starts = np.arange(0, len(lengths), num_slots)
        return int(np.maximum.reduceat(lengths, starts).sum()) if len(lengths) else 0
    ends = [0] * num_slots
    for length in lengths.tolist():
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def rollout_work(
    prompts: np.ndarray,
    completions: np.ndarray,
    group_size: int,
    *,
    num_replicas: int,
    num_slots: int,
    is_static: bool,
    max_new_tokens: int,
) -> tuple[int, int]:
    """Return (decoding steps, sampled tokens) of the slowest replica.

    `prompts` and `completions` are the tokens of B rows, int64 [B], in groups of `group_size` that
    stay together. As in a run without predicted lengths, the groups are planned by
    `max_new_tokens`; with `is_static` a replica orders its requests by prompt.
    """
    unit = group_size if len(prompts) // group_size >= num_replicas else 1
    costs = (prompts + max_new_tokens).reshape(-1, unit).sum(axis=1)
    plan = plan_rollout(costs, np.zeros(num_replicas, dtype=np.int64))
    work = []
    for replica in range(num_replicas):
        units = np.array(plan.units_of(replica), dtype=np.int64)
        rows = (units[:, None] * unit + np.arange(unit)).ravel()
        if is_static:
            rows = rows[np.argsort(prompts[rows], kind="stable")]
        own = completions[rows]
        work.append((decoding_steps(own, num_slots, is_static=is_static), int(own.sum())))
    # Both matter; their means are only a common unit.
    means = np.maximum(np.mean(work, axis=0), 1e-9)
    return max(work, key=lambda each: float((np.array(each) / means).sum()))
