"""The inner loops of the scheduler: plain Python that numba can compile, so both ways keep the same
promises.

Rows come sorted by work, dearest first, so a lower position is a dearer row. Results depend on the
arguments alone: effort is counted in steps, never in seconds. Interpreted the loops want lists,
compiled they want arrays.
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
_MAX_WALK = 1000
"""Rows looked at in one direction for one exchange."""


class State(NamedTuple):
    """An assignment under refinement, updated in place.

    A unit is what is compared: a bin where ranks meet at every microbatch, all bins of a rank where
    they meet once a step. Units stand in lines of one per rank (a line for each microbatch, or one
    line), and of each line the dearest unit is what counts.
    """

    tokens: Any  # [n] of each row, dearest row first
    work: Any  # [n]
    bin_of: Any  # [n]
    bin_tokens: Any  # [K]
    bin_sizes: Any  # [K] number of rows
    unit_of: Any  # [K] the unit of a bin
    unit_work: Any  # [U]
    roomiest: Any  # [U] its bin with fewest tokens
    bins_of: Any  # [K] bins sorted by unit
    bins_start: Any  # [U + 1] where those of a unit begin
    first: Any  # [U] a row of the unit, -1 if it has none
    following: Any  # [n] the next row of the same unit, -1 at the end
    preceding: Any  # [n] the one before, -1 at the beginning
    line_of: Any  # [U] the line a unit stands in
    tops: Any  # [U / line_size] work of the dearest unit of each line


@cache
def compiled() -> Any | None:
    """`fill`, `complete` and `level` as machine code kept on disk between processes; None where
    numba, or a place to keep it, is missing."""
    if find_spec("numba") is None:
        return None
    import numba

    # Numba resolves names in a function's globals, so copies of the functions get globals that hold
    # compiled copies.
    scope = dict(globals())
    try:
        for function in (
            fill,
            first_free,
            complete,
            nearest,
            gift,
            best_exchange,
            move,
            find_roomiest,
            level,
        ):
            copy = FunctionType(function.__code__, scope, function.__name__)
            copy.__qualname__ = function.__qualname__
            scope[function.__name__] = numba.njit(cache=True, nogil=True)(copy)
    except (
        RuntimeError
    ):  # no directory may be written to; compiling anew in each process costs more than it saves
        return None
    return SimpleNamespace(fill=scope["fill"], complete=scope["complete"], level=scope["level"])


def fill(tokens: Any, work: Any, capacity: int, bin_of: Any, bin_tokens: Any, excess: Any) -> bool:
    """Each row that has no bin to the one furthest below its target among those with room; False if
    a row fits in none.

    With equal targets this is longest-processing-time-first under the cap. `bin_of` [n] is -1 where
    there is no bin yet, `bin_tokens` [K] what bins hold and `excess` [K] their work above target
    (below 0: wanted); all are updated.
    """
    wanting = [(excess[b], b) for b in range(len(excess))]
    full = [(0, 0) for _ in range(0)]  # (tokens, bin): without room when last looked at
    heapq.heapify(wanting)
    for i in range(len(tokens)):
        if bin_of[i] >= 0:
            continue
        while len(full) > 0 and full[0][0] + tokens[i] <= capacity:
            b = full[0][1]
            heapq.heappop(full)
            heapq.heappush(wanting, (excess[b], b))
        while len(wanting) > 0 and bin_tokens[wanting[0][1]] + tokens[i] > capacity:
            b = wanting[0][1]
            heapq.heappop(wanting)
            heapq.heappush(full, (bin_tokens[b], b))
        if len(wanting) == 0:
            return False
        b = wanting[0][1]
        bin_of[i] = b
        bin_tokens[b] += tokens[i]
        excess[b] += work[i]
        heapq.heapreplace(wanting, (excess[b], b))
    return True


def complete(
    tokens: Any,
    work: Any,
    capacity: int,
    bin_of: Any,
    bin_tokens: Any,
    bin_work: Any,
    line_size: int,
    free: Any,
) -> bool:
    """One microbatch after the other, each bin completed as exactly as rows allow; False if a row
    is left that fits in none.

    The height of a microbatch is an equal share of the work left, or the dearest row left if that
    is more. Its lowest bin takes, again and again, the dearest row left that exceeds neither height
    nor cap. Rows left at the end go to the bin with least work that has room. `bin_of` [n] is -1,
    `bin_tokens` and `bin_work` [K] are 0; `free` is 0..n, a union-find whose root of i is the first
    row left from i on.
    """
    num_rows, num_bins = len(tokens), len(bin_tokens)
    left = 0.0
    for i in range(num_rows):
        left += work[i]
    for start in range(0, num_bins, line_size):
        i = first_free(free, 0)
        if i == num_rows:
            break
        height = max(left / (num_bins - start), work[i])
        heap = [(0.0, b) for b in range(start, start + line_size)]
        while len(heap) > 0:
            b = heap[0][1]
            low, high = 0, num_rows
            while low < high:
                middle = (low + high) // 2
                if bin_work[b] + work[middle] > height or bin_tokens[b] + tokens[middle] > capacity:
                    low = middle + 1
                else:
                    high = middle
            i = first_free(free, low)
            if i == num_rows or bin_tokens[b] + tokens[i] > capacity:
                heapq.heappop(heap)
                continue
            free[i] = i + 1
            bin_of[i] = b
            bin_tokens[b] += tokens[i]
            bin_work[b] += work[i]
            left -= work[i]
            heapq.heapreplace(heap, (bin_work[b], b))
    return fill(tokens, work, capacity, bin_of, bin_tokens, bin_work)


def first_free(free: Any, i: int) -> int:
    """The first row left from row i on, n if there is none."""
    while free[i] != i:
        free[i] = free[free[i]]
        i = free[i]
    return i


def nearest(
    work: Any,
    tokens: Any,
    bin_of: Any,
    bin_tokens: Any,
    bin_sizes: Any,
    unit_of: Any,
    unit_work: Any,
    roomiest: Any,
    line_of: Any,
    tops: Any,
    i: int,
    target: float,
    error: float,
    most_room: int,
    capacity: int,
) -> tuple[float, int, int, int]:
    """The row to swap row i for that changes the work nearest to `target`: (how far off, the row or
    -1, where i goes, steps).

    Rows are sorted by work, so this walks both ways from where the ideal one would be, until as far
    off as `error`; where no bin has the room for that, from the first one that `most_room` allows.
    Row i takes the place of the other or, where that has no room and is not left empty, goes to the
    roomiest bin of the same unit. No line's top rises.
    """
    unit = unit_of[bin_of[i]]
    least, room, take, receiver, steps = (
        _NEGLIGIBLE * unit_work[unit],
        capacity - bin_tokens[bin_of[i]],
        -1,
        -1,
        0,
    )
    low, high = i + 1, len(work)
    while low < high:
        middle = (low + high) // 2
        if work[middle] > work[i] - target and tokens[middle] >= tokens[i] - most_room:
            low = middle + 1
        else:
            high = middle
    for direction in (-1, 1):
        j = low if direction == 1 else low - 1
        end = steps + _MAX_WALK
        while i < j < len(work) and steps < end:
            steps += 1
            change, more_tokens = work[i] - work[j], tokens[i] - tokens[j]
            missed = (change - target) * direction
            if (
                missed < 0
                or missed >= error
                or change <= least
                or (direction == 1 and more_tokens > most_room)
            ):
                break
            b = bin_of[j]
            u = unit_of[b]
            top = tops[line_of[u]] - (least if line_of[u] == line_of[unit] else 0.0)
            if u != unit and unit_work[u] + change <= top and -more_tokens <= room:
                if bin_tokens[b] + more_tokens > capacity:
                    b = roomiest[u] if bin_sizes[b] > 1 else b
                    more_tokens = tokens[i]
                if bin_tokens[b] + more_tokens <= capacity:
                    error, take, receiver = missed, j, b
                    break
            j += direction
    return error, take, receiver, steps


def gift(s: State, i: int, unit: int, capacity: int) -> int:
    """A bin that can take row i for nothing without the top of its line rising, or -1."""
    for b in range(len(s.unit_of)):
        u = s.unit_of[b]
        margin = _NEGLIGIBLE * s.unit_work[unit] if s.line_of[u] == s.line_of[unit] else 0.0
        fits = u != unit and s.bin_tokens[b] + s.tokens[i] <= capacity
        if fits and s.unit_work[u] + s.work[i] <= s.tops[s.line_of[u]] - margin:
            return b
    return -1


def best_exchange(
    s: State, unit: int, target: float, most_room: int, capacity: int, max_steps: int
) -> tuple[int, int, int, int]:
    """The exchange that lowers `unit` nearest to `target`: (row given or -1, row taken or -1, bin
    that takes it, steps).
    """
    work, tokens, bin_of, bin_tokens, bin_sizes = (
        s.work,
        s.tokens,
        s.bin_of,
        s.bin_tokens,
        s.bin_sizes,
    )
    unit_of, unit_work, roomiest, line_of, tops = (
        s.unit_of,
        s.unit_work,
        s.roomiest,
        s.line_of,
        s.tops,
    )
    error, give, take, receiver, steps = unit_work[unit], -1, -1, -1, 0
    i, cheapest = s.first[unit], -1
    while i >= 0 and error > _CLOSE * target and steps < max_steps:
        closer, j, b, walked = nearest(
            work, tokens, bin_of, bin_tokens, bin_sizes, unit_of, unit_work, roomiest, line_of, tops,
            i, target, error, most_room, capacity,
        )  # fmt: skip
        steps += walked + 1
        if j >= 0:
            error, give, take, receiver = closer, i, j, b
        if i > cheapest and bin_sizes[bin_of[i]] > 1:
            cheapest = i
        i = s.following[i]
    if cheapest >= 0 and abs(work[cheapest] - target) < error:
        b = gift(s, cheapest, unit, capacity)
        steps += len(unit_of) // 4
        if b >= 0:
            give, take, receiver = cheapest, -1, b
    return give, take, receiver, steps


def move(s: State, i: int, b: int) -> None:
    """Row i from its bin to bin `b`."""
    source, target = s.unit_of[s.bin_of[i]], s.unit_of[b]
    if s.preceding[i] < 0:
        s.first[source] = s.following[i]
    else:
        s.following[s.preceding[i]] = s.following[i]
    if s.following[i] >= 0:
        s.preceding[s.following[i]] = s.preceding[i]
    s.following[i], s.preceding[i] = s.first[target], -1
    if s.first[target] >= 0:
        s.preceding[s.first[target]] = i
    s.first[target] = i
    s.unit_work[source] -= s.work[i]
    s.unit_work[target] += s.work[i]
    s.bin_tokens[s.bin_of[i]] -= s.tokens[i]
    s.bin_tokens[b] += s.tokens[i]
    s.bin_sizes[s.bin_of[i]] -= 1
    s.bin_sizes[b] += 1
    s.bin_of[i] = b


def find_roomiest(s: State, unit: int) -> int:
    """The bin of `unit` with fewest tokens, kept in the state; returns how many were looked at."""
    start, stop = s.bins_start[unit], s.bins_start[unit + 1]
    s.roomiest[unit] = s.bins_of[start]
    for p in range(start, stop):
        if s.bin_tokens[s.bins_of[p]] < s.bin_tokens[s.roomiest[unit]]:
            s.roomiest[unit] = s.bins_of[p]
    return stop - start


def level(s: State, order: Any, line_size: int, capacity: int, max_steps: int) -> int:
    """Lower the dearest unit of each line in turn by exchanges that raise the top of no line;
    returns the steps taken.

    `order` [U] lists the units line by line. Each exchange aims at the mean of the line, and a line
    is left when its dearest unit is there or has no exchange.
    """
    steps, most_room, most_slack = (
        len(s.unit_of),
        0,
        0.0,
    )  # bounds on what any bin and any unit can take
    for b in range(len(s.unit_of)):
        u = s.unit_of[b]
        most_room = max(most_room, capacity - s.bin_tokens[b])
        most_slack = max(most_slack, s.tops[s.line_of[u]] - s.unit_work[u])
    for m in range(len(s.tops)):
        units = [
            (-s.unit_work[order[p]], order[p]) for p in range(m * line_size, (m + 1) * line_size)
        ]
        heapq.heapify(
            units
        )  # units that have changed since stand in it twice; what they were is skipped
        steps += line_size
        total = 0.0
        for entry in units:
            total -= entry[0]
        while steps < max_steps:
            unit = units[0][1]
            if s.unit_work[unit] != -units[0][0]:
                heapq.heappop(units)
                continue
            s.tops[m] = s.unit_work[unit]
            excess = s.tops[m] - total / line_size
            if excess <= _NEGLIGIBLE * s.tops[m]:
                break
            give, take, receiver, walked = best_exchange(
                s, unit, min(excess, most_slack), most_room, capacity, max_steps - steps
            )
            steps += walked
            if give < 0:
                break
            giver = s.bin_of[give]
            move(s, give, receiver)
            if take >= 0:
                move(s, take, giver)
            steps += find_roomiest(s, unit) + find_roomiest(s, s.unit_of[receiver])
            heapq.heapreplace(units, (-s.unit_work[unit], unit))
            if s.line_of[s.unit_of[receiver]] == m:
                heapq.heappush(units, (-s.unit_work[s.unit_of[receiver]], s.unit_of[receiver]))
            else:
                total -= s.tops[m] - s.unit_work[unit]
            most_room = max(most_room, capacity - s.bin_tokens[giver])
            most_slack = max(most_slack, s.tops[m] - s.unit_work[unit])
    return steps
