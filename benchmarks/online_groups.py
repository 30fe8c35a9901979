"""Number of microbatches from windows of several sizes, against the minimum and the rule of ODB.

`separate` plans consecutive windows one by one with the fewest padded microbatches. `ODB` forms
the groups of the same windows by the rule of its reference: the size of a group follows from the
last row of the group before, so the longest row of a window is alone. `best_fit`, the default of
the streaming planner, keeps rows in the window until they fit. All lengths at once give the
minimum: the fewest padded microbatches, and ceil(tokens / limit) packed ones.

Example: python benchmarks/online_groups.py --rows 20000 --max-tokens 4096
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np

from nemo_like.data.planning.plan_step import form_padded
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.streaming.planner import StreamingPlanner
from nemo_like.data.streaming.selection import Selection
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.parallel_layout import RowLayout

WINDOWS = (16, 64, 256)


def lognormal_lengths(num_rows: int, max_tokens: int) -> np.ndarray:
    """Lengths of mean 600 and coefficient of variation 1 up to `max_tokens`, int64 [num_rows]."""
    sigma = math.sqrt(math.log(2))
    lengths = np.random.default_rng(0).lognormal(math.log(600) - sigma**2 / 2, sigma, num_rows)
    return np.clip(lengths, 1, max_tokens).astype(np.int64)


def count_streamed(
    lengths: np.ndarray, layout: RowLayout, rule: Selection, window_rows: int, max_tokens: int
) -> int:
    """Microbatches of the streaming planner for `lengths` int64 [n]."""
    spec = StreamSpec(
        plan=PlanSpec(layout=layout, max_tokens=max_tokens),
        selection=rule,
        window_rows=window_rows,
        window_tokens=0,
    )
    planner = StreamingPlanner(spec)
    for row, length in enumerate(lengths.tolist()):
        planner.push(row, length)
        while planner.next_step() is not None:
            pass
    planner.close()
    while planner.next_step() is not None:
        pass
    return planner.num_steps


def count_optimal(lengths: np.ndarray, max_tokens: int) -> int:
    """Minimum number of padded microbatches of `lengths` int64 [n]."""
    return form_padded(lengths, np.ones_like(lengths), None, max_tokens).num_bins


def count_reference(lengths: np.ndarray, max_tokens: int) -> int:
    """Groups of one window `lengths` int64 [n] by the rule of ODB."""
    num_groups = 0
    size = 0
    max_size = 0
    for length in np.sort(lengths)[::-1].tolist():
        size += 1
        if size >= max_size:
            num_groups += 1
            size = 0
            max_size = max(max_tokens // length, 1)
    return num_groups + (size > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--max-tokens", type=int, default=4096)
    arguments = parser.parse_args()
    limit = arguments.max_tokens
    lengths = lognormal_lengths(arguments.rows, limit)
    padded_minimum = count_optimal(lengths, limit)
    packed_minimum = math.ceil(lengths.sum() / limit)
    variation = lengths.std() / lengths.mean()
    print(f"{len(lengths)} rows, mean {lengths.mean():.0f}, CV {variation:.2f}; minimum with all")
    print(f"lengths: {padded_minimum} padded, {packed_minimum} packed microbatches of {limit}")
    print("| window | ODB | separate | best_fit | prefer_closest | packed best_fit | rows/s |")
    print("|---|---|---|---|---|---|---|")
    for window_rows in WINDOWS:
        starts = range(0, len(lengths), window_rows)
        windows = [lengths[start : start + window_rows] for start in starts]
        cells = [
            sum(count_reference(window, limit) for window in windows) / padded_minimum,
            sum(count_optimal(window, limit) for window in windows) / padded_minimum,
        ]
        start_s = time.process_time()
        best_fit = count_streamed(lengths, "padded", "best_fit", window_rows, limit)
        seconds = time.process_time() - start_s
        closest = count_streamed(lengths, "padded", "prefer_closest", window_rows, limit)
        packed = count_streamed(lengths, "packed", "best_fit", window_rows, limit)
        cells += [best_fit / padded_minimum, closest / padded_minimum, packed / packed_minimum]
        text = " | ".join(f"{cell:.3f}" for cell in cells)
        print(f"| {window_rows} | {text} | {len(lengths) / seconds:,.0f} |")


if __name__ == "__main__":
    main()
