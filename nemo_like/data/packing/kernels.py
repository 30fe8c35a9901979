"""The inner loops of the packers: plain Python that numba can compile, so both ways give the same
bins by construction.

Every kernel takes lengths in the order of placement (each 1 to `capacity`), writes the bin of each
position to `bin_of` and opens bins 0, 1, 2, ... `max_items` is the most rows of a bin. Work space
comes from the caller: lists for the interpreter, arrays for compiled code, each the faster of the
two in its place.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

MIN_COMPILED = 4096
"""Rows from which compiled code is worth importing numba for; below it the interpreter needs a few
milliseconds.
"""
MAX_TABLE = 1 << 24
"""Largest capacity for which a table over all possible rooms is kept."""
# The position of the only set bit of a 32-bit word, by a de Bruijn multiplication.
# fmt: off
_BIT_POSITION = np.array([0, 1, 28, 2, 29, 14, 24, 3, 30, 22, 20, 15, 25, 17, 4, 8,
                          31, 27, 13, 23, 21, 19, 16, 7, 26, 12, 18, 6, 11, 5, 10, 9])
# fmt: on


@cache
def compiled(kernel: Callable[..., Any]) -> Callable[..., Any] | None:
    """`kernel` as machine code kept on disk between processes; None where numba, or a place to keep
    it, is missing.
    """
    if find_spec("numba") is None:
        return None
    import numba

    try:
        return numba.njit(cache=True, nogil=True)(kernel)
    except (
        RuntimeError
    ):  # no directory may be written to; compiling anew in each process costs more than it saves
        return None


def stable_argsort(keys: np.ndarray, bound: int) -> np.ndarray:
    """Stable order of non-negative integers below `bound`, in linear time."""
    counting = (
        compiled(counting_sort) if len(keys) >= MIN_COMPILED and bound <= 4 * len(keys) else None
    )
    if counting is not None:
        ends = np.cumsum(np.bincount(keys, minlength=bound))
        order = np.empty(len(keys), dtype=np.int64)
        counting(keys, np.concatenate([[0], ends]), order)
        return order
    # numpy has radix sort for 16 bits at a time.
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable")
    for shift in range(16, (bound - 1).bit_length(), 16):
        digits = (keys[order] >> shift) & 0xFFFF
        order = order[np.argsort(digits.astype(np.uint16), kind="stable")]
    return order


def counting_sort(keys: Any, starts: Any, order: Any) -> None:
    """Write the stable order of `keys` to `order`; `starts[k]` is where those of key k begin, and
    is moved on.
    """
    for i in range(len(keys)):
        order[starts[keys[i]]] = i
        starts[keys[i]] += 1


def next_fit(lengths: Any, capacity: int, max_items: int, bin_of: Any) -> int:
    """Keep one bin open; close it for good when a row does not fit. Returns the number of bins."""
    last, room, slots = -1, 0, 0
    for i in range(len(lengths)):
        if lengths[i] > room or slots == 0:
            last, room, slots = last + 1, capacity, max_items
        bin_of[i] = last
        room -= lengths[i]
        slots -= 1
    return last + 1


def first_fit(
    lengths: Any, max_items: int, tree: Any, num_leaves: int, slots: Any, bin_of: Any
) -> int:
    """The leftmost bin with room, found in a tree of maxima. Returns the number of bins.

    `tree` has 2 * num_leaves entries all equal to the capacity (leaf b, the room of bin b, is at
    num_leaves + b; a power of two at least the number of bins), `slots` num_leaves entries equal to
    `max_items`.
    """
    i, num_bins = 0, 0
    while i < len(lengths):
        length = lengths[i]
        node = 1
        while node < num_leaves:
            node *= 2
            if tree[node] < length:
                node += 1
        b = node - num_leaves
        room, left = tree[node], slots[b]
        # The run of equals that fits goes into this bin at once.
        while i < len(lengths) and lengths[i] == length and room >= length and left > 0:
            bin_of[i] = b
            room -= length
            left -= 1
            i += 1
        num_bins = max(num_bins, b + 1)
        slots[b] = left
        tree[node] = room if left > 0 else 0
        node //= 2
        while node >= 1:
            roomiest = max(tree[2 * node], tree[2 * node + 1])
            if tree[node] == roomiest:
                break
            tree[node] = roomiest
            node //= 2
    return num_bins


def least_loaded(lengths: Any, capacity: int, max_items: int, num_bins: int, bin_of: Any) -> bool:
    """Each row to the bin with the fewest tokens (then the lowest number). False if some row fits
    in none.
    """
    heap = list(range(num_bins))  # entries are load * num_bins + bin
    slots = [max_items for _ in range(num_bins)]
    for i in range(len(lengths)):
        if len(heap) == 0:
            return False
        entry = heap[0]
        b = entry % num_bins
        if entry // num_bins + lengths[i] > capacity:
            return False
        bin_of[i] = b
        slots[b] -= 1
        if slots[b] > 0:
            heapq.heapreplace(heap, entry + lengths[i] * num_bins)
        else:
            heapq.heappop(heap)
    return True


def best_fit_runs(
    lengths: list[int], capacity: int, max_items: int
) -> tuple[list[int], list[int], int]:
    """Best fit of a non-increasing list for the interpreter: (bins, rows each takes in turn, number
    of bins).

    Bins of equal room are a stack (the last touched is taken first), and a run of equal lengths
    moves whole stacks.
    """
    bins: list[int] = []
    takes: list[int] = []
    rooms: list[int] = []  # the occupied rooms, ascending
    stacks: dict[int, list[int]] = {}
    slots: list[int] = []
    shortest = lengths[-1] if lengths else 0
    bounded = max_items < len(lengths)
    start = num_bins = 0
    while start < len(lengths):
        length, stop = lengths[start], start
        while stop < len(lengths) and lengths[stop] == length:
            stop += 1
        left, start = stop - start, stop
        while left > 0:
            j = bisect_left(rooms, length)
            if j == len(rooms):
                room, each = capacity, min(capacity // length, max_items)
                taken = list(range(num_bins, num_bins - (-left // each)))
                num_bins += len(taken)
                slots.extend([max_items] * len(taken))
            else:
                room = rooms[j]
                stack = stacks[room]
                each = min(room // length, slots[stack[-1]])
                count = 1 if bounded else min(len(stack), -(-left // each))
                taken = stack[: -count - 1 : -1]
                del stack[-count:]
                if not stack:
                    del rooms[j]
            full, rest = divmod(min(left, each * len(taken)), each)
            left -= each * full + rest
            for group, take in ((taken[:full], each), (taken[full:], rest)):
                if not group:
                    continue
                bins.extend(group)
                takes.extend([take] * len(group))
                if bounded:
                    for b in group:
                        slots[b] -= take
                    group = [b for b in group if slots[b] > 0]
                room_left = room - take * length
                if room_left >= shortest and group:
                    stack = stacks.setdefault(room_left, [])
                    if not stack:
                        insort(rooms, room_left)
                    stack.extend(group)
    return bins, takes, num_bins


def best_fit(
    lengths: Any,
    capacity: int,
    head: Any,
    words: Any,
    starts: Any,
    under: Any,
    slots: Any,
    bin_of: Any,
) -> int:
    """`best_fit_runs` for compiled code. Returns the number of bins.

    `head[r]` is the top of the stack of bins with room r (-1: none) and `under[b]` the bin below b.
    `words` is a bitset of the occupied rooms in levels of 32-bit words, level l from `starts[l]`; a
    bit of level l+1 says that a word of level l is not 0, so the next occupied room is found in a
    step per level.
    """
    num_levels = len(starts) - 1
    i, num_bins = 0, 0
    while i < len(lengths):
        length = lengths[i]
        level, position, room = 0, length, -1
        while level < num_levels and room < 0:
            word = starts[level] + (position >> 5)
            bits = words[word] >> (position & 31) if word < starts[level + 1] else 0
            if bits != 0:
                room = position + _BIT_POSITION[(((bits & -bits) * 0x077CB531) & 0xFFFFFFFF) >> 27]
            else:
                level, position = level + 1, (position >> 5) + 1
        if room < 0:
            b, room, num_bins = num_bins, capacity, num_bins + 1
        else:
            while level > 0:  # down to the room itself
                level -= 1
                bits = words[starts[level] + room]
                room = (room << 5) + _BIT_POSITION[
                    (((bits & -bits) * 0x077CB531) & 0xFFFFFFFF) >> 27
                ]
            b = head[room]
            head[room] = under[b]
            position = room
            while head[room] < 0 and level < num_levels:  # the last of its room: clear its bit
                words[starts[level] + (position >> 5)] &= ~(1 << (position & 31))
                if words[starts[level] + (position >> 5)] != 0:
                    break
                level, position = level + 1, position >> 5
        while i < len(lengths) and lengths[i] == length and room >= length and slots[b] > 0:
            bin_of[i] = b
            room -= length
            slots[b] -= 1
            i += 1
        if slots[b] > 0:
            under[b] = head[room]
            head[room] = b
            for level in range(num_levels):
                words[starts[level] + (room >> 5)] |= 1 << (room & 31)
                room >>= 5
    return num_bins


def modified_first_fit(
    values: Any,
    firsts: Any,
    counts: Any,
    below: Any,
    bounds: Any,
    max_items: int,
    rooms: Any,
    slots: Any,
    bin_of: Any,
) -> None:
    """Phases 2 to 4 of modified first fit decreasing: what joins the bins that phase 1 opened for
    rows above half a bin.

    `values` [V] are the distinct other lengths ascending, `bounds` the first k above 1/6 and above
    1/3 of the capacity; `counts` how many there are, `firsts` the position of the first of each.
    `below` is 0..V, a union-find whose root of k+1 is the longest length left that is at most
    `values[k]` (0: none). `rooms` and `slots` are of the bins, fullest first; `bin_of` is written
    for rows that join. D. S. Johnson and M. R. Garey, A 71/60 theorem for bin packing, J.
    Complexity 1 (1985).
    """

    def longest_within(room: int) -> int:
        low, high = 0, len(values)
        while low < high:
            middle = (low + high) // 2
            if values[middle] <= room:
                low = middle + 1
            else:
                high = middle
        while below[low] != low:
            below[low] = below[below[low]]
            low = below[low]
        return low - 1

    def place(k: int, b: int, count: int) -> None:
        for position in range(firsts[k], firsts[k] + count):
            bin_of[position] = b
        firsts[k] += count
        counts[k] -= count
        if counts[k] == 0:
            below[k + 1] = k
        rooms[b] -= count * values[k]
        slots[b] -= count

    small, medium = bounds
    for b in range(len(rooms)):  # 2: forward, the longest above a third that fits
        k = longest_within(rooms[b])
        if k >= medium and slots[b] > 0:
            place(k, b, 1)
    low = small
    for b in range(
        len(rooms) - 1, -1, -1
    ):  # 3: backward over bins without such a row, a pair of those above a sixth
        if slots[b] != max_items - 1:
            continue
        while low < medium and counts[low] == 0:
            low += 1
        second = low if low < medium and counts[low] > 1 else low + 1
        while second < medium and counts[second] == 0:
            second += 1
        if second >= medium or slots[b] < 2 or values[low] + values[second] > rooms[b]:
            break  # the bins to come have less room
        place(low, b, 1)
        place(longest_within(min(rooms[b], values[medium - 1])), b, 1)
    for b in range(len(rooms)):  # 4: forward, the longest that fits, as long as one does
        k = longest_within(rooms[b])
        while k >= 0 and slots[b] > 0:
            place(k, b, min(counts[k], rooms[b] // values[k], slots[b]))
            k = longest_within(rooms[b])
