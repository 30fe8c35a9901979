"""Greedy construction of an assignment: rows to bins by LPT, or one microbatch after the other.

Like `balance_kernels`, which compiles them: plain Python for lists, and for arrays with numba.
Rows are sorted by decreasing work. Notation: n rows, K bins.
"""

from __future__ import annotations

import heapq
from typing import Any


def fill_lpt(
    tokens: Any, work: Any, capacity: int, bin_of: Any, bin_tokens: Any, excess: Any
) -> bool:
    """Assign each row to the bin furthest below its target work that has room for the row.

    With equal targets this is longest processing time first (LPT) under a token limit. The arrays
    `bin_of` [n] (-1: unassigned), `bin_tokens` [K] and `excess` [K] (work minus target work of each
    bin) are updated. Returns False if a row fits into no bin.
    """
    open_bins = [(excess[b], b) for b in range(len(excess))]
    # Bins without room for some earlier row, as (tokens, bin). A later row may be shorter, so they
    # return to `open_bins` once they have room. The empty typed list is for numba.
    closed_bins = [(0, 0) for _ in range(0)]
    heapq.heapify(open_bins)
    for i in range(len(tokens)):
        if bin_of[i] >= 0:
            continue
        while len(closed_bins) > 0 and closed_bins[0][0] + tokens[i] <= capacity:
            b = closed_bins[0][1]
            heapq.heappop(closed_bins)
            heapq.heappush(open_bins, (excess[b], b))
        while len(open_bins) > 0 and bin_tokens[open_bins[0][1]] + tokens[i] > capacity:
            b = open_bins[0][1]
            heapq.heappop(open_bins)
            heapq.heappush(closed_bins, (bin_tokens[b], b))
        if len(open_bins) == 0:
            return False
        b = open_bins[0][1]
        bin_of[i] = b
        bin_tokens[b] += tokens[i]
        excess[b] += work[i]
        heapq.heapreplace(open_bins, (excess[b], b))
    return True


def fill_by_step(
    tokens: Any,
    work: Any,
    capacity: int,
    bin_of: Any,
    bin_tokens: Any,
    bin_work: Any,
    step_size: int,
    parent: Any,
) -> bool:
    """Fill the bins of one step (microbatch) after the other up to a common work limit.

    The work limit of a step is an equal share of the remaining work, or the largest remaining row
    if that is more. The bin with the least work repeatedly takes the largest remaining row that
    exceeds neither the work limit nor the token limit. `fill_lpt` assigns the rows left at the end.

    `bin_of` [n] is -1 and `bin_tokens`, `bin_work` [K] are 0 on entry. `parent` [n + 1] is 0..n, a
    union-find structure: the root of i is the first unassigned row from i on. Returns False if a
    row fits into no bin.
    """
    num_rows = len(tokens)
    num_bins = len(bin_tokens)
    remaining_work = 0.0
    for i in range(num_rows):
        remaining_work += work[i]
    for start in range(0, num_bins, step_size):
        i = find_unassigned(parent, 0)
        if i == num_rows:
            break
        max_work = max(remaining_work / (num_bins - start), work[i])
        heap = [(0.0, b) for b in range(start, start + step_size)]
        while len(heap) > 0:
            b = heap[0][1]
            # Binary search for the first row that fits. Work decreases with the row index, and
            # tokens are close to monotone in work, so the result is checked below.
            low = 0
            high = num_rows
            while low < high:
                middle = (low + high) // 2
                exceeds_work = bin_work[b] + work[middle] > max_work
                if exceeds_work or bin_tokens[b] + tokens[middle] > capacity:
                    low = middle + 1
                else:
                    high = middle
            i = find_unassigned(parent, low)
            if i == num_rows or bin_tokens[b] + tokens[i] > capacity:
                heapq.heappop(heap)
                continue
            parent[i] = i + 1
            bin_of[i] = b
            bin_tokens[b] += tokens[i]
            bin_work[b] += work[i]
            remaining_work -= work[i]
            heapq.heapreplace(heap, (bin_work[b], b))
    return fill_lpt(tokens, work, capacity, bin_of, bin_tokens, bin_work)


def find_unassigned(parent: Any, i: int) -> int:
    """Return the first unassigned row from row i on, or n if there is none (path halving)."""
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i
