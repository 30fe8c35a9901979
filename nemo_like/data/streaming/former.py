"""Forms microbatches from rows as they arrive. The ranks are assigned elsewhere."""

from __future__ import annotations

import copy
import heapq
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, Self

from nemo_like.data.planning.oversize import OversizeWarning
from nemo_like.data.streaming.selection import Fill, WaitingRow, Window, select_rows
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.integer_math import check_integer, round_up

_VERSION = 1
_MAX_LIMITED_SHARE = 0.95
"""Share of the token limit below which a microbatch that emptied the window gives a warning."""

Bin = list[WaitingRow]
"""The rows of one microbatch, the oldest first."""


class WindowWarning(UserWarning):
    """The rows of the window do not fill a microbatch."""


class OversizeRowError(ValueError):
    """A row exceeds the token limit, and `oversize` is `error`."""


@dataclass
class StreamCounts:
    """Rows since the start of the stream."""

    num_pushed: int = 0
    num_emitted: int = 0
    num_dropped: int = 0
    """Rows that no step has: oversize ones, and the tail with `tail="drop"`."""
    num_truncated: int = 0
    num_oversize: int = 0

    def since(self, other: StreamCounts) -> StreamCounts:
        """Return the rows since `other`, counts of the same stream at an earlier time."""
        earlier = vars(other)
        return StreamCounts(**{name: value - earlier[name] for name, value in vars(self).items()})


class MicrobatchFormer:
    """Rows in, microbatches out, `num_bins` for each step.

    Invariant: each pushed row is in the window, in the current step, emitted or counted as dropped.
    """

    def __init__(self, spec: StreamSpec, num_bins: int) -> None:
        self.spec = spec
        self.num_bins = num_bins
        self.num_steps = 0
        """Number of complete steps."""
        self.counts = StreamCounts()
        self.step_counts = StreamCounts()
        """Rows between the last two steps."""
        self._counts_at_step = StreamCounts()
        self.is_closed = False
        self._warned: set[str] = set()
        """Kinds of warnings that were given. The others of a kind are only counted."""
        self.window = Window()
        self.bins: list[Bin] = []
        """Microbatches of the current step."""
        self._set_limits()

    def copy(self) -> Self:
        """Return a former in the same state, which changes independently."""
        twin = copy.copy(self)
        twin.counts = replace(self.counts)
        twin.window = self.window.copy()
        # The rows of a complete microbatch do not change.
        twin.bins = list(self.bins)
        return twin

    @property
    def num_waiting(self) -> int:
        """Rows in the incomplete step and in the window."""
        return len(self.window) + sum(map(len, self.bins))

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ids of the rows in the incomplete step and in the window."""
        return tuple(row.row for row in chain(*self.bins, self.window))

    def push(
        self,
        row: int,
        length: int,
        num_trained: int | None = None,
        extra: int = 0,
        images: tuple[int, int] = (0, 0),
    ) -> bool:
        """Add a row to the window; return False if the oversize policy drops it.

        `row` is an id of the caller, `num_trained` its tokens with loss (None: all but the first,
        which no token predicts), `extra` its use of the second resource, `images` the tokens of its
        images and the FLOPs of the vision tower for them. Raises OversizeRowError, and ValueError
        for wrong values.
        """
        if self.is_closed:
            raise ValueError(f"row {row} arrived after the end of the stream; call `reopen` first")
        length, num_trained, extra = _check_numbers(row, length, num_trained, extra)
        plan = self.spec.step_spec
        if round_up(length, plan.row_multiple) > plan.max_row_tokens:
            kept_length = self._fit_oversize(row, length)
            if kept_length is None:
                self.counts.num_pushed += 1
                return False
            if kept_length < length:
                # The removed tokens may have loss; at most the remaining ones have.
                num_trained = None if num_trained is None else min(num_trained, kept_length)
            length = kept_length
        if num_trained is None:
            num_trained = length - 1
        self.counts.num_pushed += 1
        size = self._size(length, images[0])
        self.window.add(WaitingRow(row, length, size, num_trained, extra, self.num_steps, *images))
        return True

    def _size(self, length: int, image_tokens: int) -> int:
        """Return what counts of a row for the token limit; see `planner_sizes`."""
        plan = self.spec.step_spec
        return round_up(length, plan.row_multiple) + math.ceil(plan.image_weight * image_tokens)

    def _fit_oversize(self, row: int, length: int) -> int | None:
        """Apply the oversize policy; return the remaining length, or None for a dropped row."""
        plan = self.spec.step_spec
        limit = f"max_tokens = {self.spec.plan.max_tokens} ({plan.budget_key})"
        if self.spec.count_mode == "effective":
            limit = f"{plan.max_tokens} ({limit} x {self.spec.physical_overflow_ratio})"
        problem = f"row {row} has {length} tokens, above {limit}"
        if plan.oversize == "error":
            raise OversizeRowError(
                f"{problem}; raise it (max_tokens of a PlanSpec), or set policy.oversize_rows"
                " (oversize of a PlanSpec) to truncate, drop or singleton"
            )
        self.counts.num_oversize += 1
        if plan.oversize == "drop":
            self.counts.num_dropped += 1
            self._warn_of_row(f"{problem}; it is left out")
            return None
        if plan.oversize == "truncate":
            self.counts.num_truncated += 1
            self._warn_of_row(f"{problem}; it is truncated")
            return plan.max_row_tokens
        self._warn_of_row(f"{problem}; it runs alone")
        return length

    def _warn_of_row(self, text: str) -> None:
        """Warn of the first oversize row."""
        if "oversize" in self._warned:
            return
        self._warned.add("oversize")
        warnings.warn(
            f"{text}; further such rows are counted (packing/num_oversize) without a warning",
            OversizeWarning,
            stacklevel=4,
        )

    def close(self) -> None:
        """Mark the end of the stream: the window is emptied without waiting for further rows."""
        self.is_closed = True

    def reopen(self) -> None:
        """Continue after `close`, for example with the next epoch."""
        self.is_closed = False

    @property
    def is_ready(self) -> bool:
        """True if the next microbatch can be formed from the window."""
        if self.is_closed:
            return len(self.window) > 0
        if len(self.window) >= self._max_window_rows and self._is_enough:
            return True
        min_tokens = self._min_window_tokens
        return min_tokens is not None and self.window.num_tokens >= min_tokens

    @property
    def _is_enough(self) -> bool:
        """True if the window has rows for a full microbatch, or if only their number counts."""
        max_rows = self._limits.max_rows
        if max_rows is not None and len(self.window) >= max_rows:
            return True
        return self.window.num_tokens >= self._min_full_tokens

    def _set_limits(self) -> None:
        """Set the limits of the present step."""
        self._limits = self.spec.limits(self.num_steps)
        self._max_window_rows = self.spec.plan.num_ranks * self.spec.window_rows
        self._min_window_tokens = self.spec.min_window_tokens(self._limits)
        self._min_full_tokens = self.spec.min_full_tokens(self._limits)

    def drop_row(self) -> None:
        """Count a row that the caller leaves out."""
        self.counts.num_pushed += 1
        self.counts.num_dropped += 1

    def form(self) -> bool:
        """Form microbatches while rows suffice; return True if the step has all of them."""
        while len(self.bins) < self.num_bins and self.is_ready:
            self.form_now()
            if not (self.window or self.is_closed or "window" in self._warned):
                self._warn_if_limited(self.bins[-1])
        return len(self.bins) == self.num_bins

    def form_now(self) -> None:
        """Form one microbatch of the rows in the window without waiting for more.

        For a source whose next row may not join the window yet. Raises ValueError for an empty
        window or a complete step.
        """
        if len(self.bins) == self.num_bins:
            raise ValueError("the step has all its microbatches; call `take_step` first")
        numbers = select_rows(self.window, self._limits, self.spec.selection)
        self.bins.append([self.window.remove(number) for number in numbers])

    def _warn_if_limited(self, rows: Bin) -> None:
        """Warn once of a microbatch that has all rows of the window, and positions left."""
        fill = Fill(self._limits)
        for number, row in enumerate(rows):
            fill.add(number, row)
        used = positions(rows, self._limits.layout)
        if fill.is_full or used > _MAX_LIMITED_SHARE * self._limits.max_tokens:
            return
        self._warned.add("window")
        warnings.warn(
            f"a microbatch has all {len(rows)} rows of the window and uses {used} of"
            f" {self._limits.max_tokens} tokens: the window limits it. Raise window_rows"
            " (data.batching.window_rows, pool_size of LoadBalancedDataset), or set window_tokens"
            " to the budget or more",
            WindowWarning,
            stacklevel=3,
        )

    def take_step(self) -> list[Bin]:
        """Return the microbatches formed so far as a step, and begin the next one."""
        bins = self.bins
        self.bins = []
        self.counts.num_emitted += sum(map(len, bins))
        self.step_counts = self.counts.since(self._counts_at_step)
        self._counts_at_step = replace(self.counts)
        self.num_steps += 1
        self._set_limits()
        return bins

    def drop_rest(self) -> None:
        """Drop the rows of the incomplete step and of the window, and count them."""
        self.counts.num_dropped += self.num_waiting
        self.clear()

    def clear(self) -> None:
        """Remove the waiting rows without counting them. The number of steps continues."""
        self.bins = []
        self.window = Window()

    def restart(self, num_steps: int) -> None:
        """Begin without rows and counts after `num_steps` steps, where the warmup continues."""
        self.clear()
        self.counts = StreamCounts()
        self._counts_at_step = StreamCounts()
        self.num_steps = num_steps
        self._set_limits()

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values: the waiting rows, the incomplete step and the counters."""
        return {
            "version": _VERSION,
            "num_steps": self.num_steps,
            "num_bins": self.num_bins,
            "is_closed": self.is_closed,
            "window": [list(row) for row in self.window],
            "bins": [[list(row) for row in rows] for rows in self.bins],
            "counts": asdict(self.counts),
            "counts_at_step": asdict(self._counts_at_step),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises ValueError for a state of another version.

        If the number of microbatches of a step differs, or they exceed the limits of this spec, the
        rows of an incomplete step return to the window, as its oldest rows. A row above a lower
        token limit is treated as `push` treats it.
        """
        if state.get("version") != _VERSION:
            raise ValueError(
                f"the state of the stream has version {state.get('version')}, this is version"
                f" {_VERSION}; continue with the version that wrote it"
            )
        self.num_steps = int(state["num_steps"])
        self.is_closed = bool(state["is_closed"])
        self.counts = StreamCounts(**state["counts"])
        self._counts_at_step = StreamCounts(**state["counts_at_step"])
        self._set_limits()
        bins = [self._refit(rows) for rows in state["bins"]]
        waiting = self._refit(state["window"])
        is_kept = state["num_bins"] == self.num_bins and all(map(self._is_within, bins))
        if not is_kept:
            waiting = [row for rows in bins for row in rows] + waiting
        self.bins = bins if is_kept else []
        self.window = Window(waiting)

    def _refit(self, values: Iterable[Iterable[int]]) -> Bin:
        """Return the rows of a state, with the multiples and the token limit of this spec."""
        plan = self.spec.step_spec
        rows = []
        for numbers in values:
            row = WaitingRow(*map(int, numbers))
            row = row._replace(size=self._size(row.length, row.image_tokens))
            # Without a change of the settings, only rows that run alone exceed the limit.
            positions = round_up(row.length, plan.row_multiple)
            if positions > plan.max_row_tokens and plan.oversize != "singleton":
                length = self._fit_oversize(row.row, row.length)
                if length is None:
                    continue
                row = row._replace(
                    length=length,
                    size=self._size(length, row.image_tokens),
                    num_trained=min(row.num_trained, length),
                )
            rows.append(row)
        return rows

    def _is_within(self, rows: Bin) -> bool:
        """Return True if a microbatch of `rows` is not empty and within the limits of this step."""
        fill = Fill(self._limits)
        for number, row in enumerate(rows):
            if number > 0 and not fill.fits(row):
                return False
            fill.add(number, row)
        return len(rows) > 0


def split_bins(bins: list[Bin], num_bins: int, layout: str) -> list[Bin]:
    """Split the largest microbatches until there are `num_bins`, or one row in each.

    The rows of a microbatch are divided by size, so that padded halves have rows of similar length.
    """
    heap = [_split_entry(rows, number, layout) for number, rows in enumerate(bins)]
    heapq.heapify(heap)
    next_number = len(bins)
    alone: list[tuple[int, int, Bin]] = []
    while heap and len(heap) + len(alone) < num_bins:
        entry = heapq.heappop(heap)
        rows = entry[2]
        if len(rows) == 1:
            alone.append(entry)
            continue
        first, second = _halves(rows, layout)
        heapq.heappush(heap, _split_entry(first, entry[1], layout))
        heapq.heappush(heap, _split_entry(second, next_number, layout))
        next_number += 1
    entries = sorted([*heap, *alone], key=lambda entry: entry[1])
    return [rows for _, _, rows in entries]


def _split_entry(rows: Bin, number: int, layout: str) -> tuple[int, int, Bin]:
    """Return a heap entry: the microbatch with the most positions first."""
    return -positions(rows, layout), number, rows


def _halves(rows: Bin, layout: str) -> tuple[Bin, Bin]:
    """Divide two or more rows into two parts of similar positions."""
    by_size = sorted(rows, key=lambda row: -row.size)
    if layout == "padded":
        middle = max(1, len(by_size) // 2)
        return by_size[:middle], by_size[middle:]
    first: Bin = []
    second: Bin = []
    difference = 0
    for row in by_size:
        # The larger rows are assigned first, so that the smaller ones even out the sums.
        if difference <= 0:
            first.append(row)
            difference += row.size
        else:
            second.append(row)
            difference -= row.size
    return first, second


def positions(rows: Bin, layout: str) -> int:
    """Return the positions of a microbatch without the rounding of its total."""
    sizes = [row.size for row in rows]
    return sum(sizes) if layout == "packed" else len(sizes) * max(sizes)


def _check_numbers(
    row: int, length: int, num_trained: int | None, extra: int
) -> tuple[int, int | None, int]:
    """Return the numbers of a row as ints. Raises ValueError for numbers that no row has."""
    # For most rows no message is necessary, and to write it takes longer than the check.
    if type(length) is not int or length < 1:
        length = check_integer(f"length of row {row}", length, 1)
    if type(extra) is not int or extra < 0:
        extra = check_integer(f"extra of row {row}", extra, 0)
    if num_trained is None:
        return length, None, extra
    num_trained = check_integer(f"num_trained of row {row}", num_trained, 0)
    if num_trained > length:
        raise ValueError(
            f"row {row} has {num_trained} trained tokens; it must be from 0 to its {length} tokens"
        )
    return length, num_trained, extra
