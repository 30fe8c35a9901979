"""Inner loops of the joint scheduler: greedy construction (LPT, or one microbatch after the other),
local search, and their compilation.

The loops are plain Python that numba can compile. Both versions return the same result: effort is
counted in loop steps, never in seconds, so a result depends on the arguments alone.

Rows are sorted by decreasing work, so a smaller row index means at least as much work. The
interpreter gets lists and compiled code gets arrays, because each is the faster one there.

Notation: n rows, K bins, S slots. See `SearchState` for slots and steps.
"""

from __future__ import annotations

import heapq
from functools import cache
from importlib.util import find_spec
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

_MIN_RELATIVE_GAIN = 1e-6
"""Smallest reduction of a slot's work that is worth a move, relative to the work of the slot."""
_CLOSE_ENOUGH = 0.05
"""Stop the search for a better move once one misses the target by at most this share of it."""
_MAX_SCANNED_ROWS = 1000
"""Maximum number of candidate rows scanned in each direction for one swap."""


class SearchState(NamedTuple):
    """Assignment of rows to bins under local search. The arrays are updated in place.

    A slot is the set of bins whose work is summed and compared with other ranks: one bin if ranks
    synchronize at every microbatch, all bins of a rank if they synchronize once per optimizer step.
    A step is a group of slots that run concurrently, one per rank. The slot with the most work
    determines the time of its step, and the search minimizes the sum over steps of that maximum.
    """

    # [n] tokens of each row, rows by decreasing work
    tokens: Any
    # [n] work of each row
    work: Any
    # [n] bin of each row
    bin_of: Any
    # [K]
    bin_tokens: Any
    # [K]
    bin_num_rows: Any
    # [K] slot of each bin
    slot_of: Any
    # [S]
    slot_work: Any
    # [S] the bin with the fewest tokens in each slot
    emptiest_bin: Any
    # [K] bins sorted by slot
    bins_by_slot: Any
    # [S + 1] offsets of the slots in `bins_by_slot`
    slot_starts: Any
    # [S] head of the linked list of rows of each slot, -1 if it is empty
    first_row: Any
    # [n] next row of the same slot, -1 at the end
    next_row: Any
    # [n] previous row of the same slot, -1 at the head
    prev_row: Any
    # [S] step of each slot
    step_of: Any
    # [S / step_size] maximum slot work of each step
    step_max_work: Any


@cache
def compiled() -> Any | None:
    """Return `fill_lpt`, `fill_by_step` and `local_search` compiled by numba, or None.

    None means that numba is not installed or that its on-disk cache cannot be written.
    """
    if find_spec("numba") is None:
        return None
    import numba

    # Numba resolves names in the globals of a function. The copies get a namespace of their own, in
    # which every helper is the compiled one; the originals stay interpretable.
    scope = dict(globals())
    functions = (
        fill_lpt,
        find_unassigned,
        fill_by_step,
        find_swap,
        find_relocation,
        find_move,
        relocate,
        update_emptiest_bin,
        local_search,
    )
    try:
        for function in functions:
            copy = FunctionType(function.__code__, scope, function.__name__)
            copy.__qualname__ = function.__qualname__
            scope[function.__name__] = numba.njit(cache=True, nogil=True)(copy)
    except RuntimeError:
        # No cache directory is writable. Compiling in each process costs more than it saves.
        return None
    return SimpleNamespace(
        fill_lpt=scope["fill_lpt"],
        fill_by_step=scope["fill_by_step"],
        local_search=scope["local_search"],
    )


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
    """Return the first unassigned row from row i on, or n (path halving)."""
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


def find_swap(
    work: Any,
    tokens: Any,
    bin_of: Any,
    bin_tokens: Any,
    bin_num_rows: Any,
    slot_of: Any,
    slot_work: Any,
    emptiest_bin: Any,
    step_of: Any,
    step_max_work: Any,
    i: int,
    target: float,
    error: float,
    max_free_tokens: int,
    capacity: int,
) -> tuple[float, int, int, int]:
    """Find the row to swap with row i so that its slot loses as close to `target` work as possible.

    Rows are sorted by work, so the scan goes in both directions from the row of the ideal work and
    stops where the difference reaches `error` or nothing more can fit (`max_free_tokens` bounds the
    free tokens of any bin). Row i moves to the bin of the other row, or to the emptiest bin of that
    slot if it does not fit there and the bin keeps a row. No step's maximum increases.

    Returns (distance from `target`, other row or -1, destination bin of row i or -1, steps). The
    arrays are passed one by one because numba compiles that to faster code than a tuple.
    """
    slot = slot_of[bin_of[i]]
    min_gain = _MIN_RELATIVE_GAIN * slot_work[slot]
    free_tokens = capacity - bin_tokens[bin_of[i]]
    row_in = -1
    dst_bin = -1
    steps = 0
    low = i + 1
    high = len(work)
    while low < high:
        middle = (low + high) // 2
        if work[middle] > work[i] - target and tokens[middle] >= tokens[i] - max_free_tokens:
            low = middle + 1
        else:
            high = middle
    for direction in (-1, 1):
        j = low if direction == 1 else low - 1
        end = steps + _MAX_SCANNED_ROWS
        while i < j < len(work) and steps < end:
            steps += 1
            work_change = work[i] - work[j]
            token_change = tokens[i] - tokens[j]
            distance = (work_change - target) * direction
            if (
                distance < 0
                or distance >= error
                or work_change <= min_gain
                or (direction == 1 and token_change > max_free_tokens)
            ):
                break
            b = bin_of[j]
            s = slot_of[b]
            # Within the same step the other slot must stay below the maximum by a margin, or the
            # search could exchange the same two rows forever.
            margin = min_gain if step_of[s] == step_of[slot] else 0.0
            max_work = step_max_work[step_of[s]] - margin
            is_allowed = slot_work[s] + work_change <= max_work and -token_change <= free_tokens
            if s != slot and is_allowed:
                if bin_tokens[b] + token_change > capacity:
                    b = emptiest_bin[s] if bin_num_rows[b] > 1 else b
                    token_change = tokens[i]
                if bin_tokens[b] + token_change <= capacity:
                    error = distance
                    row_in = j
                    dst_bin = b
                    break
            j += direction
    return error, row_in, dst_bin, steps


def find_relocation(state: SearchState, i: int, slot: int, capacity: int) -> int:
    """Find a bin outside `slot` that can accept row i without raising the maximum of its step.

    Returns -1 if there is none.
    """
    for b in range(len(state.slot_of)):
        s = state.slot_of[b]
        margin = 0.0
        if state.step_of[s] == state.step_of[slot]:
            margin = _MIN_RELATIVE_GAIN * state.slot_work[slot]
        has_room = state.bin_tokens[b] + state.tokens[i] <= capacity
        max_work = state.step_max_work[state.step_of[s]] - margin
        if s != slot and has_room and state.slot_work[s] + state.work[i] <= max_work:
            return b
    return -1


def find_move(
    state: SearchState,
    slot: int,
    target: float,
    max_free_tokens: int,
    capacity: int,
    max_steps: int,
) -> tuple[int, int, int, int]:
    """Find the swap or relocation that reduces the work of `slot` closest to `target`.

    Returns (row that leaves the slot or -1, row that enters it or -1, destination bin or -1, loop
    steps).
    """
    # Attributes are read once: attribute access in the loop slows down the interpreted version.
    work = state.work
    tokens = state.tokens
    bin_of = state.bin_of
    bin_tokens = state.bin_tokens
    bin_num_rows = state.bin_num_rows
    slot_of = state.slot_of
    slot_work = state.slot_work
    emptiest_bin = state.emptiest_bin
    step_of = state.step_of
    step_max_work = state.step_max_work
    error = slot_work[slot]
    row_out = -1
    row_in = -1
    dst_bin = -1
    steps = 0
    i = state.first_row[slot]
    smallest_row = -1
    while i >= 0 and error > _CLOSE_ENOUGH * target and steps < max_steps:
        distance, j, b, num_scanned = find_swap(
            work, tokens, bin_of, bin_tokens, bin_num_rows, slot_of, slot_work, emptiest_bin,
            step_of, step_max_work, i, target, error, max_free_tokens, capacity,
        )  # fmt: skip
        steps += num_scanned + 1
        if j >= 0:
            error = distance
            row_out = i
            row_in = j
            dst_bin = b
        # Only the row with the least work is tried for a relocation, and a bin is never emptied.
        if i > smallest_row and bin_num_rows[bin_of[i]] > 1:
            smallest_row = i
        i = state.next_row[i]
    if smallest_row >= 0 and abs(work[smallest_row] - target) < error:
        b = find_relocation(state, smallest_row, slot, capacity)
        # A scanned bin costs about a quarter of a scanned row.
        steps += len(slot_of) // 4
        if b >= 0:
            row_out = smallest_row
            row_in = -1
            dst_bin = b
    return row_out, row_in, dst_bin, steps


def relocate(state: SearchState, i: int, b: int) -> None:
    """Move row i from its bin to bin `b`, in the linked lists and in all sums."""
    src_slot = state.slot_of[state.bin_of[i]]
    dst_slot = state.slot_of[b]
    if state.prev_row[i] < 0:
        state.first_row[src_slot] = state.next_row[i]
    else:
        state.next_row[state.prev_row[i]] = state.next_row[i]
    if state.next_row[i] >= 0:
        state.prev_row[state.next_row[i]] = state.prev_row[i]
    state.next_row[i] = state.first_row[dst_slot]
    state.prev_row[i] = -1
    if state.first_row[dst_slot] >= 0:
        state.prev_row[state.first_row[dst_slot]] = i
    state.first_row[dst_slot] = i
    state.slot_work[src_slot] -= state.work[i]
    state.slot_work[dst_slot] += state.work[i]
    state.bin_tokens[state.bin_of[i]] -= state.tokens[i]
    state.bin_tokens[b] += state.tokens[i]
    state.bin_num_rows[state.bin_of[i]] -= 1
    state.bin_num_rows[b] += 1
    state.bin_of[i] = b


def update_emptiest_bin(state: SearchState, slot: int) -> int:
    """Recompute the emptiest bin of `slot` and return the number of bins scanned."""
    start = state.slot_starts[slot]
    stop = state.slot_starts[slot + 1]
    state.emptiest_bin[slot] = state.bins_by_slot[start]
    for p in range(start, stop):
        b = state.bins_by_slot[p]
        if state.bin_tokens[b] < state.bin_tokens[state.emptiest_bin[slot]]:
            state.emptiest_bin[slot] = b
    return stop - start


def local_search(
    state: SearchState, order: Any, step_size: int, capacity: int, max_steps: int
) -> int:
    """Reduce the maximum slot work of each step by moves that raise the maximum of no step.

    `order` [S] lists the slots by step. Each move aims at the mean of the step; a step is finished
    when its max-loaded slot is at the mean or has no improving move. Returns the loop steps used.
    """
    steps = len(state.slot_of)
    # Upper bounds on the free tokens of any bin and on the work any slot can accept. They only grow
    # during the search, which keeps them valid without a rescan.
    max_free_tokens = 0
    max_slack = 0.0
    for b in range(len(state.slot_of)):
        s = state.slot_of[b]
        max_free_tokens = max(max_free_tokens, capacity - state.bin_tokens[b])
        max_slack = max(max_slack, state.step_max_work[state.step_of[s]] - state.slot_work[s])
    for m in range(len(state.step_max_work)):
        # A max-heap of (-work, slot). A slot whose work changed is pushed again; its outdated
        # entries are recognized by their work and skipped.
        heap = [
            (-state.slot_work[order[p]], order[p])
            for p in range(m * step_size, (m + 1) * step_size)
        ]
        heapq.heapify(heap)
        steps += step_size
        total_work = 0.0
        for entry in heap:
            total_work -= entry[0]
        while steps < max_steps:
            slot = heap[0][1]
            if state.slot_work[slot] != -heap[0][0]:
                heapq.heappop(heap)
                continue
            state.step_max_work[m] = state.slot_work[slot]
            excess = state.step_max_work[m] - total_work / step_size
            if excess <= _MIN_RELATIVE_GAIN * state.step_max_work[m]:
                break
            target = min(excess, max_slack)
            row_out, row_in, dst_bin, num_scanned = find_move(
                state, slot, target, max_free_tokens, capacity, max_steps - steps
            )
            steps += num_scanned
            if row_out < 0:
                break
            src_bin = state.bin_of[row_out]
            dst_slot = state.slot_of[dst_bin]
            relocate(state, row_out, dst_bin)
            if row_in >= 0:
                relocate(state, row_in, src_bin)
            steps += update_emptiest_bin(state, slot)
            steps += update_emptiest_bin(state, dst_slot)
            heapq.heapreplace(heap, (-state.slot_work[slot], slot))
            if state.step_of[dst_slot] == m:
                heapq.heappush(heap, (-state.slot_work[dst_slot], dst_slot))
            else:
                # Work left this step for another one.
                total_work -= state.step_max_work[m] - state.slot_work[slot]
            max_free_tokens = max(max_free_tokens, capacity - state.bin_tokens[src_bin])
            max_slack = max(max_slack, state.step_max_work[m] - state.slot_work[slot])
    return steps
