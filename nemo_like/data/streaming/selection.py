"""The window of waiting rows, and the selection of the rows of one microbatch from it.

Every rule starts with the oldest row, so a row waits for at most as many microbatches as rows were
in the window before it. The rules differ in the rows they add:

| rule | rows added to the oldest row | system |
|---|---|---|
| `prefer_closest` | the row that adds the fewest positions, then the closest length | Cosmos-RL |
| `prefer_first` | the row that adds the fewest positions, then the oldest | Cosmos-RL |
| `first_fit` | in order of arrival, each row that still fits | Cosmos-RL packed, VeOmni |
| `in_order` | in order of arrival, up to the first row that does not fit | DeepSpeed |
| `best_fit` | the combination that leaves the fewest positions unused | ODB |

With the packed layout `prefer_closest` and `prefer_first` are `first_fit`: without padding every
row adds its own length.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Literal, NamedTuple

from nemo_like.parallel_layout import RowLayout

Selection = Literal["prefer_closest", "prefer_first", "first_fit", "in_order", "best_fit"]

_MAX_COMBINED_ROWS = 96
"""Rows of the window among which `best_fit` looks for the best combination of packed rows: the
oldest ones, after those that fit in any case. The time of a search is proportional to it, and more
rows leave no less space unused.
"""


class WaitingRow(NamedTuple):
    """One row of the stream. Numbers only: the row's data stays where it was read."""

    row: int
    """Id that the caller gave to `StreamingPlanner.push`."""
    length: int
    """Real tokens, after truncation."""
    size: int
    """What counts for the token limit: positions, which are `length` rounded up to the row multiple
    of the layout, and with a trained vision tower its activations.
    """
    num_trained: int
    """Tokens with loss."""
    extra: int
    """Use of the second resource, for example image patches; 0 without one."""
    step: int
    """Number of steps that were complete when the row arrived."""
    image_tokens: int = 0
    """Those of `length` that are of images; `size` counts them with the weight of the plan."""
    image_flops: int = 0
    """Work of the vision tower."""


class Window:
    """Rows by arrival number; the caller removes those that it selects.

    Every operation is O(log n), plus the move of at most n pointers in the sorted list.
    """

    def __init__(self, rows: Iterable[WaitingRow] = ()) -> None:
        self.rows: dict[int, WaitingRow] = {}
        """Rows by arrival number, the oldest first."""
        self.by_size: list[tuple[int, int]] = []
        """(size, arrival number) of every row, ascending, so that rows of equal size stay in order
        of arrival.
        """
        self.num_tokens = 0
        """Sum of `size` over the rows."""
        self.ids: Counter[int] = Counter()
        """How often the window has each id of a row."""
        self._next_number = 0
        for row in rows:
            self.add(row)

    def copy(self) -> Window:
        """Return a window with the same rows, which changes independently."""
        # Rows are immutable, so the containers are copied only.
        window = copy.copy(self)
        window.rows = dict(self.rows)
        window.by_size = list(self.by_size)
        window.ids = self.ids.copy()
        return window

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[WaitingRow]:
        """Iterate over the rows in order of arrival."""
        return iter(self.rows.values())

    def add(self, row: WaitingRow) -> None:
        """Add a row as the newest."""
        number = self._next_number
        self._next_number += 1
        self.rows[number] = row
        insort(self.by_size, (row.size, number))
        self.num_tokens += row.size
        self.ids[row.row] += 1

    def remove(self, number: int) -> WaitingRow:
        """Remove and return the row with an arrival number."""
        row = self.rows.pop(number)
        del self.by_size[bisect_left(self.by_size, (row.size, number))]
        self.num_tokens -= row.size
        self.ids[row.row] -= 1
        if not self.ids[row.row]:
            del self.ids[row.row]
        return row


@dataclass(frozen=True, slots=True)
class MicrobatchLimits:
    """What one microbatch may have at most. A single row may exceed them; it is then alone."""

    layout: RowLayout
    max_tokens: int
    """Positions: the sum of sizes (packed), or rows times the largest size (padded)."""
    max_rows: int | None = None
    max_trained: int | None = None
    """Tokens with loss (`count_mode: effective` of VeOmni)."""
    max_extra: int | None = None
    """Sum of the second resource, for example image patches."""

    @property
    def has_other_limits(self) -> bool:
        """True if a limit other than the limit of positions applies."""
        return not (self.max_rows is None and self.max_trained is None and self.max_extra is None)


class Fill:
    """The totals of the rows selected so far."""

    __slots__ = ("limits", "max_size", "num_extra", "num_trained", "numbers", "sum_size")

    def __init__(self, limits: MicrobatchLimits) -> None:
        self.limits = limits
        self.numbers: list[int] = []
        self.sum_size = 0
        self.max_size = 0
        self.num_trained = 0
        self.num_extra = 0

    def add(self, number: int, row: WaitingRow) -> None:
        """Select a row."""
        self.numbers.append(number)
        self.sum_size += row.size
        self.max_size = max(self.max_size, row.size)
        self.num_trained += row.num_trained
        self.num_extra += row.extra

    def positions_with(self, size: int) -> int:
        """Return the positions of the microbatch with one more row of `size`."""
        if self.limits.layout == "packed":
            return self.sum_size + size
        return (len(self.numbers) + 1) * max(self.max_size, size)

    def fits(self, row: WaitingRow) -> bool:
        """Return True if the microbatch stays within every limit with `row`."""
        return self.positions_with(row.size) <= self.limits.max_tokens and self.fits_others(row)

    def fits_others(self, row: WaitingRow) -> bool:
        """Return True if the limits other than the limit of positions allow `row`."""
        limits = self.limits
        if limits.max_rows is not None and len(self.numbers) >= limits.max_rows:
            return False
        num_trained = self.num_trained + row.num_trained
        if limits.max_trained is not None and num_trained > limits.max_trained:
            return False
        return limits.max_extra is None or self.num_extra + row.extra <= limits.max_extra

    @property
    def is_full(self) -> bool:
        """True if no row of any size fits, by the limits of positions, rows and trained tokens."""
        limits = self.limits
        if self.positions_with(1) > limits.max_tokens:
            return True
        if limits.max_trained is not None and self.num_trained >= limits.max_trained:
            return True
        return limits.max_rows is not None and len(self.numbers) >= limits.max_rows


def select_rows(window: Window, limits: MicrobatchLimits, rule: Selection) -> list[int]:
    """Return the arrival numbers of the rows of the next microbatch, the oldest row first.

    They stay in the window. Raises ValueError for an empty window.
    """
    if len(window) == 0:
        raise ValueError("there are no rows to select from")
    if limits.layout == "packed" and rule in ("prefer_closest", "prefer_first"):
        rule = "first_fit"
    oldest = next(iter(window.rows))
    fill = Fill(limits)
    fill.add(oldest, window.rows[oldest])
    if fill.is_full or len(window) == 1:
        return fill.numbers
    if rule == "best_fit":
        return _best_fit(window, fill)
    if rule in ("first_fit", "in_order"):
        return _in_arrival_order(window, fill, stop_early=rule == "in_order")
    return _fewest_positions(window, fill, is_closest=rule == "prefer_closest")


def _in_arrival_order(window: Window, fill: Fill, *, stop_early: bool) -> list[int]:
    """Add rows in order of arrival; with `stop_early` up to the first one that does not fit."""
    # The oldest row is in the microbatch already.
    for number, row in islice(window.rows.items(), 1, None):
        if fill.fits(row):
            fill.add(number, row)
            if fill.is_full:
                break
        elif stop_early:
            break
    return fill.numbers


def _fewest_positions(window: Window, fill: Fill, *, is_closest: bool) -> list[int]:
    """Add the row that adds the fewest positions, as long as one fits.

    All rows up to the longest row so far add the same positions; of these it is the longest
    (`is_closest`) or the oldest. Otherwise the shortest longer row adds the fewest. A row that does
    not fit does not fit later either, so one pass finds them: the rows up to the oldest row, and
    then the longer ones by size.
    """
    limits = fill.limits
    has_other_limits = limits.has_other_limits
    oldest = fill.numbers[0]
    longer = bisect_left(window.by_size, (fill.max_size + 1, -1))
    if is_closest:
        not_longer = _downward(window.by_size, longer)
    else:
        rows = window.rows.items()
        oldest_size = fill.max_size
        not_longer = (number for number, row in rows if row.size <= oldest_size)
    by_size = (number for _, number in islice(window.by_size, longer, None))
    for number in chain(not_longer, by_size):
        if number == oldest:
            continue
        row = window.rows[number]
        # The rows that follow are not shorter, or add as many positions.
        if fill.positions_with(row.size) > limits.max_tokens:
            break
        if has_other_limits:
            if fill.is_full:
                break
            if not fill.fits_others(row):
                continue
        fill.add(number, row)
    return fill.numbers


def _downward(by_size: list[tuple[int, int]], stop: int) -> Iterator[int]:
    """Iterate over the arrival numbers of `by_size[:stop]`, the longest row first, of rows of equal
    size the oldest.
    """
    while stop > 0:
        start = bisect_left(by_size, (by_size[stop - 1][0], -1), 0, stop)
        for _, number in by_size[start:stop]:
            yield number
        stop = start


def _best_fit(window: Window, fill: Fill) -> list[int]:
    """Return the combination with the oldest row that leaves the fewest positions unused."""
    if fill.limits.layout == "padded":
        return _best_run(window, fill)
    if fill.limits.has_other_limits:
        # Packed rows with several limits.
        return _first_fit_decreasing(window, fill, len(window))
    return _best_sum(window, fill)


def _best_run(window: Window, fill: Fill) -> list[int]:
    """Padded rows: return the run of neighbors by size with the oldest row that is the best.

    The best run has the most real positions. A set that is not a run can have more, but takes rows
    from the microbatches that follow: in total it needs more microbatches.
    """
    limits = fill.limits
    oldest = fill.numbers[0]
    by_size = window.by_size
    at = bisect_left(by_size, (window.rows[oldest].size, oldest))
    # A run with the oldest row has at most as many rows on either side as fit of its size.
    max_rows = limits.max_tokens // by_size[at][0]
    low = max(at + 1 - max_rows, 0)
    nearby = by_size[low : at + max_rows]
    sums = list(accumulate((size for size, _ in nearby), initial=0))
    best_sum = 0
    best_top = at
    for index in range(at - low, len(nearby)):
        start = max(index + 1 - limits.max_tokens // nearby[index][0], 0)
        # The run from `index` downward must reach the oldest row. Longer rows allow fewer.
        if start > at - low:
            break
        if sums[index + 1] - sums[start] > best_sum:
            best_sum = sums[index + 1] - sums[start]
            best_top = low + index
    # With other limits some rows of the run do not fit; shorter rows can take their place.
    return _first_fit_decreasing(window, fill, best_top + 1)


def _first_fit_decreasing(window: Window, fill: Fill, stop: int) -> list[int]:
    """Add the rows of `window.by_size[:stop]` that fit, from the largest to the smallest."""
    oldest = fill.numbers[0]
    for _, number in reversed(window.by_size[:stop]):
        if number != oldest and fill.fits(window.rows[number]):
            fill.add(number, window.rows[number])
            if fill.is_full:
                break
    return fill.numbers


def _best_sum(window: Window, fill: Fill) -> list[int]:
    """Packed rows: return the rows whose sum is the largest up to the limit (subset sum).

    Where more rows fit than are combined, the oldest are added first, and the combination fills the
    rest. Bit s of `reachable` is set if rows of total size s exist. Adding a row is one shift of an
    integer, so a microbatch takes microseconds. Of several best combinations it is one of the
    oldest rows: preferring long rows would train them first, and leave no more space unused.
    """
    nearby = _add_oldest(window, fill)
    remaining = fill.limits.max_tokens - fill.sum_size
    mask = (1 << (remaining + 1)) - 1
    reachable = 1
    # The sums that are reachable before each row, to find the rows of the best sum again.
    before: list[tuple[int, int, int]] = []
    for number, row in nearby:
        before.append((reachable, row.size, number))
        reachable |= (reachable << row.size) & mask
        if reachable >> remaining:
            break
    total = reachable.bit_length() - 1
    for sums, size, number in reversed(before):
        # Rows are needed from the last one backward: skip a row if the others reach the total.
        if not (sums >> total) & 1:
            fill.add(number, window.rows[number])
            total -= size
    return fill.numbers


def _add_oldest(window: Window, fill: Fill) -> list[tuple[int, WaitingRow]]:
    """Add the oldest rows while `_MAX_COMBINED_ROWS` rows do not fill the microbatch.

    Return (arrival number, row) of the next rows that fit: at most twice `_MAX_COMBINED_ROWS`, more
    than fit together, or all others of the window.
    """
    remaining = fill.limits.max_tokens - fill.sum_size
    # The oldest row is in the microbatch already.
    rows = islice(window.rows.items(), 1, None)
    nearby: list[tuple[int, WaitingRow]] = []
    while more := list(islice(rows, _MAX_COMBINED_ROWS)):
        nearby += [entry for entry in more if entry[1].size <= remaining]
        if sum(row.size for _, row in nearby) > remaining:
            if len(fill.numbers) > 1:
                # With few rows more than fit, little can be chosen.
                nearby += islice(rows, _MAX_COMBINED_ROWS // 2)
            break
        # All of them fit. The newer ones are left for a choice.
        num_added = max(len(nearby) - _MAX_COMBINED_ROWS // 2, 0)
        for number, row in nearby[:num_added]:
            fill.add(number, row)
            remaining -= row.size
        del nearby[:num_added]
    return [entry for entry in nearby if entry[1].size <= remaining]
