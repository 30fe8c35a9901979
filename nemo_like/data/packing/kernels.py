"""Inner loops of the bin packers: plain Python that numba can compile, with the same result.

Every kernel takes lengths in the order of packing (each 1 to `capacity`), writes the bin of each
position to `bin_of` [n] and numbers bins 0, 1, 2, ... in the order in which they are opened. A bin
has at most `max_items` rows. The caller allocates the work space: lists for the interpreter and
arrays for compiled code, because each is the faster one there. "Free tokens" of a bin are its
capacity minus its load.
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
"""Number of rows from which compiled code is worth the import of numba; below it the interpreter
needs a few milliseconds.
"""
MAX_TABLE = 1 << 24
"""Largest capacity for which `best_fit` allocates a table with an entry per number of tokens."""
# Position of the only set bit of a 32-bit word, indexed by a de Bruijn multiplication: numba has no
# instruction for it. Source: Leiserson, Prokop and Randall, Using de Bruijn sequences to index a 1
# in a computer word, 1998.
# fmt: off
_BIT_POSITION = np.array([0, 1, 28, 2, 29, 14, 24, 3, 30, 22, 20, 15, 25, 17, 4, 8,
                          31, 27, 13, 23, 21, 19, 16, 7, 26, 12, 18, 6, 11, 5, 10, 9])
# fmt: on


@cache
def compiled(kernel: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return `kernel` compiled by numba with an on-disk cache, or None.

    None means that numba is not installed or that its cache cannot be written.
    """
    if find_spec("numba") is None:
        return None
    import numba

    try:
        return numba.njit(cache=True, nogil=True)(kernel)
    except RuntimeError:
        # No cache directory is writable. Compiling in each process costs more than it saves.
        return None


def stable_argsort(keys: np.ndarray, bound: int) -> np.ndarray:
    """Sort non-negative integers below `bound` stably in linear time; int64 [n]."""
    counting = None
    # Counting sort has a table of `bound` entries, which must not dominate.
    if len(keys) >= MIN_COMPILED and bound <= 4 * len(keys):
        counting = compiled(counting_sort)
    if counting is not None:
        ends = np.cumsum(np.bincount(keys, minlength=bound))
        order = np.empty(len(keys), dtype=np.int64)
        counting(keys, np.concatenate([[0], ends]), order)
        return order
    # NumPy uses radix sort for 16-bit keys, so sort by one 16-bit digit after the other.
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable")
    for shift in range(16, (bound - 1).bit_length(), 16):
        digits = (keys[order] >> shift) & 0xFFFF
        order = order[np.argsort(digits.astype(np.uint16), kind="stable")]
    return order


def counting_sort(keys: Any, starts: Any, order: Any) -> None:
    """Write the stable order of `keys` [n] to `order` [n].

    `starts[k]` is the first position of key k in the result; it is incremented with each key.
    """
    for i in range(len(keys)):
        order[starts[keys[i]]] = i
        starts[keys[i]] += 1


def next_fit(lengths: Any, capacity: int, max_items: int, bin_of: Any) -> int:
    """Keep one bin open and close it when a row does not fit. Returns the number of bins."""
    last = -1
    free_tokens = 0
    free_items = 0
    for i in range(len(lengths)):
        if lengths[i] > free_tokens or free_items == 0:
            last += 1
            free_tokens = capacity
            free_items = max_items
        bin_of[i] = last
        free_tokens -= lengths[i]
        free_items -= 1
    return last + 1


def first_fit(
    lengths: Any, max_items: int, tree: Any, num_leaves: int, free_items: Any, bin_of: Any
) -> int:
    """Put each row into the leftmost bin with room. Returns the number of bins.

    `tree` is a binary tree of maxima with 2 * num_leaves entries, all equal to the capacity on
    entry: leaf num_leaves + b has the free tokens of bin b. `num_leaves` is a power of two and at
    least the number of bins. `free_items` has num_leaves entries equal to `max_items`.
    """
    i = 0
    num_bins = 0
    while i < len(lengths):
        length = lengths[i]
        node = 1
        while node < num_leaves:
            node *= 2
            if tree[node] < length:
                node += 1
        b = node - num_leaves
        free_tokens = tree[node]
        num_free = free_items[b]
        # Rows of equal length that also fit go into this bin without another search.
        while i < len(lengths) and lengths[i] == length and free_tokens >= length and num_free > 0:
            bin_of[i] = b
            free_tokens -= length
            num_free -= 1
            i += 1
        num_bins = max(num_bins, b + 1)
        free_items[b] = num_free
        tree[node] = free_tokens if num_free > 0 else 0
        node //= 2
        while node >= 1:
            maximum = max(tree[2 * node], tree[2 * node + 1])
            if tree[node] == maximum:
                break
            tree[node] = maximum
            node //= 2
    return num_bins


def least_loaded(lengths: Any, capacity: int, max_items: int, num_bins: int, bin_of: Any) -> bool:
    """Put each row into the bin with the fewest tokens, of equal ones the first.

    Returns False if a row does not fit there.
    """
    # An entry is load * num_bins + bin: one integer sorts by load, then by bin.
    heap = list(range(num_bins))
    free_items = [max_items for _ in range(num_bins)]
    for i in range(len(lengths)):
        if len(heap) == 0:
            return False
        entry = heap[0]
        b = entry % num_bins
        if entry // num_bins + lengths[i] > capacity:
            return False
        bin_of[i] = b
        free_items[b] -= 1
        if free_items[b] > 0:
            heapq.heapreplace(heap, entry + lengths[i] * num_bins)
        else:
            heapq.heappop(heap)
    return True


def best_fit_runs(
    lengths: list[int], capacity: int, max_items: int
) -> tuple[list[int], list[int], int]:
    """Best fit of a non-increasing list, for the interpreter.

    Returns (bins, number of rows each of them takes in turn, number of bins). Bins with equal free
    tokens form a stack (the last one changed is used first). A run of equal lengths is assigned to
    many bins at once, which saves most of the interpreted steps.
    """
    bins: list[int] = []
    counts: list[int] = []
    # The numbers of free tokens that occur, ascending.
    free_values: list[int] = []
    # Number of free tokens -> bins.
    stacks: dict[int, list[int]] = {}
    free_items: list[int] = []
    shortest = lengths[-1] if lengths else 0
    has_item_limit = max_items < len(lengths)
    start = 0
    num_bins = 0
    while start < len(lengths):
        length = lengths[start]
        stop = start
        while stop < len(lengths) and lengths[stop] == length:
            stop += 1
        remaining = stop - start
        start = stop
        while remaining > 0:
            j = bisect_left(free_values, length)
            if j == len(free_values):
                free_tokens = capacity
                rows_per_bin = min(capacity // length, max_items)
                taken = list(range(num_bins, num_bins - (-remaining // rows_per_bin)))
                num_bins += len(taken)
                free_items.extend([max_items] * len(taken))
            else:
                free_tokens = free_values[j]
                stack = stacks[free_tokens]
                rows_per_bin = min(free_tokens // length, free_items[stack[-1]])
                # With an item limit the bins of a stack may differ, so they are taken one by one.
                num_taken = 1
                if not has_item_limit:
                    num_taken = min(len(stack), -(-remaining // rows_per_bin))
                taken = stack[: -num_taken - 1 : -1]
                del stack[-num_taken:]
                if not stack:
                    del free_values[j]
            num_full, rest = divmod(min(remaining, rows_per_bin * len(taken)), rows_per_bin)
            remaining -= rows_per_bin * num_full + rest
            # The first `num_full` bins take `rows_per_bin` rows each, the next one takes the rest.
            for group, count in ((taken[:num_full], rows_per_bin), (taken[num_full:], rest)):
                if not group:
                    continue
                bins.extend(group)
                counts.extend([count] * len(group))
                open_bins = group
                if has_item_limit:
                    for b in group:
                        free_items[b] -= count
                    open_bins = [b for b in group if free_items[b] > 0]
                new_free_tokens = free_tokens - count * length
                # Bins that no remaining row fits into are dropped.
                if new_free_tokens >= shortest and open_bins:
                    stack = stacks.setdefault(new_free_tokens, [])
                    if not stack:
                        insort(free_values, new_free_tokens)
                    stack.extend(open_bins)
    return bins, counts, num_bins


def best_fit(
    lengths: Any,
    capacity: int,
    head: Any,
    words: Any,
    level_starts: Any,
    below: Any,
    free_items: Any,
    bin_of: Any,
) -> int:
    """Run best fit as `best_fit_runs` does, for compiled code. Returns the number of bins.

    `head[f]` is the top of the stack of bins with f free tokens (-1: none) and `below[b]` the bin
    below b in its stack. `words` is a bitset of the numbers of free tokens that occur, in levels of
    32-bit words: level l starts at `level_starts[l]`, and a bit of level l + 1 is set if a word of
    level l is not 0. So the next larger number is found in one step per level.
    """
    num_levels = len(level_starts) - 1
    i = 0
    num_bins = 0
    while i < len(lengths):
        length = lengths[i]
        # Go up until a word has a bit at or after the position.
        level = 0
        position = length
        free_tokens = -1
        while level < num_levels and free_tokens < 0:
            word = level_starts[level] + (position >> 5)
            bits = 0
            if word < level_starts[level + 1]:
                bits = words[word] >> (position & 31)
            if bits != 0:
                lowest = _BIT_POSITION[(((bits & -bits) * 0x077CB531) & 0xFFFFFFFF) >> 27]
                free_tokens = position + lowest
            else:
                level += 1
                position = (position >> 5) + 1
        if free_tokens < 0:
            b = num_bins
            free_tokens = capacity
            num_bins += 1
        else:
            # Go down to level 0, where a bit is a number of free tokens.
            while level > 0:
                level -= 1
                bits = words[level_starts[level] + free_tokens]
                lowest = _BIT_POSITION[(((bits & -bits) * 0x077CB531) & 0xFFFFFFFF) >> 27]
                free_tokens = (free_tokens << 5) + lowest
            b = head[free_tokens]
            head[free_tokens] = below[b]
            position = free_tokens
            # The stack is empty now: clear its bit, and the bits of words that become 0.
            while head[free_tokens] < 0 and level < num_levels:
                words[level_starts[level] + (position >> 5)] &= ~(1 << (position & 31))
                if words[level_starts[level] + (position >> 5)] != 0:
                    break
                level += 1
                position = position >> 5
        while (
            i < len(lengths)
            and lengths[i] == length
            and free_tokens >= length
            and free_items[b] > 0
        ):
            bin_of[i] = b
            free_tokens -= length
            free_items[b] -= 1
            i += 1
        if free_items[b] > 0:
            below[b] = head[free_tokens]
            head[free_tokens] = b
            for level in range(num_levels):
                words[level_starts[level] + (free_tokens >> 5)] |= 1 << (free_tokens & 31)
                free_tokens >>= 5
    return num_bins


def modified_first_fit(
    values: Any,
    first_positions: Any,
    counts: Any,
    parent: Any,
    bounds: Any,
    max_items: int,
    free_tokens: Any,
    free_items: Any,
    bin_of: Any,
) -> None:
    """Run phases 2 to 4 of modified first fit decreasing.

    They add rows to the bins that phase 1 opened for rows above half the capacity. `values` [V] are
    the distinct other lengths, ascending; `bounds` are the first index above 1/6 and above 1/3 of
    the capacity. `counts` [V] is the number of remaining rows of each length and `first_positions`
    [V] the position of the first of them. `parent` is 0..V, a union-find structure: the root of
    k + 1 is the longest remaining length that is at most `values[k]`, plus one (0: none).
    `free_tokens` and `free_items` are per bin, fullest bin first. `bin_of` is written for the rows
    that are added.

    Source: D. S. Johnson and M. R. Garey, A 71/60 theorem for bin packing, J. Complexity 1 (1985).
    """

    def longest_within(limit: int) -> int:
        low = 0
        high = len(values)
        while low < high:
            middle = (low + high) // 2
            if values[middle] <= limit:
                low = middle + 1
            else:
                high = middle
        while parent[low] != low:
            parent[low] = parent[parent[low]]
            low = parent[low]
        return low - 1

    def add_rows(k: int, b: int, count: int) -> None:
        for position in range(first_positions[k], first_positions[k] + count):
            bin_of[position] = b
        first_positions[k] += count
        counts[k] -= count
        if counts[k] == 0:
            parent[k + 1] = k
        free_tokens[b] -= count * values[k]
        free_items[b] -= count

    first_above_sixth, first_above_third = bounds
    # Phase 2, forward: the longest row above a third of the capacity that fits.
    for b in range(len(free_tokens)):
        k = longest_within(free_tokens[b])
        if k >= first_above_third and free_items[b] > 0:
            add_rows(k, b, 1)
    # Phase 3, backward over bins that phase 2 left alone: a pair of rows above a sixth.
    low = first_above_sixth
    for b in range(len(free_tokens) - 1, -1, -1):
        if free_items[b] != max_items - 1:
            continue
        while low < first_above_third and counts[low] == 0:
            low += 1
        has_two = low < first_above_third and counts[low] > 1
        second = low if has_two else low + 1
        while second < first_above_third and counts[second] == 0:
            second += 1
        if (
            second >= first_above_third
            or free_items[b] < 2
            or values[low] + values[second] > free_tokens[b]
        ):
            # The shortest pair does not fit, and the following bins have less room.
            break
        add_rows(low, b, 1)
        add_rows(longest_within(min(free_tokens[b], values[first_above_third - 1])), b, 1)
    # Phase 4, forward: the longest row that fits, as long as one does.
    for b in range(len(free_tokens)):
        k = longest_within(free_tokens[b])
        while k >= 0 and free_items[b] > 0:
            add_rows(k, b, min(counts[k], free_tokens[b] // values[k], free_items[b]))
            k = longest_within(free_tokens[b])
