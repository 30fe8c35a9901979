"""Packing and scheduling against naive loops and peers, in one run: time, bins, waiting, and what
is proven of the best.

    python benchmarks/packing.py --quick        # under a minute
    python benchmarks/packing.py --lengths traces/conv.csv --columns ContextTokens,GeneratedTokens
    # with the packers of other projects, from their checkouts:
    python benchmarks/packing.py --nemo-rl ~/RL --verl ~/verl --trl ~/trl
    python benchmarks/packing.py --no-numba     # as on a machine without numba

Times are CPU time of this one thread, which a busy machine disturbs least; compare them within one
run. `lock` is the sum over microbatches of the max-loaded rank over its lower bound
(`bounds.lockstep_bound`), `rank` the makespan over the larger of the mean rank and the
largest row, `rank_best` the same over its lower bound (`bounds.rank_bound`), `over` the
microbatches above the cap, `M` microbatches per rank over the proven minimum. A plan that breaks
the cap can be below 1. Work is 24576 L + L^2, what peers assume for a 7B model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from packing_references import (
    KINDS,
    RankBins,
    in_turn,
    lengths_of,
    naive_first_fit_decreasing,
    naive_modified_first_fit_decreasing,
    nemo_rl,
    read_lengths,
    trl,
    verl,
    work_of,
)

from nemo_like.data.packing.algorithms import get_packer
from nemo_like.data.packing.balance import schedule
from nemo_like.data.packing.bounds import l2_bound, lockstep_bound, rank_bound
from nemo_like.data.packing.packers import Packing

CAPACITIES = (8192, 32768)
NAIVE_STEPS_PER_S = 2e7
"""Approximate number of bins that a naive loop examines per second; decides whether it is run."""


@dataclass
class Report:
    """Tables as they are printed, and the same as records."""

    records: list[dict[str, Any]] = field(default_factory=list)

    def title(self, text: str) -> None:
        print(f"\n{text}", flush=True)

    def row(self, table: str, **values: Any) -> None:
        if not self.records or self.records[-1]["table"] != table:
            print("  ".join(_aligned(name, name) for name in values))
        print(
            "  ".join(_aligned(name, _shown(value)) for name, value in values.items()), flush=True
        )
        plain = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in values.items()
        }
        self.records.append({"table": table, **plain})


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    if arguments.no_numba:
        sys.modules["numba"] = None  # type: ignore[assignment]  # what importing a package that is not installed looks like
    trace = (
        None if arguments.lengths is None else read_lengths(arguments.lengths, arguments.columns)
    )
    sizes = arguments.sizes or ([512, 4096] if arguments.quick else [512, 4096, 65536])
    seeds = range(arguments.seeds or (1 if arguments.quick else 5))
    report, start = Report(), time.process_time()
    schedule(np.full(512, 7), 64, 8, work=work_of(np.full(512, 7)))
    get_packer("first_fit_decreasing", 64).pack_csr(np.full(4096, 7))
    print(
        f"numba {'off' if arguments.no_numba else 'on'}; compiled or loaded in"
        f" {time.process_time() - start:.1f} s"
    )
    packing(report, sizes, trace, arguments)
    scheduling(report, sizes, seeds, trace, arguments)
    overflow(report, 100 if arguments.quick else 1000)
    scaling(report, 65536 if arguments.quick else 262144, trace)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.records, indent=1))


def packing(
    report: Report, sizes: list[int], trace: np.ndarray | None, arguments: argparse.Namespace
) -> None:
    """Bins and time of the packers; naive loops where they end within `--naive-limit` seconds."""
    report.title(
        "Packers, capacity 8192: ms, bins over the L2 bound, and how many times the time of best"
        " fit decreasing"
    )
    for num_rows in sizes:
        for kind in KINDS:
            lengths = lengths_of(kind, num_rows, 8192, 0, trace)
            rows, bound = lengths.tolist(), l2_bound(lengths, 8192)
            contenders: dict[str, Callable[[], Any]] = {
                name: _packer(algorithm, lengths)
                for name, algorithm in (
                    ("best fit", "best_fit_decreasing"),
                    ("first fit", "first_fit_decreasing"),
                    ("modified ff", "modified_first_fit_decreasing"),
                )
            }
            if num_rows * bound / 2 / NAIVE_STEPS_PER_S < arguments.naive_limit:
                contenders["naive first fit"] = lambda rows=rows: naive_first_fit_decreasing(
                    rows, 8192
                )
                contenders["naive modified ff"] = lambda rows=rows: (
                    naive_modified_first_fit_decreasing(rows, 8192)
                )
                if arguments.nemo_rl is not None:
                    pack = nemo_rl(arguments.nemo_rl)
                    for name in ("first_fit_decreasing", "modified_first_fit_decreasing"):
                        contenders[f"NeMo-RL {name}"] = lambda rows=rows, name=name, pack=pack: (
                            pack(name, rows, 8192, 1)
                        )
            if arguments.trl is not None:
                place = trl(arguments.trl)
                contenders["TRL best fit"] = lambda rows=rows, place=place: place(rows, 8192)
            best_s = None
            for name, contender in contenders.items():
                seconds, bins = _timed(contender)
                best_s = best_s or seconds
                num_bins = len(bins) if isinstance(bins, list) else bins.num_bins
                report.row(
                    "packers",
                    rows=num_rows,
                    lengths=kind,
                    packer=name,
                    ms=seconds * 1e3,
                    bins_over_l2=num_bins / bound,
                    times_best_fit=seconds / best_s,
                )


def scheduling(
    report: Report,
    sizes: list[int],
    seeds: range,
    trace: np.ndarray | None,
    arguments: argparse.Namespace,
) -> None:
    """Print the balance of schedules over all distributions, both capacities and the seeds."""
    report.title(
        f"Schedules: geometric mean (and worst) over {len(KINDS)} distributions x 2 capacities x"
        f" {len(seeds)} seeds"
    )
    for num_rows in sizes:
        for num_ranks in (8, 64):
            for name, plan in _schedulers(num_rows, arguments).items():
                cells = []
                for kind in KINDS:
                    for capacity in CAPACITIES:
                        for seed in seeds:
                            lengths = lengths_of(kind, num_rows, capacity, seed, trace)
                            seconds, planned = _timed(
                                partial(plan, lengths, capacity, num_ranks), 1
                            )
                            bins = planned
                            if isinstance(planned, Packing):
                                bins = by_rank(planned, num_ranks)
                            cells.append({**measure(bins, lengths, capacity), "ms": seconds * 1e3})
                report.row(
                    "schedules", rows=num_rows, ranks=num_ranks, scheduler=name, **_summary(cells)
                )


def _schedulers(
    num_rows: int, arguments: argparse.Namespace
) -> dict[str, Callable[[np.ndarray, int, int], Any]]:
    schedulers: dict[str, Callable[[np.ndarray, int, int], Any]] = {
        "balanced, sync=microbatch": lambda x, c, r: schedule(x, c, r, work=work_of(x)),
        "balanced, sync=step": lambda x, c, r: schedule(x, c, r, work=work_of(x), sync="step"),
    }
    if num_rows > 4096:
        return schedulers
    schedulers["naive first fit, in turn"] = lambda x, c, r: in_turn(
        naive_first_fit_decreasing(x.tolist(), c), r
    )
    if arguments.nemo_rl is not None:
        pack = nemo_rl(arguments.nemo_rl)
        name = "modified_first_fit_decreasing"
        schedulers["NeMo-RL modified ff"] = lambda x, c, r: in_turn(pack(name, x.tolist(), c, r), r)
    if arguments.verl is not None:
        schedulers["verl Karmarkar-Karp"] = verl(arguments.verl)
    return schedulers


def by_rank(planned: Packing, num_ranks: int) -> RankBins:
    """The bins of each rank of a schedule."""
    bins = planned.bins()
    count = len(bins) // num_ranks
    return [bins[rank * count : (rank + 1) * count] for rank in range(num_ranks)]


def measure(bins: RankBins, lengths: np.ndarray, capacity: int) -> dict[str, float]:
    """The measures of one plan, from its rows alone; raises ValueError if a row is missing or twice
    in it.
    """
    num_ranks, num_microbatches = len(bins), max(map(len, bins))
    flat = np.array([i for rank in bins for bin_ in rank for i in bin_], dtype=np.int64)
    if sorted(flat.tolist()) != list(range(len(lengths))):
        raise ValueError("the plan does not hold each row once")
    slots = [
        r * num_microbatches + m
        for r, rank in enumerate(bins)
        for m, bin_ in enumerate(rank)
        for _ in bin_
    ]
    work, num_slots = work_of(lengths), num_ranks * num_microbatches
    tokens = np.bincount(slots, lengths[flat], minlength=num_slots)
    bin_work = np.bincount(slots, work[flat], minlength=num_slots).reshape(
        num_ranks, num_microbatches
    )
    # Every rank runs its largest bin first, which minimizes the lockstep work.
    bin_work = -np.sort(-bin_work, axis=1)
    floor = max(work.sum() / num_ranks, work.max())
    shape = (lengths, work, capacity, num_ranks, num_microbatches)
    may_be_empty = len(set(slots)) < num_slots
    makespan = bin_work.sum(axis=1).max()
    return {
        "lock": bin_work.max(axis=0).sum() / max(floor, lockstep_bound(*shape)),
        "rank": makespan / floor,
        "rank_best": makespan / max(floor, rank_bound(*shape, may_be_empty=may_be_empty)),
        "M": num_microbatches / -(-l2_bound(lengths, capacity) // num_ranks),
        "over": np.count_nonzero(tokens > capacity) / num_slots,
    }


def _summary(cells: list[dict[str, float]]) -> dict[str, Any]:
    def mean(name: str) -> float:
        return float(np.exp(np.mean(np.log([cell[name] for cell in cells]))))

    worst = {name: max(cell[name] for cell in cells) for name in cells[0]}
    return {
        "lock": mean("lock"),
        "lock_worst": worst["lock"],
        "rank": f"{mean('rank'):.6f}",
        "rank_worst": f"{worst['rank']:.5f}",
        "rank_best": f"{mean('rank_best'):.6f}",
        "M": mean("M"),
        "M_least": f"{np.mean([cell['M'] == 1 for cell in cells]):.1%}",
        "over": f"{np.mean([cell['over'] for cell in cells]):.1%}",
        "ms_median": float(np.median([cell["ms"] for cell in cells])),
        "ms_worst": worst["ms"],
    }


def overflow(report: Report, trials: int) -> None:
    """Random schedules of every kind, each bin against the cap."""
    report.title(
        f"{trials} random schedules: bins above the cap, rows not exactly once, empty bins while"
        f" rows are left"
    )
    rng, over, wrong, empty = np.random.default_rng(0), 0, 0, 0
    for trial in range(trials):
        capacity, num_rows, num_ranks = (
            int(rng.integers(1, 9000)),
            int(rng.integers(1, 700)),
            int(rng.integers(1, 70)),
        )
        longest = capacity if trial % 2 else 1 + capacity // 5
        lengths = rng.integers(1, longest + 1, num_rows)
        planned = schedule(
            lengths,
            capacity,
            num_ranks,
            work=work_of(lengths),
            sync="step" if trial % 3 else "microbatch",
            microbatch_multiple=1 + trial % 4,
        )
        sizes = np.diff(planned.offsets)
        over += int((planned.loads(lengths) > capacity).sum())
        wrong += sorted(planned.perm.tolist()) != list(range(num_rows))
        empty += np.count_nonzero(sizes) != min(num_rows, len(sizes))
    report.row("overflow", schedules=trials, over_cap=over, not_once=wrong, empty=empty)


def scaling(report: Report, max_rows: int, trace: np.ndarray | None) -> None:
    """Growth with rows and ranks."""
    report.title("Growth with rows and ranks: rl lengths, capacity 8192")
    for num_rows in (512, 4096, 65536, 262144):
        for num_ranks in (1, 8, 64, 512, 4096):
            if num_rows > max_rows or num_ranks * 4 > num_rows:
                continue
            lengths = lengths_of("rl", num_rows, 8192, 0, trace)
            values: dict[str, Any] = {}
            for sync in ("microbatch", "step"):
                seconds, planned = _timed(
                    lambda x=lengths, r=num_ranks, s=sync: schedule(
                        x, 8192, r, work=work_of(x), sync=s
                    ),
                    2,
                )
                measures = measure(by_rank(planned, num_ranks), lengths, 8192)
                name, key = ("lockstep_over_bound", "lock")
                if sync == "step":
                    name, key = ("rank_imbalance", "rank")
                values |= {f"{sync}_ms": seconds * 1e3, name: f"{measures[key]:.5f}"}
            num_microbatches = planned.num_bins // num_ranks
            report.row("scaling", rows=num_rows, ranks=num_ranks, M=num_microbatches, **values)


def _packer(algorithm: str, lengths: np.ndarray) -> Callable[[], Any]:
    packer = get_packer(algorithm, 8192)
    return lambda: packer.pack_csr(lengths)


def _timed(function: Callable[[], Any], repeats: int | None = None) -> tuple[float, Any]:
    """(median CPU seconds, result): five times what is quick, once what is slow."""
    seconds: list[float] = []
    result = None
    while len(seconds) < (repeats or (5 if not seconds or seconds[0] < 0.2 else 1)):
        start = time.process_time()
        result = function()
        seconds.append(time.process_time() - start)
    return max(float(np.median(seconds)), 1e-9), result


def _aligned(column: str, text: str) -> str:
    return text.ljust(37) if column in ("packer", "scheduler") else text.rjust(max(len(column), 7))


def _shown(value: Any) -> str:
    return (
        f"{value:.4f}"
        if isinstance(value, float) and value < 100
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="512 and 4096 rows, one seed")
    parser.add_argument(
        "--sizes", type=int, nargs="+", help="numbers of rows; default 512 4096 65536"
    )
    parser.add_argument("--seeds", type=int, help="default 5")
    parser.add_argument(
        "--lengths",
        type=Path,
        help="CSV, JSONL or a list of integers, for the distribution `trace`",
    )
    parser.add_argument(
        "--columns",
        type=lambda text: text.split(","),
        default=[],
        help="columns to add up, by comma",
    )
    parser.add_argument(
        "--naive-limit",
        type=float,
        default=5.0,
        help="skip naive packers expected to take more seconds",
    )
    parser.add_argument(
        "--no-numba", action="store_true", help="run as where numba is not installed"
    )
    parser.add_argument("--nemo-rl", type=Path, help="root of a NeMo-RL checkout")
    parser.add_argument("--verl", type=Path, help="root of a verl checkout")
    parser.add_argument("--trl", type=Path, help="root of a TRL checkout")
    parser.add_argument("--json", type=Path, help="write the tables as records to this file")
    return parser


if __name__ == "__main__":
    main()
