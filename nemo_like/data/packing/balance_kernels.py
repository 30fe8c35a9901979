"""The inner loops of the scheduler: plain Python that numba can compile, so both ways keep the same promises.

Rows come sorted by work, dearest first, so a lower position is a dearer row. Results depend on the arguments alone: effort
is counted in steps, never in seconds. Interpreted the loops want lists, compiled they want arrays.
"""

from __future__ import annotations

import heapq
from functools import cache
from importlib.util import find_spec
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

_NEGLIGIBLE = 1e-6
"""Share of a unit's work below which a difference is not worth an exchange."""


_CLOSE = 0.05
"""Share of the wished change by which an exchange may miss it without others being looked at."""


class State(NamedTuple):
    """An assignment under refinement, updated in place.

    A unit is what is compared: a bin where ranks meet at every microbatch, all bins of a rank where they meet once a step.
    Units stand in rows of equally many (one microbatch of every rank, or one row of all ranks), and of each row the
    dearest unit is what counts.
    """

    tokens: Any  # [n] of each row, dearest row first
    work: Any  # [n]
    bin_of: Any  # [n]
    bin_tokens: Any  # [K]
    bin_sizes: Any  # [K] number of rows
    unit_of: Any  # [K] the unit of a bin
    unit_work: Any  # [U]
    first: Any  # [U] the dearest row of a unit, -1 if it has none
    following: Any  # [n] the next row of the same unit, -1 at the end
    row_of: Any  # [U] where a unit stands
    tops: Any  # [U / row_size] work of the dearest unit of each row


@cache
def compiled() -> Any | None:
    """`fill` and `level` as machine code kept on disk between processes, or None where numba is not installed."""
    if find_spec("numba") is None:
        return None
    import numba

    # Numba resolves names in a function's globals, so copies of the functions get globals that hold compiled copies.
    scope = dict(globals())
    for function in (fill, accepts, nearest, gift, best_exchange, move, level):
        copy = FunctionType(function.__code__, scope, function.__name__)
        copy.__qualname__ = function.__qualname__
        inline = "always" if function in (accepts, nearest) else "never"
        scope[function.__name__] = numba.njit(cache=True, nogil=True, inline=inline)(copy)
    return SimpleNamespace(fill=scope["fill"], level=scope["level"])


def fill(tokens: Any, work: Any, targets: Any, capacity: int, bin_of: Any) -> bool:
    """Each row to the bin that lacks most work to its target among those with room; False if a row fits in none.

    With equal targets this is longest-processing-time-first under the cap. `tokens` and `work` [n] in order of placement,
    `targets` [K] the work wished for in each bin (overwritten); writes the bin of each row to `bin_of` [n].
    """
    wanting = [(-targets[b], b) for b in range(len(targets))]  # (work above target, bin)
    full = [(0, 0) for _ in range(0)]  # (tokens, bin): without room when last looked at
    loads = [0 for _ in range(len(targets))]
    heapq.heapify(wanting)
    for i in range(len(tokens)):
        while len(full) > 0 and full[0][0] + tokens[i] <= capacity:
            b = full[0][1]
            heapq.heappop(full)
            heapq.heappush(wanting, (targets[b], b))
        while len(wanting) > 0 and loads[wanting[0][1]] + tokens[i] > capacity:
            excess, b = wanting[0]
            heapq.heappop(wanting)
            targets[b] = excess
            heapq.heappush(full, (loads[b], b))
        if len(wanting) == 0:
            return False
        excess, b = wanting[0]
        bin_of[i] = b
        loads[b] += tokens[i]
        heapq.heapreplace(wanting, (excess + work[i], b))
    return True


def accepts(s: State, unit: int, b: int, more_work: float, more_tokens: int, capacity: int) -> bool:
    """Whether bin `b` can take that much more from `unit` without its own row's maximum rising."""
    u = s.unit_of[b]
    if u == unit or s.bin_tokens[b] + more_tokens > capacity:
        return False
    m = s.row_of[u]
    margin = _NEGLIGIBLE * s.tops[m] if m == s.row_of[unit] else 0.0
    return s.unit_work[u] + more_work <= s.tops[m] - margin


def nearest(s: State, i: int, unit: int, target: float, error: float, capacity: int) -> tuple[float, int, int]:
    """The row to swap row i for that changes the work nearest to `target`: (how far off it is, the row or -1, steps).

    Rows are sorted by work, so this walks both ways from where the ideal one would be, until as far off as `error`.
    """
    least, take, steps = _NEGLIGIBLE * s.unit_work[unit], -1, 0
    low, high = i + 1, len(s.work)
    while low < high:
        middle = (low + high) // 2
        if s.work[middle] > s.work[i] - target:
            low = middle + 1
        else:
            high = middle
    for direction in (1, -1):
        j = low if direction == 1 else low - 1
        while i < j < len(s.work):
            steps += 1
            change = s.work[i] - s.work[j]
            if (change - target) * direction >= error or change <= least:
                break
            more_tokens = s.tokens[i] - s.tokens[j]
            if s.bin_tokens[s.bin_of[i]] - more_tokens <= capacity and accepts(s, unit, s.bin_of[j], change, more_tokens, capacity):
                error, take = (change - target) * direction, j
                break
            j += direction
    return error, take, steps


def gift(s: State, i: int, unit: int, capacity: int) -> int:
    """A bin that can take row i for nothing, or -1."""
    for b in range(len(s.unit_of)):
        if accepts(s, unit, b, s.work[i], s.tokens[i], capacity):
            return b
    return -1


def best_exchange(s: State, unit: int, target: float, capacity: int) -> tuple[int, int, int, int]:
    """The exchange that lowers `unit` nearest to `target`: (row given or -1, row taken or -1, bin that takes it, steps)."""
    error, give, take, receiver, steps = s.unit_work[unit], -1, -1, -1, 0
    i = s.first[unit]
    while i >= 0:
        closer, j, walked = nearest(s, i, unit, target, error, capacity)
        steps += walked + 1
        if j >= 0:
            error, give, take, receiver = closer, i, j, s.bin_of[j]
        if error <= _CLOSE * target:
            break
        if s.following[i] < 0 and s.bin_sizes[s.bin_of[i]] > 1 and abs(s.work[i] - target) < error:  # the cheapest row
            b = gift(s, i, unit, capacity)
            steps += len(s.unit_of) // 4
            if b >= 0:
                error, give, take, receiver = abs(s.work[i] - target), i, -1, b
        i = s.following[i]
    return give, take, receiver, steps


def move(s: State, i: int, b: int) -> None:
    """Row i from its bin to bin `b`."""
    source, target = s.unit_of[s.bin_of[i]], s.unit_of[b]
    if s.first[source] == i:
        s.first[source] = s.following[i]
    else:
        before = s.first[source]
        while s.following[before] != i:
            before = s.following[before]
        s.following[before] = s.following[i]
    if s.first[target] < 0 or s.first[target] > i:
        s.following[i] = s.first[target]
        s.first[target] = i
    else:
        before = s.first[target]
        while s.following[before] >= 0 and s.following[before] < i:
            before = s.following[before]
        s.following[i] = s.following[before]
        s.following[before] = i
    s.unit_work[source] -= s.work[i]
    s.unit_work[target] += s.work[i]
    s.bin_tokens[s.bin_of[i]] -= s.tokens[i]
    s.bin_tokens[b] += s.tokens[i]
    s.bin_sizes[s.bin_of[i]] -= 1
    s.bin_sizes[b] += 1
    s.bin_of[i] = b


def level(s: State, order: Any, row_size: int, capacity: int, max_steps: int) -> int:
    """Lower the dearest unit of each row in turn by exchanges that raise no row's maximum; returns the steps taken.

    `order` [U] lists the units row by row. Each exchange aims at the mean of the row, and a row is left when its dearest
    unit is there or has no exchange.
    """
    steps = 0
    for m in range(len(s.tops)):
        while steps < max_steps:
            unit, total = order[m * row_size], 0.0
            for p in range(m * row_size, (m + 1) * row_size):
                total += s.unit_work[order[p]]
                if s.unit_work[order[p]] > s.unit_work[unit]:
                    unit = order[p]
            steps += row_size
            s.tops[m] = s.unit_work[unit]
            target = s.tops[m] - total / row_size
            if target <= _NEGLIGIBLE * s.tops[m]:
                break
            give, take, receiver, walked = best_exchange(s, unit, target, capacity)
            steps += walked
            if give < 0:
                break
            bin_of_give = s.bin_of[give]
            move(s, give, receiver)
            if take >= 0:
                move(s, take, bin_of_give)
    return steps
