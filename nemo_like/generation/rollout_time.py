"""Decoding steps and tokens of a rollout, simulated from the lengths of its completions.

Every running completion gets one token per decoding step.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np

from nemo_like.config.rollout import GenerationConfig
from nemo_like.data.planning.token_counts import TokenCounts
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
    counts: TokenCounts, group_size: int, num_replicas: int, generation: GenerationConfig
) -> tuple[int, int]:
    """Return (decoding steps, sampled tokens) of the slowest of `num_replicas` replicas.

    Groups of `group_size` consecutive rows stay together, if there are enough. As in a run without
    predicted lengths they are planned by the max tokens; the embedded generator orders its requests
    by prompt.
    """
    assert counts.num_trained is not None, "the rows of a rollout have a token mask"
    completions = counts.num_trained
    prompts = counts.lengths - completions
    unit = group_size if len(prompts) // group_size >= num_replicas else 1
    costs = (prompts + generation.max_new_tokens).reshape(-1, unit).sum(axis=1)
    plan = plan_rollout(costs, np.zeros(num_replicas, dtype=np.int64))
    replica_of_row = np.repeat(plan.replica_of_unit, unit)
    is_static = generation.backend == "hf"
    num_slots = generation.hf.batch_size if is_static else generation.vllm.max_num_seqs
    # Rows of each replica in their order.
    order = np.lexsort([prompts, replica_of_row] if is_static else [replica_of_row])
    bounds = np.searchsorted(replica_of_row[order], np.arange(num_replicas + 1))
    work = []
    for start, stop in pairwise(bounds.tolist()):
        own = completions[order[start:stop]]
        work.append((decoding_steps(own, num_slots, is_static=is_static), int(own.sum())))
    # Both take time; their means are a common unit.
    means = np.maximum(np.mean(work, axis=0), 1e-9)
    return max(work, key=lambda each: float((np.array(each) / means).sum()))
